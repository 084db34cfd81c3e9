"""Seals: what proves that the bytes of a block are those that were saved under its key. And the keys themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.hostcache.identity import ModelIdentity
from kvpool.stores.store import KEY_BYTES, MODEL_BYTES, SEAL_BYTES, TAG_BYTES, Bytes, Rows

SECRET_BYTES = 32
_NAME = b"kvpool store 3 "
"""The format of keys and seals. Stores that outlive a process drop what was saved in another."""


class BlockNames:
    """Blocks as an engine names them, in place of their keys. A ``StoreQueue`` hashes them on its own threads.

    ``names``: bytes for each block. ``generation``: bytes that are hashed before each name. Nothing is found that was
    saved in another generation. ``contexts``: for each block what its content depends on, besides its name, such as
    ``block_context`` gives it; None where names say all. It is not part of the key, and of the seal: a block that was
    saved in another context is DAMAGED. Immutable. A part of it, by a slice or by places int64[n], has the same
    generation. Raises TypeError and ValueError.
    """

    __slots__ = ("contexts", "generation", "names")

    def __init__(
        self, names: Iterable[bytes], generation: bytes = b"", contexts: Iterable[bytes] | None = None
    ) -> None:
        self.names, self.generation = _exact_all(names), _exact(generation)
        self.contexts = None if contexts is None else _exact_all(contexts)
        if self.contexts is not None and len(self.contexts) != len(self.names):
            raise ValueError(f"contexts has {len(self.contexts)} elements: accepted is one for each of the "
                             f"{len(self.names)} names")  # fmt: skip

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, which: slice | Rows) -> BlockNames:
        places = range(len(self.names))[which] if isinstance(which, slice) else which.tolist()
        contexts = None if self.contexts is None else [self.contexts[place] for place in places]
        return BlockNames([self.names[place] for place in places], self.generation, contexts)


class Secret:
    """What is derived from the secret of a store for one model. Never shown. Thread-safe.

    All derivations are BLAKE2b or BLAKE3 in their keyed modes, under keys that are themselves derived from the secret,
    one for each purpose.
    """

    __slots__ = ("_identity", "_opaque", "_seals", "_tags", "model")

    def __init__(self, secret: bytes, identity: ModelIdentity) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"secret: accepted are {SECRET_BYTES} bytes")
        self._identity = bytes.fromhex(identity.fingerprint)
        self._opaque, self._seals, self._tags = (
            hashlib.blake2b(_NAME + purpose, key=secret, digest_size=32).digest()
            for purpose in (b"opaque", b"seals", b"tags")
        )
        self.model = hashlib.blake2b(self._identity, key=self._tags, digest_size=MODEL_BYTES).digest()
        """What all tags of the model begin with."""

    def __repr__(self) -> str:
        return "Secret()"

    def __reduce__(self) -> Any:
        raise TypeError("a secret is not pickled: it would travel with the pickle")

    def tag(self, namespace: bytes) -> bytes:
        """The name of a namespace in the store: TAG_BYTES bytes, of which the first name the model."""
        size = TAG_BYTES - MODEL_BYTES
        own = hashlib.blake2b(self._identity + namespace, key=self._tags, digest_size=size, person=b"namespace")
        return self.model + own.digest()

    def opaque(self, names: BlockNames | Iterable[bytes]) -> Bytes:
        """Keys of blocks that an engine names itself: uint8[n, KEY_BYTES]."""
        own = names if isinstance(names, BlockNames) else BlockNames(names)
        begun = hashlib.blake2b(self._identity + own.generation, key=self._opaque, digest_size=KEY_BYTES)
        found = bytearray()
        for name in own.names:
            hashed = begun.copy()
            hashed.update(name)
            found += hashed.digest()
        return np.frombuffer(found, np.uint8).reshape(-1, KEY_BYTES)

    def keys(self, blocks: Bytes | BlockNames) -> Bytes:
        """Makes keys of names, and leaves keys as they are: uint8[n, KEY_BYTES]."""
        return self.opaque(blocks) if isinstance(blocks, BlockNames) else blocks

    def seal(self, keys: Bytes, rows: Rows, memory: Bytes, contexts: Sequence[bytes] | None = None) -> Bytes:
        """Seals of rows of memory under these keys, in these contexts: uint8[n, SEAL_BYTES]. The lock of the
        interpreter is not held while a row is hashed."""
        from blake3 import blake3

        length = int(memory.shape[1]).to_bytes(8, "little")
        out = np.empty((len(keys), SEAL_BYTES), np.uint8)
        for place, (key, row) in enumerate(zip(keys, rows.tolist(), strict=True)):
            context = contexts[place] if contexts else b""
            fixed = key.tobytes() + length + self._identity + len(context).to_bytes(8, "little")
            hashed = blake3(fixed + context, key=self._seals)
            hashed.update(memory[row])
            out[place] = np.frombuffer(hashed.digest(SEAL_BYTES), np.uint8)
        return out


def block_context(
    parent: bytes, tokens: npt.NDArray[np.int32], extra: npt.NDArray[np.int64] | None, namespace: bytes, group: int
) -> bytes:
    """What a block of a prompt depends on, for ``BlockNames``: no two blocks have the same bytes.

    ``parent``: the pool's key of the block before it, or b"". ``tokens`` int32[n] and ``extra`` int64[n]: its tokens
    and their extra ids. ``namespace``: bytes that tell it from all others. ``group``: the index of its group of layers.
    """
    ids = tokens.astype("<i4").tobytes()
    more = b"" if extra is None or not extra.any() else extra.astype("<i8").tobytes()
    sizes = np.array([len(parent), len(namespace), len(ids), group], "<i8").tobytes()
    return sizes + parent + namespace + ids + more


def check_library() -> None:
    """Raise ImportError, which names the extra, if the library for seals is missing."""
    try:
        import blake3  # noqa: F401
    except ImportError as error:
        raise ImportError('stores need blake3: pip install ".[stores]"') from error


def _exact_all(names: Iterable[bytes]) -> tuple[bytes, ...]:
    own = tuple(names)
    return own if [*map(type, own)].count(bytes) == len(own) else tuple(map(_exact, own))


def _exact(name: object) -> bytes:
    """The bytes as an exact builtin. Raises TypeError for anything else."""
    if not isinstance(name, bytes):
        raise TypeError(f"{name!r:.80}: accepted are bytes")
    return bytes.__getitem__(name, slice(None))
