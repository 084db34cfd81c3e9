"""HostLease: host blocks that a reader has pinned."""

from __future__ import annotations

from collections.abc import Callable, Container
from types import TracebackType

from kvpool.common.arrays import Int64s
from kvpool.errors import LeaseExpired
from kvpool.hostcache.tier import HostSlots


class HostLease:
    """Blocks of keys, in the order of the keys. They are not evicted until the lease is closed. A context manager;
    thread-safe.

    ``keys``: as the caller gave them. ``blocks`` int64[n]: the host block of each. ``slots``: the same as a message.
    ``since``: when the lease was given, in ms on the cache's clock.
    """

    __slots__ = ("_end", "_open", "blocks", "fingerprint", "id", "keys", "owner", "since")

    def __init__(
        self,
        end: Callable[[int, bool], bool],
        opened: Container[int],
        fingerprint: str,
        number: int,
        owner: str,
        since: int,
        keys: tuple[bytes, ...],
        blocks: Int64s,
    ) -> None:
        """``end`` ends the lease of a number, if it is among those that are ``opened``."""
        self._end, self._open, self.fingerprint = end, opened, fingerprint
        self.id, self.owner, self.since, self.keys, self.blocks = number, owner, since, keys, blocks

    @property
    def slots(self) -> HostSlots:
        return HostSlots(tuple(self.blocks.tolist()), self.fingerprint)

    @property
    def closed(self) -> bool:
        """Whether it was closed or revoked, or its cache was closed."""
        return self.id not in self._open

    def close(self, *, used: bool = True) -> None:
        """Unpin the blocks, which nobody reads any more. If they were not ``used``, they are where they were among
        the victims of their priority. Raises LeaseExpired if the lease was closed before."""
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
