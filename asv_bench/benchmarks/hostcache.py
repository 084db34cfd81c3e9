"""The host tier of an engine that keeps its own blocks: each verb for 60 keys, single keys, and copies of pages beside
memcpy of the same fragments."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from statistics import median
from time import perf_counter, sleep, thread_time
from typing import Any

import numpy as np

from kvpool import HostCache, HostTier, ModelIdentity, PagedKV
from kvpool.common.jit import jit
from kvpool.common.jit.intrinsics import memcpy
from kvpool.device.regions import BYTES, FROM, TO
from kvpool.hostcache import HostCopies
from kvpool.storage import HostStorageManager, MemoryStore

KEYS, KEY_BYTES, BLOCKS = 60, 36, 16_384
IDENTITY = ModelIdentity("benchmark", "1", "float16", "pages", "1")


def keys(count: int) -> list[bytes]:
    return [os.urandom(KEY_BYTES) for _ in range(count)]


def best(calls: list[Callable[[], Any]]) -> float:
    """Seconds of the fastest call."""
    times = []
    for call in calls:
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return min(times)


class Verbs:
    """Microseconds of one call for 60 keys of 36 bytes, on a full cache of 16,384 blocks; the best of 100."""

    params = ["lookup", "reserve", "reserve_here", "publish", "abort", "pin", "unpin", "touch", "forget"]
    param_names = ["verb"]
    unit = "us"

    def setup(self, verb: str) -> None:
        self.cache = HostCache(BLOCKS, 4096, identity=IDENTITY, policy="lru")
        self.prompts = [keys(KEYS) for _ in range(2 * BLOCKS // KEYS)]
        for prompt in self.prompts:
            self.cache.reserve(prompt)
            self.cache.publish(prompt)

    def teardown(self, verb: str) -> None:
        self.cache.close()

    def _calls(self, verb: str) -> list[Callable[[], Any]]:
        cache, cached, new = self.cache, self.prompts[-100:], [keys(KEYS) for _ in range(100)]
        if verb in ("publish", "abort"):
            for prompt in new:
                cache.reserve(prompt)
            return [lambda prompt=prompt: getattr(cache, verb)(prompt) for prompt in new]  # type: ignore[misc]
        if verb == "unpin":
            return [lease.close for lease in [cache.pin(prompt) for prompt in cached]]
        name, prompts = ("reserve", new if verb == "reserve" else cached) if "reserve" in verb else (verb, cached)
        return [lambda prompt=prompt: getattr(cache, name)(prompt) for prompt in prompts]  # type: ignore[misc]

    def track_verb(self, verb: str) -> float:
        best(self._calls(verb)[:1])
        return 1e6 * best(self._calls(verb))

    track_verb.unit = "us"  # type: ignore[attr-defined]


class StorageManager:
    """Microseconds of the scheduler's thread with a store for the cache, for 60 keys: the best of 100. "idle" is one
    poll that has nothing to do. "cached" and "absent" are finds of single keys, in the cache and found absent a moment
    ago. "save" is publishing and the poll that begins the save, "saved" the poll that records its end, "ask" finding
    and the poll that looks the keys up in the store."""

    params = ["idle", "cached", "absent", "save", "saved", "ask"]
    param_names = ["call"]
    unit = "us"

    def setup(self, call: str) -> None:
        self.cache = HostCache(BLOCKS, 4096, identity=IDENTITY, policy="lru")
        self.tier = HostTier.of(self.cache)
        self.store = MemoryStore(1 << 30)
        self.storage = HostStorageManager(self.cache, self.tier, [self.store], retry_seconds=1e6)

    def teardown(self, call: str) -> None:
        self.storage.close()
        self.cache.close()
        self.tier.close()

    def _save(self, batch: list[bytes]) -> None:
        """Save keys, and do not poll after that."""
        before = self._saved()
        self.storage.publish(batch)
        self.storage.poll()
        while self._saved() < before + len(batch):
            sleep(0.001)

    def _saved(self) -> int:
        return self.storage.stats().stores[0].blocks["save", "ok"]

    def track_call(self, call: str) -> float:
        storage, times = self.storage, []
        for _ in range(100):
            batch = keys(KEYS)
            if call in ("cached", "save", "saved"):
                self.cache.reserve(batch)
            if call == "saved":
                self._save(batch)
            if call == "cached":
                self.cache.publish(batch)
            if call == "absent":
                storage.lookup(batch)
                storage.drain(60)
            start = perf_counter()
            if call in ("cached", "absent", "ask"):
                for key in batch:
                    storage.find(key)
            if call == "save":
                storage.publish(batch)
            if call in ("idle", "save", "saved", "ask"):
                storage.poll()
            times.append(perf_counter() - start)
            storage.drain(60)
        return 1e6 * min(times)

    track_call.unit = "us"  # type: ignore[attr-defined]


class Saturated(StorageManager):
    """CPU time of the scheduler's thread for each saved block, less what ``HostCache.publish`` takes for another: 40
    steps of 60 keys while the store is busy, and the polls that record their ends. The median of 20 rounds."""

    params = ["saved"]

    def track_call(self, call: str) -> float:
        store, gate = self.store, threading.Event()
        save, spent = store.save, []
        store.save = lambda *arguments: gate.wait() and save(*arguments)  # type: ignore[assignment, method-assign]
        for _ in range(20):
            steps, others = [[keys(KEYS) for _ in range(40)] for _ in range(2)]
            gate.clear()
            cpu_time = self._cpu(steps, self._step)
            gate.set()
            while self.storage._busy:
                sleep(0.003)
                cpu_time += self._cpu([[]], self._step)
            spent.append((cpu_time - self._cpu(others, self.cache.publish)) / (40 * KEYS))
        return 1e6 * median(spent)

    track_call.unit = "us"  # type: ignore[attr-defined]

    def _step(self, batch: list[bytes]) -> None:
        self.storage.publish(batch)
        self.storage.poll()

    def _cpu(self, steps: list[list[bytes]], step: Callable[[list[bytes]], Any]) -> float:
        for batch in steps:
            self.cache.reserve(batch)
        began = thread_time()
        for batch in steps:
            step(batch)
        return thread_time() - began


class SingleKeys(Verbs):
    """Finds as of an engine that looks up one key after the other."""

    params = ["find"]

    def track_verb(self, verb: str) -> float:
        batch = [key for prompt in self.prompts[-100:] for key in prompt]
        return 1e6 * best([lambda key=key: self.cache.find(key) for key in batch])  # type: ignore[misc]

    track_verb.unit = "us"  # type: ignore[attr-defined]


@jit
def plain(fragments: Any) -> None:
    """A memcpy for each fragment."""
    for i in range(fragments.shape[0]):
        memcpy(fragments[i, TO], fragments[i, FROM], fragments[i, BYTES])


class Copies:
    """60 chunks of 32 layers of pages at random places, in both directions, beside memcpy of the same fragments.

    The two alternate, each on memory that the other has not just brought into a cache; the best of each counts.
    """

    params = ([4 << 10, 32 << 10, 64 << 10], ["copy_in", "copy_out"])
    param_names = ["page_bytes", "direction"]
    chunks, layers = 60, 32

    def setup(self, page_bytes: int, direction: str) -> None:
        self.pages = [np.ones((self.chunks * 8, page_bytes), np.uint8) for _ in range(self.layers)]
        block_bytes = self.layers * page_bytes
        self.tier = HostTier(max(2 * self.chunks, (64 << 20) // block_bytes), block_bytes, identity=IDENTITY)
        self.tier.blocks[...] = 0
        self.copies = HostCopies(self.tier, PagedKV.of(self.pages, "L | B D"), device="cpu")
        self.time_copy(page_bytes, direction)

    def teardown(self, page_bytes: int, direction: str) -> None:
        self.copies.close()
        self.tier.close()

    def _places(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(seed)
        blocks, hosts = random.permutation(len(self.pages[0])), random.permutation(self.tier.host_blocks)
        return blocks[: self.chunks], hosts[: self.chunks]

    def _fragments(self, seed: int, direction: str) -> np.ndarray:
        blocks, hosts = self._places(seed)
        size = self.pages[0].shape[1]
        rows = [
            (page.ctypes.data + int(block) * size, self.tier.blocks[host].ctypes.data + layer * size, size)
            for block, host in zip(blocks, hosts, strict=True)
            for layer, page in enumerate(self.pages)
        ]
        fragments = np.array(rows, np.int64)
        return fragments if direction == "copy_in" else fragments[:, [TO, FROM, BYTES]]

    def time_copy(self, page_bytes: int, direction: str) -> None:
        getattr(self.copies, direction)(*self._places(0))

    def track_share_of_memcpy(self, page_bytes: int, direction: str) -> float:
        """Speed of the copy, memcpy of the same fragments = 1."""
        ours, theirs = [], []
        for i in range(20):
            fragments = np.ascontiguousarray(self._fragments(2 * i, direction))
            places, copy = self._places(2 * i + 1), getattr(self.copies, direction)
            ours.append(best([lambda places=places, copy=copy: copy(*places)]))  # type: ignore[misc]
            theirs.append(best([lambda fragments=fragments: plain(fragments)]))  # type: ignore[misc]
        return min(theirs) / min(ours)

    track_share_of_memcpy.unit = "x memcpy"  # type: ignore[attr-defined]
