"""Driver: functions of the CUDA driver that CuPy does not offer, under the driver's own names."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from kvpool.device.cuda.batch import LIBRARY

_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_pointer, _int = ctypes.c_void_p, ctypes.c_int


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
