"""As much of CuPy and the driver as the cuda device uses, over main memory: what is enqueued runs as late as events allow.

It refuses what CUDA refuses: memory that was not allocated or registered, copies across registrations, unknown streams and events. It
shows nothing of a GPU's speed or memory model.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvpool import StridedArray
from tests.kernels.shim import library

INVALID, OUT_OF_MEMORY, INVALID_HANDLE, NOT_READY = 1, 2, 400, 600
GPU_BYTES = 1 << 32


class FakeError(RuntimeError):
    """CUDARuntimeError."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


@dataclass(eq=False)
class Point:
    """What an event stands for since its last record."""

    stream: int
    done: bool = False


class FakeArray:
    """A cupy.ndarray: NumPy must be asked for explicitly."""

    device = SimpleNamespace(synchronize=lambda: None)

    def __init__(self, inner: np.ndarray) -> None:
        self.inner = inner
        self.dtype, self.shape, self.size, self.nbytes, self.ndim = inner.dtype, inner.shape, inner.size, inner.nbytes, inner.ndim

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self.inner.__array_interface__)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("implicit conversion to a NumPy array")

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        """Says CPU, as the memory is."""
        return self.inner.__dlpack__(max_version=max_version)

    def view(self, dtype: Any) -> FakeArray:
        return FakeArray(self.inner.view(dtype))

    def reshape(self, *shape: Any) -> FakeArray:
        return FakeArray(self.inner.reshape(*shape))

    def transpose(self, *axes: int) -> FakeArray:
        return FakeArray(self.inner.transpose(*axes))

    def __getitem__(self, index: Any) -> FakeArray:
        return FakeArray(self.inner[index])

    def __setitem__(self, index: Any, value: FakeArray) -> None:
        self.inner[index] = value.inner

    def get(self) -> np.ndarray:
        return self.inner.copy()

    def set(self, values: np.ndarray) -> None:
        assert values.shape == self.shape and values.dtype == self.dtype
        self.inner[...] = values


