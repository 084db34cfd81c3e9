"""Keys that grow, cached content by its name, and figures of requests: what a scheduler pays beside admission."""

from __future__ import annotations

import numpy as np

from .pools import (
    LONG_PROMPT_TOKENS,
    PROMPT_TOKENS,
    TOKENS_PER_BLOCK,
    Once,
    Pooled,
    blocks_of,
    make_pool,
    make_prompts,
    store,
)

TURN = 256


class GrowingKeys(Pooled):
    """A next turn of a conversation: its keys from those of the turns before, and from nothing."""

    params = [PROMPT_TOKENS, LONG_PROMPT_TOKENS]
    param_names = ["tokens"]

    def setup(self, tokens: int) -> None:
        self.cache = make_pool(2 * blocks_of(tokens))
        (self.prompt,) = make_prompts(1, tokens)
        self.turn = np.arange(TURN, dtype=np.int32)
        self.whole = np.concatenate([self.prompt, self.turn])
        self.keys = self.cache.block_keys(self.prompt)
        self.sequence = self.cache.add_sequence(self.keys)
        self.cache.commit(self.sequence)
        self.time_keys_of(tokens)
        self.time_slice(tokens)

    def time_extend(self, tokens: int) -> None:
        self.keys.extend(self.turn)

    def time_anew(self, tokens: int) -> None:
        self.cache.block_keys(self.whole)

    def time_slice(self, tokens: int) -> None:
        self.keys[: tokens // 2]

    def time_keys_of(self, tokens: int) -> None:
        self.cache.keys_of(self.sequence)

    def track_hashed_blocks(self, tokens: int) -> int:
        """Blocks that a turn hashes: those that it fills, whatever came before."""
        return len(self.keys.extend(self.turn).keys) - len(self.keys.keys)

    track_hashed_blocks.unit = "blocks"  # type: ignore[attr-defined]


class Figures(Pooled):
    """``request_stats`` of one sequence and of many."""

    params = [1, 256]
    param_names = ["sequences"]

    def setup(self, sequences: int) -> None:
        self.cache = make_pool(4 * sequences + 4)
        self.ids = self.cache.add_sequence_batch(make_prompts(sequences, 2 * TOKENS_PER_BLOCK)).ids

    def time_request_stats(self, sequences: int) -> None:
        self.cache.request_stats(self.ids)


class ByName(Pooled):
    """Cached blocks of one prompt in a pool that is full of others."""

    params = [PROMPT_TOKENS, LONG_PROMPT_TOKENS]
    param_names = ["tokens"]

    def setup(self, tokens: int) -> None:
        self.cache = make_pool(4 * blocks_of(tokens))
        prompts = [self.cache.block_keys(prompt) for prompt in make_prompts(3, tokens)]
        store(self.cache, prompts)
        self.keys, self.priority = prompts[0], 35
        self.available = np.ones((1, len(self.keys.keys)), np.bool_)
        self.time_cached_blocks(tokens)
        self.time_lacking(tokens)
        self.time_set_priority(tokens)

    def time_cached_blocks(self, tokens: int) -> None:
        self.cache.content.cached_blocks(self.keys)

    def time_lacking(self, tokens: int) -> None:
        self.cache.content.missing_blocks(self.keys, self.available)

    def time_set_priority(self, tokens: int) -> None:
        """Another one each time, so that every block changes its list."""
        self.priority = 115 - self.priority
        self.cache.content.set_priority(self.keys, self.priority)


class Forget(Once):
    """A prompt is forgotten, and a tenant with the same content: the latter looks at every block of the pool."""

    params = [["prompt", "namespace"], [10_000, 1_000_000]]
    param_names = ["what", "blocks"]

    def setup(self, what: str, blocks: int) -> None:
        self.cache = make_pool(blocks)
        for salt in ("first", "tenant"):
            (prompt,) = make_prompts(1, PROMPT_TOKENS)
            self.keys = self.cache.block_keys(prompt, salt=salt)
            store(self.cache, [self.keys])
            if salt == "first":
                self.cache.content.forget(self.keys)
                self.cache.content.forget(namespace=("first", None))

    def time_forget(self, what: str, blocks: int) -> None:
        if what == "prompt":
            self.cache.content.forget(self.keys)
        else:
            self.cache.content.forget(namespace=("tenant", None))
