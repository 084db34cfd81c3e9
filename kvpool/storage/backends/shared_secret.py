"""Secrets that several users of one store share: as an argument, in a file, or in the folder of their configuration."""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvpool.storage.mac import SECRET_BYTES

_DIGITS = 2 * SECRET_BYTES


class SharedSecret:
    """A secret that the users of one store share. Never shown, never pickled.

    ``secret``: 32 bytes. ``secret_file``: instead, the path of a file with 64 hex digits, such as ``openssl rand -hex
    32`` prints. Only its owner may have access to it. Raises TypeError, ValueError, and OSError for a file that cannot
    be read. Messages do not have the secret.
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes | None = None, secret_file: str | os.PathLike[str] | None = None) -> None:
        self._secret = secret_argument(secret, secret_file)

    def derived(self, purpose: bytes) -> bytes:
        """32 bytes for one purpose, a name of up to 16 bytes. They tell nothing of the secret, nor of other
        purposes."""
        return hashlib.blake2b(key=self._secret, digest_size=SECRET_BYTES, person=purpose).digest()

    def __repr__(self) -> str:
        return "SharedSecret()"

    def __reduce__(self) -> Any:
        raise TypeError("a secret is not pickled: it would travel with the pickle")


def secret_argument(secret: object, secret_file: object) -> bytes:
    """The 32 bytes of one of them. Raises TypeError, ValueError, OSError."""
    if (secret is None) == (secret_file is None):
        raise ValueError(f"secret, secret_file: expected one of them, got {'both' if secret else 'none'}")
    if secret is None:
        if not isinstance(secret_file, (str, os.PathLike)):
            raise TypeError(f"secret_file: expected a path, got {secret_file!r:.80}")
        return read_secret(Path(secret_file))
    if not isinstance(secret, bytes):
        raise TypeError(
            f"secret: expected {SECRET_BYTES} bytes, or a text in secret_file=, got {type(secret).__name__}"
        )
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"secret: expected {SECRET_BYTES} bytes, or a text in secret_file=, got {len(secret)} bytes")
    return bytes(memoryview(secret))


def default_place(name: str) -> Path:
    """Where the secret of stores of this kind is, if no place was named: in ``~/.config/kvpool``, or in
    ``$XDG_CONFIG_HOME/kvpool``."""
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "kvpool" / f"{name}.secret"


def read_secret(path: Path) -> bytes:
    """The 32 bytes of a file that has 64 hex digits. Raises ValueError, which does not show the content, and OSError.

    The file must be a regular one of this user, or of root, that no group and nobody else may read or write.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
        seen = os.fstat(file.fileno())
        if not stat.S_ISREG(seen.st_mode):
            raise ValueError(
                f"secret_file: expected a file with {_DIGITS} hex digits, got {path}, which is not a regular file"
            )
        if seen.st_mode & 0o077 or seen.st_uid not in (os.geteuid(), 0):
            raise ValueError(
                f"secret_file: expected a file that only its owner can read and write, got {path}: chown it, and "
                f"chmod 600 {path}"
            )
        text = file.read(_DIGITS + 16).strip()
    with suppress(ValueError):
        secret = bytes.fromhex(text.decode("ascii"))
        if len(secret) == SECRET_BYTES:
            return secret
    raise ValueError(
        f"secret_file: expected {_DIGITS} hex digits, such as openssl rand -hex 32 prints, got other content in {path}"
    )


def read_or_make_secret(path: Path) -> bytes:
    """``read_secret`` of a file that is made, with a random secret, if it is not there. Processes that make it at once
    get the same."""
    with suppress(FileNotFoundError):
        return read_secret(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    with open(draft, "x", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, 0o600)) as file:
        file.write(os.urandom(SECRET_BYTES).hex() + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
    return read_secret(path)
