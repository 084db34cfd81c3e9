"""WrappedDevice: a device that forwards every call to another one. Its subclasses watch or change a few calls."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.arrays.strided import StridedArray
from kvpool.device.base import NULL_STREAM, Device, Event, Region, Stream
from kvpool.device.shared import GpuMemory, MainMemory
from kvpool.device.steps import StagedStep, StepTargets
from kvpool.device.tables import StagedRows, StagedVectors, Table


class WrappedDevice(Device):
    """Forwards to ``inner``, under the name of that device. Subclasses override what they change."""

    def __init__(self, inner: Device) -> None:
        self.inner = inner
        self.name, self.synchronous, self.one_memory = inner.name, inner.synchronous, inner.one_memory

    def allocate(self, nbytes: int, tier: str) -> Any:
        return self.inner.allocate(nbytes, tier)

    def allocate_shared(self, nbytes: int, tier: str) -> Any:
        return self.inner.allocate_shared(nbytes, tier)

    def ipc_handle(self, array: Any, tier: str) -> MainMemory | GpuMemory:
        return self.inner.ipc_handle(array, tier)

    def free(self, array: Any) -> None:
        self.inner.free(array)

    def allocate_staging(self, nbytes: int) -> NDArray[np.uint8]:
        return self.inner.allocate_staging(nbytes)

    def adopt(self, memory: StridedArray, tier: str) -> Any:
        return self.inner.adopt(memory, tier)

    def pin(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return self.inner.pin(memory)

    def as_array(self, memory: StridedArray) -> Any:
        return self.inner.as_array(memory)

    def as_pinned_memory(self, memory: StridedArray) -> Any:
        return self.inner.as_pinned_memory(memory)

    def dlpack_device(self, tier: str) -> tuple[int, int]:
        return self.inner.dlpack_device(tier)

    def available_bytes(self, tier: str) -> int | None:
        return self.inner.available_bytes(tier)

    def as_stream(self, stream: Any) -> Stream:
        return self.inner.as_stream(stream)

    def bind(self, regions: Sequence[Region]) -> None:
        self.inner.bind(regions)

    def copy_blocks(self, moves: NDArray[np.int64], stream: Stream = NULL_STREAM) -> None:
        self.inner.copy_blocks(moves, stream)

    def copy_fragments(self, fragments: NDArray[np.int64], stream: Stream = NULL_STREAM) -> None:
        self.inner.copy_fragments(fragments, stream)

    def move_tokens(self, moves: NDArray[np.int64], starts: NDArray[np.int64], stream: Stream = NULL_STREAM) -> None:
        self.inner.move_tokens(moves, starts, stream)

    def as_table(self, target: Any, name: str = "target", vector: bool = False, itemsize: int = 4) -> Table:
        return self.inner.as_table(target, name, vector, itemsize)

    def as_step(self, arrays: Any) -> StepTargets:
        return self.inner.as_step(arrays)

    def stage_rows(self, table: Table, staged: StagedRows, stream: Stream = NULL_STREAM) -> None:
        self.inner.stage_rows(table, staged, stream)

    def stage_vectors(self, staged: StagedVectors, stream: Stream = NULL_STREAM) -> None:
        self.inner.stage_vectors(staged, stream)

    def stage_step(self, targets: StepTargets, staged: StagedStep, stream: Stream = NULL_STREAM) -> None:
        self.inner.stage_step(targets, staged, stream)

    def create_stream(self, name: str) -> Stream:
        return self.inner.create_stream(name)

    def exists(self, stream: Stream) -> bool:
        return self.inner.exists(stream)

    def record(self, stream: Stream) -> Event:
        return self.inner.record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self.inner.wait(stream, event)

    def query(self, event: Event) -> bool:
        return self.inner.query(event)

    def synchronize(self, event: Event | None = None) -> None:
        self.inner.synchronize(event)

    def calibrate(self) -> Any:
        return self.inner.calibrate()

    def host_access(
        self, *, reads: Any = None, writes: Any = None, loads: Sequence[NDArray[Any]] = (),
        stores: Sequence[NDArray[Any]] = (), outside: bool = False,
    ) -> AbstractContextManager[Any]:  # fmt: skip
        return self.inner.host_access(reads=reads, writes=writes, loads=loads, stores=stores, outside=outside)

    def close(self) -> None:
        self.inner.close()
