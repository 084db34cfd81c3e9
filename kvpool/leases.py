"""Leases: pins that somebody holds, with the name of the holder, and the way to give them back; what nobody gave back."""

from __future__ import annotations

from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvpool.device.base import Stream


class Lessor(Protocol):
    """The pool, as far as a lease knows it."""

    def now(self) -> int: ...
    def is_leased(self, lease: Lease) -> bool: ...
    def close_lease(self, lease: Lease, stream: Any) -> None: ...
    def part_addresses(self, ids: npt.NDArray[np.int64], part: Any) -> npt.NDArray[np.int64]: ...


class CloseReport(NamedTuple):
    """What was still held when a pool was closed: sequence ids, and (owner, age in ms) of open leases and reservations."""

    sequences: list[int]
    leases: list[tuple[str, int]]
    reservations: list[tuple[str, int]]


class Lease:
    """Blocks that are neither moved, overwritten nor evicted until the lease is closed. A context manager.

    ``blocks`` int64[n] ids, ``groups`` int64[n] the group of layers that each belongs to; ``keys`` uint64[n, 2] or None for a lease by
    block id: of several groups, those that have a key have a block for it, one group behind the other. ``addresses`` int64[n] of the
    first byte of each block (of a device block: of its first segment), in the first part of its group; ``generation`` counts resets of
    the pool before this lease was given, ``since`` is when that was, in ms on the pool's clock. The bytes are there when the lease is, for
    the host, or for work on ``stream`` where it was taken for one. Thread-safe.
    """

    __slots__ = ("_pool", "addresses", "blocks", "generation", "groups", "id", "keys", "owner", "since", "stream")

    def __init__(
        self, pool: Lessor, number: int, owner: str, generation: int, since: int, blocks: npt.NDArray[np.int64],
        groups: npt.NDArray[np.int64], keys: npt.NDArray[np.int64] | None, addresses: npt.NDArray[np.int64], stream: Stream | None = None,
    ) -> None:  # fmt: skip
        self._pool, self.since, self.stream = pool, since, stream
        self.id, self.owner, self.generation, self.addresses = number, owner, generation, addresses
        self.blocks, self.groups, self.keys = blocks.copy(), groups, None if keys is None else keys.view(np.uint64).copy()

    def addresses_of(self, part: int) -> npt.NDArray[np.int64]:
        """``addresses`` in another part of each block's group, 0 where there is none. Raises PoolClosed, TypeError, ValueError."""
        return self._pool.part_addresses(self.blocks, part)

    @property
    def age_ms(self) -> int:
        return self._pool.now() - self.since

    @property
    def closed(self) -> bool:
        """Whether it was closed or revoked."""
        return not self._pool.is_leased(self)

    def close(self, stream: Any = None) -> None:
        """Unpin. Raises LeaseExpired, with nothing changed, if the lease was closed or revoked before.

        ``stream``: where the reader has enqueued copies out of the blocks, by default the lease's own; nobody overwrites them before
        those are done. Without either, the reader has read.
        """
        self._pool.close_lease(self, stream)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None or not self.closed:
            self.close()

    def __repr__(self) -> str:
        return f"Lease(id={self.id}, owner={self.owner!r}, blocks={len(self.blocks)}, age_ms={self.age_ms}, closed={self.closed})"
