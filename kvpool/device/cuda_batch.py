"""cuMemcpyBatchAsync: many copies in one call of the driver, straight from arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.device.fragments import BYTES, FROM, TO

_DRIVER = "libcuda.so.1"
# The interface of this CUDA version is asked for by number, and stays the same in later drivers.
_CUDA_VERSION = 12080
_LEGACY_STREAM_FLAG = 1
# Sources are read in stream order. In any order, a copy from the host could be made before the copy to the host that its stream waits for.
_SOURCE_IN_STREAM_ORDER = 1

Batch = Callable[[npt.NDArray[np.int64], int], int]


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes_v1; the places are hints for managed memory, and ignored for any other."""

    _fields_ = [
        ("source_order", ctypes.c_int),
        ("source_place", ctypes.c_int * 2),
        ("target_place", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


def find_batch(library: Callable[[str], Any] = ctypes.CDLL) -> Batch | None:
    """A function of (fragments int64[n, 3], stream) that enqueues all copies and gives the CUresult; None where the driver has none.

    The copies must not depend on each other. The stream must not be the null stream, and a context must be current.
    """
    try:
        get = library(_DRIVER).cuGetProcAddress_v2
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
        return int(
            function(
                targets, sources, sizes, len(fragments), ctypes.byref(attributes), ctypes.byref(first), 1, ctypes.byref(failed), stream
            )
        )

    return batch
