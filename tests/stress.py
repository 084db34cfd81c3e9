"""``python -m tests.stress [TRACE]``: a replay that evicts host blocks all the time on one thread, and on another one a
reader that pins them and compares every byte. At the end all counts are compared with each other."""

from __future__ import annotations

import argparse
import ctypes
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from random import Random
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arrays.layout import BlockLayout
from kvpool.common.process import Closing
from kvpool.common.progress import shown_progress
from kvpool.errors import BlockNotFound
from kvpool.pool.leases import Lease
from kvpool.tools.replay import Replay, ReplayConfig, Request, Trace, read_trace, synthetic
from kvpool.tools.replay.content import KVBytes, names_of, token_states
from kvpool.tools.replay.engine import worst_blocks
from tests import debug

EVENTS = 1 << 16
"""The number of events that the pool keeps. One request of a long trace causes fewer."""
_PRUNE_EVERY = 64
_VERIFY_EVERY = 50
_STALL_AFTER = 1_000
"""The number of requests between two checks that reads and evictions still grow."""
_BURST = 32
_LONG = 0.03
_LONG_TURNS = 20
"""The number of pins that one turn of the reader opens, the share of long ones, and the turns that a long one lasts."""
_SWITCH_SECONDS = 1e-4
"""How long one thread may keep the interpreter while the other waits."""


