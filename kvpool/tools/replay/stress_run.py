"""Two threads on one pool: a replay that evicts host blocks all the time, and a reader that pins them and compares
their bytes."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arrays import Array, Int64s
from kvpool.common.errors import BlockNotFound
from kvpool.common.jit import jit
from kvpool.common.process import Closing
from kvpool.pool.leases import Lease
from kvpool.pool.manager import KVCacheManager
from kvpool.state.arrays import State
from kvpool.state.records import (
    CLEAN,
    DEFAULT_PRIORITY,
    HOST,
    LISTS_PER_TIER,
    NONE,
    PUBLISHED,
    blocks_of,
    counters_of,
    head,
    lists_of,
)
from kvpool.tools.replay.content import KVBytes, Request, names_of, token_states
from kvpool.tools.replay.engine import Figure, Replay, ReplayConfig, Report, Rounds, at_least, equal
from kvpool.tools.replay.traces import Trace

EVENTS = 1 << 16
"""The number of events that the pool keeps. One request of a long trace causes fewer."""
_PRUNE_EVERY = 64
_VERIFY_EVERY = 50
_STALL_AFTER = 1_000
"""The number of requests between two calls of ``prune``, between two calls of ``verify``, and between two checks that
the run still makes progress."""
_BURST = 32
_LONG = 0.03
_LONG_TURNS = 20
"""The number of pins that one turn of the reader opens, the share of long ones, and the turns that a long one lasts."""

# One host block. ``ahead``: how many blocks of its list go before it, NONE where it is in none. ``rank`` is that list,
# or the last one: 0 clean copies, 1 content. ``ticket`` and ``other_copy`` show that its content or its list changed.
# ``due`` is of a block that was pinned while it was listed: how many evictions from its list it outlives.
PLACE = np.dtype([("rank", "i8"), ("ahead", "i8"), ("ticket", "i8"), ("other_copy", "i8"), ("due", "i8")], align=True)
REDUNDANT, FORGOTTEN, COPIED, SHIELDED, TOTALS = range(5)


@dataclass(frozen=True)
class StressConfig:
    """The replay, and the numbers of pinned reads and host evictions that the run must reach. ``replay`` needs
    ``events`` and ``verify``."""

    replay: ReplayConfig
    reads: int
    evictions: int
    shielded: int
    """The number of host evictions whose victim would have been a pinned block."""
    seed: int = 0


class ExpectedContents:
    """The content of the pool according to its events, and the bytes of each key, computed from tokens alone.

    One thread writes (``learn``, ``follow``); other threads may use ``bytes_of`` and ``host_keys``. ``host_keys`` is
    replaced, never changed. ``stored`` and ``removed`` count events of host blocks, ``gaps`` counts missed events.
    """

    def __init__(self, replay: Replay) -> None:
        self._cache, config = replay.cache, replay.config
        self._layout, self._width = config.layout, config.layout.tokens_per_block
        page = np.zeros(self._layout.host_shape(config.device_blocks), self._layout.storage_dtype)
        self._page = page.reshape(config.device_blocks, -1).view(np.uint8)
        strides = self._layout.host_strides(config.device_blocks)
        self._writer = KVBytes(self._layout, page, strides, config.device_blocks)
        self._bytes: dict[bytes, bytes] = {}
        self._recent: deque[list[bytes]] = deque(maxlen=config.active + 1)
        self.cached: dict[str, set[bytes]] = {"device": set(), "host": set()}
        self.host_keys: list[bytes] = []
        self.stored = self.removed = self.gaps = self._next = 0

    def bytes_of(self, key: bytes) -> bytes | None:
        """The bytes of the block with this key, or None if no learned request has the key."""
        return self._bytes.get(key)

    def learn(self, request: Request) -> None:
        """Note the bytes of every full block of a request and its answer."""
        tokens = np.concatenate([request.prompt(), request.output()])
        names = names_of(self._cache.block_keys(tokens, salt=request.salt, adapter_id=request.adapter_id).keys)
        states = token_states(tokens, self._width, salt=request.salt, adapter_id=request.adapter_id)
        grid = states[: len(names) * self._width].reshape(len(names), self._width)
        self._writer.write(grid, np.arange(len(names)))
        for place, name in enumerate(names):
            if name not in self._bytes:
                self._bytes[name] = self._page[place].tobytes()
        self._recent.append(names)

    def follow(self) -> None:
        """Apply the events since the last call."""
        for event in self._cache.events():
            self.gaps += event.number != self._next
            self._next = event.next
            if event.keys is None or event.tier is None:
                continue
            names, there = names_of(event.keys), self.cached[event.tier]
            if event.kind == "stored":
                there.update(names)
                self.stored += len(names) if event.tier == "host" else 0
            elif event.kind == "removed":
                there.difference_update(names)
                self.removed += len(names) if event.tier == "host" else 0
        self.host_keys = list(self.cached["host"])

    def prune(self) -> None:
        """Drop bytes of content that is not cached, and belongs to no request that may be running. Such content can be
        stored again only after its request has been learned again."""
        wanted = self.cached["device"].union(self.cached["host"], *self._recent)
        self._bytes = {name: data for name, data in self._bytes.items() if name in wanted}


class _Open(NamedTuple):
    """A lease whose bytes were right, its expected bytes, and the turn in which it is checked again and closed."""

    lease: Lease
    expected: list[bytes | None]
    until: int


class Reader:
    """Pins host blocks of a pool in many overlapping leases, and compares each block when its lease begins and before
    it ends.

    Its thread runs ``work``, until ``enough`` returns True or ``stop`` is set. A *read* is one lease. It reads memory
    at the addresses of leases, as a reader from another process would.
    """

    def __init__(self, replay: Replay, contents: ExpectedContents, config: StressConfig) -> None:
        self._cache, self._contents = replay.cache, contents
        self._random = Random(config.seed)
        self._state, self._block_bytes = replay.cache.core.tokens, config.replay.layout.block_bytes
        self._most = max(1, config.replay.host_blocks // 3)
        self._open: list[_Open] = []
        self._known: deque[int] = deque([config.replay.device_blocks], maxlen=256)
        self._turn = self._pinned = 0
        self.reads = self.opened = self.missed = self.blocks = self.last_lease = 0
        self.checks = self.wrong = self.unknown = 0
        self.first_wrong = ""
        self.error: BaseException | None = None

    def work(self, enough: Callable[[], bool], stop: threading.Event) -> None:
        """Read until ``enough`` returns True, then close all leases and set ``stop``. Keeps errors in ``error``."""
        try:
            while not (stop.is_set() or enough()):
                self._take_turn()
            for entry in self._open:
                self._end(entry)
        except BaseException as error:
            self.error = error
        finally:
            stop.set()

    def _take_turn(self) -> None:
        self._turn += 1
        keys = self._contents.host_keys
        for _ in range(_BURST):
            if keys and self._pinned < self._most:
                self._begin(keys)
        # The scheduler's thread can run here. Every lease is open during at least one such pause.
        time.sleep(0)
        due = [entry for entry in self._open if entry.until <= self._turn]
        self._open = [entry for entry in self._open if entry.until > self._turn]
        for entry in due:
            self._end(entry)

    def _begin(self, keys: list[bytes]) -> None:
        """Pin one block by its key, several by their keys, or one by its id, and check the bytes."""
        draw = self._random.random()
        lease: Lease | None = None
        try:
            if draw < 0.8:
                wanted = [keys[int(self._random.random() * len(keys))]]
                lease = self._cache.find_and_pin_host(wanted[0], owner="reader")
            elif draw < 0.9:
                wanted = self._random.sample(keys, min(len(keys), self._random.randint(2, 4)))
                lease = self._cache.pin(wanted, owner="reader", tier="host")
            else:
                lease = self._cache.pin_blocks(self._random.choice(self._known), owner="reader")
                wanted = self._keys_of(lease)
        except BlockNotFound:
            pass
        if lease is None:
            self.missed += 1
            return
        self.opened, self.last_lease = self.opened + 1, lease.id
        expected = [self._contents.bytes_of(key) for key in wanted]
        self.unknown += expected.count(None)
        self.blocks += len(expected)
        self._pinned += len(expected)
        self._known.extend(lease.blocks.tolist())
        self._check(lease, expected)
        turns = _LONG_TURNS if self._random.random() < _LONG else 0
        self._open.append(_Open(lease, expected, self._turn + turns))

    def _keys_of(self, lease: Lease) -> list[bytes]:
        """The keys of pinned blocks, which cannot change."""
        fields = self._state.blocks[lease.blocks]
        return names_of(np.stack([fields["key0"], fields["key1"]], axis=1).view(np.uint64))

    def _check(self, lease: Lease, expected: list[bytes | None]) -> None:
        for block, place, wanted in zip(lease.blocks.tolist(), lease.addresses.tolist(), expected, strict=True):
            self.checks += 1
            if wanted is not None and ctypes.string_at(place, self._block_bytes) != wanted:
                self.wrong += 1
                self.first_wrong = self.first_wrong or f"host block {block}, lease {lease.id}, turn {self._turn}"

    def _end(self, entry: _Open) -> None:
        self._check(entry.lease, entry.expected)
        entry.lease.close()
        self._pinned -= len(entry.expected)
        self.reads += 1


@jit
def _count(h: Any, places: Array, totals: Int64s) -> None:
    """Count the pinned blocks that the evictions since the last look would have reached."""
    counters = counters_of(h)
    copied = counters.copied_blocks != totals[COPIED]
    for i in range(places.shape[0]):
        place, block = places[i], blocks_of(h)[h.device_blocks + i]
        lost = counters.forgotten_host_blocks if place.rank else counters.redundant_dropped
        if block.word >> 32 == 0 or block.ticket != place.ticket or block.other_copy != place.other_copy:
            place.due = NONE
        elif place.ahead != NONE:
            place.due = totals[place.rank] + place.ahead
        if place.due != NONE and copied:
            place.due += lost - totals[place.rank]
        elif place.due != NONE and lost > place.due:
            totals[SHIELDED] += 1
            place.due = NONE
    totals[REDUNDANT], totals[FORGOTTEN] = counters.redundant_dropped, counters.forgotten_host_blocks
    totals[COPIED] = counters.copied_blocks


@jit
def look(heads: Array, places: Array, totals: Int64s) -> None:
    """Record one lock holder's changes in ``places`` PLACE[host blocks] and ``totals`` int64[TOTALS]."""
    h = head(heads, 0)
    lists = lists_of(h)
    _count(h, places, totals)
    for place in places:
        place.ahead = NONE
    for rank in range(2):
        b, ahead = lists[HOST * LISTS_PER_TIER + (DEFAULT_PRIORITY if rank else CLEAN), 0], 0
        while b != NONE:
            place, block = places[b - h.device_blocks], blocks_of(h)[b]
            place.rank = rank
            place.ahead = ahead
            place.ticket = block.ticket
            place.other_copy = block.other_copy
            b, ahead = block.next, ahead + 1


