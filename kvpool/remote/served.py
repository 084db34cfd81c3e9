"""What pools can be served and fetched into: those whose blocks are all of one layout."""

from __future__ import annotations

from kvpool.layout import BlockLayout
from kvpool.manager import KVCacheManager


def served_layout(cache: KVCacheManager) -> BlockLayout:
    """The layout of all blocks of a pool. Raises ValueError for groups of layers, parts, and states, which no message names."""
    (group, *others) = cache.groups
    if others or len(group.layouts) > 1 or group.kind != "attention":
        kinds = [f"{one.kind} of {len(one.layouts)} parts" for one in cache.groups]
        raise ValueError(f"cache: its groups of layers are {kinds}; accepted are pools with one group of one layout, for attention")
    return group.layouts[0]
