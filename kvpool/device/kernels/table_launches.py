"""The launches of the kernel that writes staged block ids into tables."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvpool.device.kernels.launch import THREADS, Grid, Launch
from kvpool.device.tables import OFFSET, SCALE, START, StagedRows, staged_arrays

PLANES, ROWS = 120, 512
"""The most planes and rows of one launch. They travel in its argument, which may have 4,096 bytes."""
# The structs of cuda/stage_rows.cu, field by field.
_PLANE = np.dtype([("start", np.int64), ("scale", np.uint32), ("offset", np.uint32)])
_NUMBERS = "ids", "table", "row_stride", "planes", "rows", "width", "columns"
STAGE_ROWS = np.dtype([*((name, np.int64) for name in _NUMBERS), ("plane", _PLANE, PLANES), ("row", np.uint32, ROWS)])
_WARP = 32


def stage_rows(staged: StagedRows, address: int, table: int, row_stride: int, grid: Grid) -> Iterator[Launch]:
    """The launches that do what ``device.tables.write_rows`` does. Each writes up to ``ROWS`` rows of up to ``PLANES``
    planes.

    ``address`` is that of the buffer, for kernels. ``table`` and ``row_stride`` are as in a Table, in bytes.
    """
    _, rows, planes = staged_arrays(staged)
    threads = min(THREADS, -(-staged.columns // _WARP) * _WARP)
    for r in range(0, staged.rows, ROWS):
        for p in range(0, staged.planes, PLANES):
            some, those = rows[r : r + ROWS], planes[p : p + PLANES]
            record = np.zeros(1, STAGE_ROWS)
            numbers = (
                address + 4 * r * staged.width,
                table,
                row_stride,
                len(those),
                len(some),
                staged.width,
                staged.columns,
            )
            record[list(_NUMBERS)] = numbers
            plane = record["plane"][0, : len(those)]
            plane["start"], plane["scale"], plane["offset"] = those[:, START], those[:, SCALE], those[:, OFFSET]
            record["row"][0, : len(some)] = some
            yield Launch("stage_rows.cu", "stage_rows", grid.thread_blocks(len(some)), threads, record)
