"""Hashing of prompts into block keys, which reads no state and takes no lock."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from .pools import LONG_PROMPT_TOKENS, PROMPT_TOKENS, THREADS, Pooled, make_pool, make_prompts

PROMPTS = 16


class BlockKeys(Pooled):
    """One prompt, as an engine may have it: an int32 array, or a list of Python's integers; with a namespace, and with
    extra ids."""

    params = [PROMPT_TOKENS, LONG_PROMPT_TOKENS]
    param_names = ["tokens"]

    def setup(self, tokens: int) -> None:
        self.cache = make_pool(64)
        (self.prompt,) = make_prompts(1, tokens)
        self.listed = self.prompt.tolist()
        self.extra = np.arange(len(self.prompt), dtype=np.int64)

    def time_array(self, tokens: int) -> None:
        self.cache.block_keys(self.prompt)

    def time_list(self, tokens: int) -> None:
        self.cache.block_keys(self.listed)

    def time_namespace(self, tokens: int) -> None:
        self.cache.block_keys(self.prompt, salt="tenant", adapter_id=3)

    def time_extra_ids(self, tokens: int) -> None:
        self.cache.block_keys(self.prompt, extra_ids=self.extra)


class ThreadedBlockKeys(Pooled):
    """The same prompts one after the other, and by two threads."""

    params = [PROMPT_TOKENS, LONG_PROMPT_TOKENS]
    param_names = ["tokens"]

    def setup(self, tokens: int) -> None:
        self.cache = make_pool(64)
        self.prompts = make_prompts(PROMPTS, tokens)
        self.team = ThreadPoolExecutor(THREADS)
        self.time_threads(tokens)

    def teardown(self, *parameters: Any) -> None:
        self.team.shutdown()
        super().teardown()

    def time_serial(self, tokens: int) -> None:
        for prompt in self.prompts:
            self.cache.block_keys(prompt)

    def time_threads(self, tokens: int) -> None:
        list(self.team.map(self.cache.block_keys, self.prompts))
