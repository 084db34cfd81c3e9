"""Operations as one: a step of an engine in one call, and one that is refused when it has done the most of it."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from kvpool import OutOfBlocks
from kvpool.pool import operations as op

from .admission import BATCHES
from .pools import PROMPT_TOKENS, Once, Pooled, blocks_of, make_pool, make_prompts


class Step(Once):
    """Commit, and one more token for each sequence: in one call, and in two."""

    params = BATCHES
    param_names = ["batch"]

    def setup(self, batch: int) -> None:
        self.cache = make_pool(2 * batch * blocks_of(PROMPT_TOKENS) + 4 * batch, max_sequences=batch)
        self.ids = self.cache.add_sequence_batch(make_prompts(batch, PROMPT_TOKENS)).ids
        self.tokens, self.counts = np.arange(batch, dtype=np.int32), np.ones(batch, np.int64)
        for _ in range(3):
            self.time_apply(batch)
            self.time_one_by_one(batch)

    def time_apply(self, batch: int) -> None:
        self.cache.apply([op.commit(self.ids), op.append(self.ids, self.tokens, self.counts)])

    def time_one_by_one(self, batch: int) -> None:
        self.cache.commit(self.ids)
        self.cache.append_tokens(self.ids, self.tokens, self.counts)


class Refused(Pooled):
    """A release and an admission that does not fit, in pools of so many blocks: the state is copied, and restored."""

    params = [1_000, 50_000, 250_000]
    param_names = ["blocks"]

    def setup(self, blocks: int) -> None:
        self.cache = make_pool(blocks // 5, blocks - blocks // 5, max_sequence_tokens=16 * blocks // 5)
        (prompt,) = make_prompts(1, 16 * (blocks // 5 - 8))
        self.one = self.cache.add_sequence(prompt)
        self.small = self.cache.add_sequence([1])
        self.steps = [op.release(self.small), op.add([self.cache.block_keys(prompt[::-1].copy())])]
        self.time_refused(blocks)

    def time_refused(self, blocks: int) -> None:
        with suppress(OutOfBlocks):
            self.cache.apply(self.steps)
