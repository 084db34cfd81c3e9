"""Traffic: the bytes that a pool has copied, and the time of the copies, by group of layers and direction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpool.common.arrays import Int64s
from kvpool.common.jit import jit
from kvpool.device.regions import TARGET, TOKENS
from kvpool.state.records import DIRECTION, DIRECTIONS, place_of


@jit(nogil=False)
def _count(copy_ops: Int64s, groups: Int64s, token_bytes: Int64s, nanoseconds: int, totals: Int64s) -> None:
    """Add the bytes of copy ops, and their shares of the time, to ``totals`` int64[3, groups, DIRECTIONS]. Its last
    part is scratch."""
    moved, total = totals[2], 0
    moved[:] = 0
    for i in range(len(copy_ops)):
        # No block is copied from one group to another.
        g = place_of(groups, copy_ops[i, TARGET])[0] if len(groups) > 1 else 0
        nbytes = copy_ops[i, TOKENS] * token_bytes[g]
        moved[g, copy_ops[i, DIRECTION]] += nbytes
        total += nbytes
    for g in range(len(groups)):
        for direction in range(DIRECTIONS):
            totals[0, g, direction] += moved[g, direction]
            totals[1, g, direction] += np.int64(moved[g, direction] * (nanoseconds / max(total, 1)))


class Traffic:
    """Totals of one pool, by group and direction. One thread at a time adds; any thread may read.

    ``groups`` are the headers of the state, of which only constant fields are read. ``token_bytes`` are the bytes of a
    token in each group.
    """

    def __init__(self, groups: Int64s, token_bytes: Sequence[int]) -> None:
        self._groups, self._token_bytes = groups, np.array(token_bytes, np.int64)
        self._totals: Int64s = np.zeros((3, len(groups), DIRECTIONS), np.int64)

    def add(self, copy_ops: Int64s, nanoseconds: int) -> None:
        """Count copy ops int64[n, 5] that were made, or enqueued, together. The time is divided among groups and
        directions in proportion to their bytes."""
        _count(copy_ops, self._groups, self._token_bytes, nanoseconds, self._totals)

    @property
    def nbytes(self) -> list[list[int]]:
        """Bytes by [group][direction]."""
        return self._totals[0].tolist()

    @property
    def nanoseconds(self) -> list[list[int]]:
        """Nanoseconds by [group][direction]."""
        return self._totals[1].tolist()
