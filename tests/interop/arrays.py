"""Arrays that know one protocol only, and pools whose exports the tests look at."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvpool import BlockLayout, KVCacheManager
from kvpool.common.arrays import dlpack

LAYOUT = BlockLayout(2, 2, 8, 4, dtype="float16")


def open_pool(layout: BlockLayout = LAYOUT, **options: Any) -> KVCacheManager:
    return KVCacheManager(layout, **{"device_blocks": 6, "host_blocks": 5, "device": "cpu", **options})


class DLPackOnly:
    """An array that knows no protocol but DLPack, in the version that its package knows."""

    def __init__(self, array: np.ndarray, versioned: bool = True) -> None:
        self.array, self.versioned = array, versioned

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        if options and not self.versioned:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class OldDLPack(DLPackOnly):
    """The same of a package that knows DLPack 0 only."""

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(array, versioned=False)


class InterfaceOnly:
    """An array that knows the protocol of NumPy only. ``count``: how often that was read."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.count = array, 0

    @property
    def __array_interface__(self) -> Any:
        self.count += 1
        return self.array.__array_interface__


class GpuOnly:
    """An array that says it lies in memory of a GPU."""

    def __init__(self, array: np.ndarray, **changes: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {**array.__array_interface__, "stream": None, **changes}


FOREIGN: list[Callable[[np.ndarray], Any]] = [DLPackOnly, OldDLPack, InterfaceOnly]


def described(capsule: Any) -> tuple[SimpleNamespace, SimpleNamespace | None]:
    """What a capsule says, tensor and head, as values that hold no memory."""
    tensor, head = dlpack.opened(capsule)
    said = {name: getattr(tensor, name) for name, _ in dlpack.Tensor._fields_}
    shape = tuple(tensor.shape[: tensor.ndim])
    # Some releases of NumPy give no strides for a contiguous array.
    dense = tuple(math.prod(shape[place + 1 :]) for place in range(tensor.ndim))
    said |= {"shape": shape, "strides": tuple(tensor.strides[: tensor.ndim]) if tensor.strides else dense}
    return SimpleNamespace(**said), head and SimpleNamespace(major=head.major, minor=head.minor, flags=head.flags)


def aligned(nbytes: int, alignment: int = 64, offset: int = 0) -> np.ndarray:
    """uint8[nbytes] at ``offset`` bytes after a multiple of ``alignment``; full of something."""
    raw = np.full(nbytes + 2 * alignment, 0x5A, np.uint8)
    start = -raw.ctypes.data % alignment + offset
    return raw[start : start + nbytes]
