"""KV events: what recording costs the calls that cause them, and what a reader pays for taking them."""

from __future__ import annotations

from statistics import median

from .admission import TimedLock
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


class Recording(Once):
    """Publishing a batch of prompts, with a ring buffer of this many events; 0 records none."""

    params = [[0, 1 << 16], [1, 16]]
    param_names = ["event_capacity", "batch"]

    def setup(self, event_capacity: int, batch: int) -> None:
        self.cache = make_pool(2 * batch * blocks_of(PROMPT_TOKENS), event_capacity=event_capacity)
        self.ids = self.cache.add_sequence_batch(make_prompts(batch, PROMPT_TOKENS)).ids
        self.cache.events()

    def time_commit(self, event_capacity: int, batch: int) -> None:
        self.cache.commit(self.ids)


class Reading(Once):
    """The events of prompts that were published, one of 256 blocks each: taking them, as columns and as objects; and
    with a snapshot."""

    params = [0, 1, 16]
    param_names = ["prompts"]

    def setup(self, prompts: int) -> None:
        self.cache = make_pool(2 * max(1, prompts) * blocks_of(PROMPT_TOKENS), event_capacity=1 << 16)
        self.cache.events()
        if prompts:
            self.cache.commit(self.cache.add_sequence_batch(make_prompts(prompts, PROMPT_TOKENS)).ids)

    def time_events(self, prompts: int) -> None:
        self.cache.events()

    def time_events_as_objects(self, prompts: int) -> None:
        list(self.cache.events())

    def time_snapshot(self, prompts: int) -> None:
        self.cache.events(snapshot=True)


class SnapshotHold(Pooled):
    """How long a snapshot of a pool that is full keeps every other caller out; the median of some."""

    params = [1_000, 1_000_000]
    param_names = ["blocks"]
    snapshots = 5

    def setup(self, blocks: int) -> None:
        self.cache = make_pool(blocks, event_capacity=1)
        tokens = min(blocks // 4 * TOKENS_PER_BLOCK, LONG_PROMPT_TOKENS)
        for i in range(-(-blocks // blocks_of(tokens))):
            store(self.cache, make_prompts(1, tokens, seed=i))

    def track_held(self, blocks: int) -> float:
        lock = TimedLock(self.cache.core.lock)
        self.cache.core.lock = lock  # type: ignore[assignment]
        for _ in range(self.snapshots):
            assert len(self.cache.events(snapshot=True).records) > blocks // 2
        self.cache.core.lock = lock.inner
        return 1e3 * median(lock.held)

    track_held.unit = "ms"  # type: ignore[attr-defined]
