"""CpuDevice: both tiers in NumPy memory, copies done by the calling thread without the GIL."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.device.base import (
    NULL_EVENT,
    NULL_STREAM,
    Device,
    Event,
    Stream,
    bind_arguments,
    moves_argument,
    stream_argument,
    tier_argument,
)
from kvpool.device.block_copy import Plan, copy_moves, describe_bad_move, make_plan
from kvpool.device.ram import allocate_ram, available_ram
from kvpool.device.tables import StagedRows, StagedVectors, Table, write_rows, write_vectors
from kvpool.device.token_moves import TokenMoves, move_tokens
from kvpool.errors import PoolClosed
from kvpool.layout import BlockLayout
from kvpool.strided import StridedArray


class CpuDevice(Device):
    """The device of machines without a GPU: nothing runs behind, every copy is done when the call returns."""

    name = "cpu"
    synchronous = True
    one_memory = True

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._plan_vector: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._pools: tuple[NDArray[np.uint8], ...] = ()
        self._closed = False

    def allocate(self, nbytes: int, tier: str) -> NDArray[np.uint8]:
        self._check_open()
        tier_argument(tier)
        return allocate_ram(nbytes)

    def free(self, array: NDArray[np.uint8]) -> None:
        # The memory itself goes back with the last view of it.
        if any(array is pool for pool in self._pools):
            self._plan, self._pools = None, ()

    def adopt(self, memory: StridedArray, tier: str) -> NDArray[np.uint8]:
        self._check_open()
        return memory.host_view()

    def available_bytes(self, tier: str) -> int | None:
        tier_argument(tier)
        return available_ram()

    def as_stream(self, stream: Any) -> Stream:
        stream_argument(stream)
        return NULL_STREAM

    def bind(
        self,
        layout: BlockLayout,
        device_pool: NDArray[np.uint8],
        host_pool: NDArray[np.uint8],
        device_blocks: int,
        host_blocks: int,
    ) -> None:
        self._check_open()
        if self._plan is not None:
            raise ValueError("device: already bound to a pool; every pool needs a device of its own")
        device_blocks, host_blocks = bind_arguments(layout, device_pool, host_pool, device_blocks, host_blocks)
        self._plan = make_plan(layout, device_pool, host_pool, device_blocks, host_blocks)
        self._plan_vector = self._plan.vector()
        self._pools = (device_pool, host_pool)

    def copy_blocks(self, moves: NDArray[np.int64], stream: Stream = NULL_STREAM) -> None:
        self._check_open()
        # Addresses are all that the copy gets, so its pools are held here until it is done.
        plan, _pools = self._plan, self._pools
        if plan is None:
            raise ValueError("device: not bound to a pool")
        moves = moves_argument(moves)
        bad = copy_moves(moves, self._plan_vector)
        if bad >= 0:
            raise ValueError(describe_bad_move(bad, moves[bad], plan))

    def move_tokens(self, moves: NDArray[np.int64], starts: NDArray[np.int64], stream: Stream = NULL_STREAM) -> None:
        self._check_open()
        plan, _pools = self._plan, self._pools
        if plan is None:
            raise ValueError("device: not bound to a pool")
        move_tokens(TokenMoves.of(moves, starts, plan).moves, self._plan_vector)

    def stage_rows(self, table: Table, staged: StagedRows, stream: Stream = NULL_STREAM) -> None:
        self._check_open()
        write_rows(*staged[1:], table.address, table.strides[-2])

    def stage_vectors(self, staged: StagedVectors, stream: Stream = NULL_STREAM) -> None:
        self._check_open()
        write_vectors(staged)

    def create_stream(self, name: str) -> Stream:
        return NULL_STREAM

    def record(self, stream: Stream) -> Event:
        return NULL_EVENT

    def wait(self, stream: Stream, event: Event) -> None:
        """Nothing to wait for."""

    def query(self, event: Event) -> bool:
        return True

    def synchronize(self, event: Event | None = None) -> None:
        self._check_open()

    def close(self) -> None:
        self._plan, self._pools, self._closed = None, (), True

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed("the cpu device is closed")
