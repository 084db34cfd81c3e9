"""Admissions: what a prompt would reuse and need, and sequences for a batch of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvpool.arrays.layout import integer_argument
from kvpool.device.base import NULL_STREAM
from kvpool.entry.arguments import address, count_array, encoder_argument, id_array, is_integer
from kvpool.entry.interrupt import DeferSignals
from kvpool.errors import KVPoolError
from kvpool.pool.capacity import Capacity, match
from kvpool.pool.core import Core
from kvpool.pool.keys import Admission, BlockKeys, Plan, request_of, requests_of
from kvpool.pool.refusals import refusal
from kvpool.pool.retention import priority_argument, ttl_argument
from kvpool.state import admit, kinds, records, verbs

Rows = npt.NDArray[np.int64]
Answer = TypeVar("Answer")


class Admissions:
    """Admission and its questions, for the schedulers of one pool. Thread-safe."""

    def __init__(self, core: Core, capacity: Capacity) -> None:
        self._core, self._capacity = core, capacity

    def match(self, keys: BlockKeys) -> Rows:
        """What a prompt would reuse now, int64[groups + 1, 6], as ``state.lookup.match`` returns it. The last row is
        for all groups."""
        return match(self._core, request_of(keys))[0]

    def needed(self, keys: BlockKeys, new_tokens: Any, group: Any, encoder_tokens: Any) -> int:
        """The free device blocks of a group that a prompt and ``new_tokens`` more tokens take. Does not change the
        pool."""
        config, which = self._core.config, self._core.config.group(group)
        more = integer_argument("new_tokens", new_tokens, 0, (1 << 31) - 1)
        crosses = config.groups[which].kind == "cross"
        columns = -(-(len(keys) + more) // config.tokens_per_block)
        if crosses or encoder_tokens is not None:
            columns = -(
                -int(encoder_argument("encoder_tokens", encoder_tokens, 1, crosses)[0]) // config.tokens_per_block
            )
        found = self.match(keys)[which]
        if config.groups[which].kind == "recurrent":
            columns = found[3] + kinds.fresh_of(self._core.states.heads, which, request_of(keys), found[3], columns)
        return int(columns - found[4])

    def free_blocks(self) -> Any:
        """What ``KVCacheManager.free_blocks`` says."""
        core = self._core
        with core.lock:
            core.check_open()
            if len(core.tables) == 1:
                return int(verbs.free_device_blocks(core.states.heads))
            found = np.empty(len(core.tables), np.int64)
            verbs.free_in_groups(core.states.heads, found)
        return found

    def evictable(self, ids: Any, group: Any) -> int:
        """Device blocks of a group that would become free if these sequences were released together."""
        core, which, g = self._core, id_array("ids", ids), self._core.config.group(group)
        with core.lock:
            named = core.tables[g][core.rows(which)]
            found, times = np.unique(named[named != records.NONE], return_counts=True)
            return int(np.count_nonzero(core.states[g].blocks["word"][found] == times))

    def growth(self, sequences: Any, new_tokens: Any, group: Any) -> int:
        """The free device blocks of a group that live sequences take to grow by ``new_tokens``. Does not change the
        pool."""
        which = self._core.config.group(group)
        ids = id_array("sequences", sequences)
        counts = count_array("new_tokens", np.full(len(ids), new_tokens) if is_integer(new_tokens) else new_tokens, ids)
        with self._core.lock:
            self._core.check_open()
            # A private array, since a signal handler may decide before it is read.
            needs = np.empty(len(self._core.states), np.int64)
            error = verbs.growth_needs(self._core.states.heads, ids, counts, needs)
            if error:
                raise refusal(self._core.states.heads, error, ids, self._core.tokens.sequences)
        return int(needs[which])

    def admit(
        self, keys: list[BlockKeys], ranges: Sequence[Rows | None], decode_priority: int, decode_ttl_ms: int | None,
        stream: Any, allow_partial: bool, encoder_tokens: Any, answer: Callable[[Rows, dict[int, str]], Answer],
        now: int | None = None,
    ) -> Answer:  # fmt: skip
        """Admit a batch. Returns what ``answer`` makes of the outcome rows (see ``state.records``) of the first
        requests, with the groups joined.

        ``now`` is the time, if the clock must not be read. With ``allow_partial``, ``answer`` also gets which requests
        of the batch can never fit, and why: their rows have the id -1.
        """
        core = self._core
        rows = self._rows(keys, encoder_tokens)
        rows[:, records.R.priority] = priority_argument("decode_priority", decode_priority)
        rows[:, records.R.ttl] = ttl_argument("decode_ttl_ms", decode_ttl_ms)
        for i, own in enumerate(ranges):
            if own is not None:
                rows[i, records.R.ranges_at], rows[i, records.R.range_count] = address(own), len(own)
            if keys[i].extra_ids is not None:
                core.enable_extra()
        refused = self._capacity.refused([len(key) for key in keys], rows)
        if refused and not allow_partial:
            first = next(iter(refused))
            raise ValueError(f"{'prompt' if len(keys) == 1 else f'prompts[{first}]'}: {refused[first]}")
        kept = [i for i in range(len(keys)) if i not in refused] if refused else None
        if kept is not None:
            rows, keys = rows[kept], [keys[i] for i in kept]
        out = np.full((len(self._core.states), len(keys), records.OUTCOME_COLUMNS), records.NONE, np.int64)

        def release() -> None:
            """Nobody gets the ids."""
            admitted = out[0, out[0, :, records.OUT.id] != records.NONE, records.OUT.id]
            if len(admitted) and not core.closed:
                with suppress(KVPoolError):
                    core.decide(None, verbs.release, admitted, True, core.now(), ids=admitted)

        signals = DeferSignals()
        try:
            with signals:
                signals.undo = release
                on = NULL_STREAM if stream is None else stream
                now = core.now() if now is None else now
                n = core.decide(on, self._admit_named, rows, out, now, allow_partial, keys)
                found = out[0, :n] if len(out) == 1 else self._joined(out[:, :n])
                return answer(found if kept is None else _spread(found, kept, len(kept) + len(refused)), refused)
        except BaseException:
            signals.take_back()
            raise

    def plan(self, keys: list[BlockKeys], encoder_tokens: Any) -> Plan:
        """What ``KVCacheManager.plan_batch`` does."""
        core, rows = self._core, self._rows(keys, encoder_tokens)
        refused = self._capacity.refused([len(key) for key in keys], rows)
        kept = [i for i in range(len(keys)) if i not in refused]
        rows, groups = rows[kept], len(core.states)
        out = np.full((groups, len(kept), records.OUTCOME_COLUMNS), records.NONE, np.int64)
        blocks, computing = np.empty(groups, np.int64), np.empty((len(kept), 2), np.int64)
        # The same call undoes its claims, so a handler that raises finds the call complete.
        with DeferSignals(), core.lock:
            core.check_open()
            n = admit.plan(core.states.heads, rows, out, blocks, computing)
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


def _spread(found: Rows, kept: list[int], count: int) -> Rows:
    """Spread the outcomes of the ``kept`` requests over the rows of a batch of ``count``, up to the first request that
    waits."""
    end = kept[len(found)] if len(found) < len(kept) else count
    rows = np.zeros((end, found.shape[1]), np.int64)
    rows[:, records.OUT.id] = records.NONE
    rows[kept[: len(found)]] = found
    return rows


def only_id(out: npt.NDArray[np.int64], refused: dict[int, str]) -> int:
    return int(out[0, records.OUT.id])


def as_admission(out: npt.NDArray[np.int64], refused: dict[int, str]) -> Admission:
    cached, device, host, part, missed = out[:, records.OUT.cached : records.OUT.missed + 1].T.astype(np.int32)
    return Admission(out[:, records.OUT.id].copy(), cached, device, host, part, missed, refused)
