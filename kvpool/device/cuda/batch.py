"""cuMemcpyBatchAsync: many copies in one call of the driver, described by arrays."""

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
        return int(
            function(
                targets,
                sources,
                sizes,
                len(fragments),
                ctypes.byref(attributes),
                ctypes.byref(first),
                1,
                ctypes.byref(failed),
                stream,
            )
        )

    return batch


def batch_fragments() -> int:
    """The most fragments in one batched copy. Drivers have crashed with tens of thousands."""
    given = os.environ.get(BATCH_FRAGMENTS)
    if given is None:
        return _BATCH_FRAGMENTS
    if not given.isdecimal() or not 0 < int(given) < 1 << 31:
        raise ValueError(f"{BATCH_FRAGMENTS}={given!r}: accepted is a number of fragments, 1 or more")
    return int(given)
