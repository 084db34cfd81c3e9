"""Tables of a step: where they lie, what is staged for them, and how the staged numbers become tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.device.tables import Table
from kvpool.jit import jit
from kvpool.jit.intrinsics import array_at

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
    """Memory that a device can write for the tables of a step. See ``tables.steps.StepTables``."""

    tables: dict[str, Table]
    """The wanted tables by name."""
    places: NDArray[np.int64]
    """Where they lie, for ``write_step``: int64[9]."""
    limits: NDArray[np.int64]
    """The most tokens, columns and blocks that fit: int64[3]."""
    rows: int
    """The most sequences that fit."""

    @classmethod
    def of(cls, arrays: Any, as_table: AsTable) -> StepTargets:
        """The targets that a public call names: attributes of ``arrays``, each of which may be None.

        ``as_table``: ``host_table``, or the device's own function of that kind. Raises TypeError or ValueError, which
        name the array, for an array that cannot be written in this way, and for arrays that share memory.
        """
        given = {name: getattr(arrays, name) for name in NAMES}
        tables = {
            name: as_table(array, name, name != "table", _itemsize(name))
            for name, array in given.items()
            if array is not None
        }
        table = tables.get("table")
        if table is not None and len(table.shape) != 2:
            raise ValueError(f"table has shape {list(table.shape)}: accepted is [rows, columns]")
        _check_apart(tables)
        row = (0, 0) if table is None else (table.strides[0], table.shape[1])
        addresses = (tables[name].address if name in tables else 0 for name in NAMES)
        most = ("slot_mapping", -1), ("table", 1), ("indices", -1)
        limits = [min(tables[name].shape[axis], _INT32_MAX) if name in tables else _INT32_MAX for name, axis in most]
        rows = min((tables[name].shape[0] - more for name, more in _MORE.items() if name in tables), default=_INT32_MAX)
        return cls(tables, np.array([*addresses, *row], np.int64), np.array(limits, np.int64), rows)

    def check_rows(self, count: int) -> None:
        """Raise ValueError if ``count`` sequences do not fit."""
        if count <= self.rows:
            return
        for name, more in _MORE.items():
            if name in self.tables and self.tables[name].shape[0] < count + more:
                what = "rows" if name == "table" else "entries"
                raise ValueError(f"{name} has {self.tables[name].shape[0]} {what}: accepted are {count + more} or more")


def _itemsize(name: str) -> int:
    return 8 if name == "slot_mapping" else 4


def _check_apart(tables: dict[str, Table]) -> None:
    ranges = []
    for name, table in tables.items():
        if 0 not in table.shape:
            last = sum((count - 1) * step for count, step in zip(table.shape, table.strides, strict=True))
            ranges.append((table.address, table.address + last + _itemsize(name), name))
    ranges.sort()
    for (_, end, name), (begin, _, other) in zip(ranges, ranges[1:], strict=False):
        if begin < end:
            raise ValueError(f"{name} and {other} share memory: accepted are arrays that lie apart")


class StagedStep(NamedTuple):
    """A step on its way into ``targets``, in one buffer of the host tier that belongs to this hand-over alone.

    ``buffer`` and ``address`` are as in ``StagedRows``. From the address on, the buffer holds:

    - int64[sequences + 1, 4], the numbers of each sequence: the index of its first block id among the staged ones; how
      many of its columns, from ``sinks`` on, have no block and are left out; its tokens; the index of its first slot.
      The last row has the ends.
    - int32: the block ids, sequence after sequence.

    The tokens that get slots are the last ones of a sequence. None of them is in a column without a block. ``columns``
    is the largest number of columns of a sequence.
    """

    targets: StepTargets
    buffer: NDArray[np.uint8]
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
        used, gone = -(-length[:-1] // width), holes[:-1]
        counts, blocks = np.diff(query), np.diff(stored)
        fits = (counts >= 0) & (counts <= length[:-1]) & (gone >= 0) & (gone <= np.maximum(used - self.sinks, 0))
        fits &= (blocks == used - gone) & ((gone == 0) | (length[:-1] - counts >= (self.sinks + gone) * width))
        ends, room = (query[-1], used.max(initial=0), stored[-1]), (len(self.buffer) - begin) // 4
        if query[0] or stored[0] or not fits.all() or stored[-1] > room or (np.array(ends) > limits).any():
            raise ValueError(f"staged: a step of {ends} tokens, columns and blocks is none for {limits}")


@jit(forceinline=True)
def numbers_bytes(sequences: int) -> int:
    """Bytes of the numbers in the buffer. The block ids follow them."""
    return 32 * (sequences + 1)


@jit(forceinline=True)
def _run(source: int, target: int, count: int) -> None:
    """Copy int32."""
    given, wanted = array_at(source, (count,), np.int32), array_at(target, (count,), np.int32)
    for i in range(count):
        wanted[i] = given[i]


@jit(forceinline=True)
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


@jit(forceinline=True)
def _write_row(at: int, columns: int, begin: int, row: int, used: int, sinks: int, holes: int) -> None:
    """Write a row of the dense table: ``used`` columns, then -1. After the ``sinks``, ``holes`` columns have no block.

    The entries of the sinks are at ``begin``. The entry of a later column c is at ``row + 4 * c``.
    """
    if holes:
        wanted = array_at(at, (columns,), np.int32)
        _run(begin, at, sinks)
        for c in range(sinks, sinks + holes):
            wanted[c] = -1
        _run(row + 4 * (sinks + holes), at + 4 * (sinks + holes), used - sinks - holes)
    else:
        _run(begin, at, used)
    rest = array_at(at + 4 * used, (columns - used,), np.int32)
    for c in range(columns - used):
        rest[c] = -1


@jit
def write_step(
    numbers_at: int, count: int, ids_at: int, packed: bool, width: int, sinks: int, places: NDArray[np.int64]
) -> None:
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
        stored, holes, length, query = numbers[i, STORED], numbers[i, HOLES], numbers[i, LENGTH], numbers[i, QUERY]
        if places[QUERY_START_LOC]:
            starts[i] = query
        if places[INDPTR]:
            indptr[i] = blocks
        if i == count:
            break
        used, begin = (length + width - 1) // width, ids_at + 4 * stored
        row = begin - (4 * holes if packed else 0)
        if places[SEQ_LENS]:
            seq_lens[i] = length
        if places[LAST_PAGE_LEN]:
            last[i] = length - (used - 1) * width if length else 0
        if slots:
            _write_slots(slots + 8 * query, row, length - (numbers[i + 1, QUERY] - query), length, width)
        if table:
            _write_row(table + i * places[ROW_STRIDE], places[COLUMNS], begin, row, used, sinks, holes)
        if indices and holes:
            _run(begin, indices + 4 * blocks, sinks)
            _run(row + 4 * (sinks + holes), indices + 4 * (blocks + sinks), used - sinks - holes)
        elif indices:
            _run(begin, indices + 4 * blocks, used)
        blocks += used - holes
