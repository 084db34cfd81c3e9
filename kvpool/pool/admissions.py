"""Admissions: what a prompt would reuse and need, sequences for a batch of prompts, and which prompts a pool can never
admit, however long they wait."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.arrays.layout import integer_argument
from kvpool.device.base import NULL_STREAM, Stream
from kvpool.entry.arguments import (
    address,
    bool_argument,
    count_array,
    encoder_argument,
    id_array,
    is_integer,
    list_argument,
    priority_argument,
    retention_rows,
    ttl_argument,
)  # fmt: skip
from kvpool.entry.interrupt import DeferSignals, Door
from kvpool.pool.config import Group
from kvpool.pool.core import Core, refusal
from kvpool.pool.keys import Admission, BlockKeys, Plan, request_of, requests_of
from kvpool.pool.prompts import Prompts
from kvpool.state import admission_plan, admit, kinds, lookup, records, verbs

Rows = npt.NDArray[np.int64]


class Arrivals(NamedTuple):
    """The prompts of an admission, and what is asked for them. All of it was checked."""

    keys: list[BlockKeys]
    rows: Rows
    """The requests, int64[n, REQUEST], as jitted code sees them."""
    ranges: list[Rows | None]
    """The memory of the retention that the rows point to."""
    some: bool
    """Whether a part of them may be admitted."""


class Admissions:
    """Admission and its questions, for the schedulers of one pool. Thread-safe."""

    def __init__(self, core: Core, prompts: Prompts) -> None:
        self._core, self._prompts = core, prompts
        self._width, self._columns = core.config.tokens_per_block, core.config.columns
        # A shorter request fits into every group, whatever is cached, if nothing else lives.
        cross = [group.device_blocks for group in core.config.groups if group.kind == "cross"]
        others = [group.device_blocks for group in core.config.groups if group.kind != "cross"]
        self._always, self._encoder_always = (
            self._width * min(self._columns, *each) for each in (others, cross or [self._columns])
        )

    def match(self, keys: BlockKeys) -> Rows:
        """What a prompt would reuse now, int64[groups + 1, 6], as ``state.lookup.match`` returns it. The last row is
        for all groups."""
        return self._match(request_of(keys))[0]

    def _match(self, request: Rows) -> tuple[Rows, npt.NDArray[np.int32]]:
        """The same, and the blocks of each group, int32[groups, n]."""
        heads, full = self._core.states.heads, int(request[0, records.R.length]) // self._width
        out, ids = np.empty((len(heads) + 1, 6), np.int64), np.empty((len(heads), full), np.int32)
        with self._core.lock:
            self._core.check_open()
            lookup.match(heads, request, ids, out)
        return out, ids

    def needed(self, prompt: Any, new_tokens: Any, group: Any, encoder_tokens: Any) -> int:
        """The free device blocks of a group that a prompt and ``new_tokens`` more tokens take."""
        keys, config, which = self._prompts.of(prompt), self._core.config, self._core.config.group(group)
        more = integer_argument("new_tokens", new_tokens, 0, (1 << 31) - 1)
        crosses = config.groups[which].kind == "cross"
        tokens = len(keys) + more
        if crosses or encoder_tokens is not None:
            tokens = int(encoder_argument("encoder_tokens", encoder_tokens, 1, crosses)[0])
        columns, found = -(-tokens // self._width), self.match(keys)[which]
        if config.groups[which].kind == "recurrent":
            columns = found[3] + kinds.fresh_of(self._core.states.heads, which, request_of(keys), found[3], columns)
        return int(columns - found[4])

    def growth(self, sequences: Any, new_tokens: Any, group: Any) -> int:
        """The free device blocks of a group that live sequences take to grow by ``new_tokens``."""
        core, which, ids = self._core, self._core.config.group(group), id_array("sequences", sequences)
        counts = count_array("new_tokens", np.full(len(ids), new_tokens) if is_integer(new_tokens) else new_tokens, ids)
        with core.lock:
            core.check_open()
            # A private array, since a signal handler may decide before it is read.
            needs = np.empty(len(core.states), np.int64)
            error = verbs.growth_needs(core.states.heads, ids, counts, needs)
            if error:
                raise refusal(core.states.heads, error, ids, core.tokens.sequences)
        return int(needs[which])

    # -- admission ----------------------------------------------------------------------------------

    def arrivals(
        self, prompts: Any, retention: Any, decode_priority: Any, decode_ttl_ms: Any, allow_partial: Any,
        encoder_tokens: Any,
    ) -> Arrivals:  # fmt: skip
        """The arguments of ``add_sequence_batch``, checked. Raises TypeError, ValueError."""
        some = bool_argument("allow_partial_batch", allow_partial)
        keys = self._prompts.all_of(list_argument("prompts", prompts))
        rows = self._rows(keys, encoder_tokens)
        rows[:, records.R.priority] = priority_argument("decode_priority", decode_priority)
        rows[:, records.R.ttl] = ttl_argument("decode_ttl_ms", decode_ttl_ms)
        given = [None] * len(keys) if retention is None else list_argument("retention", retention)
        ranges = [None if one is None else retention_rows(one) for one in given]
        if len(ranges) != len(keys):
            raise ValueError(
                f"retention has {len(ranges)} entries: accepted is one for each of the {len(keys)} prompts"
            )
        for i, own in enumerate(ranges):
            if own is not None:
                rows[i, records.R.ranges_at], rows[i, records.R.range_count] = address(own), len(own)
            if keys[i].has_extra:
                self._core.enable_extra()
        return Arrivals(keys, rows, ranges, some)

    def admit(
        self, door: Door, arrivals: Arrivals, stream: Stream | Any, now: int | None = None
    ) -> tuple[Rows, dict[int, str]]:
        """Admit a batch. Returns the outcome rows (see ``state.records``) of the first requests, with the groups
        joined, and which requests of the batch can never fit, and why: their rows have the id -1.

        ``now`` is the time, if the clock must not be read.
        """
        core, (keys, rows, _, some) = self._core, arrivals
        refused = self.refused(keys, rows)
        if refused and not some:
            first = next(iter(refused))
            raise ValueError(f"{'prompt' if len(keys) == 1 else f'prompts[{first}]'}: {refused[first]}")
        kept = [i for i in range(len(keys)) if i not in refused] if refused else None
        if kept is not None:
            rows, keys = rows[kept], [keys[i] for i in kept]
        out = np.full((len(core.states), len(keys), records.OUTCOME_COLUMNS), records.NONE, np.int64)
        door.undo = lambda: core.release_unseen(out[0, :, records.OUT.id])
        on = NULL_STREAM if stream is None else stream
        now = core.now() if now is None else now
        n = core.decide(on, self._admit_named, rows, out, now, some, keys)
        found = out[0, :n] if len(out) == 1 else self._joined(out[:, :n])
        return found if kept is None else _spread(found, kept, len(kept) + len(refused)), refused

    def plan(self, prompts: Any, encoder_tokens: Any) -> Plan:
        """What ``admit`` would do now."""
        core, keys = self._core, self._prompts.all_of(list_argument("prompts", prompts))
        rows = self._rows(keys, encoder_tokens)
        refused = self.refused(keys, rows)
        kept = [i for i in range(len(keys)) if i not in refused]
        rows, groups = rows[kept], len(core.states)
        out = np.full((groups, len(kept), records.OUTCOME_COLUMNS), records.NONE, np.int64)
        blocks, computing = np.empty(groups, np.int64), np.empty((len(kept), 2), np.int64)
        # The same call undoes its claims, so a handler that raises finds the call complete.
        with DeferSignals(), core.lock:
            core.check_open()
            n = admission_plan.plan(core.states.heads, rows, out, blocks, computing)
        found, ahead = self._joined(out[:, :n]), computing[:n]
        if refused:
            found, ahead = (_spread(each, kept, len(keys)) for each in (found, ahead))
        cached, device, host, part, missed = found[:, records.OUT.cached : records.OUT.missed + 1].T.astype(np.int32)
        taken = int(blocks[0]) if groups == 1 else blocks
        tokens = ahead[:, 1].astype(np.int32)
        return Plan(cached, device, host, part, missed, taken, ahead[:, 0].copy(), tokens, refused)

    def _rows(self, keys: list[BlockKeys], encoder_tokens: Any) -> Rows:
        """The prompts of a batch as jitted code sees them. Raises TypeError, ValueError."""
        rows, crosses = requests_of(keys), self._core.config.crosses
        if crosses or encoder_tokens is not None:
            rows[:, records.R.encoder] = encoder_argument("encoder_tokens", encoder_tokens, len(keys), crosses)
        return rows

    def _joined(self, out: Rows) -> Rows:
        """The outcomes of all groups as one, as ``Admission`` has them."""
        found = out[int(self._core.tokens.group)].copy()
        full, host = (
            found[:, records.OUT.cached] - found[:, records.OUT.partial],
            out[:, :, records.OUT.host_tokens].max(axis=0),
        )
        found[:, records.OUT.device_tokens], found[:, records.OUT.host_tokens] = full - host, host
        return found

    def _admit_named(
        self, heads: Rows, rows: Rows, out: Rows, now: int, allow_partial: bool, keys: list[BlockKeys]
    ) -> int:
        """Note the namespaces that events will name, then call the verb. The caller holds the state lock."""
        self._core.names.learn(keys)
        return int(admit.admit(heads, rows, out, now, allow_partial))

    # -- what a pool has room for if nothing else lives in it ---------------------------------------

    def refused(self, keys: list[BlockKeys], rows: Rows) -> dict[int, str]:
        """Which of the requests int64[n, REQUEST] of these prompts can never be admitted, and why.

        With a sliding window, only a part of a cached prefix is needed. So a request may fit because of what is cached
        now. Raises PoolClosed.
        """
        if max(map(len, keys), default=0) <= self._always and not self._core.config.crosses:
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
        out, ids = self._match(row)
        counts = [int(one[3]) for one in out[:-1]]
        return [
            (count, int(np.count_nonzero(own[:count] != records.NONE))) for count, own in zip(counts, ids, strict=True)
        ]


def _spread(found: Rows, kept: list[int], count: int) -> Rows:
    """Spread the outcomes of the ``kept`` requests over the rows of a batch of ``count``, up to the first request that
    waits."""
    end = kept[len(found)] if len(found) < len(kept) else count
    rows = np.zeros((end, found.shape[1]), np.int64)
    rows[:, records.OUT.id] = records.NONE
    rows[kept[: len(found)]] = found
    return rows


def as_admission(out: npt.NDArray[np.int64], refused: dict[int, str]) -> Admission:
    cached, device, host, part, missed = out[:, records.OUT.cached : records.OUT.missed + 1].T.astype(np.int32)
    return Admission(out[:, records.OUT.id].copy(), cached, device, host, part, missed, refused)
