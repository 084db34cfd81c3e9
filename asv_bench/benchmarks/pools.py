"""Pools, prompts and the base that most benchmarks share: blocks of a few bytes, so that what is timed is not the
moving of KV."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import kvpool

TOKENS_PER_BLOCK = 16
PROMPT_TOKENS = 4_096
LONG_PROMPT_TOKENS = 131_072
THREADS = 2

Prompt = npt.NDArray[np.int32]


def make_pool(device_blocks: int, host_blocks: int = 0, **options: Any) -> kvpool.KVCacheManager:
    """A pool, in main memory unless a device is given, whose functions are compiled and loaded: a request has passed
    through."""
    layout = kvpool.BlockLayout(1, 1, 1, TOKENS_PER_BLOCK, dtype="uint8", planes=1)
    cache = kvpool.KVCacheManager(
        layout, device_blocks=device_blocks, host_blocks=host_blocks, **{"device": "cpu", **options}
    )
    keys = cache.block_keys(np.arange(TOKENS_PER_BLOCK + 1, dtype=np.int32))
    for _ in range(2):
        ids = cache.add_sequence_batch([keys]).ids
        cache.append_tokens(ids, np.arange(2, dtype=np.int32), np.array([2]))
        cache.commit(ids)
        cache.release(ids)
    cache.match_prefix(keys)
    cache.clear()
    return cache


def make_prompts(count: int, tokens: int, seed: int = 0) -> list[Prompt]:
    """Prompts that share nothing, each one token longer than ``tokens``, so that all of ``tokens`` can match."""
    random = np.random.default_rng(seed)
    return list(random.integers(0, 128_000, (count, tokens + 1), dtype=np.int32))


def blocks_of(tokens: int) -> int:
    """Blocks that a prompt of ``make_prompts`` takes."""
    return tokens // TOKENS_PER_BLOCK + 1


def store(cache: kvpool.KVCacheManager, prompts: list[Any]) -> None:
    """Have each prompt pass through, so that it stays cached for as long as nothing evicts it."""
    for prompt in prompts:
        sequence = cache.add_sequence(prompt)
        cache.commit(sequence)
        cache.release(sequence)


class Pooled:
    """Base of the benchmarks with a pool, ``self.cache``: closes it. asv tears down also what ``setup`` has skipped."""

    cache: kvpool.KVCacheManager

    def teardown(self, *parameters: Any) -> None:
        if hasattr(self, "cache"):
            self.cache.close()


class Once(Pooled):
    """Base of those whose operation uses its preparation up: one run for each ``setup``."""

    number = 1
    repeat = 10
    rounds = 1
    warmup_time = 0.0
