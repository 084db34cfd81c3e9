"""Tables of fragments as kernels read them, and their launches, made step by step: what ``native`` makes at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvpool.common.arrays import Int64s
from kvpool.device import launches
from kvpool.device.fragments import UNIT, Cutter, table_size, tabulate_blocks, tabulate_fragments
from kvpool.device.launches import (
    BULK_FRAGMENTS,
    COPY_FRAGMENTS,
    FEW_ROWS,
    ROW_BYTES,
    SIZES,
    SOME_ROWS,
    THREADS,
    WARP,
    Grid,
    Launch,
)


class Table(NamedTuple):
    """Rows int64[n, 4] as in ``copy.cuh``, and the words of the longest. ``in_words``: whether all addresses and
    lengths are whole words of 16 bytes."""

    rows: Int64s
    words: int
    in_words: bool


def tabulate(fragments: Int64s) -> Table:
    """The rows of fragments that do not depend on each other."""
    words_max, room = table_size(fragments)
    rows = np.empty((room, 4), np.int64)
    count, most, bits = tabulate_fragments(fragments, words_max, rows)
    return Table(rows[:count], int(most), not bits % UNIT)


def table_of(cutter: Cutter, copy_ops: Int64s) -> Table:
    """The rows of copy ops."""
    if not cutter.in_words:
        return tabulate(cutter.cut(copy_ops))
    rows = np.empty((cutter.room(len(copy_ops)), 4), np.int64)
    count, most = tabulate_blocks(copy_ops, cutter.vector, rows)
    return Table(rows[:count], int(most), True)


def launched(
    table: Table, address: int, grid: Grid, chosen: int | None = None, bulk: bool = False, size: int = 0
) -> Iterator[Launch]:
    """The launches, one unless there are very many, that copy the rows of a table, which lie at ``address``; for a
    ``size`` of 1 or 2 in the argument, as far as they fit there."""
    (source, kernel), threads = (BULK_FRAGMENTS, WARP) if bulk else (COPY_FRAGMENTS, THREADS)
    pieces = -(-table.words // launches.PIECE_WORDS)
    most = max(1, launches.COUNT_MAX // max(1, pieces))
    for first in range(0, len(table.rows), most):
        some = min(most, len(table.rows) - first)
        record = np.array([some, pieces, address + first * ROW_BYTES], np.int64)
        if size:
            record = np.full(2 + 4 * (FEW_ROWS, SOME_ROWS)[size - 1], -1, np.int64)
            record[: 2 + 4 * some] = some, pieces, *table.rows.ravel()
        blocks = grid.thread_blocks(-(-some * pieces * WARP // threads), True, chosen)
        yield Launch(source, kernel + SIZES[size], blocks, threads, record)
