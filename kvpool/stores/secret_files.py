"""Files that hold the secret of a store which several workers share. Nobody else may read them."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from kvpool.stores.seals import SECRET_BYTES

_DIGITS = 2 * SECRET_BYTES


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
            raise ValueError(f"{path} is no regular file: accepted is a file with {_DIGITS} hex digits")
        if seen.st_mode & 0o077 or seen.st_uid not in (os.geteuid(), 0):
            raise ValueError(f"{path} holds a secret, and others can read or write it: chown it, and chmod 600 {path}")
        text = file.read(_DIGITS + 16).strip()
    try:
        secret = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"{path}: accepted is a file with {_DIGITS} hex digits, such as openssl rand -hex 32 prints")
    return secret


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
