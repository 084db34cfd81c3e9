"""Small pools that other processes can attach."""

from __future__ import annotations

from typing import Any

from kvpool import BlockLayout, KVCacheManager, MemoryOptions

LAYOUT = BlockLayout(2, 2, 8, 4, dtype="uint16")


def open_pool(device: str = "cpu", **options: Any) -> KVCacheManager:
    shared = MemoryOptions(shared=True)
    return KVCacheManager(
        LAYOUT, **{"device_blocks": 6, "host_blocks": 5, "device": device, "memory": shared} | options
    )
