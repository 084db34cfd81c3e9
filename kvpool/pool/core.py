"""Core: what all parts of one pool share: its state, the state lock, ``decide``, and whether the pool is open.

A decision is a verb that runs under the state lock. Its copy ops join the queue there. Then the queue goes to the
device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import call
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool.common.arguments import milliseconds
from kvpool.common.arrays import Int32s, Int64s
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.arrays.strided import read_only
from kvpool.common.changes import Changes
from kvpool.device.base import NULL_STREAM, Device, DeviceEvent, Stream
from kvpool.device.memory.main_memory import available_ram
from kvpool.device.memory.pools import MemoryPools
from kvpool.errors import (
    DeviceError,
    InsufficientMemory,
    OutOfBlocks,
    OutOfSequences,
    PoolClosed,
    UnknownSequence,
)
from kvpool.pool import events as kv_events
from kvpool.pool.config import MemoryOptions, PoolConfig
from kvpool.pool.tables.block_table import own_table
from kvpool.pool.transfer.transfer import NO_IDS, Transfer
from kvpool.state import records, verbs
from kvpool.state.arrays import GroupSizes, Settings, States, state_bytes
from kvpool.state.hostcache import KEY_WORDS
from kvpool.state.records import RECURRENT, H
from kvpool.state.sequences import are_short, check_ids

if TYPE_CHECKING:
    from kvpool.pool.keys import BlockKeys

MAX_MS = 1 << 42
KEEP_GIL_SEQUENCES, KEEP_GIL_TOKENS = 64, 32_768
"""Calls for so many sequences with so many tokens together, and admissions of so many, keep the interpreter's lock:
they take no longer than another thread would keep it."""


class Names:
    """The namespaces of all live sequences and, in a pool with events, of all content. Others are forgotten now and
    then. The state lock guards it."""

    LEAST = 1024

    def __init__(self, states: States) -> None:
        self._states, self._limit = states, self.LEAST
        self.known: dict[int, kv_events.Name] = {}

    def learn(self, prompts: Sequence[BlockKeys]) -> None:
        """Note the namespaces of prompts whose content the present decision may store."""
        if len(self.known) + len(prompts) > self._limit:
            self._forget()
        for prompt in prompts:
            if prompt.namespace not in self.known:
                self.known[prompt.namespace] = kv_events.Name(prompt.salt, prompt.adapter_id, prompt.root)

    def _forget(self) -> None:
        """Keep the namespaces that sequences name and, if there are events, those of blocks and events. A thread that
        decodes events meanwhile keeps the old dictionary."""
        parts = [state.sequences for state in self._states]
        if self._states.groups[0, H.event_capacity]:
            parts += [*(state.blocks for state in self._states), self._states.ring.events]
        named = np.concatenate([part["namespace"] for part in parts])
        kept = set(np.unique(named).tolist())
        self.known = {tag: name for tag, name in self.known.items() if tag in kept}
        self._limit = max(self.LEAST, 2 * len(self.known))


class Core:
    """The state of one pool, and the only way to change it. Thread-safe.

    ``lock`` is the state lock. It guards ``states`` and ``names``, the namespaces that events name. Whoever holds it
    enters ``changes`` too. ``tables`` are the rows of each group, read-only. ``tokens`` is the state of a group that
    has the tokens of sequences.
    """

    def __init__(self, config: PoolConfig, device: Device, states: States) -> None:
        self.config, self.device, self.states, self.clock = config, device, states, config.clock
        # Reentrant: a destructor that closes a lease while its thread is inside the pool must not wait for itself.
        self.lock: AbstractContextManager[Any]
        self._hold_lock(threading.RLock())
        self.changes = Changes()
        token_bytes = [sum(layout.token_bytes for layout in group.layouts) for group in config.groups]
        self.transfer = Transfer(states, self.lock, self.changes, device, token_bytes)
        self.transfer.forks.guard(self, "lock")
        # Every group has the tokens of sequences, except those for cross attention.
        self.tokens = next(state for state in states if state.header.kind != records.CROSS)
        self._lengths = self.tokens.sequences["length"].data
        self.tables = tuple(read_only(table) for table in states.table)
        self.names = Names(states)
        self.closed = False
        kv_events.announce(states)

    def decide(
        self,
        stream: Any,
        verb: Callable[..., Any],
        *args: Any,
        ids: Int64s | None = NO_IDS,
        first: Callable[[], tuple[Any, ...] | None] | None = None,
        finish: Callable[[Any], object] | None = None,
    ) -> Any:
        """Run a jitted verb under the state lock, queue its copy ops, and enqueue everything queued before it.

        Decisions of other threads are enqueued too, since a block that this call returns may wait for them. ``ids`` are
        the sequences whose streams the call concerns (None: all live ones). ``stream`` is the one that the caller
        named. ``first`` is called under the lock before the verb. It may refuse by an exception, and may return the
        arguments of the verb. ``finish`` is called with the result: see ``Changes``. Raises what the verb refuses. A
        copy that the device refuses raises nothing here: see ``pool.transfer``.
        """
        run = getattr(verb, "keep_gil", verb) if self._keeps_gil(ids) else verb
        make = self.changes.call if finish is None else partial(self.changes.call, finish=finish)
        asked = stream is None or (stream is NULL_STREAM and self.transfer.order is None)
        return self._decide(stream if asked else self.as_stream(stream), verb, run, args, ids, first, make)

    def use(self, stream: Stream | None, function: Callable[..., Any], *args: Any, ids: Int64s = NO_IDS) -> Any:
        """``decide`` for a function in Python that reads the state, and notes at most which stream uses ``ids``. What
        an exception leaves of that harms nothing. ``stream`` is the result of ``as_stream``."""
        return self._decide(stream, function, function, args, ids, None, call)

    def _decide(
        self,
        on: Stream | None,
        verb: Callable[..., Any],
        run: Callable[..., Any],
        args: tuple[Any, ...],
        ids: Int64s | None,
        first: Callable[[], tuple[Any, ...] | None] | None,
        make: Callable[..., Any],
    ) -> Any:
        inside, groups, transfer, order = self._owned(), self.states.groups, self.transfer, self.transfer.order
        with self.lock, self.changes:
            if self.closed or transfer.broken is not None or self.changes.torn is not None:
                self.check_open()
            # A destructor may decide inside another call. It finds that call's copy ops here, and keeps
            # them in order.
            transfer.collect()
            if first is not None:
                args = first() or args
            if order is None:
                result = make(run, groups, *args)
            else:
                result = transfer.decide(on, ids, make, run, groups, *args)
            if result is not None and result < 0:
                raise self._refusal(result, verb, *args)
            if self.changes.torn is not None:
                self.check_open()
            mine = transfer.collect()
            later = mine and transfer.may_lag()
        if later and not inside:
            transfer.drain_later()
        elif (mine or transfer.waiting) and not inside:
            transfer.drain()
        if self.changes.torn is not None:
            self.check_open()
        return result

    def _refusal(self, code: int, verb: Callable[..., Any], ids: Int64s, *args: Any) -> Exception:
        """What to raise for a refused decision. The state lock is held. No wait helps a growth that never fits."""
        if code == records.SHORT_OF_BLOCKS and verb is verbs.append:
            code = verbs.never_fits(self.states.groups, ids, args[0]) or code
        return self.refusal(code, ids, verb)

    def refusal(self, code: int, ids: Int64s, verb: object = None) -> Exception:
        """What to raise for the result below zero of a ``verb``. ``ids`` are the sequences that the call named.

        The state lock is still held.
        """
        groups = self.states.groups
        detail, more = int(groups[0, H.detail]), int(groups[0, H.bound])
        group = int(groups[0, H.detail_group]) if len(groups) > 1 else None
        if code == records.SHORT_OF_BLOCKS:
            return OutOfBlocks("device", detail, more, group)
        if code == records.SHORT_OF_HOST_BLOCKS:
            return OutOfBlocks("host", detail, more, group)
        if code == records.SHORT_OF_SEQUENCES:
            return OutOfSequences(detail, more)
        if code == records.BAD_TOTAL:
            return ValueError(f"counts add up to {detail}, tokens has {more} entries")
        if code == records.BAD_ACCEPTED:
            return ValueError(
                f"accepted[{detail}]: expected indices in rising order, below the {more} drafts, got another"
            )
        which = int(ids[detail])
        if code == records.UNKNOWN:
            return UnknownSequence(f"{which} is not a live sequence of this pool")
        if code == records.IS_SWAPPED:
            return ValueError(f"sequence {which} is swapped out: accepted by resume and release")
        if code == records.NOT_SWAPPED:
            return ValueError(f"sequence {which} is not swapped out: resume accepts those that are")
        if code == records.DUPLICATE:
            return ValueError(f"sequence {which} is named twice")
        if code == records.FAILED:
            return DeviceError(f"sequence {which} lost a block to a failed copy: release it")
        if code == records.BAD_DRAFTS:
            return ValueError(
                f"drafts: sequence {which} has {more} tokens that are not committed, and no more can be drafts"
            )
        if code == records.NEVER_FITS:
            return _never_fits(groups, which, more)
        if code == records.TOO_LONG:
            return ValueError(
                f"sequence {which} would pass max_sequence_tokens={groups[0, H.columns] * groups[0, H.width]}"
            )
        if code == records.PASSED:
            gone = (
                "what was committed has no state before"
                if groups[groups[0, H.detail_group], H.kind] == RECURRENT
                else "its window has passed"
            )
            return ValueError(f"counts: expected up to {more} tokens for sequence {which}, got more: {gone}")
        sequence = self.tokens.sequences[which & 0xFFFFFFFF]
        lowest, length = int(sequence["committed"]) if verb is verbs.commit else 0, int(sequence["length"])
        return ValueError(f"counts: expected {lowest} to {length} tokens for sequence {which}, got another count")

    def _keeps_gil(self, ids: Int64s | None) -> bool:
        """Whether a call for these sequences, which are not checked, is likely to have little to do. Needs no lock."""
        if ids is None or not 0 < len(ids) <= KEEP_GIL_SEQUENCES:
            return False
        if len(ids) == 1:
            return self._lengths[(ids.item() & 0xFFFFFFFF) % len(self._lengths)] <= KEEP_GIL_TOKENS
        return bool(are_short(self.states.groups, self.tokens.group, ids, KEEP_GIL_TOKENS))

    def as_stream(self, stream: object) -> Stream:
        """``Device.as_stream`` of an open pool. Raises PoolClosed, too."""
        self.check_open()
        return self.transfer.as_stream(stream)

    def check_open(self) -> None:
        """Raise PoolClosed if the pool was closed, its device has failed for good, or its state is in doubt. Raises
        RuntimeError in a call that is not allowed inside ``exclusive``."""
        if self.closed:
            raise PoolClosed("the pool is closed")
        if self.changes.torn is not None:
            raise PoolClosed(f"the state of the pool is in doubt: {self.changes.torn}") from self.changes.torn
        if self.transfer.broken is not None:
            raise PoolClosed(f"the device has failed: {self.transfer.broken}") from self.transfer.broken
        if self.changes.hold is not None:
            self.changes.hold.check()

    def refuse_inside(self, call: str) -> None:
        """Raise inside a decision or an enqueueing of this thread. The thread holds a lock, and others would wait for
        what the call waits for."""
        if self._owned() or self.transfer.enqueuing:
            if self.changes.hold is not None:
                self.changes.hold.check(call)
            raise RuntimeError(f"{call} inside another call of this pool: destructors may close leases and release")

    @property
    def is_exclusive(self) -> bool:
        """Whether this thread is inside ``exclusive``."""
        hold = self.changes.hold
        return hold is not None and hold.is_live

    def now(self) -> int:
        """Milliseconds on the pool's clock, which is not read inside ``exclusive``. Raises TypeError or ValueError if
        the clock returns anything else."""
        if self.clock is milliseconds:
            return monotonic_ns() // 1_000_000
        if self.is_exclusive and self.changes.hold is not None:
            return self.changes.hold.now_ms
        ms = self.clock()
        return ms if type(ms) is int and 0 <= ms <= MAX_MS else integer_argument("clock()", ms, 0, MAX_MS)

    # -- what a part reads or says under the state lock ---------------------------------------------

    def rows(self, which: Int64s) -> Int64s:
        """Rows of live sequences. The caller holds the state lock. Raises UnknownSequence, DeviceError, ValueError,
        PoolClosed."""
        self.check_open()
        error = check_ids(self.states.groups, which, True)
        if error:
            raise self.refusal(error, which)
        return which & 0xFFFFFFFF

    def live(self, kind: int = records.LIVE) -> Int64s:
        """Ids of all rows of a kind, or of several (LIVE | SWAPPED). The caller holds the state lock."""
        sequences = self.tokens.sequences
        rows = np.flatnonzero(sequences["live"] & kind)
        return (sequences["generation"][rows].astype(np.int64) << 32) | rows

    def enable_extra(self) -> None:
        """Have the state keep extra ids from now on."""
        with self.lock, self.changes:
            self.states.enable_extra()

    def note(self, kind: int, stream: Stream | None, ids: Int64s) -> None:
        """Have the next decision note what a stream does to blocks, if there is a stream. The caller holds the state
        lock."""
        if stream is not None and self.transfer.order is not None:
            self.transfer.note(
                np.stack([np.full(len(ids), kind), np.full(len(ids), self.transfer.slot(stream)), ids], axis=1)
            )

    def flush(self) -> None:
        """Enqueue all that is decided. The caller holds no lock."""
        with self.lock, self.changes:
            if self.changes.torn is None:
                self.transfer.collect()
        self.transfer.drain()

    # -- waiting ------------------------------------------------------------------------------------

    def wait_for(self, events: Sequence[DeviceEvent]) -> None:
        """Have the host wait for events. The caller holds no lock. After a DeviceError the pool counts as broken."""
        try:
            for event in events:
                self.device.synchronize(event)
        except DeviceError as error:
            self.transfer.fail(error)
            raise

    def follow(self, stream: object) -> None:
        """Have all work that is enqueued on ``stream`` from now on wait for all copies enqueued so far. The caller
        holds no lock."""
        on = self.as_stream(stream)
        self.refuse_inside("what waits for copies")
        self.transfer.drain()
        self.transfer.follow(on)

    def disable_guard(self, name: str) -> None:
        """Take one named rule out, so that a test can show that its proof fails without it. Never call it elsewhere."""
        if name == "state_lock":
            self.use_lock(nullcontext())
        else:
            self.states.disable_guard(name)

    def use_lock(self, lock: AbstractContextManager[Any]) -> None:
        """Use another state lock, for a tool that watches it. No call may be running."""
        self._hold_lock(lock)
        self.transfer.state_lock = lock

    def _hold_lock(self, lock: Any) -> None:
        self.lock = lock
        # Whether this thread is in a call already, and holds the lock. Then this is a destructor.
        self._owned: Callable[[], bool] = getattr(lock, "_is_owned", lambda: False)


def pool_memory(config: PoolConfig, device: Device, options: MemoryOptions) -> MemoryPools:
    """The memory of both tiers. Raises InsufficientMemory, TypeError, ValueError."""
    groups = ((group.layouts, group.device_blocks, group.host_blocks) for group in config.groups)
    layouts, device_blocks, host_blocks = zip(*groups, strict=True)
    memory = (options.device_memory, options.host_memory)
    return MemoryPools(device, layouts, device_blocks, host_blocks, *memory, bool(options.shared))


def pool_states(config: PoolConfig, device: Device, table: Int32s | None) -> States:
    """The state of a pool. Raises InsufficientMemory. Raises TypeError and ValueError for a ``table`` that does not
    fit."""
    settings, sizes = config.settings._replace(notes_accesses=not device.synchronous), config.sizes
    needed, available = state_bytes(sizes, settings), device.available_bytes("host")
    if available is not None and needed > available:
        raise InsufficientMemory("state: the host", needed, available)
    return States(sizes, settings, own_table(table, len(sizes), settings.sequences, settings.columns))


def host_states(host_blocks: int, secret: bytes, event_capacity: int, policy: str) -> States:
    """The state of a pool that has host blocks only, under opaque keys, and no sequences. Raises InsufficientMemory."""
    groups = [GroupSizes(0, host_blocks)]
    settings = Settings(KEY_WORDS, 0, 0, secret, partial_reuse=False, event_capacity=event_capacity, policy=policy)
    needed, available = state_bytes(groups, settings), available_ram()
    if available is not None and needed > available:
        raise InsufficientMemory("state: the host", needed, available)
    return States(groups, settings)


def _never_fits(groups: Int64s, sequence: int, needed: int) -> ValueError:
    """For a sequence that needs more blocks at once than the group of the error has."""
    group = int(groups[0, H.detail_group])
    whole = groups[group, H.kind] == records.ATTENTION and not groups[group, H.window]
    where = f" of group {group}" if len(groups) > 1 else ""
    advice = "" if whole else " as a whole; commit what it has, and append fewer tokens at once"
    return ValueError(
        f"tokens: expected at most {groups[group, H.device_blocks]} device blocks{where} for sequence {sequence}, "
        f"got {needed}: it can never fit{advice}"
    )
