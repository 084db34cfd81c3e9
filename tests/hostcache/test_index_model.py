"""Random calls do in a host cache what they do in a model of dictionaries, order of eviction included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpool import HostCache, OutOfBlocks
from kvpool.errors import BlockNotFound, ReservationExpired
from kvpool.hostcache import HostLease
from kvpool.state.arrays import POLICIES
from tests.hostcache.conftest import Make
from tests.hostcache.model import Entry, Model
from tests.seeds import some_of

VERBS = ["reserve", "publish", "abort", "pin", "unpin", "touch", "forget", "clear", "wait"]
OFTEN = [6, 8, 1, 2, 5, 3, 0.3, 0.05, 1]
FEW_NAMES = [bytes([i]) * (1 + 7 * i % 64) for i in range(1, 30)]


class Pair:
    """A cache and its model. Each call is made on both, and must answer alike."""

    def __init__(self, cache: HostCache, clock: list[int], random: np.random.Generator) -> None:
        self.cache, self.clock, self.random, self.model = cache, clock, random, Model(cache.host_blocks)
        self.leases: list[tuple[HostLease, list[Entry]]] = []

    def some(self, names: list[bytes], least: int = 0) -> list[bytes]:
        """A few of these, some of them twice."""
        most = int(self.random.integers(least, 5))
        return [names[int(i)] for i in self.random.integers(0, len(names), most)] if names else []

    def step(self, verb: str) -> None:
        getattr(self, verb)()
        self.model.expire()
        for name in FEW_NAMES:
            assert self.cache.find(name) == self.model.look(name), (verb, name)
        stats = self.cache.stats()
        held = [entry for entry, pins in self.model.pins.items() if pins]
        pending = sum(entry.pending for entry in self.model.entries.values())
        assert (stats.pending, stats.pinned, stats.empty) == (pending, len(held), self.model.empty), verb
        assert (stats.expired_reservations, stats.overdue) == (self.model.expired, len(self.model.overdue)), verb
        assert sorted(self.cache.overdue()) == sorted(self.model.overdue), verb

    def reserve(self) -> None:
        keys, priority = self.some(FEW_NAMES), int(self.random.choice([35, 35, 10, 80]))
        ttl = None if self.random.random() < 0.5 else int(self.random.integers(1, 20))
        deadline = None if self.random.random() < 0.3 else int(self.random.integers(1, 6))
        self.some_time()
        try:
            reservation = self.cache.reserve(
                keys, priority=priority, ttl_ms=ttl, deadline_seconds=None if deadline is None else deadline / 1000
            )
        except OutOfBlocks:
            assert self.model.reserve(keys, priority, ttl, deadline) is None
            return
        self.model.chosen = None if self.cache.policy == "lru" else list(reservation.evicted)
        assert (reservation.keys, reservation.evicted) == self.model.reserve(keys, priority, ttl, deadline)
        assert len(set(reservation.blocks.tolist())) == len(reservation.keys)

    def _end(self, verb: str) -> None:
        pending = [key for key, entry in self.model.entries.items() if entry.pending]
        keys = self.some(pending) + self.some(FEW_NAMES, 0)[: int(self.random.random() < 0.1)]
        self.some_time()
        try:
            expected = getattr(self.model, verb)(keys)
        except ReservationExpired:
            with pytest.raises(ReservationExpired):
                getattr(self.cache, verb)(keys)
            return
        if expected is None:
            with pytest.raises(BlockNotFound):
                getattr(self.cache, verb)(keys)
        else:
            assert getattr(self.cache, verb)(keys) == expected

    def publish(self) -> None:
        self._end("publish")

    def abort(self) -> None:
        self._end("abort")

    def pin(self) -> None:
        keys = self.here()
        held = self.model.pin(keys)
        if held is None:
            with pytest.raises(BlockNotFound):
                self.cache.pin(keys)
        else:
            self.leases.append((self.cache.pin(keys), held))

    def unpin(self) -> None:
        if self.leases:
            lease, held = self.leases.pop(int(self.random.integers(len(self.leases))))
            lease.close()
            self.model.unpin(held)

    def here(self) -> list[bytes]:
        """Keys that are here, and now and then another."""
        here = [key for key in FEW_NAMES if self.model.look(key) == self.cache.HERE]
        return self.some(here) + self.some(FEW_NAMES, 0)[: int(self.random.random() < 0.1)]

    def touch(self) -> None:
        keys = self.here()
        assert self.cache.touch(keys, turn=self.random.random() < 0.7) == self.model.touch(keys)

    def forget(self) -> None:
        keys = self.some(FEW_NAMES)
        assert self.cache.forget(keys) == self.model.forget(keys)

    def clear(self) -> None:
        self.cache.clear(force=True)
        self.model.clear()

    def some_time(self) -> None:
        """Now and then a deadline passes, and nobody has looked before the next call."""
        if self.random.random() < 0.3:
            self.clock[0] = self.model.now = self.clock[0] + int(self.random.integers(1, 8))

    def wait(self) -> None:
        self.clock[0] = self.model.now = self.clock[0] + int(self.random.integers(1, 8))
        if self.random.random() < 0.5:
            assert self.cache.refresh() == self.model.refresh()


@pytest.mark.parametrize("seed", some_of(8, range(20)))
def test_a_cache_does_what_its_model_does(make: Make, seed: int) -> None:
    random, clock = np.random.default_rng(seed), [0]
    options: dict[str, Any] = {"clock": lambda: clock[0], "event_capacity": 64, "policy": POLICIES[seed % 4]}
    pair = Pair(make(int(random.integers(2, 12)), **options), clock, random)
    chances = np.array(OFTEN) / sum(OFTEN)
    for step in range(400):
        pair.step(str(random.choice(VERBS, p=chances)))
        if step % 8 == 0:
            pair.cache.verify()
    print(f"seed {seed}: {pair.cache.stats()}")
    assert pair.model.expired
