"""The CUDA driver, where CuPy offers too little of it: contexts, the capture mode of a thread, batched copies."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.device.base import BYTES, FROM, TO

BATCH_FRAGMENTS = "KVPOOL_BATCH_FRAGMENTS"
_BATCH_FRAGMENTS = 8192
LIBRARY = "libcuda.so.1"
"""The library of the driver."""
# The version number asks for the interface of this CUDA version. Later drivers keep it.
_CUDA_VERSION = 12080
_LEGACY_STREAM_FLAG = 1
# Read sources in stream order. In any other order, a copy from the host could read before the copy to the host that its
# stream waits for.
_SOURCE_IN_STREAM_ORDER = 1

_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_pointer, _int = ctypes.c_void_p, ctypes.c_int

Batch = Callable[[npt.NDArray[np.int64], int], int]


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes_v1. The locations are hints for managed memory, and ignored for other memory."""

    _fields_ = [
        ("source_order", ctypes.c_int),
        ("source_place", ctypes.c_int * 2),
        ("target_place", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


def find_batch(library: Callable[[str], Any] = ctypes.CDLL) -> Batch | None:
    """A function of (fragments int64[n, 3], stream) that enqueues all copies and returns the CUresult. None if the
    driver has no batched copy.

    The copies must not depend on each other. The stream must not be the null stream, and a context must be current.
    """
    try:
        get = library(LIBRARY).cuGetProcAddress_v2
    except (OSError, AttributeError):
        return None
    address, found = ctypes.c_void_p(), ctypes.c_int()
    version, flags = ctypes.c_int(_CUDA_VERSION), ctypes.c_uint64(_LEGACY_STREAM_FLAG)
    if get(b"cuMemcpyBatchAsync", ctypes.byref(address), version, flags, ctypes.byref(found)) or not address.value:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    arguments = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
    function = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(address.value)
    attributes = _Attributes(source_order=_SOURCE_IN_STREAM_ORDER)

    def batch(fragments: npt.NDArray[np.int64], stream: int) -> int:
        columns = np.ascontiguousarray(fragments.T)
        first, failed = size(0), size(0)
        targets, sources, sizes = (columns[column].ctypes.data for column in (TO, FROM, BYTES))
        of_all = ctypes.byref(attributes), ctypes.byref(first), 1
        return int(function(targets, sources, sizes, len(fragments), *of_all, ctypes.byref(failed), stream))

    return batch


def batch_fragments() -> int:
    """The most fragments in one batched copy. Drivers have crashed with tens of thousands."""
    given = os.environ.get(BATCH_FRAGMENTS)
    if given is None:
        return _BATCH_FRAGMENTS
    if not given.isdecimal() or not 0 < int(given) < 1 << 31:
        raise ValueError(f"{BATCH_FRAGMENTS}={given!r}: accepted is a number of fragments, 1 or more")
    return int(given)


class Driver:
    """Contexts and the capture mode of the calling thread. Methods return the CUresult, 0 for success, and their other
    results.

    A function that the driver does not have does nothing and succeeds. Thread-safe.
    """

    def __init__(self, library: Callable[[str], Any] = ctypes.CDLL) -> None:
        try:
            found = library(LIBRARY)
        except OSError:
            found = None
        self._retain = _function(found, "cuDevicePrimaryCtxRetain", _pointer, _int)
        self._state = _function(found, "cuDevicePrimaryCtxGetState", _int, _pointer, _pointer)
        self._push = _function(found, "cuCtxPushCurrent_v2", _pointer)
        self._pop = _function(found, "cuCtxPopCurrent_v2", _pointer)
        self._attribute = _function(found, "cuPointerGetAttribute", _pointer, _int, ctypes.c_uint64)
        self._query = _function(found, "cuEventQuery", _pointer)
        self._exchange = _function(found, "cuThreadExchangeStreamCaptureMode", _pointer)

    def primary_context(self, index: int) -> tuple[int, int | None]:
        """The context that the runtime uses on a GPU. It is created if it does not exist. It is kept until the process
        ends, as the runtime's own calls keep it."""
        context = ctypes.c_void_p()
        return self._retain(ctypes.byref(context), index), context.value

    def gpu_of(self, address: int, count: int) -> int | None:
        """Which of the ``count`` GPUs some memory belongs to. Creates no context: where there is GPU memory, there is a
        context."""
        found = self._ordinal(address)
        for index in range(count) if found is None else ():
            flags, active = ctypes.c_uint(), ctypes.c_int()
            self._state(index, ctypes.byref(flags), ctypes.byref(active))
            if active.value and found is None:
                self.push(self.primary_context(index)[1])
                found = self._ordinal(address)
                self.pop()
        return found

    def _ordinal(self, address: int) -> int | None:
        """The GPU of an address, as the current context knows it."""
        number = ctypes.c_int(-1)
        status = self._attribute(ctypes.byref(number), _DEVICE_ORDINAL, address)
        return None if status or number.value < 0 else number.value

    def push(self, context: int | None) -> tuple[int, bool]:
        """Make a context current. Returns whether it did: then ``pop`` has to undo it."""
        status = self._push(context)
        return status, status == 0

    def pop(self) -> None:
        """Restore what was current before ``push``: another context, or none."""
        self._pop(ctypes.byref(ctypes.c_void_p()))

    def query(self, event: int) -> int:
        """Query an event. The runtime's own query would leave "not ready" as the last error of this thread. Other code
        that shares the runtime would take that for a failed launch of its own."""
        return self._query(event)

    def relax(self) -> ctypes.c_int:
        """Let calls of this thread pass while other threads capture, without ending a capture. Returns the argument of
        ``restore``."""
        mode = ctypes.c_int(_RELAXED)
        self._exchange(ctypes.byref(mode))
        return mode

    def restore(self, mode: ctypes.c_int) -> None:
        self._exchange(ctypes.byref(mode))


def _function(library: Any, name: str, *arguments: Any) -> Callable[..., int]:
    found = getattr(library, name, None)
    if found is None:
        return lambda *given: 0
    found.argtypes, found.restype = arguments, _int
    return found
