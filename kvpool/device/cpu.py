"""CpuDevice: both tiers in NumPy memory. The calling thread copies, without the GIL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool.arrays import Int64s, Uint8s
from kvpool.arrays.strided import StridedArray
from kvpool.device.base import (
    ALL_LAYERS,
    BOUND_ALREADY,
    NOT_BOUND,
    NULL_EVENT,
    NULL_STREAM,
    Device,
    Event,
    Layers,
    Region,
    Stream,
    stream_argument,
)
from kvpool.device.block_copy import HostPool, copy_moves
from kvpool.device.main_memory import allocate_ram, allocate_shared, available_ram, free_shared
from kvpool.device.regions import Regions
from kvpool.device.work import Work
from kvpool.errors import PoolClosed


class CpuDevice(Device):
    """The device of machines without a GPU. Every copy is done when the call returns."""

    name = "cpu"
    synchronous = True
    one_memory = True

    def __init__(self) -> None:
        self._bound: HostPool | None = None
        self._closed = False

    def allocate(self, nbytes: int, tier: str, shared: bool = False) -> Uint8s:
        self._check_open()
        return (allocate_shared if shared else allocate_ram)(nbytes)

    def free(self, array: Uint8s) -> None:
        # The memory itself is freed with the last view of it.
        free_shared(array)
        if self._bound is not None and any(array is pool for pool in self._bound.regions.pools):
            self._bound = None

    def adopt(self, memory: StridedArray, tier: str, pin: bool = False) -> Uint8s:
        self._check_open()
        return memory.host_view()

    def available_bytes(self, tier: str) -> int | None:
        return available_ram()

    def as_stream(self, stream: Any) -> Stream:
        if stream is not NULL_STREAM:
            stream_argument(stream)
        return NULL_STREAM

    def create_stream(self, name: str, urgent: bool = False) -> Stream:
        return NULL_STREAM

    def bind(self, regions: Sequence[Region]) -> None:
        self._check_open()
        if self._bound is not None:
            raise ValueError(BOUND_ALREADY)
        self._bound = HostPool(Regions(regions))

    def _pool(self) -> HostPool:
        if self._bound is None:
            self._check_open()
            raise ValueError(NOT_BOUND)
        return self._bound

    def copy_blocks(self, moves: Int64s, stream: Stream = NULL_STREAM, layers: Layers = ALL_LAYERS) -> None:
        for rows, plan in self._pool().planned(moves, layers):
            copy_moves(rows, plan)

    def enqueue(self, work: Work, stream: Stream = NULL_STREAM, captured: bool = False) -> None:
        if captured:
            raise ValueError("stream: the cpu device has no graphs, so that none is being captured")
        work.run(self._pool())

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
