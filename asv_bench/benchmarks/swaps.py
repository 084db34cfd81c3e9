"""Preemption: sequences that are swapped out and come back. The moving of KV is left out: blocks have a few bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .admission import BATCHES
from .pools import PROMPT_TOKENS, Once, blocks_of, make_pool, make_prompts


class Swaps(Once):
    """A batch of sequences of 4,096 tokens each, all of whose blocks have to be copied, there or back."""

    params = BATCHES
    param_names = ["batch"]

    def setup(self, batch: int) -> None:
        count = batch * blocks_of(PROMPT_TOKENS)
        self.cache = make_pool(2 * count, 2 * count, max_sequences=2 * batch)
        self.ids = self._admitted(batch, 0)
        self.away = self._admitted(batch, 1)
        for _ in range(2):
            self.cache.swap_out(self.away)
            self.cache.resume(self.away)
        self.cache.swap_out(self.away)

    def _admitted(self, batch: int, seed: int) -> npt.NDArray[np.int64]:
        return self.cache.add_sequence_batch(make_prompts(batch, PROMPT_TOKENS, seed)).ids

    def time_swap_out(self, batch: int) -> None:
        self.cache.swap_out(self.ids)

    def time_resume(self, batch: int) -> None:
        self.cache.resume(self.away)
