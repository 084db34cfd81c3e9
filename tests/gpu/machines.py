"""A GPU as an engine uses it: streams that can be held back, and work on them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

_STALL_SECONDS_MAX = 600


class Machine:
    """Over CuPy."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.empty((2,)).fill(1)  # loads the kernel, which would wait for stalled streams; zeros need none

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
