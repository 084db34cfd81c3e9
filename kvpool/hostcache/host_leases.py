"""Leases of a host cache: blocks that somebody reads. They stay where they are until the lease is closed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.entry.interrupt import DeferSignals
from kvpool.errors import LeaseExpired
from kvpool.state import control
from kvpool.state.arrays import States

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HostSlots:
    """Host blocks as a message to a copy engine, in this process or another. ``fingerprint`` is that of their cache.

    Immutable and picklable. A slice of it is such a message too.
    """

    blocks: tuple[int, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, which: slice) -> HostSlots:
        if not isinstance(which, slice):
            raise TypeError(f"which={which!r:.80}: accepted is a slice")
        return HostSlots(self.blocks[which], self.fingerprint)


class HostLease:
    """Blocks of keys, in the order of the keys. They are not evicted until the lease is closed. A context manager;
    thread-safe.

    ``keys``: as the caller gave them. ``blocks`` int64[n]: the host block of each. ``slots``: the same as a message.
    ``since``: when the lease was given, in ms on the cache's clock.
    """

    __slots__ = ("_leases", "blocks", "fingerprint", "id", "keys", "owner", "since")

    def __init__(
        self, leases: HostLeases, number: int, owner: str, since: int, keys: tuple[bytes, ...], blocks: Ids,
        fingerprint: str,
    ) -> None:  # fmt: skip
        self._leases, self.id, self.owner, self.since = leases, number, owner, since
        self.keys, self.blocks, self.fingerprint = keys, blocks, fingerprint

    @property
    def slots(self) -> HostSlots:
        return HostSlots(tuple(self.blocks.tolist()), self.fingerprint)

    @property
    def closed(self) -> bool:
        """Whether it was closed or revoked, or its cache was closed."""
        return not self._leases.is_open(self)

    def close(self) -> None:
        """Unpin the blocks, which nobody reads any more. Raises LeaseExpired if the lease was closed before."""
        self._leases.close(self)

    def __enter__(self) -> HostLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or not self.closed:
            self.close()

    def __repr__(self) -> str:
        return f"HostLease(id={self.id}, owner={self.owner!r}, blocks={len(self.blocks)}, closed={self.closed})"


class HostLeases:
    """The open leases of one cache. The cache's lock guards them."""

    def __init__(self, states: States, lock: AbstractContextManager[Any], now: Callable[[], int]) -> None:
        self._states, self.lock, self._now = states, lock, now
        # Private copies of the blocks, the last first, so that the end of a prompt is evicted before its beginning.
        self._open: dict[int, tuple[HostLease, Ids]] = {}
        self._count = 0

    def add(self, owner: str, now: int, keys: tuple[bytes, ...], blocks: Ids, fingerprint: str) -> HostLease:
        """A lease of blocks that were just pinned. The caller holds the lock."""
        self._count += 1
        lease = HostLease(self, self._count, owner, now, keys, blocks, fingerprint)
        self._open[lease.id] = lease, blocks[::-1].copy()
        return lease

    @property
    def all(self) -> list[HostLease]:
        """The open leases, oldest first."""
        return [lease for lease, _ in list(self._open.values())]

    def is_open(self, lease: HostLease) -> bool:
        return lease.id in self._open

    def pinned(self) -> list[Ids]:
        """The blocks of each open lease. The caller holds the lock."""
        return [ids for _, ids in list(self._open.values())]

    def close(self, lease: HostLease) -> None:
        """What ``HostLease.close`` does."""
        self.close_at(lease, self._now())

    def close_at(self, lease: HostLease, now: int) -> None:
        with DeferSignals(), self.lock:
            _, ids = self._open.pop(lease.id, (None, None))
            if ids is None:
                raise LeaseExpired(f"lease {lease.id} of {lease.owner!r} was closed or revoked")
            control.unpin(self._states.heads, ids, now)

    def revoke(self, owner: str, now: int) -> int:
        """Close all leases of an owner; returns how many. The lock is held by the caller."""
        closed = 0
        for lease in self.all:
            # A destructor may close it first.
            _, ids = self._open.pop(lease.id, (None, None)) if lease.owner == owner else (None, None)
            if ids is not None:
                control.unpin(self._states.heads, ids, now)
                closed += 1
        return closed

    def clear(self) -> None:
        """Forget all leases of a cache that is being closed."""
        self._open.clear()
