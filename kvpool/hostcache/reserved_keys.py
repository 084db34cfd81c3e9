"""Reserved: the keys that a call has reserved, with their blocks."""

from __future__ import annotations

from itertools import compress
from typing import NamedTuple

from kvpool.common.arrays import Int64s
from kvpool.hostcache.opaque_keys import Packed
from kvpool.hostcache.tier import HostSlots
from kvpool.state.records import NONE


class Reserved(NamedTuple):
    """The keys that ``HostCache.reserve`` has reserved, with their blocks. Can be pickled.

    Attributes
    ----------
    keys : tuple of bytes
        The reserved keys, in the order of the call.
    blocks : ndarray of int64, shape (n,)
        The host block of each.
    evicted : list of bytes
        Keys that the call has evicted.
    fingerprint : str
        That of the cache.
    """

    keys: tuple[bytes, ...]
    blocks: Int64s
    evicted: list[bytes]
    fingerprint: str

    @property
    def slots(self) -> HostSlots:
        """The blocks as a message to a copy engine, in this process or another."""
        return HostSlots(tuple(self.blocks.tolist()), self.fingerprint)


def reserved_of(wanted: Packed, count: int, evicted: list[bytes], fingerprint: str) -> Reserved:
    """The ``count`` keys that were taken."""
    blocks = wanted.found[:, 2]
    if count == len(wanted.keys):
        return Reserved(wanted.keys, blocks.copy(), evicted, fingerprint)
    taken = blocks != NONE
    return Reserved(tuple(compress(wanted.keys, taken.tolist())), blocks[taken], evicted, fingerprint)
