"""Work: what ``Device.enqueue`` takes. Each record has ``run``, which does it at once in main memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from kvpool.common.arrays import Int64s, Uint8s
from kvpool.common.arrays.strided import in_numpy
from kvpool.common.jit import inline, jit
from kvpool.common.jit.intrinsics import array_at

if TYPE_CHECKING:
    from kvpool.device.regions import Regions


INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)
START, SCALE, OFFSET = range(3)
"""Columns of the planes of an upload."""


class Table(NamedTuple):
    """An array that a device can write: int32 of shape (..., rows, columns), or a *vector* of shape (n,).

    Attributes
    ----------
    address : int
        The address of the first element.
    shape : tuple of int
        Elements along each axis.
    strides : tuple of int
        Bytes from an element to the next along each axis.
    owner : object
        Keeps the memory alive.
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
    """An upload of rows of block ids to a table, from a staging buffer that belongs to this upload alone.

    Attributes
    ----------
    table : Table
        The table to write, which has room for the rows.
    buffer : ndarray of uint8
        Memory of ``Device.allocate``.
    address : int
        The address of its first byte.
    planes : int
        The number of planes of the table, 1 or more.
    rows : int
        The number of rows of ids, 1 or more.
    width : int
        The number of ids of a row, 0 or more.
    columns : int
        The number of columns to write, 1 or more. Those from ``width`` on become -1.

    Notes
    -----
    The buffer has, in this order:

    - int32[rows, width]: the ids, -1 where there is no block, padded to a multiple of 8 bytes;
    - int64[rows]: the row of the table for each row of ids, all different;
    - int64[planes, 3]: for each plane of the table its first byte, counted from the table's address, its scale and its
      offset.
    """

    table: Table
    buffer: Uint8s
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
        numbers = self.buffer[ids_bytes(self.rows, self.width) : staged_bytes(*self[3:6])].view(np.int64)
        rows, starts, shape = numbers[: self.rows], numbers[self.rows :: 3], self.table.shape
        inside = (rows >= 0).all() and (rows < shape[-2]).all() and self.columns <= shape[-1]
        if not inside or not np.isin(starts, self.table.starts()).all():
            raise ValueError(
                f"staged: rows {rows[:8]} in planes at {starts[:8]} are not all in a table of shape {list(shape)}"
            )


@inline
def ids_bytes(rows: int, width: int) -> int:
    """Bytes of the ids in the buffer. The rows and the planes follow them."""
    return (4 * rows * width + 7) // 8 * 8


@inline
def staged_views(address: int, planes: int, rows: int, width: int) -> tuple[Any, Any, Any]:
    """Ids, rows and planes in the buffer at ``address``."""
    behind_ids = address + ids_bytes(rows, width)
    return (
        array_at(address, (rows, width), np.int32),
        array_at(behind_ids, (rows,), np.int64),
        array_at(behind_ids + 8 * rows, (planes, 3), np.int64),
    )


@jit
def staged_bytes(planes: int, rows: int, width: int) -> int:
    """The bytes of ids, rows and planes in the buffer."""
    return ids_bytes(rows, width) + 8 * rows + 24 * planes


