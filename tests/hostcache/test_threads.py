"""Threads that use one cache at the same time: one writer a key, one content a block."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvpool import BlockNotFound, HostCache, HostTier, OutOfBlocks
from tests.hostcache.conftest import IDENTITY

NAMES = [f"key {i}".encode() for i in range(40)]


def test_a_block_is_written_by_one_and_read_with_its_content(make: Callable[..., HostCache]) -> None:
    """Six threads reserve, write, publish, pin and read; a byte of another key, or one that changes, is a failure."""
    cache = make(16, 64)
    tier = HostTier(16, 64, identity=IDENTITY)
    seen = [0, 0]

    def content(key: bytes) -> int:
        return 1 + NAMES.index(key)

    def store(random: np.random.Generator) -> None:
        taken = cache.reserve([NAMES[i] for i in random.integers(0, len(NAMES), 3)])
        for key, block in zip(taken.keys, taken.blocks.tolist(), strict=True):
            tier.blocks[block] = content(key)
        if random.random() < 0.2:
            cache.abort(taken.keys)
        else:
            seen[0] += cache.publish(taken.keys)

    def load(random: np.random.Generator) -> None:
        here = [key for key in NAMES if cache.find(key) == cache.HERE][:4]
        with cache.pin(here) as lease:
            for key, block in zip(lease.keys, lease.blocks.tolist(), strict=True):
                assert (tier.blocks[block] == content(key)).all(), key
                seen[1] += 1

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        barrier.wait()
        for _ in range(150):
            try:
                (store if random.random() < 0.5 else load)(random)
            except (OutOfBlocks, BlockNotFound):
                pass  # Others hold too much, or have evicted it since.
            if random.random() < 0.05:
                cache.forget([NAMES[int(random.integers(len(NAMES)))]])

    barrier = threading.Barrier(6)
    with ThreadPoolExecutor(6) as threads:
        for future in [threads.submit(work, seed) for seed in range(6)]:
            future.result()
    assert cache.stats().used == 0 and seen[0] and seen[1]


def test_nobody_reserves_a_key_before_its_old_order_is_forgotten(make: Callable[..., HostCache]) -> None:
    """Else the order of the new reservation would be lost, and the beginning of a prompt evicted before its end."""
    cache, seen = make(4, 64), list[bool]()

    class Order(dict[bytes, int]):
        def pop(self, key: bytes, *default: object) -> object:
            other = threading.Thread(target=lambda: seen.append(cache._lock.acquire(blocking=False)))
            other.start()
            other.join()
            return super().pop(key, *default)

    cache.reserve(NAMES[:2])
    cache._order = Order(cache._order)
    cache.abort(NAMES[:2])
    assert seen == [False, False] and not cache._order
