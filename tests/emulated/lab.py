"""The emulated driver as tests call it: documented functions and the knobs of the emulation, through ctypes."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SUCCESS, INVALID, OUT_OF_MEMORY, NOT_INITIALIZED, INVALID_CONTEXT, INVALID_HANDLE = 0, 1, 2, 3, 201, 400
NOT_READY, ILLEGAL_ADDRESS, ALREADY_REGISTERED, NOT_REGISTERED, NOT_PERMITTED, NOT_SUPPORTED = (
    600,
    700,
    712,
    713,
    800,
    801,
)
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_UNJOINED, CAPTURE_ISOLATION, CAPTURE_IMPLICIT, CAPTURED_EVENT = (
    900,
    901,
    904,
    905,
    906,
    907,
)
NON_BLOCKING, NO_TIMING = 1, 2
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
NONE, ACTIVE, INVALIDATED = 0, 1, 2


class CudaError(Exception):
    def __init__(self, name: str, status: int) -> None:
        super().__init__(f"{name}: {status}")
        self.status = status


class Driver:
    """``driver.cuMemFree_v2(...)`` raises CudaError unless it succeeds; ``driver.status(name, ...)`` gives the
    CUresult.

    Numbers are passed as 64 bits.
    """

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self._kept: list[object] = []

    def status(self, name: str, *arguments: object) -> int:
        converted = [ctypes.c_size_t(argument) if isinstance(argument, int) else argument for argument in arguments]
        return int(getattr(self.library, name)(*converted))

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object) -> None:
            status = self.status(name, *arguments)
            if status:
                raise CudaError(name, status)

        return call

    def made(self, name: str, *arguments: object) -> int:
        """What a function gives through its first argument."""
        value = ctypes.c_size_t()
        self.__getattr__(name)(ctypes.byref(value), *arguments)  # type: ignore[operator]
        return value.value

    def use(self, device: int) -> int:
        context = self.made("cuDevicePrimaryCtxRetain", device)
        self.status("cuCtxSetCurrent", context)
        return context

    def allocate(self, nbytes: int) -> int:
        return self.made("cuMemAlloc_v2", nbytes)

    def pinned(self, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
        return (ctypes.c_uint8 * nbytes).from_address(self.made("cuMemHostAlloc", nbytes, 0))

    def near(self, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
        """Memory of the GPU, which a test of the emulation may look into."""
        return (ctypes.c_uint8 * nbytes).from_address(self.allocate(nbytes))

    def stream(self, flags: int = NON_BLOCKING) -> int:
        return self.made("cuStreamCreate", flags)

    def event(self) -> int:
        return self.made("cuEventCreate", NO_TIMING)

    def pending(self, stream: int) -> bool:
        """Whether work of a stream is not done."""
        return self.status("cuStreamQuery", stream) == NOT_READY

    def copy(self, target: object, source: object, nbytes: int, stream: int = 0) -> int:
        ends: tuple[Any, Any] = target, source
        places = [end if isinstance(end, int) else ctypes.addressof(end) for end in ends]
        return self.status("cuMemcpyAsync", *places, nbytes, stream)

    def host_function(self, function: object, stream: int) -> object:
        """Enqueue a Python function of no arguments; the result has to be kept."""
        kept = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: function())  # type: ignore[operator]
        self.__getattr__("cuLaunchHostFunc")(stream, kept, None)  # type: ignore[operator]
        return kept

    def stall(self, stream: int) -> Callable[[], None]:
        """Hold back what is enqueued on a stream from now on, whatever else could run; the result lets it go."""
        gate = threading.Event()
        self._kept.append(self.host_function(lambda: gate.wait(600), stream))
        return gate.set

    def counter(self, name: str) -> int:
        function = self.library.emu_counter
        function.restype = ctypes.c_longlong
        return int(function(name.encode()))

    def calls(self, name: str) -> int:
        """How often a function was called, by its name in the driver's sources."""
        function = self.library.emu_calls
        function.restype = ctypes.c_longlong
        return int(function(name.encode()))

    @contextmanager
    def counting(self, *names: str) -> Iterator[dict[str, int]]:
        """By how much counters, and calls of functions, have grown once this is left."""

        def now() -> list[int]:
            return [self.calls(name) if self.counter(name) < 0 else self.counter(name) for name in names]

        grown, before = dict[str, int](), now()
        yield grown
        grown.update(zip(names, np.subtract(now(), before).tolist(), strict=True))

    def in_use(self, collected: bool = True) -> dict[str, int]:
        """What has been taken from the driver and not been given back; ``collected``: what is garbage does not
        count."""
        if collected:
            gc.collect()
        return {name: self.counter(name) for name in ("allocations", "registrations", "pinned", "streams", "events")}

    @contextmanager
    def failing(self, name: str, error: int, passed: int = 0, failing: int = -1) -> Iterator[None]:
        """As ``fail``, inside the context."""
        self.fail(name, error, passed, failing)
        try:
            yield
        finally:
            self.fail(name, SUCCESS)

    @contextmanager
    def attribute(self, attribute: int, value: int) -> Iterator[None]:
        """Inside the context, an attribute of all GPUs is another."""
        self.library.emu_change_attribute(attribute, value)
        try:
            yield
        finally:
            self.library.emu_change_attribute(-1, 0)

    def fail(self, name: str, error: int, passed: int = 0, failing: int = -1) -> None:
        """Let ``passed`` calls of a function through; the next ones (-1: all) do nothing and fail. ``error=0`` ends
        it."""
        self.library.emu_fail(name.encode(), error, passed, failing if error else 0)

    def launches(self, device: int) -> int:
        function = self.library.emu_launches
        function.restype = ctypes.c_longlong
        return int(function(device))

    def hold(self, stream: int, held: bool = True) -> None:
        """A stream that is held back runs nothing while any other stream can."""
        self.library.emu_hold(ctypes.c_void_p(stream), held)

    def quiet(self, seed: int = 0, progress: float = 0.0, idle_ms: int = -1) -> None:
        """Nothing runs unless somebody waits, or as ``progress`` sets it."""
        self.library.emu_set_seed(ctypes.c_uint64(seed))
        self.library.emu_set_progress(ctypes.c_double(progress))
        self.library.emu_set_idle_ms(idle_ms)


@functools.cache
def driver() -> Driver:
    driver_loaded = Driver()
    driver_loaded.cuInit(0)  # type: ignore[operator]
    return driver_loaded


def in_a_process(script: str, *arguments: object) -> str:
    """Run Python of its own; its output. What ends a context is done there."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