class Figure(NamedTuple):
    """A count, and the value that it must have, or must reach."""

    name: str
    value: int
    bound: int = 0
    at_least: bool = False

    @property
    def ok(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value == self.bound

    def __str__(self) -> str:
        relation = ">=" if self.at_least else "="
        return f"{'ok' if self.ok else 'FAILED':<7} {self.name:<48} {self.value:>12,}  {relation} {self.bound:,}"


@dataclass(frozen=True)
class StressConfig:
    """The replay, and the numbers of pinned reads and host evictions that the run must reach. ``replay`` needs
    ``events`` and ``verify``."""

    replay: ReplayConfig
    reads: int
    evictions: int
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
        """Return the bytes of the block with this key, or None if no learned request has the key."""
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
            names, cached = names_of(event.keys), self.cached[event.tier]
            if event.kind == "stored":
                cached.update(names)
                self.stored += len(names) if event.tier == "host" else 0
            elif event.kind == "removed":
                cached.difference_update(names)
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

    def __init__(self, replay: Replay, contents: ExpectedContents, seed: int) -> None:
        self._cache, self._contents = replay.cache, contents
        self._random = Random(seed)
        self._state, self._block_bytes = replay.cache.core.tokens, replay.config.layout.block_bytes
        self._most = max(1, replay.config.host_blocks // 3)
        self._open: list[_Open] = []
        self._known: deque[int] = deque([replay.config.device_blocks], maxlen=256)
        self._turn = self._pinned = 0
        self.reads = self.opened = self.blocks = self.last_lease = 0
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
        """Return the keys of pinned blocks, which cannot change."""
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


class Stress(Closing):
    """One run. A context manager: leaving it closes the pool. ``run`` does the work once and returns the figures.
    Errors of either thread propagate."""

    def __init__(self, trace: Trace, config: StressConfig, *, progress: Callable[[int], Any] | None = None) -> None:
        self._config = config
        self._trace = trace
        self.replay = Replay(trace, config.replay)
        self.cache = self.replay.cache
        self.contents = ExpectedContents(self.replay)
        self.reader = Reader(self.replay, self.contents, config.seed)
        self.stop = threading.Event()
        self._progress = progress or (lambda count: None)
        self._done = self._shown = self._evictions = self._evicted_beside_pins = 0
        self._before = (0, 0)

    def close(self) -> None:
        self.replay.close()

    def run(self) -> list[Figure]:
        """Replay until the reader has enough, then check all counts."""
        thread = threading.Thread(target=self.reader.work, args=(self._enough, self.stop), name="stress reader")
        switch_seconds = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        thread.start()
        try:
            self.replay.run(self._requests())
        finally:
            self.stop.set()
            thread.join()
            sys.setswitchinterval(switch_seconds)
        if self.reader.error is not None:
            raise self.reader.error
        self.cache.verify()
        self.contents.follow()
        self._count()
        return self._figures()

    def _requests(self) -> Iterator[Request]:
        """Yield the requests of the trace again and again, until the run is stopped."""
        for request in cycle(self._trace.requests):
            numbered = replace(request, index=self._done)
            yield numbered
            self._done += 1
            if worst_blocks(numbered, self.cache.tokens_per_block) <= self.cache.device_blocks:
                self.contents.learn(numbered)
            self._look()
            if self.stop.is_set():
                return

    def _look(self) -> None:
        """Follow the pool after a request."""
        self.contents.follow()
        self._count()
        if self._done % _PRUNE_EVERY == 0:
            self.contents.prune()
        if self._done % _VERIFY_EVERY == 0:
            self.cache.verify()
        reads = min(self.reader.reads, self._config.reads)
        self._progress(reads - self._shown)
        self._shown = reads
        if self._is_stalled():
            self.stop.set()

    def _count(self) -> None:
        """Count the host evictions since the last call, and those after which blocks were pinned."""
        stats = self.cache.stats()
        evictions = stats.forgotten_host_blocks + stats.redundant_dropped
        if stats.host.pinned:
            self._evicted_beside_pins += evictions - self._evictions
        self._evictions = evictions

    def _enough(self) -> bool:
        return self.reader.reads >= self._config.reads and self._evictions >= self._config.evictions

    def _is_stalled(self) -> bool:
        """Whether a whole round of the trace added nothing to a count that is not reached yet."""
        if self._done % max(_STALL_AFTER, len(self._trace.requests)):
            return False
        counts, wanted = (self.reader.reads, self._evictions), (self._config.reads, self._config.evictions)
        before, self._before = self._before, counts
        return any(now == old < most for now, old, most in zip(counts, before, wanted, strict=True))

    def _figures(self) -> list[Figure]:
        """Return all figures after both threads have ended."""
        reader, contents, evictions = self.reader, self.contents, self._evictions
        stats, kept = self.cache.stats(), debug.cached(self.cache.core.tokens)
        differ = sum(len(contents.cached[tier] ^ kept[tier].keys()) for tier in kept)
        return [
            Figure("pinned reads", reader.reads, self._config.reads, at_least=True),
            Figure("leases that the pool gave", reader.last_lease, reader.opened),
            Figure("leases closed", reader.reads, reader.opened),
            Figure("leases open at the end", stats.leases),
            Figure("blocks pinned at the end", stats.device.pinned + stats.host.pinned),
            Figure("comparisons, two for each block read", reader.checks, 2 * reader.blocks),
            Figure("blocks with wrong bytes", reader.wrong),
            Figure("blocks with content that no request has", reader.unknown),
            Figure("host evictions", evictions, self._config.evictions, at_least=True),
            Figure(
                "... while blocks were pinned", self._evicted_beside_pins, self._config.evictions // 10, at_least=True
            ),
            Figure("host blocks in removed events, evictions", contents.removed, evictions),
            Figure("host blocks in stored events, offloads", contents.stored, stats.offloaded_blocks),
            Figure("events dropped or missing", stats.events_dropped + contents.gaps),
            Figure("keys in which events and pool differ", differ),
            Figure("blocks lost", stats.lost_blocks),
        ]


def main(arguments: list[str] | None = None) -> int:
    """Run the stress, print its figures, and return 1 if one of them is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("trace", nargs="?", help="as for kvpool replay; none: a synthetic workload")
    parser.add_argument("--reads", type=int, default=1_000_000, help="pinned reads (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the workload and of the reader (default: 0)")
    options = parser.parse_args(arguments)
    layout = BlockLayout.of_block_bytes(2048, 16 if options.trace is None else 128)
    trace = synthetic(seed=options.seed) if options.trace is None else read_trace(options.trace)
    replay = ReplayConfig(layout, 1024, 128, device="cpu", verify=True, events=EVENTS)
    config = StressConfig(replay, options.reads, options.reads // 10, options.seed)
    print(f"seed {options.seed}: {trace.name}")
    with shown_progress(options.reads, " reads") as progress, Stress(trace, config, progress=progress) as stress:
        figures = stress.run()
    print(*figures, sep="\n")
    if stress.reader.first_wrong:
        print(f"wrong bytes, first in {stress.reader.first_wrong}")
    return 0 if all(figure.ok for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