class VictimWatch:
    """Counts the host evictions of a pool, and the blocks that were spared because they were pinned.

    The watch looks at the pool each time the state lock is released, before another thread can take it. So between two
    looks there is one decision, one pin or one unpin, and during a decision no pin begins or ends.

    Evictions take a list from its front, and blocks enter it at its back. So a block with n blocks ahead of it is among
    the first n + 1 that its list loses, or leaves it for another reason. One that is pinned has left its list: when the
    list has lost n + 1 since then, the block would have been a victim if it alone had not been pinned. Each stay in a
    list counts at most once.

    ``shielded`` is a lower bound. It leaves out blocks whose content came to the device or left it while they were
    pinned, and evictions of decisions with partial copies, since the call itself may have held their source.

    Use it for new pools, if all blocks have the default priority and sequences are stored when they are released.
    Thread-safe: all its work is done under the state lock.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        heads = cache.core.states.heads
        places, self._totals = np.full(cache.host_blocks, NONE, PLACE), np.zeros(TOTALS, np.int64)
        totals = self._totals
        look(heads, places, totals)
        # Every holder of the state lock must be seen, so the lock is replaced.
        cache.core.use_lock(WatchedLock(cache.core.lock, lambda: look(heads, places, totals)))

    @property
    def evictions(self) -> int:
        """The number of host blocks that were evicted."""
        return int(self._totals[REDUNDANT] + self._totals[FORGOTTEN])

    @property
    def shielded(self) -> int:
        """A lower bound of the host evictions whose victim would have been a pinned block."""
        return int(self._totals[SHIELDED])


class WatchedLock:
    """A reentrant lock that calls ``look`` before its outermost release."""

    def __init__(self, inner: Any, look: Callable[[], None]) -> None:
        self.inner = inner
        self._look = look
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = bool(self.inner.acquire(blocking, timeout))
        self._depth += taken
        return taken

    def release(self) -> None:
        try:
            if self._depth == 1:
                self._look()
        finally:
            self._depth -= 1
            self.inner.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


class Stress(Closing):
    """One run. A context manager: leaving it closes the pool. ``run`` does the work once and returns the report."""

    def __init__(self, trace: Trace, config: StressConfig, *, progress: Callable[[int], Any] | None = None) -> None:
        self._config = config
        self._name = trace.name
        self._round = len(trace.requests)
        self.rounds = Rounds(trace, config.replay, self._admitted)
        self.replay = self.rounds.replay
        self.cache = self.replay.cache
        self.watch = VictimWatch(self.cache)
        self.contents = ExpectedContents(self.replay)
        self.reader = Reader(self.replay, self.contents, config)
        self._progress = progress or (lambda count: None)
        self._shown = self._verified = self._evictions_then = self._reads_then = 0

    def close(self) -> None:
        self.replay.close()

    def run(self) -> Report:
        """Replay until the reader has enough, then check all counts. Errors of the threads are not raised: they are in
        the report."""
        begin, stop = time.perf_counter(), self.rounds.stop
        thread = threading.Thread(target=self.reader.work, args=(self._enough, stop), name="kvpool stress reader")
        thread.start()
        try:
            failure = self.rounds.run()
        finally:
            stop.set()
            thread.join()
        if self.reader.error is not None:
            failure = f"reader: {type(self.reader.error).__name__}: {self.reader.error}"
        elif self.reader.first_wrong:
            failure = f"wrong bytes, first in {self.reader.first_wrong}"
        broken = self.rounds.verify()
        if broken is None:
            self._verified += 1
            self.contents.follow()
        config = {"trace": self._name, **self.replay.summary().config, "seed": self._config.seed}
        title, seconds = f"stress  {self._name}", time.perf_counter() - begin
        return Report(title, self._figures(), failure or broken, self.rounds.interrupted, seconds, config)

    def _enough(self) -> bool:
        return self.reader.reads >= self._config.reads and self.watch.evictions >= self._config.evictions

    def _admitted(self, request: Request | None) -> None:
        """Called after every request, on the scheduler's thread."""
        if request is not None:
            self.contents.learn(request)
        self.contents.follow()
        if self.rounds.done % _PRUNE_EVERY == 0:
            self.contents.prune()
        if self.rounds.done % _VERIFY_EVERY == 0:
            self.cache.verify()
            self._verified += 1
        reads = min(self.reader.reads, self._config.reads)
        self._progress(reads - self._shown)
        self._shown = reads
        if self._stalled():
            self.rounds.stop.set()

    def _stalled(self) -> bool:
        """Whether a whole round made no progress towards the missing counts, so that another would make none either."""
        if self.rounds.done % max(_STALL_AFTER, self._round):
            return False
        reads, evictions = self.reader.reads, self.watch.evictions
        stalled = reads < self._config.reads and reads == self._reads_then
        stalled |= evictions < self._config.evictions and evictions == self._evictions_then
        self._reads_then, self._evictions_then = reads, evictions
        return stalled

    def _figures(self) -> list[Figure]:
        """All figures after both threads have ended."""
        config = self._config
        reader = self.reader
        watch = self.watch
        contents = self.contents
        stats, kept = self.cache.stats(), _cached(self.cache.core.tokens)
        differ = sum(len(contents.cached[tier] ^ kept[tier]) for tier in kept)
        forgotten = stats.forgotten_host_blocks + stats.redundant_dropped
        return [
            at_least("pinned reads", reader.reads, config.reads),
            equal("leases that the pool gave", reader.last_lease, reader.opened, "that the reader got"),
            equal("leases closed", reader.reads, reader.opened, "opened"),
            equal("leases open at the end", stats.leases),
            equal("blocks pinned at the end", stats.device.pinned + stats.host.pinned),
            Figure("blocks read", reader.blocks),
            Figure("pins refused: the content had gone", reader.missed),
            equal("comparisons of a block's bytes", reader.checks, 2 * reader.blocks, "two for each block read"),
            equal("blocks with wrong bytes", reader.wrong),
            equal("blocks with content that no request has", reader.unknown),
            at_least("host evictions", watch.evictions, config.evictions),
            at_least("... where a pinned block would have been the victim", watch.shielded, config.shielded),
            equal("host blocks forgotten or dropped", forgotten, watch.evictions, "evictions"),
            equal("host blocks in removed events", contents.removed, watch.evictions, "evictions"),
            equal("host blocks in stored events", contents.stored, stats.offloaded_blocks, "offloaded"),
            equal("events dropped or missing", stats.events_dropped + contents.gaps),
            equal("keys in which events and pool differ", differ),
            equal("blocks lost", stats.lost_blocks),
            at_least("verify() clean, times", self._verified, 1),
        ]


def _cached(state: State) -> dict[str, set[bytes]]:
    """The keys of what is cached on each tier, as the state has them."""
    kept: dict[str, set[bytes]] = {"device": set(), "host": set()}
    for b in np.flatnonzero(state.blocks["flags"] & PUBLISHED):
        block = state.blocks[b]
        kept["device" if b < state.head.device_blocks else "host"].add(
            block["key0"].tobytes() + block["key1"].tobytes()
        )
    return kept
