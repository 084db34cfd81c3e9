"""Digest: what many bytes are hashed to, fast, before a keyed hash makes their seal of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_NONCE = bytes(12)
_AT_ONCE = 1 << 30
"""Bytes of one call of the library, which takes less than 2 GiB."""


class Digest:
    """Hashes buffers under a key of 32 bytes that nobody else knows. Thread-safe.

    It is GHASH, the universal hash in AES-GCM (NIST SP 800-38D), of buffers that are authenticated and not encrypted.
    Whoever does not know the key, and has seen no digest, finds other bytes with the same digest with a probability of
    at most 2**-128 for each 16 bytes. So a digest is never shown, since its nonce is always the same: what is shown is
    a keyed hash of it (Wegman and Carter, 1981; Shoup, "On Fast and Provably Secure Message Authentication Based on
    Universal Hashing", 1996). The constructor raises ImportError if the library is missing.
    """

    __slots__ = ("_cipher", "_whole")

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._whole = AESGCM(key)
        self._cipher = Cipher(algorithms.AES256(key), modes.GCM(_NONCE))

    def of(self, buffers: Sequence[Any]) -> bytes:
        """16 bytes for C-contiguous buffers of any type that follow each other. The lock of the interpreter
        is not held while long ones are hashed."""
        views: list[Any] = []
        for buffer in buffers:
            view = memoryview(buffer)
            if view.nbytes:
                views.append(view.cast("B"))
        if len(views) == 1 and len(views[0]) <= _AT_ONCE:
            # The same code in one call, which takes a fifth of the time where the buffer is short.
            return self._whole.encrypt(_NONCE, b"", views[0])
        hashed = self._cipher.encryptor()
        for whole in views:
            for start in range(0, len(whole), _AT_ONCE):
                part = whole[start : start + _AT_ONCE]
                hashed.authenticate_additional_data(part)
        hashed.finalize()
        return hashed.tag


def check_library(who: str, extra: str) -> None:
    """Raise ImportError, which names the extra, if the library for digests is missing, or one that holds the lock of
    the interpreter."""
    try:
        import cryptography
    except ImportError as error:
        raise ImportError(f'{who} needs cryptography: pip install ".[{extra}]"') from error
    version = cryptography.__version__
    major = int(version.partition(".")[0])
    if major < 50:
        raise ImportError(f'{who} needs cryptography 50, and this is {version}: pip install -U ".[{extra}]"')