class FakeRuntime:
    """``cupy.cuda.runtime``. ``fails`` maps the name of a call to the status that it ends with."""

    memcpyDefault, streamNonBlocking, eventDisableTiming = 4, 1, 2
    memoryTypeUnregistered, memoryTypeDevice, memoryTypeManaged = 0, 2, 3
    cudaDevAttrMultiProcessorCount, cudaDevAttrCanUseHostPointerForRegisteredMem = "multiprocessors", "same addresses"

    def __init__(self) -> None:
        self.fails: dict[str, int] = {}
        self.calls: list[str] = []
        self.current = self.home = 0
        self.allocated: dict[int, np.ndarray] = {}
        self.registered: dict[int, int] = {}
        self.streams: dict[int, deque[tuple[str, Any]]] = {0: deque()}
        self.events: dict[int, Point | None] = {}
        self.stalled: set[int] = set()
        self.attributes = {"multiprocessors": 2, "same addresses": 1}
        self._handles = 100

    def note(self, name: str) -> None:
        self.calls.append(name)
        self.check_status(self.fails.get(name, 0))

    def check_status(self, status: int) -> None:
        if status:
            raise FakeError(status)

    def handle(self) -> int:
        self._handles += 1
        return self._handles

    # Devices and memory

    def getDeviceCount(self) -> int:
        return 2

    def getDevice(self) -> int:
        return self.current

    def setDevice(self, index: int) -> None:
        self.note("setDevice")
        self.current = index

    def getDeviceProperties(self, index: int) -> dict[str, Any]:
        return {"name": b"Fake GPU", "totalGlobalMem": GPU_BYTES}

    def driverGetVersion(self) -> int:
        return 13000

    def deviceGetAttribute(self, attribute: str, index: int) -> int:
        return self.attributes[attribute]

    def memGetInfo(self) -> tuple[int, int]:
        self.note("memGetInfo")
        return GPU_BYTES - sum(array.nbytes for array in self.allocated.values()), GPU_BYTES

    def malloc(self, nbytes: int) -> int:
        self.note("malloc")
        self.check_status(OUT_OF_MEMORY if nbytes > GPU_BYTES else 0)
        array = np.full(nbytes, 0xA5, np.uint8)
        self.allocated[array.ctypes.data] = array
        return int(array.ctypes.data)

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        self.note("hostRegister")
        assert flags == 0 and nbytes > 0
        self.registered[address] = nbytes

    def hostUnregister(self, address: int) -> None:
        self.note("hostUnregister")
        self.check_status(0 if address in self.registered else INVALID)
        del self.registered[address]

    def pointerGetAttributes(self, address: int) -> Any:
        pinned = any(start <= address < start + size for start, size in self.registered.items())
        known = pinned or any(start <= address < start + array.nbytes for start, array in self.allocated.items())
        return SimpleNamespace(type=1 if pinned else 2 if known else 0, devicePointer=address if known else 0, device=self.home)

    def reachable(self, address: int, nbytes: int) -> bool:
        """Whether a copy may touch these bytes: inside one allocation or one registration."""
        spans = [*((start, array.nbytes) for start, array in self.allocated.items()), *self.registered.items()]
        return any(start <= address and address + nbytes <= start + size for start, size in spans)

    # Streams and events

    def enqueue(self, stream: int, kind: str, work: Any) -> None:
        self.check_status(0 if stream in self.streams else INVALID_HANDLE)
        self.streams[stream].append((kind, work))

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self.note("memcpyAsync")
        assert kind == self.memcpyDefault
        self.check_status(0 if self.reachable(target, nbytes) and self.reachable(source, nbytes) else INVALID)
        self.enqueue(stream, "work", lambda: ctypes.memmove(target, source, nbytes))

    def memsetAsync(self, target: int, value: int, nbytes: int, stream: int) -> None:
        self.check_status(0 if self.reachable(target, nbytes) else INVALID)
        self.enqueue(stream, "work", lambda: ctypes.memset(target, value, nbytes))

    def streamCreateWithFlags(self, flags: int) -> int:
        assert flags == self.streamNonBlocking
        handle = self.handle()
        self.streams[handle] = deque()
        return handle

    def streamDestroy(self, stream: int) -> None:
        self.note("streamDestroy")
        del self.streams[stream]

    def eventCreateWithFlags(self, flags: int) -> int:
        self.note("eventCreateWithFlags")
        assert flags == self.eventDisableTiming
        handle = self.handle()
        self.events[handle] = None
        return handle

    def eventDestroy(self, event: int) -> None:
        del self.events[event]

    def eventRecord(self, event: int, stream: int) -> None:
        self.note("eventRecord")
        assert event in self.events
        point = self.events[event] = Point(stream)
        self.enqueue(stream, "record", point)

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:
        self.note("streamWaitEvent")
        point = self.events[event]
        if point is not None:
            self.enqueue(stream, "wait", point)

    def eventQuery(self, event: int) -> int:
        """Every query takes a step, so that loops end."""
        self.calls.append("eventQuery")
        point = self.events[event]
        if "eventQuery" in self.fails:
            return self.fails["eventQuery"]
        if point is None or point.done:
            return 0
        self.advance(point.stream)
        return NOT_READY

    def eventSynchronize(self, event: int) -> None:
        self.note("eventSynchronize")
        point = self.events[event]
        if point is not None:
            self.reach(point)

    def streamSynchronize(self, stream: int) -> None:
        while self.streams[stream]:
            self.step(stream)

    def deviceSynchronize(self) -> None:
        self.note("deviceSynchronize")
        for stream in list(self.streams):
            self.streamSynchronize(stream)

    def advance(self, stream: int) -> None:
        """Do what is next on a stream, or on the one that it waits for, unless that is stalled."""
        kind, work = self.streams[stream][0] if self.streams[stream] else ("", None)
        if kind == "wait" and not work.done:
            self.advance(work.stream)
        elif kind and stream not in self.stalled:
            self.step(stream)

    def step(self, stream: int) -> None:
        """Do what is next on a stream, and before it what it waits for."""
        assert stream not in self.stalled, "a wait for a stalled stream"
        kind, work = self.streams[stream].popleft()
        if kind == "wait":
            self.reach(work)
        elif kind == "record":
            work.done = True
        else:
            work()

    def reach(self, point: Point) -> None:
        while not point.done:
            self.step(point.stream)


