"""``python -m tests.stress``: a replay that evicts host blocks all the time on one thread, and on another one a reader
that pins them and compares every byte. At the end all counts are compared with each other."""

from __future__ import annotations

import argparse
import ctypes
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np

from kvpool.common.arrays.layout import BlockLayout
from kvpool.common.process import Closing
from kvpool.errors import BlockNotFound
from kvpool.pool.leases import Lease
from kvpool.tools.replay import Replay, ReplayConfig, Trace, synthetic
from kvpool.tools.replay.content import KVBytes, names_of, token_states
from tests import debug

REQUESTS = 100
_ROUNDS = 10_000
"""The number of requests of a round, and of rounds after which a run ends that has not reached its counts."""
_BURST = 32
_LONG = 0.03
_LONG_TURNS = 20
"""The number of pins that one turn of the reader opens, the share of long ones, and the turns that a long one lasts."""
_SWITCH_SECONDS = 1e-4
"""How long one thread may keep the interpreter while the other waits."""


class Figure(NamedTuple):
    """A count, and what it must be."""

    name: str
    value: int
    expected: int = 0

    @property
    def ok(self) -> bool:
        return self.value == self.expected

    def __str__(self) -> str:
        return f"{'ok' if self.ok else 'FAILED':<7} {self.name:<48} {self.value:>12,}  = {self.expected:,}"


@dataclass(frozen=True)
class StressConfig:
    """The replay, which needs ``verify``, and the numbers of pinned reads and host evictions that the run must
    reach."""

    replay: ReplayConfig
    reads: int
    evictions: int
    seed: int = 0


def contents_of(replay: Replay) -> dict[bytes, bytes]:
    """The bytes of every full block of the requests and their answers by their keys, computed from tokens alone."""
    layout, contents = replay.config.layout, dict[bytes, bytes]()
    for request in replay.trace.requests:
        names = {"salt": request.salt, "adapter_id": request.adapter_id}
        tokens = np.concatenate([request.prompt(), request.output()])
        keys = names_of(replay.cache.block_keys(tokens, **names).keys)
        states = token_states(tokens, layout.tokens_per_block, **names)[: len(keys) * layout.tokens_per_block]
        blocks = np.zeros(layout.host_shape(len(keys)), layout.storage_dtype)
        writer = KVBytes(layout, blocks, layout.host_strides(len(keys)), len(keys))
        writer.write(states.reshape(len(keys), -1), np.arange(len(keys)))
        contents.update((key, block.tobytes()) for key, block in zip(keys, blocks, strict=True))
    return contents


class _Open(NamedTuple):
    """A lease whose bytes were right, its expected bytes, and the turn in which it is checked again and closed."""

    lease: Lease
    expected: list[bytes | None]
    until: int


class Reader:
    """Pins host blocks of a pool in many overlapping leases, and compares each block when its lease begins and before
    it ends.

    Its thread runs ``work``, until ``enough`` returns True or ``stop`` is set. A *read* is one lease. It reads memory
    at the addresses of leases, as a reader from another process would. ``host_keys``: the keys of the host tier, as
    the other thread saw them last.
    """

    def __init__(self, replay: Replay, seed: int) -> None:
        self._cache, self._contents = replay.cache, contents_of(replay)
        self.host_keys: list[bytes] = []
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
        keys = self.host_keys
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
        expected = [self._contents.get(key) for key in wanted]
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

    def __init__(self, trace: Trace, config: StressConfig) -> None:
        self._config = config
        self.replay = Replay(trace, config.replay, progress=lambda count: self._look())
        self.cache = self.replay.cache
        self.reader = Reader(self.replay, config.seed)
        self.stop = threading.Event()
        self._evictions = self._evicted_beside_pins = 0

    def close(self) -> None:
        self.replay.close()

    def run(self) -> list[Figure]:
        """Replay until the reader has enough, then check all counts."""
        thread = threading.Thread(target=self.reader.work, args=(self._enough, self.stop), name="stress reader")
        switch_seconds = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        thread.start()
        try:
            for _ in range(_ROUNDS):
                self.replay.run()
                if self.stop.is_set():
                    break
        finally:
            self.stop.set()
            thread.join()
            sys.setswitchinterval(switch_seconds)
        if self.reader.error is not None:
            raise self.reader.error
        self._look()
        return self._figures()

    def _look(self) -> None:
        """Give the reader the keys of the host tier, and count the host evictions since the last call, and those after
        which blocks were pinned."""
        self.reader.host_keys = [*debug.cached(self.cache.core.tokens)["host"]]
        stats = self.cache.stats()
        evictions = stats.forgotten_host_blocks + stats.redundant_dropped
        if stats.host.pinned:
            self._evicted_beside_pins += evictions - self._evictions
        self._evictions = evictions

    def _enough(self) -> bool:
        return self.reader.reads >= self._config.reads and self._evictions >= self._config.evictions

    def _figures(self) -> list[Figure]:
        """Return all figures after both threads have ended."""
        reader, stats = self.reader, self.cache.stats()
        least = (
            ("pinned reads", reader.reads, self._config.reads),
            ("host evictions", self._evictions, self._config.evictions),
            ("... while blocks were pinned", self._evicted_beside_pins, self._config.evictions // 10),
        )
        return [
            *(Figure(f"{name}, counted up to {bound:,}", min(value, bound), bound) for name, value, bound in least),
            Figure("leases that the pool gave", reader.last_lease, reader.opened),
            Figure("leases closed", reader.reads, reader.opened),
            Figure("leases open at the end", stats.leases),
            Figure("blocks pinned at the end", stats.device.pinned + stats.host.pinned),
            Figure("comparisons, two for each block read", reader.checks, 2 * reader.blocks),
            Figure("blocks with wrong bytes", reader.wrong),
            Figure("blocks with content that no request has", reader.unknown),
            Figure("blocks lost", stats.lost_blocks),
        ]


def main(arguments: list[str] | None = None) -> int:
    """Run the stress, print its figures, and return 1 if one of them is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("--reads", type=int, default=1_000_000, help="pinned reads (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the workload and of the reader (default: 0)")
    options = parser.parse_args(arguments)
    replay = ReplayConfig(BlockLayout.of_block_bytes(2048, 16), 1024, 128, device="cpu", verify=True)
    config = StressConfig(replay, options.reads, options.reads // 10, options.seed)
    print(f"seed {options.seed}")
    with Stress(synthetic(REQUESTS, seed=options.seed), config) as stress:
        figures = stress.run()
    print(*figures, sep="\n")
    if stress.reader.first_wrong:
        print(f"wrong bytes, first in {stress.reader.first_wrong}")
    return 0 if all(figure.ok for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
