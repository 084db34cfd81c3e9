"""Together: several operations under one hold of the state lock, enqueued together. All of them happen, or none."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arguments import (
    bool_argument,
    count_array,
    id_array,
    list_argument,
    returns_argument,
    split_argument,
    stop_argument,
    text_argument,
    token_array,
)
from kvpool.common.arrays import Int64s
from kvpool.device.base import Stream, StreamLike
from kvpool.pool.core import Core
from kvpool.pool.keys import Admission, key_rows, tier_number
from kvpool.pool.leases import Lease, Leases
from kvpool.pool.prompts import Prompts, as_admission
from kvpool.state import records, verbs
from kvpool.state.arrays import Undo
from kvpool.state.records import LIVE, SWAPPED
from kvpool.state.sequences import check_kinds

Ids = Int64s
NO_IDS: Ids = np.empty(0, np.int64)


class Operation(NamedTuple):
    """One operation, made by the functions of ``kvpool.pool.operations``; its arguments are checked by ``apply``."""

    verb: str
    arguments: tuple[Any, ...]


class Step(NamedTuple):
    """An operation whose arguments were checked. ``run(now)`` does it. The other fields say what it may touch and
    need."""

    verb: str
    run: Callable[[int], Any]
    ids: Ids = NO_IDS
    """The sequences that it names."""
    kinds: int = int(LIVE)
    """The kinds that these sequences may have."""
    counts: Ids = NO_IDS
    """How many tokens of each it commits or appends, if it does."""
    prompts: Ids = np.zeros((0, 2), np.int64)
    """The tokens of each prompt that it adds, and of the prompt's encoder."""
    keys: int = 0
    """The blocks that it pins in each group."""
    lease: Lease | None = None
    """The lease that it closes."""
    partial: bool = False
    """It accepts a part of what it asks for, and is never refused."""


