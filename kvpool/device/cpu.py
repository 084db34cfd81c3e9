"""CpuDevice: both tiers in NumPy memory. The calling thread copies, without the GIL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.arrays.strided import StridedArray
from kvpool.device.base import (
    NULL_EVENT,
    NULL_STREAM,
    Device,
    Event,
    Region,
    Stream,
    moves_argument,
    stream_argument,
    tier_argument,
)
from kvpool.device.block_copy import copy_fragments, copy_moves, goes_around_caches, make_plan
from kvpool.device.ram import allocate_ram, available_ram
from kvpool.device.regions import Regions
from kvpool.device.shared import MainMemory, SharedMemories
from kvpool.device.steps import StagedStep, StepTargets, write_staged_step
from kvpool.device.tables import StagedRows, StagedVectors, Table, write_rows, write_vectors
from kvpool.device.token_moves import TokenMoves, move_tokens
from kvpool.errors import PoolClosed


class _Bound(NamedTuple):
    """The pool that the device is bound to. A copy gets addresses only, so ``regions`` keeps the memory alive."""

    regions: Regions
    plans: list[list[NDArray[np.int64]]]
    """For each region and each of its parts, the vector of its plan."""
    streaming: bool
    """Whether fragments are copied past the caches."""
    only: NDArray[np.int64] | None
    """The plan, if there is only one; else None."""

    @classmethod
    def of(cls, regions: Regions) -> _Bound:
        plans = [
            [make_plan(*part, region.device_blocks, region.host_blocks).vector() for part in region.parts]
            for region in regions.all
        ]
        streaming = goes_around_caches(sum(pool.nbytes for pool in regions.pools))
        return cls(regions, plans, streaming, plans[0][0] if len(plans) == len(plans[0]) == 1 else None)


class CpuDevice(Device):
    """The device of machines without a GPU. Every copy is done when the call returns."""

    name = "cpu"
    synchronous = True
    one_memory = True

    def __init__(self) -> None:
        self._bound: _Bound | None = None
        self._shared = SharedMemories()
        self._closed = False

    def allocate(self, nbytes: int, tier: str) -> NDArray[np.uint8]:
        self._check_open()
        tier_argument(tier)
        return allocate_ram(nbytes)

    def allocate_shared(self, nbytes: int, tier: str) -> NDArray[np.uint8]:
        self._check_open()
        tier_argument(tier)
        return self._shared.allocate(nbytes)

    def ipc_handle(self, array: NDArray[np.uint8], tier: str) -> MainMemory:
        return self._shared.handle(array)

    def free(self, array: NDArray[np.uint8]) -> None:
        # The memory itself is freed with the last view of it.
        self._shared.free(array)
        bound = self._bound
        if bound is not None and any(array is pool for pool in bound.regions.pools):
            self._bound = None

    def adopt(self, memory: StridedArray, tier: str) -> NDArray[np.uint8]:
        self._check_open()
        return memory.host_view()

    def available_bytes(self, tier: str) -> int | None:
        tier_argument(tier)
        return available_ram()

    def as_stream(self, stream: Any) -> Stream:
        stream_argument(stream)
        return NULL_STREAM

    def bind(self, regions: Sequence[Region]) -> None:
        self._check_open()
        if self._bound is not None:
            raise ValueError("device: already bound to a pool; every pool needs a device of its own")
        self._bound = _Bound.of(Regions(regions))

    def _pool(self) -> _Bound:
        bound = self._bound
        if bound is None:
            self._check_open()
            raise ValueError("device: not bound to a pool")
        return bound

    def copy_blocks(self, moves: NDArray[np.int64], stream: Stream = NULL_STREAM) -> None:
        bound, moves = self._pool(), moves_argument(moves)
        if bound.only is None:
            for region, rows in bound.regions.split(moves):
                for plan in bound.plans[region]:
                    copy_moves(rows, plan)
            return
        bad = copy_moves(moves, bound.only)
        if bad >= 0:
            raise ValueError(bound.regions.describe_bad_move(bad, moves[bad]))

    def copy_fragments(self, fragments: NDArray[np.int64], stream: Stream = NULL_STREAM) -> None:
        copy_fragments(fragments, self._pool().streaming)

    def move_tokens(self, moves: NDArray[np.int64], starts: NDArray[np.int64], stream: Stream = NULL_STREAM) -> None:
        bound = self._pool()
        for region, found in TokenMoves.of(moves, starts, bound.regions).by_region(bound.regions):
            for plan in bound.plans[region]:
                move_tokens(found.moves, plan)

    def stage_rows(self, table: Table, staged: StagedRows, stream: Stream = NULL_STREAM) -> None:
        self._check_open()
        write_rows(*staged[1:], table.address, table.strides[-2])

    def stage_vectors(self, staged: StagedVectors, stream: Stream = NULL_STREAM) -> None:
        self._check_open()
        write_vectors(staged)

    def stage_step(self, targets: StepTargets, staged: StagedStep, stream: Stream = NULL_STREAM) -> None:
        self._check_open()
        write_staged_step(targets, staged)

    def create_stream(self, name: str) -> Stream:
        return NULL_STREAM

    def record(self, stream: Stream) -> Event:
        return NULL_EVENT

    def wait(self, stream: Stream, event: Event) -> None:
        """Return at once: nothing is ever pending here."""

    def query(self, event: Event) -> bool:
        return True

    def synchronize(self, event: Event | None = None) -> None:
        self._check_open()

    def close(self) -> None:
        self._bound, self._closed = None, True

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed("the cpu device is closed")
