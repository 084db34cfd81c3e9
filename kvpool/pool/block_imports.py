"""Imports: the KV of full blocks from elsewhere, stored on the host under keys that this pool has computed."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from kvpool.arrays import Int64s, Uint8s
from kvpool.arrays.strided import in_numpy
from kvpool.entry.interrupt import DeferSignals
from kvpool.memory.pools import MemoryPools
from kvpool.pool.config import Group
from kvpool.pool.core import Core
from kvpool.pool.keys import BlockKeys, request_of
from kvpool.state import control, records

Ids = Int64s
NO_IDS: Ids = np.empty(0, np.int64)


class Imports:
    """Stores blocks in the host tier. One import runs at a time. The memory stays while an import writes to it.
    Thread-safe."""

    def __init__(self, core: Core, pools: MemoryPools) -> None:
        self._core, self._pools = core, pools
        self._one = threading.Lock()
        core.transfer.forks.guard(self, "_one")
        self._pinned = NO_IDS

    def store(self, into: Group, keys: BlockKeys, first: int, priority: int, buffers: list[Uint8s]) -> int:
        self._core.refuse_inside("import_blocks")
        now = self._core.now()
        with self._one, DeferSignals():
            full = len(keys) // self._core.config.tokens_per_block
            ids, held = np.full(len(buffers), records.NONE, np.int64), np.full(full, records.NONE, np.int64)
            try:
                generation = self._take(into, keys, first, priority, ids, held, now)
                self._fill(into, ids, buffers)
                return int(self._core.decide(None, self._publish, into, keys, first, priority, ids, generation, now))
            finally:
                self._give_back(now)

    def pinned(self) -> Ids:
        """The blocks that the present import holds. The caller holds the state lock."""
        return self._pinned

    def close(self) -> None:
        """Free the pool's memory, once no import writes to it any more."""
        with self._one:
            self._pools.close()

    def _take(self, into: Group, keys: BlockKeys, first: int, priority: int, ids: Ids, held: Ids, now: int) -> int:
        """Take blocks: their ids in the group go into ``ids`` and ``held``. Returns the generation in which they were
        taken."""
        if keys.extra_ids is not None:
            self._core.enable_extra()

        def take(heads: Ids, request: Ids) -> int:
            control.take_missing(heads, into.index, request, first, priority, ids, held, now)
            # They are given back in this order: the last block first, so that leaves age first, and what was cached
            # before last.
            taken = np.concatenate([_named(ids)[::-1], _named(held)[::-1]])
            self._pinned = self._core.states.pool_ids.of(into.index, taken)
            return int(heads[0, records.H.generation])

        return int(self._core.decide(None, take, request_of(keys)))

    def _fill(self, into: Group, ids: Ids, buffers: list[Uint8s]) -> None:
        taken = self._core.states.pool_ids.of(into.index, _named(ids))
        self._core.wait_for(self._core.transfer.pending(taken, writes=True))
        rows = [
            self._pools.flat("host", into.index, i).reshape(-1, layout.block_bytes)
            for i, layout in enumerate(into.layouts)
        ]
        ends = np.cumsum([layout.block_bytes for layout in into.layouts])[:-1]
        tokens = int(self._core.states.heads[into.index, records.H.block_tokens])
        whole = np.stack([taken, np.zeros_like(taken), np.full_like(taken, tokens)], axis=1)
        with self._core.device.host_access(writes=whole):
            for block, buffer in zip(ids.tolist(), buffers, strict=True):
                for part, own in zip(rows, np.split(buffer, ends) if block != records.NONE else (), strict=False):
                    part[block - into.device_blocks] = own

    def _publish(
        self, heads: Ids, into: Group, keys: BlockKeys, first: int, priority: int, ids: Ids, generation: int, now: int
    ) -> int:
        """Publish the blocks, unless the pool was reset since they were taken. Returns how many. The caller holds the
        state lock."""
        if generation != heads[0, records.H.generation]:
            return 0
        self._core.names.learn([keys])
        return int(control.publish_taken(heads, into.index, request_of(keys), first, priority, ids, now))

    def _give_back(self, now: int) -> None:
        """Unpin the blocks that an import has pinned."""
        with self._core.lock:
            if not self._core.closed:
                control.unpin(self._core.states.heads, self._pinned, now)
            self._pinned = NO_IDS


def block_buffer(place: int, buffer: Any, size: int) -> Uint8s:
    """The bytes of one block from the caller, in place. Raises TypeError or ValueError, which name ``data[place]``."""
    buffer = in_numpy(f"data[{place}]", buffer)
    try:
        if getattr(getattr(buffer, "dtype", None), "hasobject", False):
            raise TypeError("objects are no bytes")
        found = np.frombuffer(buffer, np.uint8)
    except (TypeError, ValueError, BufferError):
        raise TypeError(f"data[{place}] is a {type(buffer).__name__}: accepted are contiguous buffers") from None
    if found.nbytes != size:
        raise ValueError(f"data[{place}] has {found.nbytes} bytes: accepted are the {size} of a block")
    return found


def _named(ids: Ids) -> Ids:
    return ids[ids != records.NONE]
