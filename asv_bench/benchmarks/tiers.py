"""Two tiers: what the verbs that move content cost, and how many offload copies an inclusive host tier saves."""

from __future__ import annotations

from typing import Any

import numpy as np

from .pools import TOKENS_PER_BLOCK, Once, Pooled, blocks_of, make_pool, make_prompts, store

PROMPT_TOKENS = 2_048


class MoveContent(Once):
    """Prompts of 2,048 tokens between the tiers, without the bytes: offload, prefetch, and admission of what only the
    host has."""

    params = [1, 16]
    param_names = ["prompts"]

    def setup(self, prompts: int) -> None:
        blocks = prompts * blocks_of(PROMPT_TOKENS)
        self.cache = make_pool(2 * blocks, 4 * blocks)
        self.on_device = [self.cache.block_keys(prompt) for prompt in make_prompts(prompts, PROMPT_TOKENS)]
        self.on_host = [self.cache.block_keys(prompt) for prompt in make_prompts(prompts, PROMPT_TOKENS, seed=1)]
        store(self.cache, self.on_host)
        store(self.cache, make_prompts(2 * prompts, PROMPT_TOKENS, seed=2))
        store(self.cache, self.on_device)

    def time_offload(self, prompts: int) -> None:
        for keys in self.on_device:
            self.cache.content.offload(keys)

    def time_prefetch(self, prompts: int) -> None:
        for keys in self.on_host:
            self.cache.content.prefetch(keys)

    def time_add_sequence_batch(self, prompts: int) -> None:
        self.cache.add_sequence_batch(self.on_host)


class Inclusion(Pooled):
    """The share of device evictions that needed no copy, as the host still had one.

    Prompts of eight blocks are asked for at random. They fill the host tier to a share, 1 being all of it beside what
    the device holds alone; past that, host copies of what is on the device are dropped first.
    """

    params = [0.5, 0.75, 1.0, 1.25, 1.5, 2.0]
    param_names = ["working_set_per_host_tier"]
    device_blocks, host_blocks = 1_024, 4_096
    requests = 4_000
    prompt_blocks = 8

    def setup(self, share: float) -> None:
        self.cache = make_pool(self.device_blocks, self.host_blocks, secret=b"the same keys in every run")
        count = int(share * self.host_blocks) // self.prompt_blocks
        self.tokens = self.prompt_blocks * TOKENS_PER_BLOCK
        self.keys = [self.cache.block_keys(prompt) for prompt in make_prompts(count, self.tokens)]
        self.asked = np.random.default_rng(0).integers(0, count, self.requests)

    def _evictions(self) -> tuple[int, int, Any]:
        for i in self.asked:
            sequence = self.cache.add_sequence(self.keys[i])
            # Not the last token, which can never match: full blocks only.
            self.cache.commit(sequence, self.tokens)
            self.cache.release(sequence)
        stats = self.cache.stats()
        saved = stats.offloads_saved
        return saved, saved + stats.offloaded_blocks + stats.forgotten_device_blocks, stats.host

    def track_saved(self, share: float) -> float:
        saved, evicted, _ = self._evictions()
        return 100 * saved / max(1, evicted)

    def track_host_full(self, share: float) -> float:
        _, _, host = self._evictions()
        return 100 * (1 - host.empty / host.capacity)

    track_saved.unit = "% of device evictions"  # type: ignore[attr-defined]
    track_host_full.unit = "% of host blocks"  # type: ignore[attr-defined]
