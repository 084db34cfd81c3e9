"""kvpool: a paged KV cache in two tiers, device blocks and host blocks, for any LLM inference engine.

A public name is imported when it is first used, so that ``python -m kvpool doctor`` runs where Numba cannot be
imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.arrays.attachments import Attachment as Attachment
    from kvpool.arrays.attachments import SharedTier as SharedTier
    from kvpool.arrays.attachments import attach as attach
    from kvpool.arrays.export import Export as Export
    from kvpool.arrays.kv_copy import Stagings as Stagings
    from kvpool.arrays.kv_copy import gather_kv as gather_kv
    from kvpool.arrays.kv_copy import scatter_kv as scatter_kv
    from kvpool.arrays.layout import BlockLayout as BlockLayout
    from kvpool.arrays.paged import PagedKV as PagedKV
    from kvpool.arrays.strided import StridedArray as StridedArray
    from kvpool.config import LayerGroup as LayerGroup
    from kvpool.config import split_blocks as split_blocks
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
    from kvpool.holders.leases import Lease as Lease
    from kvpool.holders.reservations import Loadable as Loadable
    from kvpool.holders.reservations import Reservation as Reservation
    from kvpool.hostcache.copies import HostCopies as HostCopies
    from kvpool.hostcache.copies import HostCopy as HostCopy
    from kvpool.hostcache.identity import ModelIdentity as ModelIdentity
    from kvpool.hostcache.index import HostCache as HostCache
    from kvpool.hostcache.index import HostCacheStats as HostCacheStats
    from kvpool.hostcache.index import HostEvent as HostEvent
    from kvpool.hostcache.index import Reserved as Reserved
    from kvpool.hostcache.leases import HostLease as HostLease
    from kvpool.hostcache.leases import HostSlots as HostSlots
    from kvpool.hostcache.tier import HostTier as HostTier
    from kvpool.hostcache.tier import HostTierDescription as HostTierDescription
    from kvpool.manager import KVCacheManager as KVCacheManager
    from kvpool.observe.events import Event as Event
    from kvpool.observe.events import Events as Events
    from kvpool.observe.stats import GroupStats as GroupStats
    from kvpool.observe.stats import Stats as Stats
    from kvpool.observe.stats import TierStats as TierStats
    from kvpool.sequences.contents import Lacking as Lacking
    from kvpool.sequences.keys import Admission as Admission
    from kvpool.sequences.keys import BlockKeys as BlockKeys
    from kvpool.sequences.keys import Match as Match
    from kvpool.sequences.keys import Plan as Plan
    from kvpool.sequences.progress import RequestStats as RequestStats
    from kvpool.sequences.retention import RetentionRange as RetentionRange
    from kvpool.tables.block_table import BlockTable as BlockTable
    from kvpool.tables.steps import StepTables as StepTables
    from kvpool.warming import warm_up as warm_up

__version__ = "0.1.0"

_MODULES = {
    "Attachment": "kvpool.arrays.attachments",
    "SharedTier": "kvpool.arrays.attachments",
    "attach": "kvpool.arrays.attachments",
    "Export": "kvpool.arrays.export",
    "Stagings": "kvpool.arrays.kv_copy",
    "gather_kv": "kvpool.arrays.kv_copy",
    "scatter_kv": "kvpool.arrays.kv_copy",
    "BlockLayout": "kvpool.arrays.layout",
    "PagedKV": "kvpool.arrays.paged",
    "StridedArray": "kvpool.arrays.strided",
    "LayerGroup": "kvpool.config",
    "split_blocks": "kvpool.config",
    "BlockNotFound": "kvpool.errors",
    "DeviceError": "kvpool.errors",
    "ForkedProcess": "kvpool.errors",
    "InsufficientMemory": "kvpool.errors",
    "IntegrityError": "kvpool.errors",
    "KVPoolError": "kvpool.errors",
    "LeaseExpired": "kvpool.errors",
    "OutOfBlocks": "kvpool.errors",
    "OutOfSequences": "kvpool.errors",
    "PoolBusy": "kvpool.errors",
    "PoolClosed": "kvpool.errors",
    "ReservationExpired": "kvpool.errors",
    "StoreBusy": "kvpool.errors",
    "UnknownSequence": "kvpool.errors",
    "Lease": "kvpool.holders.leases",
    "Loadable": "kvpool.holders.reservations",
    "Reservation": "kvpool.holders.reservations",
    "HostCopies": "kvpool.hostcache.copies",
    "HostCopy": "kvpool.hostcache.copies",
    "ModelIdentity": "kvpool.hostcache.identity",
    "HostCache": "kvpool.hostcache.index",
    "HostCacheStats": "kvpool.hostcache.index",
    "HostEvent": "kvpool.hostcache.index",
    "Reserved": "kvpool.hostcache.index",
    "HostLease": "kvpool.hostcache.leases",
    "HostSlots": "kvpool.hostcache.leases",
    "HostTier": "kvpool.hostcache.tier",
    "HostTierDescription": "kvpool.hostcache.tier",
    "KVCacheManager": "kvpool.manager",
    "Event": "kvpool.observe.events",
    "Events": "kvpool.observe.events",
    "GroupStats": "kvpool.observe.stats",
    "Stats": "kvpool.observe.stats",
    "TierStats": "kvpool.observe.stats",
    "Lacking": "kvpool.sequences.contents",
    "Admission": "kvpool.sequences.keys",
    "BlockKeys": "kvpool.sequences.keys",
    "Match": "kvpool.sequences.keys",
    "Plan": "kvpool.sequences.keys",
    "RequestStats": "kvpool.sequences.progress",
    "RetentionRange": "kvpool.sequences.retention",
    "BlockTable": "kvpool.tables.block_table",
    "StepTables": "kvpool.tables.steps",
    "warm_up": "kvpool.warming",
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    """Import a public name, and keep it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
