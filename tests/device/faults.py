"""FaultyDevice: a device that fails where a test says, after having done everything before that."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.device.base import NULL_STREAM, Device, Stream
from kvpool.errors import DeviceError
from kvpool.layout import BlockLayout

Predicate = Callable[[int, int, NDArray[np.int64]], bool]


class FaultyDevice(Device):
    """Passes everything on to ``inner``, except the moves that are to fail.

    ``fail_at`` is a set of (call, index of the move in that call), calls of ``copy_blocks`` counted from 0, or a
    predicate of (call, index, move). The moves before the failing one are copied, it and those after it are not, and
    DeviceError says so. After a ``sticky`` failure every later call fails at its first move. ``calls`` counts calls,
    ``failures`` those that failed.
    """

    def __init__(self, inner: Device, fail_at: Collection[tuple[int, int]] | Predicate = (), sticky: bool = False) -> None:
        self.inner = inner
        self.fail_at = fail_at
        self.sticky = sticky
        self.calls = self.failures = 0
        self.name, self.one_memory = inner.name, inner.one_memory

    def copy_blocks(self, moves: NDArray[np.int64], stream: Stream = NULL_STREAM) -> None:
        call, self.calls = self.calls, self.calls + 1
        broken = self.sticky and self.failures > 0
        completed = 0 if broken else self._first_fault(call, moves)
        if completed is None:
            self.inner.copy_blocks(moves, stream)
            return
        self.inner.copy_blocks(moves[:completed], stream)
        self.failures += 1
        raise DeviceError(f"call {call} was told to fail at move {completed}", completed=completed, sticky=self.sticky)

    def _first_fault(self, call: int, moves: NDArray[np.int64]) -> int | None:
        for index, move in enumerate(moves):
            if self.fail_at(call, index, move) if callable(self.fail_at) else (call, index) in self.fail_at:
                return index
        return None

    def allocate(self, nbytes: int, tier: str) -> NDArray[np.uint8]:
        return self.inner.allocate(nbytes, tier)

    def free(self, array: NDArray[np.uint8]) -> None:
        self.inner.free(array)

    def available_bytes(self, tier: str) -> int | None:
        return self.inner.available_bytes(tier)

    def as_stream(self, stream: Any) -> Stream:
        return self.inner.as_stream(stream)

    def bind(
        self,
        layout: BlockLayout,
        device_pool: NDArray[np.uint8],
        host_pool: NDArray[np.uint8],
        device_blocks: int,
        host_blocks: int,
    ) -> None:
        self.inner.bind(layout, device_pool, host_pool, device_blocks, host_blocks)

    def synchronize(self) -> None:
        self.inner.synchronize()

    def close(self) -> None:
        self.inner.close()
