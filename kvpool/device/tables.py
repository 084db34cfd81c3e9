"""Tables of int32 block ids that a device writes: where they lie, what is staged for them, and what becomes of it."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.jit import jit
from kvpool.state.atomics import array_at
from kvpool.strided import in_numpy

START, SCALE, OFFSET = range(3)
"""Columns of the planes of a hand-over."""


class Table(NamedTuple):
    """int32[..., rows, columns], or int32[n] (a *vector*), that a device can write.

    ``address`` and ``strides`` are in bytes; ``owner`` keeps the memory alive.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    owner: Any

    def starts(self) -> list[int]:
        """The first byte of each plane, counted from the address; planes are what the dimensions before the rows number."""
        places = product(*map(range, self.shape[:-2]))
        return [sum(i * step for i, step in zip(place, self.strides, strict=False)) for place in places]


class StagedRows(NamedTuple):
    """Rows of block ids on their way into a table, all in one buffer of the host tier that belongs to this hand-over alone.

    ``buffer`` uint8 is what ``Device.allocate`` gave, ``address`` its first byte. From there on it holds, one behind the other:

    - int32[rows, width]: the ids, -1 where there is no block, and up to a multiple of 8 bytes;
    - int64[rows]: the row of the table that each row of ids goes to, all different;
    - int64[planes, 3]: for each plane of the table its first byte, counted from the table's address, its scale and its offset.

    Columns [width, columns) of these rows of the table are -1. ``planes``, ``rows`` and ``columns`` are at least 1, ``width`` may be 0.
    """

    buffer: NDArray[np.uint8]
    address: int
    planes: int
    rows: int
    width: int
    columns: int


@jit(inline="always")
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
    """Bytes of the buffer that they take."""
    return (4 * rows * width + 7) // 8 * 8 + 8 * rows + 24 * planes


@jit
def write_rows(address: int, planes: int, rows: int, width: int, columns: int, table: int, row_stride: int) -> None:
    """What a hand-over means: ``table[plane, row, column] = id * scale + offset``, -1 where there is no id. Addresses and bytes."""
    ids, row, plane = staged_views(address, planes, rows, width)
    for p in range(planes):
        scale, offset = plane[p, SCALE], plane[p, OFFSET]
        for i in range(rows):
            target = array_at(table + plane[p, START] + row[i] * row_stride, (columns,), np.int32)
            for j in range(width):
                target[j] = ids[i, j] * scale + offset if ids[i, j] >= 0 else -1
            for j in range(width, columns):
                target[j] = -1


def write_checked(table: Table, staged: StagedRows) -> None:
    """``write_rows`` for devices that watch: a buffer that was taken too early may hold anything. Raises ValueError outside the table."""
    behind_ids = (4 * staged.rows * staged.width + 7) // 8 * 8
    numbers = staged.buffer[behind_ids : staged_bytes(*staged[2:5])].view(np.int64)
    rows, starts = numbers[: staged.rows], numbers[staged.rows :: 3]
    inside = (rows >= 0).all() and (rows < table.shape[-2]).all() and staged.columns <= table.shape[-1]
    if not inside or not np.isin(starts, table.starts()).all():
        raise ValueError(f"staged: rows {rows[:8]} in planes at {starts[:8]} are not all in a table of shape {list(table.shape)}")
    write_rows(*staged[1:], table.address, table.strides[-2])


class StagedVectors(NamedTuple):
    """Numbers on their way into vectors, all in one buffer of the host tier that belongs to this hand-over alone.

    ``buffer`` and ``address`` are as in ``StagedRows``. ``pieces`` are (vector, first byte in the buffer, bytes), each for the begin of
    its vector; none is empty.
    """

    buffer: NDArray[np.uint8]
    address: int
    pieces: list[tuple[Table, int, int]]


def write_vectors(staged: StagedVectors) -> None:
    """What a hand-over of vectors means."""
    for vector, first, nbytes in staged.pieces:
        ctypes.memmove(vector.address, staged.address + first, nbytes)


def make_table(name: str, address: int, shape: tuple[int, ...], strides: tuple[int, ...], owner: Any, vector: bool) -> Table:
    """Memory of int32 as a table; ValueError where ``shape`` and ``strides`` (bytes) are none that rows can be written to."""
    wrong = _wrong(shape, strides, vector)
    if wrong:
        raise ValueError(f"{name} has {wrong}")
    if address % 4:
        raise ValueError(f"{name} is at {address:#x}: accepted is a multiple of 4")
    return Table(address, shape, strides, owner)


@lru_cache(maxsize=256)
def _wrong(shape: tuple[int, ...], strides: tuple[int, ...], vector: bool) -> str:
    """What is wrong with them, or nothing. Remembered, since an engine hands over to the same few targets at every step."""
    if vector and len(shape) != 1:
        return f"shape {shape}: accepted is one dimension"
    if not vector and (len(shape) < 2 or 0 in shape):
        return f"shape {shape}: accepted is [..., rows, columns], with one of each at least"
    if strides[-1] != 4 and shape[-1] > 1:
        return f"strides {strides}: accepted are {'elements' if vector else 'columns'} that follow each other, 4 bytes apart"
    end = 4
    for stride, count in sorted(zip(strides, shape, strict=True)):
        if count > 1 and (stride < end or stride % 4):
            return f"shape {shape} and strides {strides}: accepted are elements that do not overlap, in rising order"
        end += (count - 1) * stride
    return ""


def host_table(target: Any, name: str, vector: bool) -> Table:
    """An array of main memory as a table, for devices whose memory NumPy reaches. Raises TypeError or ValueError."""
    target = in_numpy(name, target)
    if not isinstance(target, np.ndarray) or target.dtype != np.int32:
        found = target.dtype if isinstance(target, np.ndarray) else type(target).__name__
        raise TypeError(f"{name}: accepted is an int32 array, not {found}")
    address, read_only = target.__array_interface__["data"]
    if read_only:
        raise ValueError(f"{name} is read-only: accepted is an array that can be written")
    return make_table(name, address, target.shape, target.strides, target, vector)
