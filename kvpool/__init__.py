"""kvpool: a paged KV cache in two tiers, device blocks and host blocks, for any LLM inference engine.

These are the names that most programs use. Others are in ``kvpool.errors``, ``kvpool.pool``, ``kvpool.hostcache``,
``kvpool.device.memory`` and the packages around the core. A public name is imported when it is first used, so that
``python -m kvpool doctor`` runs where Numba cannot be imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.common.lazy import lazy_names

if TYPE_CHECKING:
    from kvpool import device as device
    from kvpool import errors as errors
    from kvpool import hostcache as hostcache
    from kvpool import pool as pool
    from kvpool.common.arguments import RetentionRange as RetentionRange
    from kvpool.common.arrays.layout import BlockLayout as BlockLayout
    from kvpool.common.arrays.paged import PagedKV as PagedKV
    from kvpool.device.memory.attachments import attach as attach
    from kvpool.device.memory.kv_copy import StagingBuffers as StagingBuffers
    from kvpool.device.memory.kv_copy import gather_kv as gather_kv
    from kvpool.device.memory.kv_copy import scatter_kv as scatter_kv
    from kvpool.errors import KVPoolError as KVPoolError
    from kvpool.errors import OutOfBlocks as OutOfBlocks
    from kvpool.errors import PoolClosed as PoolClosed
    from kvpool.hostcache.host_cache import HostCache as HostCache
    from kvpool.hostcache.identity import ModelIdentity as ModelIdentity
    from kvpool.hostcache.tier import HostTier as HostTier
    from kvpool.hostcache.warming import warm_up as warm_up
    from kvpool.opening import open as open
    from kvpool.opening import open_host_cache as open_host_cache
    from kvpool.pool.config import EvictionOptions as EvictionOptions
    from kvpool.pool.config import LayerGroup as LayerGroup
    from kvpool.pool.config import MemoryOptions as MemoryOptions
    from kvpool.pool.keys import Admission as Admission
    from kvpool.pool.keys import BlockKeys as BlockKeys
    from kvpool.pool.keys import Match as Match
    from kvpool.pool.leases import Lease as Lease
    from kvpool.pool.manager import KVCacheManager as KVCacheManager

__version__ = "0.1.0"

# Where each public name comes from.
_NAMES = {
    "kvpool.common.arguments": "RetentionRange",
    "kvpool.common.arrays.layout": "BlockLayout",
    "kvpool.common.arrays.paged": "PagedKV",
    "kvpool.device.memory.attachments": "attach",
    "kvpool.device.memory.kv_copy": "StagingBuffers gather_kv scatter_kv",
    "kvpool.errors": "KVPoolError OutOfBlocks PoolClosed",
    "kvpool.hostcache.host_cache": "HostCache",
    "kvpool.hostcache.identity": "ModelIdentity",
    "kvpool.hostcache.tier": "HostTier",
    "kvpool.hostcache.warming": "warm_up",
    "kvpool.opening": "open open_host_cache",
    "kvpool.pool.config": "EvictionOptions LayerGroup MemoryOptions",
    "kvpool.pool.keys": "Admission BlockKeys Match",
    "kvpool.pool.leases": "Lease",
    "kvpool.pool.manager": "KVCacheManager",
}
__all__ = ["__version__", *(name for names in _NAMES.values() for name in names.split())]

if not TYPE_CHECKING:  # a name that is not public is an error there
    __getattr__, __dir__ = lazy_names(__name__, _NAMES, ("device", "errors", "hostcache", "pool"))
