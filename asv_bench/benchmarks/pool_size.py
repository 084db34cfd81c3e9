"""What a block costs as pools grow past every cache, and the memory that its state takes."""

from __future__ import annotations

from time import perf_counter

import kvpool
from kvpool.device.memory.main_memory import available_ram

from .pools import TOKENS_PER_BLOCK, Pooled, make_pool, make_prompts, store

# State, tokens and memory of a block, the prompts that fill the pool, and a margin.
BYTES_PER_BLOCK = 400
FILLING_TOKENS = 131_056


class PoolSize(Pooled):
    """Requests of 4,096 tokens with ready keys, in a pool full of committed content: time per block of the prompt,
    median of 200.

    "miss" evicts the oldest blocks of the pool; "hit" finds prompts at random places of it. The three calls of a
    request are counted: admission, commit and release.
    """

    params = [["hit", "miss"], [50_000, 500_000, 2_000_000, 10_000_000]]
    param_names = ["kind", "pool_blocks"]
    timeout = 600
    prompt_blocks, requests = 256, 200

    def setup(self, kind: str, pool_blocks: int) -> None:
        available = available_ram()
        if available is not None and available < BYTES_PER_BLOCK * pool_blocks:
            raise NotImplementedError(f"{BYTES_PER_BLOCK * pool_blocks >> 20} MiB are needed")
        self.cache = make_pool(pool_blocks)
        tokens = self.prompt_blocks * TOKENS_PER_BLOCK
        prompts = [self.cache.block_keys(prompt) for prompt in make_prompts(self.requests, tokens)]
        # What is asked for again lies between other content, as far apart as the pool allows.
        filling = -(-pool_blocks * TOKENS_PER_BLOCK // FILLING_TOKENS) + 1
        asked = min(self.requests, pool_blocks // self.prompt_blocks // 2) if kind == "hit" else 0
        for i in range(filling):
            store(self.cache, make_prompts(1, FILLING_TOKENS, seed=1 + i))
            store(self.cache, prompts[i * asked // filling : (i + 1) * asked // filling])
        cached = [prompt for prompt in prompts[:asked] if self.cache.match_prefix(prompt).tokens == tokens]
        self.asked = cached if kind == "hit" else prompts

    def track_time_per_block(self, kind: str, pool_blocks: int) -> float:
        times = []
        for keys in self.asked:
            start = perf_counter()
            self._serve(self.cache, keys)
            times.append(perf_counter() - start)
        return 1e9 * sorted(times)[len(times) // 2] / self.prompt_blocks

    track_time_per_block.unit = "ns/block"  # type: ignore[attr-defined]

    @staticmethod
    def _serve(cache: kvpool.KVCacheManager, keys: kvpool.BlockKeys) -> None:
        sequence = cache.add_sequence(keys)
        cache.commit(sequence)
        cache.release(sequence)


class StateMemory:
    """Peak memory of a process with a pool of this many blocks of one byte a token, all of them filled."""

    params = [50_000, 1_000_000]
    param_names = ["pool_blocks"]

    def peakmem_full_pool(self, pool_blocks: int) -> None:
        with make_pool(pool_blocks) as cache:
            for i in range(pool_blocks * TOKENS_PER_BLOCK // FILLING_TOKENS):
                store(cache, make_prompts(1, FILLING_TOKENS, seed=i))
