"""FaultyDevice: a device that fails where a test says, after having done everything before that."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

from kvpool.device.base import NULL_STREAM, Device, Stream, WrappedDevice
from kvpool.device.regions import ALL_LAYERS, Layers
from kvpool.errors import DeviceError

Predicate = Callable[[int, int, NDArray[np.int64]], bool]


class FaultyDevice(WrappedDevice):
    """Passes everything on to ``inner``, except the moves that are to fail.

    ``fail_at`` is a set of (call, index of the move in that call), calls of ``copy_blocks`` counted from 0, or a
    predicate of (call, index, move). The moves before the failing one are copied, it and those after it are not, and
    DeviceError says so. After a ``sticky`` failure every later call fails at its first move. ``calls`` counts calls,
    ``failures`` those that failed.
    """

    def __init__(
        self, inner: Device, fail_at: Collection[tuple[int, int]] | Predicate = (), sticky: bool = False
    ) -> None:
        super().__init__(inner)
        self.fail_at = fail_at
        self.sticky = sticky
        self.calls = self.failures = 0

    def copy_blocks(self, moves: NDArray[np.int64], stream: Stream = NULL_STREAM, layers: Layers = ALL_LAYERS) -> None:
        call, self.calls = self.calls, self.calls + 1
        broken = self.sticky and self.failures > 0
        completed = 0 if broken else self._first_fault(call, moves)
        if completed is None:
            self.inner.copy_blocks(moves, stream, layers)
            return
        self.inner.copy_blocks(moves[:completed], stream, layers)
        self.failures += 1
        raise DeviceError(f"call {call} was set to fail at move {completed}", completed=completed, sticky=self.sticky)

    def _first_fault(self, call: int, moves: NDArray[np.int64]) -> int | None:
        for index, move in enumerate(moves):
            if self.fail_at(call, index, move) if callable(self.fail_at) else (call, index) in self.fail_at:
                return index
        return None
