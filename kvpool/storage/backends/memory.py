"""MemoryStore: keeps blocks in the memory of this process. For tests, and as the shortest store to read."""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from typing import NamedTuple

import numpy as np

from kvpool.common.arrays.layout import choice_argument, integer_argument
from kvpool.state.arrays import LRU, POLICIES, PolicyName
from kvpool.storage.backends.tag_limits import Victims
from kvpool.storage.store import (
    ABSENT,
    CANCELLED,
    EPOCH_BYTES,
    EPOCHS_MAX,
    MAC_BYTES,
    OK,
    REFUSED,
    TAG_BYTES,
    Bytes,
    Rows,
    Space,
    Stop,
    Store,
)


class _Block(NamedTuple):
    content: bytes
    mac: bytes
    tag: bytes


class MemoryStore(Store):
    """A ``Store`` in the memory of this process, for tests and as the shortest store to read.

    Parameters
    ----------
    capacity : int
        The most bytes of blocks.
    policy : {"lru", "reuse", "agent", "adaptive"}, default "lru"
        Which block is evicted next, as in a pool.

    Notes
    -----
    Content stays for the next ``open`` of the same object. Any thread may call it.

    Examples
    --------
    >>> from kvpool.storage import MemoryStore
    >>> store = MemoryStore(1 << 20)
    >>> store.name, store.persistent, len(store.secret)
    ('memory', False, 32)
    """

    name = "memory"
    threads = 2
    clears_prefix = TAG_BYTES
    persistent = False
    indexed = True

    def __init__(self, capacity: int, *, policy: PolicyName = LRU) -> None:
        self._policy = choice_argument("policy", policy, POLICIES)
        self._victims: Victims | None = None
        self._capacity = integer_argument("capacity", capacity, 1, 1 << 62)
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()
        self._of_tag: Counter[bytes] = Counter()
        self._secret = os.urandom(32)
        self._lock, self._evicted = threading.Lock(), 0
        self._epochs: dict[bytes, bytes] = {}

    @property
    def secret(self) -> bytes:
        return self._secret

    def open(self, space: Space) -> bytes:
        kept = next((len(block.content) for block in self._blocks.values()), space.block_bytes)
        if kept != space.block_bytes:
            raise ValueError(f"space: expected blocks of {kept} bytes, which this store has, got {space.block_bytes}")
        self._memory, self._most = space.memory, self._capacity // space.block_bytes
        if self._policy != LRU:
            self._victims = Victims(self._policy, max(self._most, len(self._blocks), 1), self._blocks)
        return self._secret

    def epoch(self, model: bytes, new: bool) -> bytes:
        with self._lock:
            if new:
                self._epochs[model] = os.urandom(EPOCH_BYTES)
                while len(self._epochs) > EPOCHS_MAX:
                    del self._epochs[next(iter(self._epochs))]
            return self._epochs.get(model, b"")

    def find(self, keys: Bytes) -> Bytes:
        with self._lock:
            return np.array([OK if key.tobytes() in self._blocks else ABSENT for key in keys], np.uint8)

    def save(self, keys: Bytes, rows: Rows, macs: Bytes, tag: bytes, limit: int, stop: Stop) -> Bytes:
        codes = np.full(len(keys), CANCELLED, np.uint8)
        for place, (key, row, mac) in enumerate(zip(keys, rows.tolist(), macs, strict=True)):
            if stop():
                break
            content = self._memory[row].tobytes()
            with self._lock:
                codes[place] = self._put(key.tobytes(), _Block(content, mac.tobytes(), tag), limit)
        self._use(keys)
        return codes

    def load(self, keys: Bytes, rows: Rows, stop: Stop) -> tuple[Bytes, Bytes]:
        codes, macs = np.full(len(keys), CANCELLED, np.uint8), np.zeros((len(keys), MAC_BYTES), np.uint8)
        for place, (key, row) in enumerate(zip(keys, rows.tolist(), strict=True)):
            if stop():
                break
            with self._lock:
                block = self._blocks.get(key.tobytes())
                if block is not None:
                    self._blocks.move_to_end(key.tobytes())
            codes[place] = ABSENT if block is None else OK
            if block is not None:
                self._memory[row] = np.frombuffer(block.content, np.uint8)
                macs[place] = np.frombuffer(block.mac, np.uint8)
        self._use(keys)
        return codes, macs

    def forget(self, keys: Bytes) -> int:
        with self._lock:
            return sum(self._drop(key.tobytes()) for key in keys)

    def clear(self, tag: bytes) -> int:
        with self._lock:
            return sum(self._drop(key) for key, block in list(self._blocks.items()) if block.tag.startswith(tag))

    def stats(self) -> dict[str, int]:
        return {"capacity": self._most, "blocks": len(self._blocks), "evicted": self._evicted}

    def close(self) -> None:
        """Content stays for the next ``open`` of this object."""

    def _use(self, keys: Bytes) -> None:
        """Keys were saved or loaded together."""
        if self._victims is not None:
            with self._lock:
                self._victims.use([key for key in map(bytes, keys) if key in self._blocks])

    def _put(self, key: bytes, block: _Block, limit: int) -> int:
        """Keep one block. The lock is held."""
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return OK
        if limit < 1 or self._most < 1:
            return REFUSED
        while self._of_tag[block.tag] >= limit:
            self._evict(next(key for key, other in self._blocks.items() if other.tag == block.tag))
        while len(self._blocks) >= self._most:
            # Keys of this call are no victims yet.
            victims = [] if self._victims is None else self._victims.first(1)
            self._evict(victims[0] if victims else next(iter(self._blocks)))
        self._blocks[key] = block
        self._of_tag[block.tag] += 1
        return OK

    def _evict(self, key: bytes) -> None:
        self._evicted += self._drop(key)

    def _drop(self, key: bytes) -> bool:
        block = self._blocks.pop(key, None)
        if block is not None:
            self._of_tag[block.tag] -= 1
            if self._victims is not None:
                self._victims.drop(key)
        return block is not None
