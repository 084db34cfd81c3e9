"""A CuPy and a driver of GPUs that do nothing, at once: what a call then takes is kvpool's own code.

Both tiers are main memory, and nothing is copied. The functions of the driver are machine code that returns 0, so that
they can be called by address too.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from numba import carray, cfunc, types

from kvpool.device.cuda import cuda_device
from kvpool.device.cuda.runtime import Driver

CONTEXTS = (0x1000, 0x2000)
"""The primary contexts of the GPUs. That of the first is always current."""
_word, _words = types.int64, types.CPointer(types.int64)


@cfunc(types.int32(_word))
def _succeed(ignored: int) -> int:
    return 0


@cfunc(types.int32(_words))
def _current(context: Any) -> int:
    carray(context, 1)[0] = 0x1000
    return 0


@cfunc(types.int32(_words, types.int32))
def _retain(context: Any, index: int) -> int:
    carray(context, 1)[0] = 0x1000 * (index + 1)
    return 0


class _Library:
    """``ctypes.CDLL("libcuda.so.1")``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "cuGetProcAddress_v2":
            raise AttributeError(name)
        function = {"cuCtxGetCurrent": _current, "cuDevicePrimaryCtxRetain": _retain}.get(name, _succeed)
        return ctypes.CFUNCTYPE(ctypes.c_int)(function.address)


class _Runtime:
    """``cupy.cuda.runtime``."""

    memcpyDefault, streamNonBlocking = 4, 1
    memoryTypeUnregistered, memoryTypeHost, memoryTypeDevice, memoryTypeManaged = range(4)
    cudaDevAttrMultiProcessorCount, cudaDevAttrCanUseHostPointerForRegisteredMem = 16, 91

    def __init__(self) -> None:
        self._memory: dict[int, Any] = {}
        self._handles = iter(range(0x10000, 1 << 40, 16))

    def getDeviceCount(self) -> int:
        return len(CONTEXTS)

    def getDevice(self) -> int:
        return 0

    def driverGetVersion(self) -> int:
        return 13000

    def getDeviceProperties(self, index: int) -> dict[str, Any]:
        return {
            "name": b"null",
            "totalGlobalMem": 1 << 34,
            "major": 9,
            "minor": 0,
            "multiProcessorCount": 132,
            "uuid": bytes(16),
        }

    def deviceGetPCIBusId(self, index: int) -> str:
        return "none"

    def deviceGetAttribute(self, attribute: int, index: int) -> int:
        return {16: 132, 91: 1}.get(attribute, 0)

    def memGetInfo(self) -> tuple[int, int]:
        return 1 << 34, 1 << 34

    def malloc(self, nbytes: int) -> int:
        memory = np.zeros(nbytes, np.uint8)
        self._memory[memory.ctypes.data] = memory
        return int(memory.ctypes.data)

    def free(self, address: int) -> None:
        del self._memory[address]

    def streamCreateWithPriority(self, flags: int, priority: int) -> int:
        return next(self._handles)

    def streamIsCapturing(self, stream: int) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return _nothing


def _nothing(*arguments: Any) -> None:
    pass


class _Event:
    def __init__(self, **how: bool) -> None:
        self.ptr = id(self)


class _Kernel:
    """What a ``RawModule`` gives, and a function of Numba's."""

    num_regs = 32
    overloads = {0: SimpleNamespace(_codelibrary=SimpleNamespace(get_cufunc=lambda: SimpleNamespace(handle=0x5000)))}
    kernel = SimpleNamespace(ptr=0x5000)

    def __call__(self, *arguments: Any, stream: Any = None) -> None:
        pass

    def __getitem__(self, launch: Any) -> _Kernel:
        return self


class _Pool:
    """A memory pool that never has to ask the system twice."""

    def __init__(self, allocator: Any = None) -> None:
        self._free: dict[int, list[Any]] = {}

    def malloc(self, nbytes: int) -> Any:
        free = self._free.setdefault(nbytes, [])
        lent = (free.pop() if free else np.zeros(nbytes, np.uint8)).view(_Lent)
        lent.ptr, lent.free = lent.ctypes.data, free
        return lent

    def free_all_blocks(self) -> None:
        self._free.clear()


class _Lent(np.ndarray):  # type: ignore[type-arg]
    """Memory of a pool, which gets it back."""

    ptr: int
    free: Any = None

    def __del__(self) -> None:
        if self.free is not None:
            self.free.append(self.base)


def _array(shape: Any, dtype: Any, memptr: Any, strides: Any) -> Any:
    memory = (ctypes.c_uint8 * memptr.nbytes).from_address(memptr.ptr)
    memory.owner = memptr  # type: ignore[attr-defined]
    return np.ndarray(shape, dtype, memory, strides=strides)


def make_cupy() -> Any:
    """As much of CuPy as the device uses."""
    pinned = SimpleNamespace(
        runtime=_Runtime(),
        nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
        Event=_Event,
        MemoryPool=_Pool,
        PinnedMemoryPool=_Pool,
        PinnedMemoryPointer=SimpleNamespace,
        Stream=SimpleNamespace(from_external=lambda stream: stream),
        UnownedMemory=lambda address, nbytes, owner, index: SimpleNamespace(ptr=address, nbytes=nbytes, owner=owner),
        MemoryPointer=lambda memory, offset: memory,
    )
    module = SimpleNamespace(get_function=lambda name: _Kernel())
    return SimpleNamespace(cuda=pinned, ndarray=_array, RawModule=lambda **code: module)


class NullTable:
    """int32 memory "of the GPU"."""

    def __init__(self, *shape: int) -> None:
        self._memory = np.zeros(shape, np.int32)
        self.__cuda_array_interface__ = {**self._memory.__array_interface__, "stream": None}


@contextmanager
def null_cuda() -> Iterator[None]:
    """``CudaDevice`` is on two such GPUs inside this context."""
    from kvpool.device.cuda import table_kernels

    cupy, driver = make_cupy(), Driver(lambda name: _Library())
    with ExitStack() as patched:
        # No kernel is tested: none copies anything.
        patched.enter_context(patch.dict(os.environ, KVPOOL_SELF_TEST="0"))
        for owner, name, value in (
            (cuda_device, "_cupy", lambda: cupy),
            (cuda_device, "find_driver", lambda: driver),
            (table_kernels, "compiled", lambda name, index: _Kernel()),
            (table_kernels.cuda, "external_stream", lambda handle: handle),
        ):
            patched.enter_context(patch.object(owner, name, value))
        yield
