"""A host tier for engines that keep their own device blocks. It has an index, the memory, and copies; each can be used
alone. A public name is imported when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.common.lazy import lazy_names

if TYPE_CHECKING:
    from kvpool.hostcache.host_copies import HostCopies as HostCopies
    from kvpool.hostcache.host_copies import HostCopy as HostCopy
    from kvpool.hostcache.host_events import HostEvent as HostEvent
    from kvpool.hostcache.host_lease import HostLease as HostLease
    from kvpool.hostcache.host_stats import HostCacheStats as HostCacheStats
    from kvpool.hostcache.reserved_keys import Reserved as Reserved
    from kvpool.hostcache.tier import HostSlots as HostSlots
    from kvpool.hostcache.tier import HostTierDescription as HostTierDescription

_NAMES = {
    "kvpool.hostcache.host_copies": "HostCopies HostCopy",
    "kvpool.hostcache.host_events": "HostEvent",
    "kvpool.hostcache.host_lease": "HostLease",
    "kvpool.hostcache.host_stats": "HostCacheStats",
    "kvpool.hostcache.reserved_keys": "Reserved",
    "kvpool.hostcache.tier": "HostSlots HostTierDescription",
}
__all__ = [name for names in _NAMES.values() for name in names.split()]

if not TYPE_CHECKING:  # a name that is not public is an error there
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
