"""Sequences that run: they grow, publish what they computed, take tokens back and are released."""

from __future__ import annotations

import numpy as np

from .admission import BATCHES
from .pools import PROMPT_TOKENS, TOKENS_PER_BLOCK, Once, blocks_of, make_pool, make_prompts


class Sequences(Once):
    """Base: a batch of sequences that was just admitted, and tokens ready in arrays: one for each, or a whole block for
    each."""

    params = BATCHES
    param_names = ["batch"]

    def setup(self, batch: int) -> None:
        self.cache = make_pool(4 * batch * blocks_of(PROMPT_TOKENS))
        keys = [self.cache.block_keys(prompt) for prompt in make_prompts(batch, PROMPT_TOKENS)]
        self.ids = self.cache.add_sequence_batch(keys).ids
        self.single_tokens = np.arange(batch, dtype=np.int32), np.ones(batch, np.int64)
        self.full_blocks = np.arange(batch * TOKENS_PER_BLOCK, dtype=np.int32), np.full(batch, TOKENS_PER_BLOCK)
        self._warm_up()

    def _warm_up(self) -> None:
        """Bring arrays and code into the caches, as in a running engine."""
        for tokens, counts in (self.single_tokens, self.full_blocks):
            for _ in range(3):
                self.cache.append_tokens(self.ids, tokens, counts)
                self.cache.rewind(self.ids, counts)


class Running(Sequences):
    """None of their content is published yet."""

    def time_append_token(self, batch: int) -> None:
        self.cache.append_tokens(self.ids, *self.single_tokens)

    def time_append_block(self, batch: int) -> None:
        self.cache.append_tokens(self.ids, *self.full_blocks)

    def time_rewind_token(self, batch: int) -> None:
        self.cache.rewind(self.ids, self.single_tokens[1])

    def time_commit(self, batch: int) -> None:
        self.cache.commit(self.ids)

    def time_release(self, batch: int) -> None:
        self.cache.release(self.ids)


class Committed(Sequences):
    """Their content is published, but for one token each: a commit finds little to do, and released content stays
    cached."""

    def setup(self, batch: int) -> None:
        super().setup(batch)
        self.cache.commit(self.ids)
        self.cache.append_tokens(self.ids, *self.single_tokens)

    def time_commit(self, batch: int) -> None:
        self.cache.commit(self.ids)

    def time_release(self, batch: int) -> None:
        self.cache.release(self.ids)


class Decoding(Once):
    """Steps of decoding: a token for each of 256 sequences and its commit. Most steps take no block, every sixteenth
    takes one for each."""

    params = [16]
    param_names = ["steps"]

    def setup(self, steps: int) -> None:
        self.cache = make_pool(256 * 8)
        keys = [self.cache.block_keys(prompt) for prompt in make_prompts(256, 48)]
        self.ids = self.cache.add_sequence_batch(keys).ids
        self.tokens, self.counts = np.arange(256, dtype=np.int32), np.ones(256, np.int64)
        self.cache.commit(self.ids)

    def time_append_and_commit(self, steps: int) -> None:
        for _ in range(steps):
            self.cache.append_tokens(self.ids, self.tokens, self.counts)
            self.cache.commit(self.ids)
