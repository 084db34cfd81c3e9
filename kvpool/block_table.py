"""Block tables: the persistent host table that CPU readers use in place."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class BlockTable(NamedTuple):
    """Block ids of some sequences, at this moment.

    ``table`` int32[max_sequences, max_blocks] is the persistent table of the whole pool, read-only, -1 where there is no block; it
    keeps its address and layout while the pool lives, and changes with every call that changes these sequences. ``rows`` int64[n] are
    the rows of the sequences asked for, ``lengths`` int64[n] their tokens.
    """

    table: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    def dense(self, width: int | None = None) -> npt.NDArray[np.int32]:
        """A private copy int32[n, width] of the rows; by default as wide as the columns in use."""
        found = self.table[self.rows]
        if width is None:
            used = found != -1
            width = int(used.any(axis=0).sum()) if used.size else 0
        return np.ascontiguousarray(found[:, :width])
