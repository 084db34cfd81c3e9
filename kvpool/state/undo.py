"""Undo: a copy of the state, from which it is restored to the byte.

It copies all blocks, lists and keys of a pool, at the speed of memory, and the named rows of the table. So it is only
for calls that may be refused after they have changed something.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.state.arrays import State, States

Rows = npt.NDArray[np.int64]


class Undo:
    """The arrays of a pool's states as they were. The memory is kept for the next ``take``. The state lock guards
    it."""

    def __init__(self, states: States) -> None:
        self._states = states
        self._copies: list[npt.NDArray[Any]] = []
        self._rows: list[tuple[npt.NDArray[Any], Rows, npt.NDArray[Any]]] = []

    def take(self, rows: Rows, columns: int) -> None:
        """Copy everything except the table, and of the table the first ``columns`` of these rows. Nothing else of it
        may change."""
        arrays = list(self._arrays())
        if [len(one) for one in self._copies] != [len(one) for one in arrays]:
            self._copies = [np.empty_like(one) for one in arrays]
        for copy, array in zip(self._copies, arrays, strict=True):
            np.copyto(copy, array)
        views = [view for state in self._states for view in _of_rows(state, columns)]
        self._rows = [(view, rows, view[rows]) for view in views]

    def restore(self) -> None:
        """Restore everything as it was at the last ``take``."""
        for copy, array in zip(self._copies, self._arrays(), strict=True):
            np.copyto(array, copy)
        for view, rows, kept in self._rows:
            view[rows] = kept

    def _arrays(self) -> Iterator[npt.NDArray[np.uint8]]:
        """The arrays as bytes: NumPy copies records field by field."""
        ring = self._states.ring
        found: list[npt.NDArray[Any]] = [self._states.heads, ring.numbers, ring.events, ring.tokens, ring.extra]
        for state in self._states:
            found += [state.blocks, state.tokens, state.extra, state.lists, state.index, state.children, state.heap]
            found += [state.sequences, state.rows, state.counters, state.histograms]
            found += [] if state.book is None else state.book.arrays
        return (one.reshape(-1).view(np.uint8) for one in found)


def _of_rows(state: State, columns: int) -> Iterator[npt.NDArray[Any]]:
    yield from (state.table[:, :columns], state.swapped[:, :columns])
    for noted in (state.row_tokens, state.row_extra):
        if noted.shape[1] > 1:
            yield noted[:, : columns * state.tokens.shape[1]]
