"""What proves that the bytes of a block are those that were saved under its key, and the keys themselves. Both are
derived from the secret of a store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvpool.common.arrays import Int32s, Int64s
from kvpool.common.arrays.digest import Digest
from kvpool.hostcache.identity import ModelIdentity
from kvpool.storage.store import KEY_BYTES, MAC_BYTES, MODEL_BYTES, TAG_BYTES, Bytes, Rows

SECRET_BYTES = 32
_NAME = b"kvpool store 4 "
"""The format of keys and MACs. Stores that outlive a process drop what was saved in another."""


class BlockNames:
    """Blocks as an engine names them, in place of their keys. A ``StoreWorker`` hashes them on its own threads.

    It has a length, and parts by a slice or by places int64[n].

    Parameters
    ----------
    names : iterable of bytes
        A name for each block.
    contexts : iterable of bytes, optional
        For each block what its content depends on, besides its name. It is part of the MAC, and not of the key: a block
        that was saved in another context is DAMAGED.

    Raises
    ------
    TypeError, ValueError
        For anything but bytes, and for contexts of another number.

    Notes
    -----
    Immutable, so that threads can share it.
    """

    __slots__ = ("contexts", "names")

    def __init__(self, names: Iterable[bytes], contexts: Iterable[bytes] | None = None) -> None:
        self.names = _bytes_argument(names)
        self.contexts = None if contexts is None else _bytes_argument(contexts)
        if self.contexts is not None and len(self.contexts) != len(self.names):
            raise ValueError(
                f"contexts: expected one for each of the {len(self.names)} names, got {len(self.contexts)}"
            )

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, which: slice | Rows) -> BlockNames:
        places = range(len(self.names))[which] if isinstance(which, slice) else which.tolist()
        contexts = None if self.contexts is None else [self.contexts[place] for place in places]
        return BlockNames([self.names[place] for place in places], contexts)


class Secret:
    """What is derived from the secret of a store for one model. Never shown. Thread-safe.

    All derivations are BLAKE2b in its keyed mode, under keys that are themselves derived from the secret, one for each
    purpose. Blocks enter it by their ``Digest``.
    """

    __slots__ = ("_digest", "_identity", "_opaque", "_macs", "_tags", "model")

    def __init__(self, secret: bytes, identity: ModelIdentity) -> None:
        if not isinstance(secret, bytes) or len(secret) != SECRET_BYTES:
            raise ValueError(f"secret: expected {SECRET_BYTES} bytes, got another value")
        self._identity = bytes.fromhex(identity.fingerprint)
        self._opaque, self._macs, self._tags, digests = (
            hashlib.blake2b(_NAME + purpose, key=secret, digest_size=32).digest()
            for purpose in (b"opaque", b"seals", b"tags", b"digests")
        )
        self._digest = Digest(digests)
        self.model = hashlib.blake2b(self._identity, key=self._tags, digest_size=MODEL_BYTES).digest()
        """What all tags of the model begin with."""

    def __repr__(self) -> str:
        return "Secret()"

    def __reduce__(self) -> Any:
        raise TypeError("a secret is not pickled: it would travel with the pickle")

    def tag(self, namespace: bytes) -> bytes:
        """The name of a namespace in the store: TAG_BYTES bytes, of which the first name the model."""
        size = TAG_BYTES - MODEL_BYTES
        digest = hashlib.blake2b(self._identity + namespace, key=self._tags, digest_size=size, person=b"namespace")
        return self.model + digest.digest()

    def derive_keys(self, names: BlockNames | Iterable[bytes]) -> Bytes:
        """Keys of blocks that an engine names itself: uint8[n, KEY_BYTES]."""
        block_names = names if isinstance(names, BlockNames) else BlockNames(names)
        begun = hashlib.blake2b(self._identity, key=self._opaque, digest_size=KEY_BYTES)
        digests = bytearray()
        for name in block_names.names:
            hashed = begun.copy()
            hashed.update(name)
            digests += hashed.digest()
        return np.frombuffer(digests, np.uint8).reshape(-1, KEY_BYTES)

    def in_epoch(self, keys: Bytes, epoch: bytes) -> Bytes:
        """What a store has blocks with these keys by, in this epoch of the model: uint8[n, KEY_BYTES]."""
        if not epoch:
            return keys
        # Keys are as good as random, so that a mask that nobody knows makes others of them at no cost.
        mask = hashlib.blake2b(epoch, key=self._opaque, digest_size=KEY_BYTES, person=b"epoch").digest()
        return keys ^ np.frombuffer(mask, np.uint8)

    def keys(self, blocks: Bytes | BlockNames) -> Bytes:
        """Makes keys of names, and leaves keys as they are: uint8[n, KEY_BYTES]."""
        return self.derive_keys(blocks) if isinstance(blocks, BlockNames) else blocks

    def mac(self, keys: Bytes, rows: Rows, memory: Bytes, contexts: Sequence[bytes] | None = None) -> Bytes:
        """MACs of rows of memory under these keys, in these contexts: uint8[n, MAC_BYTES]."""
        fixed = int(memory.shape[1]).to_bytes(8, "little") + self._identity
        whole, out = keys.tobytes(), []
        for place, row in enumerate(rows.tolist()):
            context = contexts[place] if contexts else b""
            named = whole[place * KEY_BYTES : (place + 1) * KEY_BYTES] + fixed
            named += len(context).to_bytes(8, "little") + context
            authenticated = named + self._digest.of([memory[row]])
            out.append(hashlib.blake2b(authenticated, key=self._macs, digest_size=MAC_BYTES).digest())
        return np.frombuffer(b"".join(out), np.uint8).reshape(-1, MAC_BYTES)


def block_context(parent: bytes, tokens: Int32s, extra: Int64s | None, namespace: bytes, group: int) -> bytes:
    """What a block of a prompt depends on, for ``BlockNames``: no two blocks have the same bytes.

    ``parent``: the pool's key of the block before it, or b"". ``tokens`` int32[n] and ``extra`` int64[n]: its tokens
    and their extra ids. ``namespace``: bytes that tell it from all others. ``group``: the index of its group of layers.
    """
    ids = tokens.astype("<i4").tobytes()
    more = b"" if extra is None or not extra.any() else extra.astype("<i8").tobytes()
    sizes = np.array([len(parent), len(namespace), len(ids), group], "<i8").tobytes()
    return sizes + parent + namespace + ids + more


def _bytes_argument(names: Iterable[bytes]) -> tuple[bytes, ...]:
    name_tuple = tuple(names)
    if [*map(type, name_tuple)].count(bytes) < len(name_tuple):
        for name in name_tuple:
            if not isinstance(name, bytes):
                raise TypeError(f"name: expected bytes, got {name!r:.80}")
    return name_tuple
