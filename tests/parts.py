"""The public calls of a pool, whether they are methods of the manager or of one of its parts. Their names differ."""

from __future__ import annotations

from typing import Any

from kvpool import KVCacheManager
from kvpool.pool import BlockTables, CachedContent, Imports, PoolMemory

PARTS: dict[str, type] = {"content": CachedContent, "imports": Imports, "memory": PoolMemory, "tables": BlockTables}
"""The class of each part, by the attribute of the manager."""


def owner_of(name: str) -> tuple[str, type]:
    """The part that has a public call, "" for the manager, and its class."""
    return next(((part, owner) for part, owner in PARTS.items() if hasattr(owner, name)), ("", KVCacheManager))


def reach(cache: KVCacheManager, name: str) -> Any:
    """A public member of a pool by its name."""
    part, _ = owner_of(name)
    return getattr(getattr(cache, part) if part else cache, name)


def public_names() -> set[str]:
    """The names of all public members."""
    return {name for owner in (KVCacheManager, *PARTS.values()) for name in vars_of(owner)}


def vars_of(owner: type) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}