class FakeCupy:
    """The package, with a driver that has batched copies where ``batches``."""

    def __init__(self, batches: bool = True) -> None:
        self.runtime = runtime = FakeRuntime()
        self.batched: list[int] = []
        self.launched: list[str] = []
        stream = SimpleNamespace(from_external=lambda obj: SimpleNamespace(ptr=obj.__cuda_stream__()[1]))
        self.cuda = SimpleNamespace(
            runtime=runtime, Memory=self._memory, UnownedMemory=_Unowned, MemoryPointer=self._pointer, Stream=stream
        )
        self._function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * 9)(self._batch) if batches else None

    def _memory(self, nbytes: int) -> Any:
        return _Memory(self.runtime, nbytes)

    def _pointer(self, memory: Any, offset: int) -> Any:
        return SimpleNamespace(mem=memory, ptr=memory.ptr + offset)

    def ndarray(self, shape: tuple[int, ...], dtype: Any, memptr: Any, strides: Any = None) -> FakeArray:
        if isinstance(memptr.mem, _Unowned):
            kind, itemsize = np.dtype(dtype).kind, np.dtype(dtype).itemsize
            return FakeArray(StridedArray(memptr.ptr, shape, itemsize, strides, kind=kind, owner=memptr).host_view())
        start = memptr.ptr - memptr.mem.ptr
        array = FakeArray(memptr.mem.array[start : start + shape[0]].view(dtype))
        array.owner = memptr  # type: ignore[attr-defined]
        return array

    def RawModule(self, code: str, options: tuple[str, ...]) -> Any:
        source = next(name for name in ("block_copy.cu", "kv_copy.cu", "stage_rows.cu", "token_moves.cu") if library_source(name) == code)
        return SimpleNamespace(compile=lambda: library(source), get_function=lambda name: self._kernel(source, name))

    def _kernel(self, source: str, name: str) -> Callable[..., None]:
        run = getattr(library(source), f"run_{name}")

        def launch(grid: tuple[int], block: tuple[int], args: tuple[np.ndarray], *, stream: Any) -> None:
            self.runtime.note("launchKernel")
            self.launched.append(name)
            assert len(args) == 1 and args[0].size == 1 and run(None, 0, 0) == args[0].nbytes
            record = args[0].copy()
            self.runtime.enqueue(stream.ptr, "work", lambda: run(ctypes.c_void_p(record.ctypes.data), grid[0], block[0]))

        return launch

    def library(self, name: str) -> Any:
        """``ctypes.CDLL``."""
        if self._function is None:
            return SimpleNamespace(cuGetProcAddress_v2=lambda *args: 500)
        return SimpleNamespace(cuGetProcAddress_v2=self._proc_address)

    def _proc_address(self, symbol: bytes, address: Any, version: Any, flags: Any, found: Any) -> int:
        assert (symbol, version.value, flags.value) == (b"cuMemcpyBatchAsync", 12080, 1)
        address._obj.value = ctypes.cast(self._function, ctypes.c_void_p).value
        return 0

    def _batch(
        self, targets: int, sources: int, sizes: int, count: int, attributes: int, first: int, kinds: int, failed: int, stream: int
    ) -> int:
        """cuMemcpyBatchAsync of CUDA 12.8. The copies are made in another order than they are given."""
        numbers = [np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(at)).tolist() for at in (targets, sources, sizes)]
        order = ctypes.c_int.from_address(attributes).value
        if not stream or kinds != 1 or ctypes.c_size_t.from_address(first).value or order != 1 or not failed:
            return INVALID
        self.batched.append(count)
        try:
            for target, source, nbytes in reversed(list(zip(*numbers, strict=True))):
                self.runtime.memcpyAsync(target, source, nbytes, 4, stream)
        except FakeError as error:
            return error.status
        return 0


@dataclass
class _Unowned:
    """cupy.cuda.UnownedMemory."""

    ptr: int
    size: int
    owner: Any
    device_id: int


class _Memory:
    """cupy.cuda.Memory: freed with its last reference."""

    def __init__(self, runtime: FakeRuntime, nbytes: int) -> None:
        self._runtime, self.ptr = runtime, runtime.malloc(nbytes)
        self.array = runtime.allocated[self.ptr]

    def __del__(self) -> None:
        if hasattr(self, "ptr"):
            self._runtime.allocated.pop(self.ptr, None)


def library_source(name: str) -> str:
    from kvpool.kernels.launch import cuda_source

    return cuda_source(name)
