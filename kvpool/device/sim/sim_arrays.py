"""Arrays outside the pools: staging buffers, tables and whatever else kernels and the host share. Each counts as a
whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.device.sim.order import Rows


class _Watched(NamedTuple):
    """An array, the content that it should have, and the range of its addresses."""

    array: NDArray[Any]
    shadow: NDArray[Any]
    begin: int
    end: int


class Arrays:
    """The arrays that some access has named. Each has a place with a number above all block ids. Rows name it like a
    block of ``tokens`` tokens.

    If arrays share bytes, an access to one is an access to all of them. Two halves of one array are separate if each is
    named by itself.
    """

    def __init__(self, blocks: int, tokens: int) -> None:
        self._blocks, self._tokens = blocks, tokens
        self._watched: list[_Watched | None] = []

    def rows(self, name: str, arrays: Sequence[NDArray[Any]]) -> Rows:
        """The places of arrays, which are watched from now on. Raises TypeError."""
        found: set[int] = set()
        for array in arrays:
            if not isinstance(array, np.ndarray):
                raise TypeError(f"{name}: arrays are needed, not {type(array).__name__}")
            begin, end = _extent(array)
            self._watch(array, begin, end)
            found.update(self._sharing(begin, end))
        return self._rows(sorted(found))

    def _sharing(self, begin: int, end: int) -> list[int]:
        """The numbers of the arrays that have some of these bytes."""
        return [
            i for i, other in enumerate(self._watched) if other is not None and other.begin < end and begin < other.end
        ]

    def everything(self) -> Rows:
        return self._rows(range(len(self._watched)))

    def _rows(self, numbers: Sequence[int]) -> Rows:
        return np.array([(self._blocks + i, 0, self._tokens) for i in numbers], np.int64).reshape(-1, 3)

    def _watch(self, array: NDArray[Any], begin: int, end: int) -> None:
        if not any(other is not None and _same(other.array, array) for other in self._watched):
            self._watched.append(_Watched(array, array.copy(), begin, end))

    def forget(self, array: NDArray[Any]) -> None:
        """Stop watching memory. Its place stays, for accesses that were made before."""
        begin, end = _extent(array)
        for i, other in enumerate(self._watched):
            if other is not None and begin <= other.begin and other.end <= end:
                self._watched[i] = None

    def adopt(self, places: NDArray[np.int64]) -> None:
        """Accept the present content of these arrays, and of the arrays that share bytes with them, which may have been
        named later."""
        named = [self._watched[i] for i in (places - self._blocks).tolist()]
        for i in {i for one in named if one is not None for i in self._sharing(one.begin, one.end)}:
            if (watched := self._watched[i]) is not None:
                watched.shadow[...] = watched.array

    def differences(self) -> list[int]:
        """The places of arrays whose content is not what it should be."""
        wrong = []
        for i, watched in enumerate(self._watched):
            if watched is not None and watched.array.tobytes() != watched.shadow.tobytes():
                wrong.append(self._blocks + i)
        return wrong


def _extent(array: NDArray[Any]) -> tuple[int, int]:
    """The address of the first byte, and of the first byte after the array."""
    address = array.ctypes.data
    if array.size == 0:
        return address, address
    steps = [(count - 1) * stride for count, stride in zip(array.shape, array.strides, strict=True)]
    return address + sum(step for step in steps if step < 0), address + sum(
        step for step in steps if step > 0
    ) + array.itemsize


def _same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.ctypes.data == b.ctypes.data and a.shape == b.shape and a.strides == b.strides and a.dtype == b.dtype
