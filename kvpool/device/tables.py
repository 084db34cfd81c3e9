"""Tables of int32 block ids that a device writes: where they lie, what is staged for them, and how it is written."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.arrays.strided import in_numpy
from kvpool.jit import jit
from kvpool.jit.intrinsics import array_at

START, SCALE, OFFSET = range(3)
"""Columns of the planes of a hand-over."""


class Table(NamedTuple):
    """int32[..., rows, columns], or int32[n] (a *vector*), that a device can write.

    ``address`` and ``strides`` are in bytes. ``owner`` keeps the memory alive.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    owner: Any

    def starts(self) -> list[int]:
        """The first byte of each plane, counted from the address. A plane is one index of the dimensions before the
        rows."""
        places = product(*map(range, self.shape[:-2]))
        return [sum(i * step for i, step in zip(place, self.strides, strict=False)) for place in places]


class StagedRows(NamedTuple):
    """Rows of block ids on their way into ``table``, in one buffer of the host tier that belongs to this hand-over
    alone. It fits the table.

    ``buffer`` uint8 is memory of ``Device.allocate``, and ``address`` its first byte. From there on it holds, in this
    order:

    - int32[rows, width]: the ids, -1 where there is no block, padded to a multiple of 8 bytes;
    - int64[rows]: for each row of ids the row of the table that it is for, all different;
    - int64[planes, 3]: for each plane of the table its first byte, counted from the table's address, its scale and its
      offset.

    In these rows of the table, the columns [width, columns) become -1. ``planes``, ``rows`` and ``columns`` are at
    least 1. ``width`` may be 0.
    """

    table: Table
    buffer: NDArray[np.uint8]
    address: int
    planes: int
    rows: int
    width: int
    columns: int

    def run(self, pool: object = None) -> None:
        """Write them, on the CPU."""
        write_rows(*self[2:], self.table.address, self.table.strides[-2])

    def written(self) -> list[Table]:
        """What the device will write."""
        return [self.table]

    def check(self) -> None:
        """For devices that look for races, where a buffer that was reused too early may hold anything. Raises
        ValueError for a write outside the table."""
        _, rows, planes = staged_arrays(self)
        starts, shape = planes[:, START], self.table.shape
        inside = (rows >= 0).all() and (rows < shape[-2]).all() and self.columns <= shape[-1]
        if not inside or not np.isin(starts, self.table.starts()).all():
            raise ValueError(
                f"staged: rows {rows[:8]} in planes at {starts[:8]} are not all in a table of shape {list(shape)}"
            )


@jit(forceinline=True)
def staged_views(address: int, planes: int, rows: int, width: int) -> tuple[Any, Any, Any]:
    """Ids, rows and planes in the buffer at ``address``."""
    behind_ids = address + (4 * rows * width + 7) // 8 * 8
    return (
        array_at(address, (rows, width), np.int32),
        array_at(behind_ids, (rows,), np.int64),
        array_at(behind_ids + 8 * rows, (planes, 3), np.int64),
    )


@jit
def staged_bytes(planes: int, rows: int, width: int) -> int:
    """The bytes of ids, rows and planes in the buffer."""
    return (4 * rows * width + 7) // 8 * 8 + 8 * rows + 24 * planes


def staged_arrays(staged: StagedRows) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Ids, rows and planes of a hand-over, as views of its buffer."""
    ids = 4 * staged.rows * staged.width
    numbers = staged.buffer[(ids + 7) // 8 * 8 : staged_bytes(*staged[3:6])].view(np.int64)
    rows, planes = numbers[: staged.rows], numbers[staged.rows :].reshape(staged.planes, 3)
    return staged.buffer[:ids].view(np.int32).reshape(staged.rows, staged.width), rows, planes


@jit
def write_rows(address: int, planes: int, rows: int, width: int, columns: int, table: int, row_stride: int) -> None:
    """Write the rows of a hand-over: ``table[plane, row, column] = id * scale + offset``, or -1 where there is no id.

    ``address`` and ``table`` are addresses; ``row_stride`` is in bytes.
    """
    ids, row, plane = staged_views(address, planes, rows, width)
    for p in range(planes):
        scale, offset = plane[p, SCALE], plane[p, OFFSET]
        for i in range(rows):
            target = array_at(table + plane[p, START] + row[i] * row_stride, (columns,), np.int32)
            for j in range(width):
                target[j] = ids[i, j] * scale + offset if ids[i, j] >= 0 else -1
            for j in range(width, columns):
                target[j] = -1


class StagedVectors(NamedTuple):
    """Numbers on their way into vectors, in one buffer of the host tier that belongs to this hand-over alone.

    ``buffer`` and ``address`` are as in ``StagedRows``. ``pieces`` are (vector, first byte in the buffer, bytes). Each
    is written to the start of its vector; none is empty.
    """

    buffer: NDArray[np.uint8]
    address: int
    pieces: list[tuple[Table, int, int]]

    def run(self, pool: object = None) -> None:
        """Write them, on the CPU."""
        for vector, first, nbytes in self.pieces:
            ctypes.memmove(vector.address, self.address + first, nbytes)

    def written(self) -> list[Table]:
        """What the device will write."""
        return [vector for vector, _, _ in self.pieces]

    def check(self) -> None:
        """The pieces are in no buffer, so there is nothing to check."""


def make_table(
    name: str,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    owner: Any,
    vector: bool,
    itemsize: int,
) -> Table:
    """Memory of integers of ``itemsize`` bytes as a table. Raises ValueError for a ``shape`` and ``strides`` (bytes)
    whose rows cannot be written."""
    wrong = _wrong(shape, strides, vector, itemsize)
    if wrong:
        raise ValueError(f"{name} has {wrong}")
    if address % itemsize:
        raise ValueError(f"{name} is at {address:#x}: accepted is a multiple of {itemsize}")
    return Table(address, shape, strides, owner)


@lru_cache(maxsize=256)
def _wrong(shape: tuple[int, ...], strides: tuple[int, ...], vector: bool, itemsize: int) -> str:
    """Why rows cannot be written so, or an empty string. Cached, since an engine hands over to the same few targets at
    every step."""
    if vector and len(shape) != 1:
        return f"shape {shape}: accepted is one dimension"
    if not vector and (len(shape) < 2 or 0 in shape):
        return f"shape {shape}: accepted is [..., rows, columns], with one of each at least"
    if strides[-1] != itemsize and shape[-1] > 1:
        what = "elements" if vector else "columns"
        return f"strides {strides}: accepted are {what} that follow each other, {itemsize} bytes apart"
    end = itemsize
    for stride, count in sorted(zip(strides, shape, strict=True)):
        if count > 1 and (stride < end or stride % itemsize):
            return f"shape {shape} and strides {strides}: accepted are elements that do not overlap, in rising order"
        end += (count - 1) * stride
    return ""


def host_table(target: Any, name: str, vector: bool = False, itemsize: int = 4) -> Table:
    """An array in main memory as a table, for devices whose memory NumPy reaches. Raises TypeError or ValueError."""
    target = in_numpy(name, target)
    # The view has its own type and shape, which nobody else changes.
    view = np.asarray(target)[...] if isinstance(target, np.ndarray) else None
    if view is None or view.dtype != (np.int32 if itemsize == 4 else np.int64):
        found = type(target).__name__ if view is None else view.dtype
        raise TypeError(f"{name}: accepted is an int{8 * itemsize} array, not {found}")
    address, read_only = view.__array_interface__["data"]
    if read_only:
        raise ValueError(f"{name} is read-only: accepted is an array that can be written")
    return make_table(name, address, view.shape, view.strides, target, vector, itemsize)
