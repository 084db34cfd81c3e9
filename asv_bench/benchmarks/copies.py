"""Block copies of the cpu device beside one memcpy of the same bytes."""

from __future__ import annotations

import ctypes
import time

import numpy as np

from kvpool.common.arrays.layout import BlockLayout
from kvpool.device.cpu import CpuDevice
from kvpool.device.memory.pools import MemoryPools

TIER_BYTES = 256 << 20
TOKENS = 16


class BlockCopies:
    """Whole blocks at random places of two tiers that no cache holds; the bytes of a batch are a sixteenth of a tier.

    The memcpy copies as many bytes, between places as random, in one call.
    """

    params = (["layer_first", "block_first"], ["onboard", "offload"], [4 << 10, 64 << 10, 1 << 20])
    param_names = ("order", "direction", "block_bytes")
    repeat = 3
    rounds = 1

    def setup(self, order: str, direction: str, block_bytes: int) -> None:
        blocks = TIER_BYTES // block_bytes
        layout = BlockLayout.of_block_bytes(block_bytes, TOKENS, order=order)
        self.pools = MemoryPools(CpuDevice(), layout, blocks, blocks)
        # The first write, not the allocation, is what gives memory its pages.
        self.pools.flat("device")[:] = 1
        self.pools.flat("host")[:] = 2
        random = np.random.default_rng(0)
        device, host = random.permutation(blocks), blocks + random.permutation(blocks)
        source, target = (host, device) if direction == "onboard" else (device, host)
        every = np.stack([source, target, np.full(blocks, TOKENS), np.zeros(blocks, int)], axis=1).astype(np.int64)
        self.batches = np.split(every, 16)
        self.batch_bytes = TIER_BYTES // 16
        source_bytes, target_bytes = (self.pools.flat("host"), self.pools.flat("device"))[
            :: 1 if direction == "onboard" else -1
        ]
        places = [int(place) * self.batch_bytes for place in random.permutation(16)]
        self.spans = [
            (target_bytes.ctypes.data + place, source_bytes.ctypes.data + other)
            for place, other in zip(places, reversed(places), strict=True)
        ]
        self.pools.device.copy_blocks(every[:1])

    def teardown(self, order: str, direction: str, block_bytes: int) -> None:
        self.pools.close()

    def time_blocks(self, order: str, direction: str, block_bytes: int) -> None:
        for moves in self.batches:
            self.pools.device.copy_blocks(moves)

    def time_memcpy(self, order: str, direction: str, block_bytes: int) -> None:
        for target, source in self.spans:
            ctypes.memmove(target, source, self.batch_bytes)

    def track_share_of_memcpy(self, order: str, direction: str, block_bytes: int) -> float:
        """Speed of the block copies, memcpy of the same bytes = 1. The two alternate; the best of each counts."""
        arguments = (order, direction, block_bytes)
        blocks, memcpy = [], []
        for _ in range(5):
            memcpy.append(_seconds(self.time_memcpy, *arguments))
            blocks.append(_seconds(self.time_blocks, *arguments))
        return min(memcpy) / min(blocks)

    track_share_of_memcpy.unit = "x memcpy"  # type: ignore[attr-defined]


class CallCost:
    """What a call costs: a few 4 KiB blocks."""

    params = [1, 8, 64, 512]
    param_names = ("moves",)

    def setup(self, moves: int) -> None:
        layout = BlockLayout.of_block_bytes(4096, TOKENS)
        self.pools = MemoryPools(CpuDevice(), layout, 1024, 1024)
        self.pools.flat("device")[:] = 1
        self.pools.flat("host")[:] = 2
        self.moves = np.array([(i, 1024 + i, TOKENS, 0) for i in range(moves)], dtype=np.int64)
        self.pools.device.copy_blocks(self.moves)

    def teardown(self, moves: int) -> None:
        self.pools.close()

    def time_copy(self, moves: int) -> None:
        self.pools.device.copy_blocks(self.moves)


def _seconds(function, *arguments: object) -> float:  # type: ignore[no-untyped-def]
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start
