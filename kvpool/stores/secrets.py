"""The secret that the workers of a shared store are given: 16 to 64 bytes, as an argument or as a file."""

from __future__ import annotations

import hashlib
import os
import stat
from typing import Any

_LEAST, _MOST = 16, 64


class SharedSecret:
    """A secret that the users of one store share. Never shown, never pickled.

    ``secret``: 16 to 64 bytes. ``secret_file``: instead, the path of a file that has them, of which a line end is left
    out. Only its owner may have access to the file. Raises TypeError, ValueError, and OSError for a file that cannot be
    read. Messages do not have the secret.
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: Any = None, secret_file: Any = None) -> None:
        if (secret is None) == (secret_file is None):
            raise ValueError("secret, secret_file: accepted is one of them")
        name = "secret" if secret_file is None else f"secret_file={secret_file!r:.200}"
        own = secret if secret_file is None else _content(name, secret_file)
        if not isinstance(own, bytes):
            raise TypeError("secret: accepted are bytes")
        if not _LEAST <= len(own) <= _MOST:
            raise ValueError(f"{name}: accepted are {_LEAST} to {_MOST} bytes")
        self._secret = bytes(memoryview(own))

    def derived(self, purpose: bytes) -> bytes:
        """32 bytes for one purpose, a name of up to 16 bytes. They tell nothing of the secret, nor of other
        purposes."""
        return hashlib.blake2b(key=self._secret, digest_size=32, person=purpose).digest()

    def __repr__(self) -> str:
        return "SharedSecret()"

    def __reduce__(self) -> Any:
        raise TypeError("a secret is not pickled: it would travel with the pickle")


def _content(name: str, path: Any) -> bytes:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name}: accepted is a path")
    with open(path, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode) or stat.S_IMODE(mode) & 0o077:
            raise ValueError(f"{name}: accepted is a file that only its owner may read: chmod 600")
        return file.read(4096).rstrip(b"\r\n")
