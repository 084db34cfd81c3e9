"""kvpool: a paged KV cache in two tiers, device blocks and host blocks, for any LLM inference engine.

A public name is imported when it is first used, so that ``python -m kvpool doctor`` runs where Numba cannot be
imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.common.arguments import RetentionRange as RetentionRange
    from kvpool.common.arrays.layout import BlockLayout as BlockLayout
    from kvpool.common.arrays.paged import PagedKV as PagedKV
    from kvpool.common.arrays.strided import StridedArray as StridedArray
    from kvpool.common.errors import BlockNotFound as BlockNotFound
    from kvpool.common.errors import DeviceError as DeviceError
    from kvpool.common.errors import ForkedProcess as ForkedProcess
    from kvpool.common.errors import InsufficientMemory as InsufficientMemory
    from kvpool.common.errors import IntegrityError as IntegrityError
    from kvpool.common.errors import KVPoolError as KVPoolError
    from kvpool.common.errors import LeaseExpired as LeaseExpired
    from kvpool.common.errors import OutOfBlocks as OutOfBlocks
    from kvpool.common.errors import OutOfSequences as OutOfSequences
    from kvpool.common.errors import PoolBusy as PoolBusy
    from kvpool.common.errors import PoolClosed as PoolClosed
    from kvpool.common.errors import ReservationExpired as ReservationExpired
    from kvpool.common.errors import StoreBusy as StoreBusy
    from kvpool.common.errors import UnknownSequence as UnknownSequence
    from kvpool.device.memory.attachments import Attachment as Attachment
    from kvpool.device.memory.attachments import SharedTier as SharedTier
    from kvpool.device.memory.attachments import attach as attach
    from kvpool.device.memory.export import Export as Export
    from kvpool.device.memory.kv_copy import StagingBuffers as StagingBuffers
    from kvpool.device.memory.kv_copy import gather_kv as gather_kv
    from kvpool.device.memory.kv_copy import scatter_kv as scatter_kv
    from kvpool.hostcache.host_cache import HostCache as HostCache
    from kvpool.hostcache.host_copies import HostCopies as HostCopies
    from kvpool.hostcache.host_copies import HostCopy as HostCopy
    from kvpool.hostcache.host_events import HostEvent as HostEvent
    from kvpool.hostcache.host_lease import HostLease as HostLease
    from kvpool.hostcache.host_stats import HostCacheStats as HostCacheStats
    from kvpool.hostcache.identity import ModelIdentity as ModelIdentity
    from kvpool.hostcache.reserved_keys import Reserved as Reserved
    from kvpool.hostcache.tier import HostSlots as HostSlots
    from kvpool.hostcache.tier import HostTier as HostTier
    from kvpool.hostcache.tier import HostTierDescription as HostTierDescription
    from kvpool.hostcache.warming import warm_up as warm_up
    from kvpool.pool.block_tables import GraphTables as GraphTables
    from kvpool.pool.config import LayerGroup as LayerGroup
    from kvpool.pool.config import split_blocks as split_blocks
    from kvpool.pool.events import Event as Event
    from kvpool.pool.events import Events as Events
    from kvpool.pool.explain import Explanation as Explanation
    from kvpool.pool.explain import Missed as Missed
    from kvpool.pool.hints import HintAnswer as HintAnswer
    from kvpool.pool.keys import Admission as Admission
    from kvpool.pool.keys import BlockKeys as BlockKeys
    from kvpool.pool.keys import Match as Match
    from kvpool.pool.keys import MissingBlocks as MissingBlocks
    from kvpool.pool.keys import Plan as Plan
    from kvpool.pool.leases import Lease as Lease
    from kvpool.pool.manager import KVCacheManager as KVCacheManager
    from kvpool.pool.prompts import LayerLoads as LayerLoads
    from kvpool.pool.reservations import LoadTarget as LoadTarget
    from kvpool.pool.reservations import Reservation as Reservation
    from kvpool.pool.stats import GroupStats as GroupStats
    from kvpool.pool.stats import RequestStats as RequestStats
    from kvpool.pool.stats import Stats as Stats
    from kvpool.pool.stats import TierStats as TierStats
    from kvpool.pool.tables.block_table import BlockTable as BlockTable
    from kvpool.pool.tables.step_tables import StepTables as StepTables

__version__ = "0.1.0"

# Where each public name comes from.
_NAMES = {
    "kvpool.device.memory.attachments": "Attachment SharedTier attach",
    "kvpool.device.memory.export": "Export",
    "kvpool.device.memory.kv_copy": "StagingBuffers gather_kv scatter_kv",
    "kvpool.common.arrays.layout": "BlockLayout",
    "kvpool.common.arrays.paged": "PagedKV",
    "kvpool.common.arrays.strided": "StridedArray",
    "kvpool.pool.block_tables": "GraphTables",
    "kvpool.pool.config": "LayerGroup split_blocks",
    "kvpool.common.errors": (
        "BlockNotFound DeviceError ForkedProcess InsufficientMemory IntegrityError KVPoolError "
        "LeaseExpired OutOfBlocks OutOfSequences PoolBusy PoolClosed ReservationExpired StoreBusy "
        "UnknownSequence"
    ),
    "kvpool.pool.hints": "HintAnswer",
    "kvpool.pool.prompts": "LayerLoads",
    "kvpool.pool.leases": "Lease",
    "kvpool.pool.reservations": "LoadTarget Reservation",
    "kvpool.hostcache.host_copies": "HostCopies HostCopy",
    "kvpool.hostcache.identity": "ModelIdentity",
    "kvpool.hostcache.host_cache": "HostCache",
    "kvpool.hostcache.host_lease": "HostLease",
    "kvpool.hostcache.host_events": "HostEvent",
    "kvpool.hostcache.host_stats": "HostCacheStats",
    "kvpool.hostcache.reserved_keys": "Reserved",
    "kvpool.hostcache.tier": "HostSlots HostTier HostTierDescription",
    "kvpool.pool.manager": "KVCacheManager",
    "kvpool.pool.events": "Event Events",
    "kvpool.pool.stats": "GroupStats RequestStats Stats TierStats",
    "kvpool.pool.explain": "Explanation Missed",
    "kvpool.pool.keys": "Admission BlockKeys MissingBlocks Match Plan",
    "kvpool.common.arguments": "RetentionRange",
    "kvpool.pool.tables.block_table": "BlockTable",
    "kvpool.pool.tables.step_tables": "StepTables",
    "kvpool.hostcache.warming": "warm_up",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", *_MODULES]


if not TYPE_CHECKING:  # a name that is not public is an error there

    def __getattr__(name: str) -> Any:
        """Import a public name, and keep it."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
