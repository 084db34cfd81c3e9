"""The secret that the clients of a shared store are given, as an argument or as a file."""

from __future__ import annotations

import hashlib
import os
import stat
from typing import Any

from kvpool.stores.seals import SECRET_BYTES

_DIGITS = 2 * SECRET_BYTES


class SharedSecret:
    """A secret that the users of one store share. Never shown, never pickled.

    ``secret``: 32 bytes. ``secret_file``: instead, the path of a file with 64 hex digits, such as ``openssl rand -hex
    32`` prints. Only its owner may have access to it. Raises TypeError, ValueError, and OSError for a file that cannot
    be read. Messages do not have the secret.
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: Any = None, secret_file: Any = None) -> None:
        if (secret is None) == (secret_file is None):
            raise ValueError("secret, secret_file: accepted is one of them")
        own = secret if secret_file is None else _read(secret_file)
        if not isinstance(own, bytes):
            raise TypeError(f"secret: accepted are {SECRET_BYTES} bytes")
        if len(own) != SECRET_BYTES:
            raise ValueError(f"secret: accepted are {SECRET_BYTES} bytes")
        self._secret = bytes(memoryview(own))

    def derived(self, purpose: bytes) -> bytes:
        """32 bytes for one purpose, a name of up to 16 bytes. They tell nothing of the secret, nor of other
        purposes."""
        return hashlib.blake2b(key=self._secret, digest_size=SECRET_BYTES, person=purpose).digest()

    def __repr__(self) -> str:
        return "SharedSecret()"

    def __reduce__(self) -> Any:
        raise TypeError("a secret is not pickled: it would travel with the pickle")


def _read(path: Any) -> bytes:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError("secret_file: accepted is a path")
    name = f"secret_file={os.fspath(path)!r:.200}"
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
        seen = os.fstat(file.fileno())
        if not stat.S_ISREG(seen.st_mode) or seen.st_mode & 0o077 or seen.st_uid not in (os.geteuid(), 0):
            raise ValueError(f"{name}: accepted is a file that only its owner can read or write: chmod 600")
        text = file.read(_DIGITS + 16).strip()
    try:
        secret = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"{name}: accepted is a file with {_DIGITS} hex digits, such as openssl rand -hex 32 prints")
    return secret
