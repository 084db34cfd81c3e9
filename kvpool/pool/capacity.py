"""Capacity: which prompts a pool can never admit, however long they wait, and why."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpool.pool.config import Group
from kvpool.pool.core import Core
from kvpool.state import kinds, lookup, records

Rows = npt.NDArray[np.int64]


def match(core: Core, request: Rows) -> tuple[Rows, npt.NDArray[np.int32]]:
    """What a request would reuse now, int64[groups + 1, 6], as ``state.lookup.match`` returns it, and the blocks of
    each group, int32[groups, n].

    The last row is for all groups. Does not change the pool. Raises PoolClosed.
    """
    heads, full = core.states.heads, int(request[0, records.R.length]) // core.config.tokens_per_block
    out, ids = np.empty((len(heads) + 1, 6), np.int64), np.empty((len(heads), full), np.int32)
    with core.lock:
        core.check_open()
        lookup.match(heads, request, ids, out)
    return out, ids


class Capacity:
    """What one pool has room for if nothing else lives in it. Thread-safe."""

    def __init__(self, core: Core) -> None:
        self._core, self._width, self._columns = core, core.config.tokens_per_block, core.config.columns
        # A shorter request fits into every group, whatever is cached.
        cross = [group.device_blocks for group in core.config.groups if group.kind == "cross"]
        others = [group.device_blocks for group in core.config.groups if group.kind != "cross"]
        self._always, self._encoder_always = (
            self._width * min(self._columns, *each) for each in (others, cross or [self._columns])
        )

    def refused(self, lengths: Sequence[int], rows: Rows) -> dict[int, str]:
        """Which of the requests int64[n, REQUEST] can never be admitted, and why. Does not change the pool.

        With a sliding window, only a part of a cached prefix is needed. So a request may fit because of what is cached
        now. Raises PoolClosed.
        """
        if max(lengths, default=0) <= self._always and not self._core.config.crosses:
            return {}
        large = (rows[:, records.R.length] > self._always) | (rows[:, records.R.encoder] > self._encoder_always)
        found = ((i, self._why_never(rows[i : i + 1])) for i in np.flatnonzero(large).tolist())
        return {i: why for i, why in found if why is not None}

    def _why_never(self, row: Rows) -> str | None:
        columns, encoder = (-(-int(row[0, i]) // self._width) for i in (records.R.length, records.R.encoder))
        groups, heads = self._core.config.groups, self._core.states.heads
        needs = [encoder if g.kind == "cross" else int(kinds.fresh_of(heads, g.index, row, 0, columns)) for g in groups]
        short = [g for g in groups if needs[g.index] > g.device_blocks]
        # Groups for cross attention or full attention need all of their blocks at once. The others need what the next
        # token sees.
        for group in short:
            if group.kind == "cross" or (group.kind == "attention" and group.window is None):
                return f"{self._lack(group, needs[group.index])}: it can never fit"
        if columns > self._columns or encoder > self._columns:
            what = (
                f"a prompt of {columns} blocks"
                if columns > self._columns
                else f"encoder_tokens={int(row[0, records.R.encoder])}"
            )
            return f"{what} passes max_sequence_tokens={self._columns * self._width}: it can never fit"
        cached = self._cached(row) if short else []
        for group in short:
            matched, held = cached[group.index]
            needed = min(needs[group.index], held + int(kinds.fresh_of(heads, group.index, row, matched, columns)))
            if needed > group.device_blocks:
                return (
                    f"{self._lack(group, needed)}: it can never fit as a whole; add its first tokens, commit them, "
                    "append the others"
                )
        return None

    def _lack(self, group: Group, needed: int) -> str:
        where = f" of group {group.index}" if len(self._core.config.groups) > 1 else ""
        return f"{needed} device blocks{where} are needed at once, of {group.device_blocks}"

    def _cached(self, row: Rows) -> list[tuple[int, int]]:
        """For each group: the longest prefix of a prompt, in blocks, that all groups can reuse now, and how many of
        these blocks the group would hold."""
        out, ids = match(self._core, row)
        counts = [int(one[3]) for one in out[:-1]]
        return [
            (count, int(np.count_nonzero(own[:count] != records.NONE))) for count, own in zip(counts, ids, strict=True)
        ]
