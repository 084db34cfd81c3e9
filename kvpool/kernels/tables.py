"""The launch of the kernel that writes staged block ids into tables."""

from __future__ import annotations

import numpy as np

from kvpool.device.tables import StagedRows
from kvpool.kernels.launch import BLOCKS_PER_MULTIPROCESSOR, THREADS, Launch

# The struct of cuda/stage_rows.cu, field by field.
STAGE_ROWS = np.dtype([(name, np.int64) for name in ("staged", "table", "row_stride", "planes", "rows", "width", "columns")])
_WARP = 32


def stage_rows(staged: StagedRows, address: int, table: int, row_stride: int, multiprocessors: int) -> Launch:
    """The launch that does what ``device.tables.write_rows`` does.

    ``address`` is that of what is staged, for kernels; ``table`` and ``row_stride`` are as in a Table, in bytes.
    """
    record = np.zeros(1, STAGE_ROWS)
    record[0] = (address, table, row_stride, staged.planes, staged.rows, staged.width, staged.columns)
    threads = min(THREADS, -(-staged.columns // _WARP) * _WARP)
    return Launch("stage_rows.cu", "stage_rows", min(staged.rows, BLOCKS_PER_MULTIPROCESSOR * multiprocessors), threads, record)