class Together(Prompts):
    """The call of a pool that does several operations together. Thread-safe."""

    def __init__(self, core: Core, leases: Leases) -> None:
        super().__init__(core)
        self._leases, self._undo = leases, Undo(core.states)

    def apply(self, operations: Sequence[Operation], *, stream: StreamLike = None) -> list[Any]:
        """Do several operations in this order. No other call comes between them. All of them happen, or none.

        ``operations``: a list of operations of ``kvpool.pool.operations`` (match, pin, unpin, add, append, commit,
        release). Each does what the call of that name does, and sees the effects of those before it. If one is refused,
        this call raises that operation's error, and nothing has changed. ``stream`` is used for all of them. A pin
        needs it, since a call that waits is not accepted. Returns a list of what each call returns. Changes the pool.

        The copies of all operations are enqueued together at the end. If an operation may be refused after an earlier
        one has changed the pool, as when blocks are scarce, the call first copies the state of the pool, about 150
        bytes a block. Thread-safe. Raises OutOfBlocks, OutOfSequences, UnknownSequence, BlockNotFound, LeaseExpired,
        DeviceError, ValueError, TypeError, and RuntimeError inside another call of this pool.
        """
        core = self.core
        on = None if stream is None else core.as_stream(stream)
        steps = [self._checked(i, operation, on) for i, operation in enumerate(list_argument("operations", operations))]
        now_ms, results = core.now(), list[Any]()
        core.refuse_inside("apply")
        with core.lock, core.changes, _collector.off():
            core.check_open()
            if on is None:
                core.transfer.check_streams(np.concatenate([NO_IDS, *(step.ids for step in steps)]))
            self._decide(steps, results, now_ms)
        core.transfer.drain()
        for i, result in enumerate(results):
            if isinstance(result, ExitStack):
                result.close()
            if isinstance(result, ExitStack) or isinstance(result, Lease) and not self._leases.settle(result, now_ms):
                results[i] = None
        return results

    def _decide(self, steps: list[Step], results: list[Any], now_ms: int) -> None:
        """Do all steps, or none. The result of a lease that is closed is its host access. The state lock is held."""
        core, leases, names = self.core, self._leases.picture(), self.core.names.picture()
        may_fail = self._may_fail_late(steps)
        with core.transfer.together() as forget:
            if may_fail:
                self._undo.take(*self._touched(steps))
            try:
                results += [step.run(now_ms) for step in steps]
            except BaseException:
                if may_fail:
                    self._undo.restore()
                    self._leases.restore(leases)
                    core.names.restore(names)
                    forget()
                raise

    # -- arguments: nothing of the caller's is asked for under the lock -----------------------------------------

    def _checked(self, i: int, operation: Any, on: Stream | None) -> Step:
        make = getattr(self, f"_{operation.verb}_step", None) if type(operation) is Operation else None
        if (
            make is None
            or type(operation.arguments) is not tuple
            or len(operation.arguments) != make.__code__.co_argcount - 2
        ):
            raise TypeError(f"operations[{i}]: expected one of kvpool.pool.operations, got {operation!r:.80}")
        step: Step = make(on, *operation.arguments)
        return step

    def _match_step(self, on: Stream | None, prompt: object) -> Step:
        keys = self._keys_of(prompt)
        return Step("match", lambda now_ms: self._match(keys))

    def _pin_step(self, on: Stream | None, keys: object, owner: object, tier: object) -> Step:
        if on is None:
            raise ValueError("stream: expected the stream that reads the pinned blocks, got None")
        rows, name, which, only = key_rows(keys), text_argument("owner", owner), tier_number(tier), int(records.NONE)
        return Step("pin", lambda now_ms: self._leases.take(rows, None, which, name, only, now_ms, on), keys=len(rows))

    def _unpin_step(self, on: Stream | None, lease: object) -> Step:
        if not isinstance(lease, Lease):
            raise TypeError(f"lease: expected a lease, got {lease!r:.80}")
        return Step("unpin", lambda now_ms: self._leases.give_back(lease, now_ms, on), lease=lease)

    def _add_step(
        self,
        on: Stream | None,
        prompts: object,
        retention: object,
        priority: object,
        ttl: object,
        partial: object,
        encoder: object,
    ) -> Step:
        arrivals = self._arrivals(prompts, retention, priority, ttl, partial, encoder)
        _, rows, _, some = arrivals
        tokens = rows[:, [records.R.length, records.R.encoder]]

        def run(now_ms: int) -> Admission:
            return as_admission(*self._admit(arrivals, on, now_ms))

        return Step("add", run, prompts=tokens, partial=some)

    def _append_step(self, on: Stream | None, ids: object, tokens: object, counts: object) -> Step:
        which, new = id_array("ids", ids), token_array("tokens", tokens, empty=True)
        each = split_argument(counts, which, "tokens", new)
        return Step("append", self._verb(on, verbs.append, which, each, new), which, counts=each)

    def _commit_step(self, on: Stream | None, ids: object, counts: object) -> Step:
        which = id_array("ids", ids)
        each = NO_IDS if counts is None else count_array("counts", counts, which)
        return Step("commit", self._verb(on, verbs.commit, which, each), which, counts=each)

    def _release_step(
        self, on: Stream | None, ids: object, store: object, stop: object, ends: object, returns: object
    ) -> Step:
        which, verb, how = release_arguments(ids, store, stop, ends, returns)
        return Step("release", self._verb(on, verb, which, *how), which, int(LIVE | SWAPPED))

    def _verb(self, on: Stream | None, verb: Any, which: Ids, *args: Any) -> Callable[[int], None]:
        def run(now_ms: int) -> None:
            self.core.decide(on, verb, which, *args, now_ms, ids=which)

        return run

    # -- what may be refused, and what it may have touched by then ----------------------------------------------

    def _may_fail_late(self, steps: list[Step]) -> bool:
        """Whether a step may be refused after another has changed the pool. False is certain.

        A step is refused for what it names, or because blocks are short. What it names is checked now. For blocks,
        there is a bound of what all steps may take. If so many are free now, no step can be short, since the others
        only give back.
        """
        takes = rows = grown = 0
        gone, changed = set[Any](), False
        for step in steps:
            if changed and not self._is_right(step, gone, grown):
                return True
            takes, rows, grown = takes + step.keys, rows + len(step.prompts), grown + (step.verb == "commit")
            if step.verb == "append":
                # Each takes a copy of its last block, or a state, besides the columns that it opens.
                takes += int(self._blocks_of(step.counts).sum()) + 2 * len(step.counts)
                grown += int(step.counts.sum())
            elif step.verb == "add":
                takes += int(self._blocks_of(step.prompts).sum())
            if changed and step.verb in ("append", "add") and not step.partial and not self._has_room(takes, rows):
                return True
            if step.verb in ("release", "unpin"):
                gone |= {step.lease, *step.ids.tolist()}
            changed |= step.verb != "match"
        return False

    def _is_right(self, step: Step, gone: set[Any], grown: int) -> bool:
        """Whether a step names what exists, whatever the steps before it do. They have released or closed ``gone``;
        ``grown`` is not zero if they grew or committed sequences."""
        groups, sequences = self.core.states.groups, self.core.tokens.sequences
        if step.verb == "pin":
            return False
        if step.lease is not None:
            return self._leases.is_open(step.lease) and step.lease not in gone
        if len(step.prompts) and int(self._blocks_of(step.prompts).max()) > self.core.config.columns:
            return False
        if check_kinds(groups, step.ids, step.verb != "release", step.kinds):
            return False
        if gone and not gone.isdisjoint(step.ids.tolist()):
            return False
        if step.verb == "append":
            most = self.core.config.columns * self.core.config.tokens_per_block
            length = sequences["length"][step.ids & 0xFFFFFFFF]
            return bool((length + step.counts + grown <= most).all())
        if step.verb == "commit" and len(step.counts):
            # The committed tokens and all tokens bound it. Both are equal in all groups.
            rows = sequences[step.ids & 0xFFFFFFFF]
            return not grown and bool(((rows["committed"] <= step.counts) & (step.counts <= rows["length"])).all())
        return True

    def _blocks_of(self, tokens: Any) -> Any:
        return -(-tokens // self.core.config.tokens_per_block)

    def _has_room(self, blocks: int, rows: int) -> bool:
        free = np.empty(len(self.core.states), np.int64)
        verbs.free_in_groups(self.core.states.groups, free)
        return blocks <= int(free.min()) and rows <= int(self.core.states.groups[0, records.H.free_rows])

    def _touched(self, steps: list[Step]) -> tuple[Ids, int]:
        """Rows of the table that these steps may change, and columns."""
        state, adds = self.core.tokens, sum(len(step.prompts) for step in steps)
        free = int(state.header.free_rows)
        named = [step.ids & 0xFFFFFFFF for step in steps]
        rows = np.unique(np.concatenate([NO_IDS, *named, state.rows[max(0, free - adds) : free]]))
        rows = rows[rows < len(state.sequences)]
        columns = [int(group_state.sequences["blocks"][rows].max(initial=0)) for group_state in self.core.states]
        grown = sum(int(self._blocks_of(step.counts).sum()) + 1 for step in steps if step.verb == "append")
        added = max((int(self._blocks_of(step.prompts).max(initial=0)) for step in steps), default=0)
        return rows, min(self.core.config.columns, max(max(columns) + grown, added + grown) + 1)


def release_arguments(ids: object, store: object, stop: object, ends: object, returns: object) -> tuple[Ids, Any, Any]:
    """The sequences that a call releases, the verb for it, and its arguments behind them. Raises TypeError,
    ValueError."""
    which, keep = id_array("ids", ids), bool_argument("store", store)
    if stop is None and ends is False and returns is None:
        return which, verbs.release, (keep,)
    said = stop_argument(stop), returns_argument(ends, returns)
    return (which, verbs.release_saying, (keep, *said)) if any(said) else (which, verbs.release, (keep,))


class _Collector:
    """Switches the garbage collector off while any pool of this process is inside. It could close a lease, which would
    be undone with the rest."""

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._after_fork)

    def _begin(self) -> None:
        self._lock, self._inside, self._enabled = threading.RLock(), 0, False

    def _after_fork(self) -> None:
        """In a child: threads that were inside are not there any more."""
        if self._inside and self._enabled:
            gc.enable()
        self._begin()

    @contextmanager
    def off(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._enabled = gc.isenabled()
            gc.disable()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside and self._enabled:
                    gc.enable()


_collector = _Collector()