@jit
def write_rows(address: int, planes: int, rows: int, width: int, columns: int, table: int, row_stride: int) -> None:
    """Write the rows of an upload: ``table[plane, row, column] = id * scale + offset``, or -1 where there is no id.

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
    """An upload of numbers to vectors, from a staging buffer that belongs to this upload alone.

    Attributes
    ----------
    buffer : ndarray of uint8
        Memory of ``Device.allocate``.
    address : int
        The address of its first byte.
    pieces : list of (Table, int, int)
        Each vector, its first byte in the buffer, and its bytes, 1 or more. They are written to the start of the
        vector.
    """

    buffer: Uint8s
    address: int
    pieces: list[tuple[Table, int, int]]

    def run(self, pool: object = None) -> None:
        """Write them, on the CPU."""
        for vector, first, nbytes in self.pieces:
            ctypes.memmove(vector.address, self.address + first, nbytes)

    def written(self) -> list[Table]:
        """What the device will write."""
        return [vector for vector, _, _ in self.pieces]


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
        raise ValueError(f"{name}: expected {wrong}")
    if address % itemsize:
        raise ValueError(f"{name}: expected an address that is a multiple of {itemsize}, got {address:#x}")
    return Table(address, shape, strides, owner)


@lru_cache(maxsize=256)
def _wrong(shape: tuple[int, ...], strides: tuple[int, ...], vector: bool, itemsize: int) -> str:
    """Why rows cannot be written so, or an empty string. Cached, since an engine hands over to the same few targets at
    every step."""
    if vector and len(shape) != 1:
        return f"one dimension, got shape {shape}"
    if not vector and (len(shape) < 2 or 0 in shape):
        return f"[..., rows, columns], with one of each at least, got shape {shape}"
    if strides[-1] != itemsize and shape[-1] > 1:
        what = "elements" if vector else "columns"
        return f"{what} that follow each other, {itemsize} bytes apart, got strides {strides}"
    end = itemsize
    for stride, count in sorted(zip(strides, shape, strict=True)):
        if count > 1 and (stride < end or stride % itemsize):
            return f"elements that do not overlap, in rising order, got shape {shape} and strides {strides}"
        end += (count - 1) * stride
    return ""


def host_table(target: Any, name: str, vector: bool = False, itemsize: int = 4) -> Table:
    """An array in main memory as a table, for devices whose memory NumPy reaches. Raises TypeError or ValueError."""
    target = in_numpy(name, target)
    # The view has its own type and shape, which nobody else changes.
    view = np.asarray(target)[...] if isinstance(target, np.ndarray) else None
    if view is None or view.dtype != (INT32 if itemsize == 4 else INT64):
        actual = type(target).__name__ if view is None else view.dtype
        raise TypeError(f"{name}: expected an int{8 * itemsize} array, got {actual}")
    if not view.flags.writeable:
        raise ValueError(f"{name}: expected an array that can be written, got a read-only one")
    try:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view.data))  # a third of what the other way takes
    except (TypeError, ValueError):  # it has gaps, or no element
        address = view.__array_interface__["data"][0]
    return make_table(name, address, view.shape, view.strides, target, vector, itemsize)


STORED, HOLES, LENGTH, QUERY = range(4)
"""Columns of the numbers of a step."""
SLOT_MAPPING, SEQ_LENS, QUERY_START_LOC, LAST_PAGE_LEN, TABLE, INDPTR, INDICES, ROW_STRIDE, COLUMNS = range(9)
"""The entries of ``StepTargets.places``: an address for each target, 0 where it is not wanted; then the bytes from one
row of the dense table to the next, and its columns."""
_INT32_MAX = 2**31 - 1


NAMES = ("slot_mapping", "seq_lens", "query_start_loc", "last_page_len", "table", "indptr", "indices")
_MORE = {"seq_lens": 0, "query_start_loc": 1, "last_page_len": 0, "table": 0, "indptr": 1}
"""How many entries a vector has beyond one for each sequence."""

AsTable = Callable[[Any, str, bool, int], Table]


@dataclass(frozen=True, eq=False)
class StepTargets:
    """The arrays of a ``StepTables`` that a device writes.

    Attributes
    ----------
    tables : dict of str to Table
        The wanted arrays, by name.
    places : ndarray of int64, shape (9,)
        Their addresses, 0 for an array that is not wanted; then the row stride in bytes and the columns of ``table``.
    limits : ndarray of int64, shape (3,)
        The most tokens, columns and blocks that fit.
    rows : int
        The most sequences that fit.
    """

    tables: dict[str, Table]
    places: Int64s
    limits: Int64s
    rows: int

    @classmethod
    def of(cls, arrays: Any, as_table: AsTable) -> StepTargets:
        """The targets that a public call names: attributes of ``arrays``, each of which may be None.

        ``as_table``: ``host_table``, or the device's own function of that kind. Raises TypeError or ValueError, which
        name the array, for an array that cannot be written in this way, and for arrays that share memory.
        """
        by_name = {name: getattr(arrays, name) for name in NAMES}
        tables = {
            name: as_table(array, name, name != "table", _itemsize(name))
            for name, array in by_name.items()
            if array is not None
        }
        table = tables.get("table")
        if table is not None and len(table.shape) != 2:
            raise ValueError(f"table: expected [rows, columns], got shape {list(table.shape)}")
        check_apart(tables)
        row = (0, 0) if table is None else (table.strides[0], table.shape[1])
        addresses = (tables[name].address if name in tables else 0 for name in NAMES)
        most = ("slot_mapping", -1), ("table", 1), ("indices", -1)
        limits = [min(tables[name].shape[axis], _INT32_MAX) if name in tables else _INT32_MAX for name, axis in most]
        rows = min((tables[name].shape[0] - more for name, more in _MORE.items() if name in tables), default=_INT32_MAX)
        return cls(tables, np.array([*addresses, *row], np.int64), np.array(limits, np.int64), rows)

    def check_rows(self, count: int) -> None:
        """Raise ValueError if ``count`` sequences do not fit."""
        if count > self.rows:
            check_entries(self.tables, count)


def check_entries(tables: dict[str, Table], count: int) -> None:
    """Raise ValueError if a table of a step is too small for ``count`` sequences."""
    for name, more in _MORE.items():
        if name in tables and tables[name].shape[0] < count + more:
            what = "rows" if name == "table" else "entries"
            raise ValueError(f"{name}: expected {count + more} {what} or more, got {tables[name].shape[0]}")


def _itemsize(name: str) -> int:
    return 8 if name == "slot_mapping" else 4


def check_apart(tables: dict[str, Table]) -> None:
    """Raise ValueError if tables of a step share memory."""
    spans = []
    for name, table in tables.items():
        if 0 not in table.shape:
            last = sum((count - 1) * step for count, step in zip(table.shape, table.strides, strict=True))
            spans.append((table.address, table.address + last + _itemsize(name), name))
    check_spans(spans)


def check_spans(spans: Iterable[tuple[int, int, str]]) -> None:
    """Raise ValueError, with the names of two, if ranges of addresses overlap: (first, end, name)."""
    for (_, end, name), (begin, _, other) in pairwise(sorted(span for span in spans if span[0] < span[1])):
        if begin < end:
            raise ValueError(f"{name}: expected memory of its own, got some that {other} has too")


class StagedStep(NamedTuple):
    """An upload of the tables of a step, from a staging buffer that belongs to this upload alone.

    Attributes
    ----------
    targets : StepTargets
        The arrays to write.
    buffer : ndarray of uint8
        Memory of ``Device.allocate``.
    address : int
        The address of its first byte.
    sequences : int
        The number of sequences.
    columns : int
        The largest number of columns of a sequence.
    tokens_per_block : int
        The number of tokens of a block.
    sinks : int
        The number of first columns that a window never passes.

    Notes
    -----
    The buffer has, in this order:

    - int64[sequences + 1, 4], for each sequence: the index of its first block id among the staged ones; how many of its
      columns, from ``sinks`` on, have no block and are left out; its tokens; the index of its first slot. The last row
      has the ends.
    - int32: the block ids, one sequence after the other.

    The tokens that get slots are the last ones of a sequence. None of them is in a column without a block.
    """

    targets: StepTargets
    buffer: Uint8s
    address: int
    sequences: int
    columns: int
    tokens_per_block: int
    sinks: int

    def run(self, pool: object = None) -> None:
        """Write it, on the CPU."""
        ids_at, places = self.address + int(numbers_bytes(self.sequences)), self.targets.places
        write_step(self.address, self.sequences, ids_at, True, self.tokens_per_block, self.sinks, places)

    def written(self) -> list[Table]:
        """What the device will write."""
        return list(self.targets.tables.values())

    def check(self) -> None:
        """For devices that look for races, where a buffer that was reused too early may hold anything. Raises
        ValueError for a write outside the targets."""
        begin, width, limits = int(numbers_bytes(self.sequences)), self.tokens_per_block, self.targets.limits
        stored, holes, length, query = self.buffer[:begin].view(np.int64).reshape(-1, 4).T
        filled, gone = -(-length[:-1] // width), holes[:-1]
        counts, blocks = np.diff(query), np.diff(stored)
        fits = (counts >= 0) & (counts <= length[:-1]) & (gone >= 0) & (gone <= np.maximum(filled - self.sinks, 0))
        fits &= (blocks == filled - gone) & ((gone == 0) | (length[:-1] - counts >= (self.sinks + gone) * width))
        ends = query[-1], filled.max(initial=0), stored[-1]
        room = (len(self.buffer) - begin) // 4
        begins = query[0] == stored[0] == 0
        if not begins or not fits.all() or stored[-1] > room or (np.array(ends) > limits).any():
            raise ValueError(f"staged: a step of {ends} tokens, columns and blocks is none for {limits}")


@inline
def numbers_bytes(sequences: int) -> int:
    """Bytes of the numbers in the buffer. The block ids follow them."""
    return 32 * (sequences + 1)


@inline
def _run(source: int, target: int, count: int) -> None:
    """Copy int32."""
    numbers, wanted = array_at(source, (count,), np.int32), array_at(target, (count,), np.int32)
    for i in range(count):
        wanted[i] = numbers[i]


@inline
def _write_slots(at: int, row: int, first: int, length: int, width: int) -> None:
    """Write the slots of the tokens [first, length) to ``at``. The entry of column c of their sequence is at
    ``row + 4 * c``."""
    slots = array_at(at, (length - first,), np.int64)
    token = first
    while token < length:
        column = token // width
        block = np.int64(array_at(row + 4 * column, (1,), np.int32)[0])
        end = min(length, (column + 1) * width)
        ahead = block * width - column * width
        for t in range(token, end):
            slots[t - first] = ahead + t
        token = end


@inline
def _write_row(at: int, columns: int, begin: int, row: int, filled: int, sinks: int, holes: int) -> None:
    """Write a row of the dense table: ``filled`` columns, then -1. After the ``sinks``, ``holes`` columns have no
    block.

    The entries of the sinks are at ``begin``. The entry of a later column c is at ``row + 4 * c``.
    """
    wanted = array_at(at, (columns,), np.int32)
    _run(begin, at, sinks)
    for c in range(sinks, sinks + holes):
        wanted[c] = -1
    _run(row + 4 * (sinks + holes), at + 4 * (sinks + holes), filled - sinks - holes)
    for c in range(filled, columns):
        wanted[c] = -1


@jit
def write_step(numbers_at: int, count: int, ids_at: int, packed: bool, width: int, sinks: int, places: Int64s) -> None:
    """Write the tables of a step, from numbers as in ``StagedStep`` and from block ids. ``places`` are those of
    ``StepTargets``.

    ``packed``: the ids leave out the columns that have no block, as staged ids do. All arguments are addresses or
    numbers that have been checked.
    """
    numbers = array_at(numbers_at, (count + 1, 4), np.int64)
    slots, table, indices = places[SLOT_MAPPING], places[TABLE], places[INDICES]
    seq_lens, last = array_at(places[SEQ_LENS], (count,), np.int32), array_at(places[LAST_PAGE_LEN], (count,), np.int32)
    starts, indptr = (
        array_at(places[QUERY_START_LOC], (count + 1,), np.int32),
        array_at(places[INDPTR], (count + 1,), np.int32),
    )
    blocks = np.int64(0)
    for i in range(count + 1):
        stored = numbers[i, STORED]
        holes = numbers[i, HOLES]
        length = numbers[i, LENGTH]
        query = numbers[i, QUERY]
        if places[QUERY_START_LOC]:
            starts[i] = query
        if places[INDPTR]:
            indptr[i] = blocks
        if i == count:
            break
        filled, begin = (length + width - 1) // width, ids_at + 4 * stored
        first = min(sinks, filled)
        row = begin - (4 * holes if packed else 0)
        if places[SEQ_LENS]:
            seq_lens[i] = length
        if places[LAST_PAGE_LEN]:
            last[i] = length - (filled - 1) * width if length else 0
        if slots:
            _write_slots(slots + 8 * query, row, length - (numbers[i + 1, QUERY] - query), length, width)
        if table:
            _write_row(table + i * places[ROW_STRIDE], places[COLUMNS], begin, row, filled, first, holes)
        if indices:
            _run(begin, indices + 4 * blocks, first)
            _run(row + 4 * (first + holes), indices + 4 * (blocks + first), filled - first - holes)
        blocks += filled - holes


class MainMemoryCopies(Protocol):
    """Copies in main memory: what ``run`` of fragments and of token moves needs."""

    def copy_fragments(self, rows: Int64s) -> None: ...
    def move_tokens(self, work: TokenMoves) -> None: ...


class Fragments(NamedTuple):
    """Contiguous bytes to copy: ``rows`` int64[n, 3] of (source address, target address, bytes).

    None writes what another one reads or writes, so the device may make them in any order and at the same time. Each
    lies in memory that the device can reach: memory that ``bind`` got, memory of its GPU, pinned memory, or, on a
    device without a GPU, any main memory. The caller keeps that memory alive as long as the device is bound. The array
    may be changed when ``enqueue`` returns.
    """

    rows: Int64s

    def run(self, pool: MainMemoryCopies) -> None:
        pool.copy_fragments(self.rows)


class TokenMoves(NamedTuple):
    """Tokens that move to other slots of device blocks, in all parts, layers, planes and heads.

    ``moves`` is int64[n, 2] with rows (source, target) inside one region. A slot is block id * width + token, where
    width is the most tokens that a block of any region has. Tokens of regions whose blocks have fewer tokens than that
    do not move.

    Group g of the rows is [starts[g], starts[g + 1]); ``starts`` is int64[groups + 1], from 0 to n. The rows of a group
    are made in order. Inside a group, a row may write what an earlier row reads, but may not read what an earlier row
    writes. No group writes what another group reads or writes.
    """

    moves: Int64s
    starts: Int64s

    def run(self, pool: MainMemoryCopies) -> None:
        pool.move_tokens(self)

    def by_region(self, regions: Regions) -> Iterator[tuple[int, TokenMoves]]:
        """The moves of each region that has any, in their groups, with the slots of the region."""
        if len(regions.all) == 1:
            yield 0, self
            return
        region, _ = regions.pool_ids.place(self.moves[:, 0] // regions.width)
        for number in np.unique(region).tolist():
            mine = region == number
            before = np.concatenate([[0], np.cumsum(mine)])
            first = regions.pool_ids.first(number)[0] * regions.width
            yield number, TokenMoves(self.moves[mine] - first, before[self.starts])

    def reads_and_writes(self, width: int) -> tuple[Int64s, Int64s]:
        """What the moves read and write: rows (block id, first token, end of tokens), for devices that look for
        races."""
        blocks, tokens = np.divmod(self.moves.T, width)
        reads, writes = np.stack([blocks, tokens, tokens + 1], axis=2)
        return reads, writes


Work: TypeAlias = Fragments | TokenMoves | StagedRows | StagedVectors | StagedStep
"""Each has ``run(pool)``, which does it at once in main memory. ``pool`` is what a device is bound to."""
