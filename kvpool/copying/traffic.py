"""Moved: the bytes that a device was told to copy, by group of layers and direction, and the time that it took if the
device can tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.device.base import TARGET, TOKENS
from kvpool.jit import jit
from kvpool.state.records import DIRECTION, DIRECTIONS, place_of


@jit
def _add(moves: Any, heads: Any, token_bytes: Any, nanoseconds: int, totals: Any) -> None:
    """Add the bytes of moves, and their shares of the time, to ``totals`` int64[3, groups, DIRECTIONS]. Its last part
    is scratch."""
    moved, total = totals[2], 0
    moved[:] = 0
    for i in range(moves.shape[0]):
        # No block is copied from one group to another.
        g = place_of(heads, moves[i, TARGET])[0] if heads.shape[0] > 1 else 0
        nbytes = moves[i, TOKENS] * token_bytes[g]
        moved[g, moves[i, DIRECTION]] += nbytes
        total += nbytes
    for g in range(heads.shape[0]):
        for direction in range(DIRECTIONS):
            totals[0, g, direction] += moved[g, direction]
            totals[1, g, direction] += np.int64(moved[g, direction] * (nanoseconds / max(total, 1)))


class Moved:
    """Totals of one pool, by group and direction. One thread at a time adds; any thread may read.

    ``heads`` are the headers of the state. Only fields that never change are read. ``token_bytes`` are the bytes of a
    token in each group.
    """

    def __init__(self, heads: npt.NDArray[np.int64], token_bytes: Sequence[int]) -> None:
        self._heads, self._token_bytes = heads, np.array(token_bytes, np.int64)
        self._totals: npt.NDArray[np.int64] = np.zeros((3, len(heads), DIRECTIONS), np.int64)

    def add(self, moves: npt.NDArray[np.int64], nanoseconds: int) -> None:
        """Count moves int64[n, 5] that were made, or enqueued, together. Groups and directions share the time by their
        bytes."""
        _add(moves, self._heads, self._token_bytes, nanoseconds, self._totals)

    @property
    def nbytes(self) -> list[list[int]]:
        """Bytes by [group][direction]."""
        return self._totals[0].tolist()

    @property
    def nanoseconds(self) -> list[list[int]]:
        """Nanoseconds by [group][direction]."""
        return self._totals[1].tolist()
