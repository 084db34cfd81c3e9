"""kvpool: a paged KV cache in two tiers, device blocks and host blocks, for any LLM inference engine.

A public name is imported when it is first used, so that ``python -m kvpool doctor`` runs where Numba cannot be
imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.arrays.layout import BlockLayout as BlockLayout
    from kvpool.arrays.paged import PagedKV as PagedKV
    from kvpool.arrays.strided import StridedArray as StridedArray
    from kvpool.entry.arguments import RetentionRange as RetentionRange
    from kvpool.errors import BlockNotFound as BlockNotFound
    from kvpool.errors import DeviceError as DeviceError
    from kvpool.errors import ForkedProcess as ForkedProcess
    from kvpool.errors import InsufficientMemory as InsufficientMemory
    from kvpool.errors import IntegrityError as IntegrityError
    from kvpool.errors import KVPoolError as KVPoolError
    from kvpool.errors import LeaseExpired as LeaseExpired
    from kvpool.errors import OutOfBlocks as OutOfBlocks
    from kvpool.errors import OutOfSequences as OutOfSequences
    from kvpool.errors import PoolBusy as PoolBusy
    from kvpool.errors import PoolClosed as PoolClosed
    from kvpool.errors import ReservationExpired as ReservationExpired
    from kvpool.errors import StoreBusy as StoreBusy
    from kvpool.errors import UnknownSequence as UnknownSequence
    from kvpool.hostcache.host_cache import HostCache as HostCache
    from kvpool.hostcache.host_cache import HostCacheStats as HostCacheStats
    from kvpool.hostcache.host_cache import HostEvent as HostEvent
    from kvpool.hostcache.host_cache import HostLease as HostLease
    from kvpool.hostcache.host_cache import Reserved as Reserved
    from kvpool.hostcache.host_copies import HostCopies as HostCopies
    from kvpool.hostcache.host_copies import HostCopy as HostCopy
    from kvpool.hostcache.identity import ModelIdentity as ModelIdentity
    from kvpool.hostcache.tier import HostSlots as HostSlots
    from kvpool.hostcache.tier import HostTier as HostTier
    from kvpool.hostcache.tier import HostTierDescription as HostTierDescription
    from kvpool.memory.attachments import Attachment as Attachment
    from kvpool.memory.attachments import SharedTier as SharedTier
    from kvpool.memory.attachments import attach as attach
    from kvpool.memory.export import Export as Export
    from kvpool.memory.kv_copy import Stagings as Stagings
    from kvpool.memory.kv_copy import gather_kv as gather_kv
    from kvpool.memory.kv_copy import scatter_kv as scatter_kv
    from kvpool.pool.block_tables import CapturedTables as CapturedTables
    from kvpool.pool.config import LayerGroup as LayerGroup
    from kvpool.pool.config import split_blocks as split_blocks
    from kvpool.pool.events import Event as Event
    from kvpool.pool.events import Events as Events
    from kvpool.pool.explain import Explanation as Explanation
    from kvpool.pool.explain import Missed as Missed
    from kvpool.pool.hints import HintAnswer as HintAnswer
    from kvpool.pool.keys import Admission as Admission
    from kvpool.pool.keys import BlockKeys as BlockKeys
    from kvpool.pool.keys import Lacking as Lacking
    from kvpool.pool.keys import Match as Match
    from kvpool.pool.keys import Plan as Plan
    from kvpool.pool.leases import Lease as Lease
    from kvpool.pool.manager import KVCacheManager as KVCacheManager
    from kvpool.pool.prompts import LayerLoads as LayerLoads
    from kvpool.pool.reservations import Loadable as Loadable
    from kvpool.pool.reservations import Reservation as Reservation
    from kvpool.pool.stats import GroupStats as GroupStats
    from kvpool.pool.stats import RequestStats as RequestStats
    from kvpool.pool.stats import Stats as Stats
    from kvpool.pool.stats import TierStats as TierStats
    from kvpool.tables.block_table import BlockTable as BlockTable
    from kvpool.tables.step_tables import StepTables as StepTables
    from kvpool.warming import warm_up as warm_up

__version__ = "0.1.0"

# Where each public name comes from.
_NAMES = {
    "kvpool.memory.attachments": "Attachment SharedTier attach",
    "kvpool.memory.export": "Export",
    "kvpool.memory.kv_copy": "Stagings gather_kv scatter_kv",
    "kvpool.arrays.layout": "BlockLayout",
    "kvpool.arrays.paged": "PagedKV",
    "kvpool.arrays.strided": "StridedArray",
    "kvpool.pool.block_tables": "CapturedTables",
    "kvpool.pool.config": "LayerGroup split_blocks",
    "kvpool.errors": (
        "BlockNotFound DeviceError ForkedProcess InsufficientMemory IntegrityError KVPoolError "
        "LeaseExpired OutOfBlocks OutOfSequences PoolBusy PoolClosed ReservationExpired StoreBusy "
        "UnknownSequence"
    ),
    "kvpool.pool.hints": "HintAnswer",
    "kvpool.pool.prompts": "LayerLoads",
    "kvpool.pool.leases": "Lease",
    "kvpool.pool.reservations": "Loadable Reservation",
    "kvpool.hostcache.host_copies": "HostCopies HostCopy",
    "kvpool.hostcache.identity": "ModelIdentity",
    "kvpool.hostcache.host_cache": "HostCache HostCacheStats HostEvent HostLease Reserved",
    "kvpool.hostcache.tier": "HostSlots HostTier HostTierDescription",
    "kvpool.pool.manager": "KVCacheManager",
    "kvpool.pool.events": "Event Events",
    "kvpool.pool.stats": "GroupStats RequestStats Stats TierStats",
    "kvpool.pool.explain": "Explanation Missed",
    "kvpool.pool.keys": "Admission BlockKeys Lacking Match Plan",
    "kvpool.entry.arguments": "RetentionRange",
    "kvpool.tables.block_table": "BlockTable",
    "kvpool.tables.step_tables": "StepTables",
    "kvpool.warming": "warm_up",
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
