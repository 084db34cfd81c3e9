"""Groups of layers: what a request costs in a pool of one group, and of two that share its tokens."""

from __future__ import annotations

import numpy as np

import kvpool

from .pools import LONG_PROMPT_TOKENS, PROMPT_TOKENS, TOKENS_PER_BLOCK, Pooled, blocks_of, make_prompts, store

WINDOW = 1024


class CachedPrompt(Pooled):
    """A prompt that is cached, with ready keys, in one group with attention to all tokens, with a sliding window, or in
    both."""

    params = [["full", "window", "full and window"], [PROMPT_TOKENS, LONG_PROMPT_TOKENS]]
    param_names = ["groups", "tokens"]

    def setup(self, groups: str, tokens: int) -> None:
        layout = kvpool.BlockLayout(1, 1, 1, TOKENS_PER_BLOCK, dtype="uint8", planes=1)
        named = {"full": kvpool.LayerGroup(layout), "window": kvpool.LayerGroup(layout, window=WINDOW)}
        chosen = [named[name] for name in groups.split(" and ")]
        self.cache = kvpool.KVCacheManager(
            groups=chosen, device_blocks=[4 * blocks_of(tokens)] * len(chosen), device="cpu"
        )
        self.keys = self.cache.block_keys(make_prompts(1, tokens)[0])
        store(self.cache, [self.keys] * 2)
        self.sequence = self.cache.add_sequence(self.keys)
        self.token = np.zeros(1, np.int32)
        self.time_match(groups, tokens)
        self.time_append_rewind(groups, tokens)

    def time_match(self, groups: str, tokens: int) -> None:
        self.cache.match_prefix(self.keys)

    def time_match_claim_release(self, groups: str, tokens: int) -> None:
        self.cache.release(self.cache.add_sequence(self.keys))

    def time_append_rewind(self, groups: str, tokens: int) -> None:
        self.cache.append_tokens(self.sequence, self.token)
        self.cache.rewind(self.sequence, 1)
