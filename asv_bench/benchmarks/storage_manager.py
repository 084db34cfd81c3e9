"""The storage manager: the cost of saving for the scheduler's thread, and for its own thread, per block; admissions
beside a storage manager under full load."""

from __future__ import annotations

import gc
import time
from statistics import median, quantiles

import kvpool
from kvpool.storage import MemoryStore, StorageManager

from .pools import PROMPT_TOKENS, Pooled, blocks_of, make_pool, make_prompts

IDENTITY = kvpool.ModelIdentity("benchmark", "1", "uint8", "tiny", "1")
BATCH = 4


def open_storage(cache: kvpool.KVCacheManager) -> StorageManager:
    return StorageManager(cache, [MemoryStore(1 << 30)], identity=IDENTITY, queued_blocks=1 << 20, staging_blocks=256)


class Saved(Pooled):
    """CPU time of the scheduler's thread for requests that are admitted, committed and released, for each block that
    is saved: with a storage manager, minus the time with neither it nor events. Medians of alternating rounds."""

    rounds = 20

    def setup(self) -> None:
        blocks = 2 * BATCH * blocks_of(PROMPT_TOKENS)
        self.cache = make_pool(blocks, blocks, event_capacity=1 << 17)
        self.plain = make_pool(blocks, blocks)
        self.storage = open_storage(self.cache)

    def teardown(self, *params: object) -> None:
        self.storage.close()
        self.plain.close()
        super().teardown(*params)

    def round(self, cache: kvpool.KVCacheManager, seed: int) -> float:
        """Seconds of this thread's CPU for one batch."""
        prompts = [cache.block_keys(prompt) for prompt in make_prompts(BATCH, PROMPT_TOKENS, seed)]
        gc.collect()
        began = time.thread_time()
        ids = cache.add_sequence_batch(prompts).ids
        cache.commit(ids)
        cache.release(ids)
        return time.thread_time() - began

    def track_scheduler_per_block(self) -> float:
        with_saves, without = [], []
        for seed in range(self.rounds):
            before = self.storage.stats().saved_blocks
            with_saves.append(self.round(self.cache, seed))
            assert self.storage.drain(60.0)
            saved = self.storage.stats().saved_blocks - before
            assert saved == BATCH * (blocks_of(PROMPT_TOKENS) - 1), saved
            without.append(self.round(self.plain, seed))
        blocks = BATCH * (blocks_of(PROMPT_TOKENS) - 1)
        return 1e9 * (median(with_saves) - median(without)) / blocks

    track_scheduler_per_block.unit = "ns"  # type: ignore[attr-defined]

    def track_own_thread_per_block(self) -> float:
        """Wall time from the end of the scheduler's calls until all is saved, for each block."""
        spent = []
        for seed in range(self.rounds):
            self.round(self.cache, 1000 + seed)
            began = time.perf_counter()
            assert self.storage.drain(60.0)
            spent.append(time.perf_counter() - began)
        return 1e6 * median(spent) / (BATCH * (blocks_of(PROMPT_TOKENS) - 1))

    track_own_thread_per_block.unit = "us"  # type: ignore[attr-defined]


class Beside(Pooled):
    """``add_sequence`` of new prompts of 4,096 tokens, 2 ms apart, whose blocks a storage manager saves meanwhile: the
    90th percentile, that of a pool without one = 1. The two alternate."""

    rounds, requests = 6, 60

    def setup(self) -> None:
        blocks = self.requests * blocks_of(PROMPT_TOKENS)
        self.cache, self.plain = make_pool(blocks, blocks, event_capacity=1 << 17), make_pool(blocks, blocks)
        self.storage = open_storage(self.cache)

    def teardown(self, *params: object) -> None:
        self.storage.close()
        self.plain.close()
        super().teardown(*params)

    def round(self, cache: kvpool.KVCacheManager, seed: int) -> list[float]:
        spent = []
        for prompt in [cache.block_keys(tokens) for tokens in make_prompts(self.requests, PROMPT_TOKENS, seed)]:
            began = time.perf_counter()
            sequence = cache.add_sequence(prompt)
            spent.append(time.perf_counter() - began)
            cache.commit(sequence)
            cache.release(sequence)
            time.sleep(0.002)
        return spent

    def track_p90(self) -> float:
        beside, alone = [], []
        for seed in range(self.rounds):
            beside += self.round(self.cache, 2 * seed)
            assert self.storage.drain(60.0)
            alone += self.round(self.plain, 2 * seed + 1)
        return quantiles(beside, n=10)[-1] / quantiles(alone, n=10)[-1]

    track_p90.unit = "x"  # type: ignore[attr-defined]
