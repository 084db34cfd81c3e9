"""KV events: what recording costs the calls that cause them, and what a reader pays for taking them."""

from __future__ import annotations

from .pools import PROMPT_TOKENS, Once, blocks_of, make_pool, make_prompts


class Recording(Once):
    """Publishing a batch of prompts, with a ring that keeps so many events; 0 records none."""

    params = [[0, 1 << 16], [1, 16]]
    param_names = ["event_capacity", "batch"]

    def setup(self, event_capacity: int, batch: int) -> None:
        self.cache = make_pool(2 * batch * blocks_of(PROMPT_TOKENS), event_capacity=event_capacity)
        self.ids = self.cache.add_sequence_batch(make_prompts(batch, PROMPT_TOKENS)).ids
        self.cache.events()

    def time_commit(self, event_capacity: int, batch: int) -> None:
        self.cache.commit(self.ids)


class Reading(Once):
    """Taking the events of prompts that were published: one of 256 blocks each."""

    params = [0, 1, 16]
    param_names = ["prompts"]

    def setup(self, prompts: int) -> None:
        self.cache = make_pool(2 * max(1, prompts) * blocks_of(PROMPT_TOKENS), event_capacity=1 << 16)
        self.cache.events()
        if prompts:
            self.cache.commit(self.cache.add_sequence_batch(make_prompts(prompts, PROMPT_TOKENS)).ids)

    def time_events(self, prompts: int) -> None:
        self.cache.events()
