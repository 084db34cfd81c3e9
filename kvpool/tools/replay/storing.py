"""A store behind the pool of a replay: what is saved, what comes back before each admission, and what it was worth."""

from __future__ import annotations

from collections import Counter
from time import perf_counter

from kvpool.common.arrays.layout import BlockLayout
from kvpool.hostcache.identity import ModelIdentity
from kvpool.pool.keys import BlockKeys
from kvpool.pool.manager import KVCacheManager
from kvpool.storage import StorageManager, Store
from kvpool.tools.replay.content import names_of
from kvpool.tools.replay.summary import Stored

STAGING_BYTES = 64 << 20
"""Blocks that are on their way to or from the store take about this much memory."""


class Storing:
    """The store of one replay. ``wait``: how many seconds it waits for saves, and for loads, before each admission.

    Close it before the pool. Raises what ``StorageManager`` raises. Not thread-safe.
    """

    def __init__(self, store: Store, cache: KVCacheManager, layout: BlockLayout, *, written: bool, wait: float) -> None:
        self._cache, self._wait, self._width = cache, wait, layout.tokens_per_block
        # Blocks of a replay that writes no bytes are never taken for those of one that does.
        identity = ModelIdentity(
            "replay of a trace",
            "digests of tokens" if written else "no content",
            layout.dtype_name,
            layout,
            "kvpool replay 1",
        )
        # Of these rows, half are for saves, which pass through the host tier.
        rows = max(2, min(STAGING_BYTES // layout.block_bytes, cache.host_blocks))
        self._storage = StorageManager(
            cache,
            [store],
            identity=identity,
            load_seconds=max(1e-3, wait),
            staging_blocks=rows,
            promotion_blocks=cache.host_blocks,
            queued_blocks=1 << 20,
        )
        self._seen: set[bytes] = set()
        self._hit_tokens = self._earlier_tokens = 0
        self._waited = 0.0

    def bring(self, keys: BlockKeys) -> None:
        """Bring what the store has of a prompt, as far as the host tier has room. From then on this run has its
        blocks."""
        begin = perf_counter()
        before = self._cache.match_prefix(keys).full_tokens // self._width
        handle = self._storage.prefetch(keys, self._wait)
        if not handle.wait(self._wait):
            handle.cancel()
            handle.wait(self._wait)
        came = names_of(keys.keys[before : self._cache.match_prefix(keys).full_tokens // self._width])
        self._hit_tokens += self._width * len(came)
        self._earlier_tokens += self._width * sum(name not in self._seen for name in came)
        self._waited += perf_counter() - begin
        self.computed(keys)

    def computed(self, keys: BlockKeys) -> None:
        """This run has the blocks of these tokens from now on."""
        self._seen.update(names_of(keys.keys))

    def settle(self) -> None:
        """Wait until what the pool has is saved, so that evictions that follow lose nothing."""
        begin = perf_counter()
        self._storage.drain(self._wait)
        self._waited += perf_counter() - begin

    def close(self) -> None:
        """Give up what is not saved yet, and close the store. A second call does nothing."""
        self._storage.close()

    def summary(self) -> Stored:
        """The figures so far, also of a closed store."""
        stats = self._storage.stats()
        (queue,) = stats.stores.values()
        lost = Counter({code: count for (kind, code), count in queue.blocks.items() if kind == "load" and code != "ok"})
        return Stored(
            name=queue.name,
            saved_blocks=stats.saved_blocks,
            loaded_blocks=stats.loaded_blocks,
            found_blocks=stats.found_blocks,
            hit_tokens=self._hit_tokens,
            earlier_tokens=self._earlier_tokens,
            dropped=dict(+Counter({reason: count for (_, reason), count in stats.dropped.items()})),
            not_loaded=dict(+lost),
            prefetches=dict(+Counter(stats.prefetches)),
            call_seconds={str(kind): seconds for kind, seconds in queue.seconds.items()},
            wait_seconds=self._waited,
            store=dict(queue.store),
        )
