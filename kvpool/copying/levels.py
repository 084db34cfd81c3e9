"""Cutting a batch of moves, sequential in meaning, into levels of moves that do not depend on each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.device.base import SOURCE, TARGET, TOKENS
from kvpool.jit import jit

DROPPED = -1
NO_RANGES: npt.NDArray[np.int64] = np.zeros((0, 2), np.int64)
_LIVE, _DEAD = 1, 2


@jit
def _is_whole(move: Any, width: int, states: Any) -> bool:
    """Whether a move writes all of its target."""
    whole = move[TOKENS] == width
    for i in range(states.shape[0]):
        whole |= states[i, 0] <= move[TARGET] < states[i, 1]
    return whole


@jit
def _drop_overwritten(moves: Any, width: int, states: Any, scratch: Any, level: Any) -> int:
    """Mark moves whose whole target is overwritten before anything reads it. ``scratch`` int32[blocks, 2] is zero at
    the start and at the end."""
    dropped = 0
    for i in range(moves.shape[0] - 1, -1, -1):
        source, target = moves[i, SOURCE], moves[i, TARGET]
        if scratch[target, 0] == _DEAD:
            level[i] = DROPPED
            dropped += 1
            continue
        if _is_whole(moves[i], width, states):
            scratch[target, 0] = _DEAD
        scratch[source, 0] = _LIVE
    for i in range(moves.shape[0]):
        scratch[moves[i, SOURCE], 0] = scratch[moves[i, TARGET], 0] = 0
    return dropped


@jit
def _assign(moves: Any, scratch: Any, level: Any) -> int:
    """Set the level of each move that is not dropped. It is higher than the levels of earlier moves that write its
    source, and of earlier moves that read or write its target."""
    last = 0
    for i in range(moves.shape[0]):
        if level[i] == DROPPED:
            continue
        source, target = moves[i, SOURCE], moves[i, TARGET]
        # Levels count from 1 here: 0 in the scratch is "not in this batch". Columns: last write, last read.
        own = max(scratch[source, 0], scratch[target, 0], scratch[target, 1]) + 1
        scratch[target, 0] = own
        scratch[source, 1] = max(scratch[source, 1], own)
        level[i] = own - 1
        last = max(last, own)
    for i in range(moves.shape[0]):
        for block in (moves[i, SOURCE], moves[i, TARGET]):
            scratch[block, 0] = scratch[block, 1] = 0
    return last


class Levels:
    """Cuts batches for one pool of ``blocks`` blocks of ``width`` tokens. Blocks in the ranges ``states`` int64[n, 2]
    are always copied whole. Not thread-safe: the transfer lock guards it."""

    def __init__(self, blocks: int, width: int, states: npt.NDArray[np.int64] = NO_RANGES) -> None:
        self._scratch = np.zeros((blocks, 2), np.int32)
        self._width, self._states = width, states

    def cut(self, moves: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
        """The levels of a batch int64[n, 5], first to last. A move whose target is overwritten before it is read is in
        none."""
        level = np.zeros(len(moves), np.int32)
        dropped = _drop_overwritten(moves, self._width, self._states, self._scratch, level)
        count = _assign(moves, self._scratch, level)
        if count == 1 and not dropped:
            yield moves
            return
        order = np.argsort(level, kind="stable")
        ends = np.searchsorted(level[order], np.arange(count + 1))
        for i in range(count):
            yield moves[order[ends[i] : ends[i + 1]]]
