"""Which blocks of a pool are served, and fetched into it: those of each group of layers, part after part."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.pool.manager import KVCacheManager
from kvpool.remote.frames import NUMBERS_MAX

HostBytes = npt.NDArray[np.uint8]


class Served(NamedTuple):
    """For each group, the bytes of each part of a block. A group for cross attention has none, since nobody can find
    its blocks.

    ``fingerprint`` is equal for pools whose blocks have the same content, in whatever order on the device, and with
    whatever interval between states.
    """

    parts: tuple[tuple[int, ...], ...]
    fingerprint: str

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """The bytes of a block of each group, 0 for a group that is not served."""
        return tuple(map(sum, self.parts))


def served(cache: KVCacheManager) -> Served:
    """What is served of a pool. Raises ValueError for a pool with more groups than a message can have."""
    if len(cache.groups) > NUMBERS_MAX:
        raise ValueError(f"cache: it has {len(cache.groups)} groups of layers: accepted are up to {NUMBERS_MAX}")
    rules = [
        (group.kind, group.window, group.sinks, [layout.fingerprint for layout in group.layouts])
        for group in cache.groups
    ]
    text = repr((cache.tokens_per_block, rules)).encode()
    parts = tuple(
        () if group.kind == "cross" else tuple(layout.block_bytes for layout in group.layouts) for group in cache.groups
    )
    return Served(parts, hashlib.blake2b(text, digest_size=16, person=b"kvpool.groups").hexdigest())


def host_bytes(cache: KVCacheManager) -> list[list[HostBytes]]:
    """The host tier as uint8[host_blocks, bytes], for each group and each part that is served."""
    return [
        [
            pool.reshape(-1).view(np.uint8).reshape(group.host_blocks, layout.block_bytes)
            for pool, layout in zip(pools, group.layouts, strict=True)
            if group.kind != "cross"
        ]
        for group, pools in zip(cache.groups, cache.host_pools, strict=True)
    ]
