"""Cost of each verb of the pool, without moving KV: blocks of a few bytes, prompts of a size that engines see."""

from __future__ import annotations

from typing import Any

import numpy as np

import kvpool

TOKENS_PER_BLOCK = 16
PROMPT_TOKENS = 4_096
BATCHES = [1, 16, 256]


def make_pool(device_blocks: int, host_blocks: int = 0, sequences: int = 256) -> kvpool.KVCacheManager:
    layout = kvpool.BlockLayout(1, 1, 1, TOKENS_PER_BLOCK, dtype="uint8", planes=1)
    return kvpool.KVCacheManager(layout, device_blocks=device_blocks, host_blocks=host_blocks, device="cpu", max_sequences=sequences)


def make_prompts(count: int, tokens: int, seed: int = 0) -> list[np.ndarray]:
    """Return prompts that share nothing, each one token longer than `tokens`, so that all of `tokens` can match."""
    random = np.random.default_rng(seed)
    return list(random.integers(0, 128_000, (count, tokens + 1), dtype=np.int32))


def store(cache: kvpool.KVCacheManager, prompts: list[Any]) -> None:
    for prompt in prompts:
        sequence = cache.add_sequence(prompt)
        cache.commit(sequence)
        cache.release(sequence)


def touch(cache: kvpool.KVCacheManager) -> None:
    """Make one request pass through, so that compiling and loading stay outside what is timed."""
    keys = cache.block_keys(np.arange(TOKENS_PER_BLOCK + 1, dtype=np.int32))
    for _ in range(2):
        ids = cache.add_sequence_batch([keys]).ids
        cache.append_tokens(ids, np.arange(2, dtype=np.int32), np.array([2]))
        cache.commit(ids)
        cache.release(ids)
    cache.match_prefix(keys)


class BlockKeys:
    """Hash a prompt."""

    params = [PROMPT_TOKENS, 131_072]
    param_names = ["tokens"]

    def setup(self, tokens: int) -> None:
        self.cache = make_pool(64)
        touch(self.cache)
        self.prompt = make_prompts(1, tokens)[0]

    def time_block_keys(self, tokens: int) -> None:
        self.cache.block_keys(self.prompt)


class CachedPrompt:
    """A prompt whose blocks are all in the pool."""

    params = [PROMPT_TOKENS, 131_072]
    param_names = ["tokens"]

    def setup(self, tokens: int) -> None:
        self.cache = make_pool(4 * (tokens // TOKENS_PER_BLOCK + 1))
        touch(self.cache)
        self.prompt = make_prompts(1, tokens)[0]
        store(self.cache, [self.prompt])
        self.keys = self.cache.block_keys(self.prompt)

    def time_match(self, tokens: int) -> None:
        self.cache.match_prefix(self.keys)

    def time_hash_match_claim_release(self, tokens: int) -> None:
        self.cache.release(self.cache.add_sequence(self.cache.block_keys(self.prompt)))


class Verb:
    """Base of benchmarks whose operation uses its preparation up: one run per setup."""

    number = 1
    repeat = 20
    warmup_time = 0.0
    params = BATCHES
    param_names = ["batch"]
    prompt_tokens = PROMPT_TOKENS

    def prepare(self, batch: int, capacity_factor: int = 4) -> None:
        blocks = batch * (self.prompt_tokens // TOKENS_PER_BLOCK + 2)
        self.cache = make_pool(capacity_factor * blocks)
        touch(self.cache)
        self.prompts = make_prompts(batch, self.prompt_tokens)
        self.keys = [self.cache.block_keys(prompt) for prompt in self.prompts]


class AdmitHit(Verb):
    """Admit prompts that are cached in full."""

    def setup(self, batch: int) -> None:
        self.prepare(batch)
        store(self.cache, self.keys)

    def time_add_sequence_batch(self, batch: int) -> None:
        self.cache.add_sequence_batch(self.keys)


class AdmitMiss(Verb):
    """Admit prompts that nobody has seen, into empty blocks."""

    def setup(self, batch: int) -> None:
        self.prepare(batch)

    def time_add_sequence_batch(self, batch: int) -> None:
        self.cache.add_sequence_batch(self.keys)


class AdmitEvict(Verb):
    """Admit prompts that nobody has seen, into a pool full of other content, which is forgotten."""

    def setup(self, batch: int) -> None:
        self.prepare(batch, capacity_factor=1)
        store(self.cache, make_prompts(batch + 1, self.prompt_tokens, seed=1))

    def time_add_sequence_batch(self, batch: int) -> None:
        self.cache.add_sequence_batch(self.keys)


class Running(Verb):
    """Grow, publish and release sequences that were just admitted."""

    def setup(self, batch: int) -> None:
        self.prepare(batch)
        self.ids = self.cache.add_sequence_batch(self.keys).ids
        self.tokens = np.arange(batch * TOKENS_PER_BLOCK, dtype=np.int32)
        self.counts = np.full(batch, TOKENS_PER_BLOCK)

    def time_append_tokens(self, batch: int) -> None:
        self.cache.append_tokens(self.ids, self.tokens, self.counts)

    def time_commit(self, batch: int) -> None:
        self.cache.commit(self.ids)

    def time_release(self, batch: int) -> None:
        self.cache.release(self.ids)


class ReleaseCommitted(Verb):
    """Release sequences whose content stays cached."""

    def setup(self, batch: int) -> None:
        self.prepare(batch)
        self.ids = self.cache.add_sequence_batch(self.keys).ids
        self.cache.commit(self.ids)

    def time_release(self, batch: int) -> None:
        self.cache.release(self.ids)
