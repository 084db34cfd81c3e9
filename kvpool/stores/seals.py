"""Seals: what proves that the bytes of a block are those that were saved under its key. And the keys themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.hostcache.identity import ModelIdentity
from kvpool.stores.base import KEY_BYTES, SEAL_BYTES, TAG_BYTES, Bytes, Rows

SECRET_BYTES = 32
_NAME = b"kvpool store 1 "


class Secret:
    """What is derived from the secret of a store for one model. Never shown. Thread-safe.

    All derivations are BLAKE2b or BLAKE3 in their keyed modes, under keys that are themselves derived from the secret,
    one for each purpose.
    """

    __slots__ = ("_chains", "_identity", "_opaque", "_roots", "_seals", "_tags")

    def __init__(self, secret: bytes, identity: ModelIdentity) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"secret: accepted are {SECRET_BYTES} bytes")
        self._identity = bytes.fromhex(identity.fingerprint)
        self._opaque, self._roots, self._chains, self._seals, self._tags = (
            hashlib.blake2b(_NAME + purpose, key=secret, digest_size=32).digest()
            for purpose in (b"opaque", b"roots", b"chains", b"seals", b"tags")
        )

    def __repr__(self) -> str:
        return "Secret()"

    def __reduce__(self) -> Any:
        raise TypeError("a secret is not pickled: it would travel with the pickle")

    def tag(self, namespace: bytes) -> bytes:
        """The name of a namespace in the store: TAG_BYTES bytes."""
        return hashlib.blake2b(self._identity + namespace, key=self._tags, digest_size=TAG_BYTES).digest()

    def opaque(self, keys: Iterable[bytes]) -> Bytes:
        """Keys of blocks that an engine names itself: uint8[n, KEY_BYTES]."""
        found = [
            hashlib.blake2b(self._identity + key, key=self._opaque, digest_size=KEY_BYTES).digest() for key in keys
        ]
        return _rows(found)

    def chain(self, namespace: bytes, group: int, tokens: npt.NDArray[np.int32],
              extra: npt.NDArray[np.int64] | None, tokens_per_block: int) -> Bytes:  # fmt: skip
        """Keys of the full blocks of a prompt, for one group of layers: uint8[n, KEY_BYTES].

        Each key is hashed over the key before it, the tokens of its block and their extra ids. The first is hashed over
        the identity, the namespace and the group.
        """
        root = self._identity + group.to_bytes(4, "little") + namespace
        key = hashlib.blake2b(root, key=self._roots, digest_size=KEY_BYTES).digest()
        content, width = np.ascontiguousarray(tokens, "<i4").tobytes(), 4 * tokens_per_block
        found = []
        for place in range(len(tokens) // tokens_per_block):
            key += content[place * width : (place + 1) * width]
            if extra is not None:
                own = extra[place * tokens_per_block : (place + 1) * tokens_per_block]
                key += own.astype("<i8").tobytes() if own.any() else b""
            key = hashlib.blake2b(key, key=self._chains, digest_size=KEY_BYTES).digest()
            found.append(key)
        return _rows(found)

    def seal(self, keys: Bytes, rows: Rows, memory: Bytes) -> Bytes:
        """Seals of rows of memory under these keys: uint8[n, SEAL_BYTES]. The lock of the interpreter is not held while
        a row is hashed."""
        from blake3 import blake3

        length = int(memory.shape[1]).to_bytes(8, "little")
        out = np.empty((len(keys), SEAL_BYTES), np.uint8)
        for place, (key, row) in enumerate(zip(keys, rows.tolist(), strict=True)):
            hashed = blake3(key.tobytes() + length + self._identity, key=self._seals)
            hashed.update(memory[row])
            out[place] = np.frombuffer(hashed.digest(SEAL_BYTES), np.uint8)
        return out


def check_library() -> None:
    """Raise ImportError, which names the extra, if the library for seals is missing."""
    try:
        import blake3  # noqa: F401
    except ImportError as error:
        raise ImportError("stores need blake3: pip install 'kvpool[stores]'") from error


def _rows(digests: list[bytes]) -> Bytes:
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, KEY_BYTES)
