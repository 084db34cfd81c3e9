"""Dependency levels: batches of copy ops, cut into parts within which the copy ops can run in any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvpool.common.arrays import Int64s
from kvpool.common.jit import jit
from kvpool.device.regions import SOURCE, TARGET, TOKENS

DROPPED = -1
_LIVE, _DEAD = 1, 2


@jit(nogil=False)
def _drop_overwritten(copy_ops: Any, whole: Any, scratch: Any, level: Any) -> int:
    """Mark copy ops whose whole target is overwritten before anything reads it. ``scratch`` int32[blocks, 2] is zero at
    the start and at the end."""
    dropped = 0
    for i in range(len(copy_ops) - 1, -1, -1):
        source, target = copy_ops[i, SOURCE], copy_ops[i, TARGET]
        if scratch[target, 0] == _DEAD:
            level[i] = DROPPED
            dropped += 1
            continue
        if copy_ops[i, TOKENS] >= whole[target]:
            scratch[target, 0] = _DEAD
        scratch[source, 0] = _LIVE
    for i in range(len(copy_ops)):
        scratch[copy_ops[i, SOURCE], 0] = scratch[copy_ops[i, TARGET], 0] = 0
    return dropped


@jit(nogil=False)
def _assign(copy_ops: Any, scratch: Any, level: Any) -> int:
    """Set the level of each copy op that is not dropped. It is higher than the levels of earlier copy ops that write
    its source, and of earlier copy ops that read or write its target."""
    last = 0
    for i in range(len(copy_ops)):
        if level[i] == DROPPED:
            continue
        source, target = copy_ops[i, SOURCE], copy_ops[i, TARGET]
        # Levels count from 1 here: 0 in the scratch is "not in this batch". Columns: last write, last read.
        op_level = max(scratch[source, 0], scratch[target, 0], scratch[target, 1]) + 1
        scratch[target, 0] = op_level
        scratch[source, 1] = max(scratch[source, 1], op_level)
        level[i] = op_level - 1
        last = max(last, op_level)
    for i in range(len(copy_ops)):
        for block in (copy_ops[i, SOURCE], copy_ops[i, TARGET]):
            scratch[block, 0] = scratch[block, 1] = 0
    return last


class Levels:
    """Cuts batches for one pool. ``whole`` int64[blocks] says how many tokens are all of a block: 0 for blocks that are
    always copied whole. Thread-safe: threads that cut at a time have scratches of their own."""

    def __init__(self, whole: Int64s) -> None:
        self._free, self._whole = deque([np.zeros((len(whole), 2), np.int32)]), whole

    def cut(self, copy_ops: Int64s) -> Iterator[Int64s]:
        """The levels of a batch int64[n, 5], first to last. A copy op whose target is overwritten before it is read is
        in none."""
        level = np.zeros(len(copy_ops), np.int32)
        try:
            scratch = self._free.pop()
        except IndexError:
            scratch = np.zeros((len(self._whole), 2), np.int32)
        dropped = _drop_overwritten(copy_ops, self._whole, scratch, level)
        count = _assign(copy_ops, scratch, level)
        self._free.append(scratch)
        if count == 1 and not dropped:
            yield copy_ops
            return
        order = np.argsort(level, kind="stable")
        ends = np.searchsorted(level[order], np.arange(count + 1))
        for i in range(count):
            yield copy_ops[order[ends[i] : ends[i + 1]]]
