"""HostLease: host blocks that a reader has pinned."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from types import TracebackType

from kvpool.common.arrays import Int64s
from kvpool.errors import LeaseExpired
from kvpool.hostcache.tier import HostSlots


@dataclass(slots=True, eq=False, repr=False)
class HostLease:
    """Host blocks that are pinned for a reader: they are not evicted until the lease is closed.

    A context manager, which closes the lease. ``HostCache.pin`` returns it.

    Attributes
    ----------
    keys : tuple of bytes
        The keys, as the caller gave them.
    blocks : ndarray of int64, shape (n,)
        The host block of each key.
    owner : str
        Name of the reader.
    since : int
        When the lease was opened, in milliseconds on the cache's clock.
    id : int
        Its number in the cache.
    fingerprint : str
        That of the cache.

    Notes
    -----
    Any thread may use it.
    """

    _end: Callable[[int, bool], bool]
    """Ends the lease of a number, if it is among those that are open."""
    _open: Container[int]
    fingerprint: str
    id: int
    owner: str
    since: int
    keys: tuple[bytes, ...]
    blocks: Int64s

    @property
    def slots(self) -> HostSlots:
        """The blocks as a message to a copy engine, in this process or another."""
        return HostSlots(tuple(self.blocks.tolist()), self.fingerprint)

    @property
    def closed(self) -> bool:
        """Whether it was closed or revoked, or its cache was closed."""
        return self.id not in self._open

    def close(self, *, used: bool = True) -> None:
        """Unpin the blocks, which nobody reads any more.

        Parameters
        ----------
        used : bool, default True
            Whether the blocks were used. Otherwise they return to where they were in the order of eviction.

        Raises
        ------
        LeaseExpired
            If the lease was closed or revoked before.

        Notes
        -----
        Changes the cache.
        """
        if not self._end(self.id, used):
            raise LeaseExpired(f"lease {self.id} of {self.owner!r} was closed or revoked")

    def __enter__(self) -> HostLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or not self.closed:
            self.close()

    def __repr__(self) -> str:
        return f"HostLease(id={self.id}, owner={self.owner!r}, blocks={len(self.blocks)}, closed={self.closed})"
