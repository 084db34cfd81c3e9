"""A GPU, or the stand-in for one, as an engine uses it: streams that can be held back, and work on them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpool.device.base import Stream
from tests.device.fake_cupy import FakeArray, FakeCupy

_STALL_SECONDS_MAX = 60


class Machine:
    """Over real CuPy."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.empty((1,)).fill(0)  # compiles the kernel, which would wait for stalled streams

    def stream(self) -> Any:
        return self.cupy.cuda.Stream(non_blocking=True)

    def stall(self, stream: Any) -> Callable[[], None]:
        """Hold back what is enqueued from now on; the result lets it go."""
        gate = threading.Event()
        stream.launch_host_func(lambda _: gate.wait(_STALL_SECONDS_MAX), None)
        return gate.set

    def empty(self, shape: tuple[int, ...]) -> Any:
        return self.cupy.zeros(shape, np.int32)

    def fill(self, array: Any, value: int, stream: Any) -> None:
        """Enqueue a write."""
        with stream:
            array.fill(value)

    def busy(self, stream: Any) -> bool:
        return not stream.done


class FakeMachine(Machine):
    """Over the stand-in."""

    def __init__(self, cupy: FakeCupy) -> None:
        self.cupy = cupy

    def stream(self) -> Stream:
        return Stream(self.cupy.runtime.streamCreateWithFlags(self.cupy.runtime.streamNonBlocking))

    def stall(self, stream: Stream) -> Callable[[], None]:
        self.cupy.runtime.stalled.add(stream.handle)
        return lambda: self.cupy.runtime.stalled.discard(stream.handle)

    def empty(self, shape: tuple[int, ...]) -> FakeArray:
        return FakeArray(np.zeros(shape, np.int32))

    def fill(self, array: FakeArray, value: int, stream: Stream) -> None:
        self.cupy.runtime.enqueue(stream.handle, "work", lambda: array.inner.fill(value))

    def busy(self, stream: Stream) -> bool:
        return bool(self.cupy.runtime.streams[stream.handle])
