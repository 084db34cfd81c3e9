"""Shared by tests of the host storage manager: an engine whose cache has a storage manager, and its fixture."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvpool import HostCache, HostTier
from kvpool.storage.host_storage_manager import HostStorageManager, HostStorageManagerStats
from tests.stores.lab import BLOCK_BYTES, IDENTITY, Gate, Wrong, content, names

ABSENT, HERE, PENDING = HostCache.ABSENT, HostCache.HERE, HostCache.PENDING


class Engine:
    """A cache, its memory and a storage manager, and an engine that writes and reads blocks of known content."""

    def __init__(
        self, *stores: Any, blocks: int = 16, identity: Any = IDENTITY, event_capacity: int = 0, **options: Any
    ) -> None:
        self.cache = HostCache(blocks, BLOCK_BYTES, identity=identity, event_capacity=event_capacity)
        self.tier = HostTier.of(self.cache)
        self.now = 1000.0
        self.manager = HostStorageManager(self.cache, self.tier, list(stores), **{"clock": lambda: self.now} | options)

    def later(self, seconds: float) -> None:
        """Time passes. The threads that watch deadlines look at the clock when a job begins."""
        self.now += seconds
        self.manager.find(b"another at %f" % self.now)
        self.manager.poll()

    def write(self, count: int, first: int = 0) -> list[int]:
        """Reserve, fill and publish blocks. Returns the rows."""
        taken = self.cache.reserve(names(count, first))
        for row, key in zip(taken.blocks.tolist(), taken.keys, strict=True):
            self.tier.blocks[row] = content(number_of(key))
        self.manager.publish(taken.keys)
        return taken.blocks.tolist()

    def saved(self, count: int, first: int = 0) -> None:
        """Write blocks, have them saved, and drop them from the cache."""
        self.write(count, first)
        assert self.manager.drain(600)
        self.cache.forget(names(count, first))

    @property
    def stats(self) -> HostStorageManagerStats:
        return self.manager.stats()

    def drain(self) -> None:
        assert self.manager.drain(600)

    def look(self, count: int, first: int = 0) -> list[int]:
        """What one lookup says of each."""
        return self.manager.lookup(names(count, first)).tolist()

    def ask(self, count: int, first: int = 0) -> list[int]:
        """Look up keys and read their blocks once. Return ABSENT or HERE for each."""
        self.manager.lookup(names(count, first))
        self.until(lambda: not self.manager.stats().searching)
        here = self.manager.lookup(names(count, first)) == HERE
        return np.where(here, HERE, ABSENT).tolist()

    def held(self, gate: Gate, count: int) -> None:
        """A call of the store for these keys hangs at the gate."""
        self.manager.lookup(names(count))
        self.until(gate.reached.is_set)

    def take(self, count: int) -> int:
        """Read a prompt as its blocks come, window by window. Returns how many came."""
        came, more = 0, True
        while more:
            said = [*self.ask(count - came, came), ABSENT]
            more = said[0] == HERE
            self.read(said.index(ABSENT), came)
            came += said.index(ABSENT)
        return came

    def until(self, right: Callable[[], bool]) -> None:
        end = time.monotonic() + 600
        self.manager.poll()
        while not right():
            assert time.monotonic() < end, self.manager.stats()
            time.sleep(0.001)
            self.manager.poll()

    def read(self, count: int, first: int = 0) -> None:
        """Pin blocks, and compare every byte."""
        with self.manager.pin(names(count, first)) as lease:
            for row, key in zip(lease.blocks.tolist(), lease.keys, strict=True):
                assert np.array_equal(self.tier.blocks[row], content(number_of(key))), key

    def close(self) -> None:
        assert self.manager.close(600)
        self.cache.verify()
        self.cache.close()
        self.tier.close()


Make = Callable[..., Engine]
"""Makes engines."""


def number_of(key: bytes) -> int:
    return int(key.split()[1])


def engines(store: Wrong) -> Iterator[Callable[..., Engine]]:
    """Makes engines, over this store unless others are given, and closes them."""
    opened: list[Engine] = []

    def build(*stores: Any, **options: Any) -> Engine:
        opened.append(Engine(*(stores or (store,)), **options))
        return opened[-1]

    yield build
    for engine in opened:
        if not engine.cache.closed:
            engine.close()
