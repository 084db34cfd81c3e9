"""The secret that the clients of a shared store are given, as an argument or as a file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from kvpool.stores.seals import SECRET_BYTES
from kvpool.stores.secret_files import read_secret


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
    try:
        return read_secret(Path(path))
    except ValueError as error:
        raise ValueError(f"secret_file: {error}") from None
