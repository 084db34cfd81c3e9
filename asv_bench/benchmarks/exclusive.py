"""Exclusive: a step of an engine in one block, and without one."""

from __future__ import annotations

import numpy as np

from .admission import BATCHES
from .pools import PROMPT_TOKENS, Once, blocks_of, make_pool, make_prompts


class Step(Once):
    """Commit, and one more token for each sequence."""

    params = BATCHES
    param_names = ["batch"]

    def setup(self, batch: int) -> None:
        self.cache = make_pool(2 * batch * blocks_of(PROMPT_TOKENS) + 4 * batch, max_sequences=batch)
        self.ids = self.cache.add_sequence_batch(make_prompts(batch, PROMPT_TOKENS)).ids
        self.tokens, self.counts = np.arange(batch, dtype=np.int32), np.ones(batch, np.int64)
        for _ in range(3):
            self.time_exclusive(batch)
            self.time_one_by_one(batch)

    def time_exclusive(self, batch: int) -> None:
        with self.cache.exclusive():
            self.time_one_by_one(batch)

    def time_one_by_one(self, batch: int) -> None:
        self.cache.commit(self.ids)
        self.cache.append_tokens(self.ids, self.tokens, self.counts)
