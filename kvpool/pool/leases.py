"""Leases: blocks that readers on other threads and streams have pinned, with the name of each reader."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvpool.arrays import Int64s, Uint64s
from kvpool.arrays.layout import integer_argument
from kvpool.device.base import Stream, StreamLike
from kvpool.entry.arguments import id_array, text_argument
from kvpool.entry.interrupt import DeferSignals
from kvpool.errors import BlockNotFound, LeaseExpired, PoolClosed
from kvpool.memory.pools import MemoryPools
from kvpool.pool.core import Core
from kvpool.pool.keys import key_row, key_rows, tier_number
from kvpool.state import control, records
from kvpool.state.tiers import ACCESSED, WILL_READ

Ids = Int64s
Answer = TypeVar("Answer")


@dataclass(eq=False, repr=False, slots=True)
class Lease:
    """Blocks that are neither moved, overwritten nor evicted until the lease is closed. A context manager.

    ``blocks`` int64[n]: pool ids. ``groups`` int64[n]: the group of layers that each block belongs to. ``keys``
    uint64[n, 2], or None for a lease by block id. With several groups, each group that has a key has a block for it,
    group after group.

    ``addresses`` int64[n]: the first byte of each block in the first part of its group; of a device block, the first
    byte of its first segment. ``generation`` counts the resets of the pool before this lease. ``since`` is when it was
    given, in ms on the pool's clock.

    Once you have the lease, the host may read the bytes; or, for a lease with a ``stream``, work on that stream.
    Thread-safe.
    """

    _leases: Leases
    id: int
    owner: str
    generation: int
    since: int
    blocks: Ids
    groups: Ids
    keys: Uint64s | None
    addresses: Ids
    stream: Stream | None

    def addresses_of(self, part: int) -> Int64s:
        """``addresses`` in another part of each block's group, 0 where there is none. Raises PoolClosed, TypeError,
        ValueError."""
        return self._leases.addresses(self.blocks, part)

    @property
    def age_ms(self) -> int:
        return self._leases.now() - self.since

    @property
    def closed(self) -> bool:
        """Whether it was closed or revoked."""
        return not self._leases.is_open(self)

    def close(self, stream: StreamLike = None) -> None:
        """Unpin. Raises LeaseExpired, with nothing changed, if the lease was closed or revoked before.

        ``stream``: where the reader has enqueued copies out of the blocks (default: the lease's own). Nobody overwrites
        the blocks before those copies are done. Without a stream, the reader must have finished reading.
        """
        self._leases.close(self, stream)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or not self.closed:
            self.close()

    def __repr__(self) -> str:
        return (
            f"Lease(id={self.id}, owner={self.owner!r}, blocks={len(self.blocks)}, age_ms={self.age_ms}, "
            f"closed={self.closed})"
        )


class _Held(NamedTuple):
    """An open lease, a private copy of its block ids, and the host access that the device was told about."""

    lease: Lease
    ids: Ids
    access: AbstractContextManager[Any]


class Leases:
    """The open leases of one pool. Thread-safe."""

    def __init__(self, core: Core, pools: MemoryPools) -> None:
        self._core, self._pools = core, pools
        self._open: dict[int, _Held] = {}
        self._count = 0

    # -- opening ------------------------------------------------------------------------------------

    def pin(self, keys: Any, owner: Any, tier: Any, stream: Any, group: Any = None) -> Lease:
        wanted, rows = tier_number(tier), key_rows(keys)

        def missing(place: int) -> Lease:
            raise BlockNotFound(f"key {rows[place].tobytes().hex()} is not cached{_TIERS[wanted]}")

        return self._pin(owner, rows, None, wanted, stream, missing, group)

    def find_and_pin_host(self, key: Any, owner: Any, stream: Any, group: Any = None) -> Lease | None:
        return self._pin(owner, key_row(key), None, records.HOST, stream, lambda place: None, group)

    def pin_blocks(self, ids: Any, owner: Any, stream: Any) -> Lease:
        which = id_array("ids", ids)

        def missing(place: int) -> Lease:
            raise BlockNotFound(f"block {which[place]} is unknown or holds nothing")

        return self._pin(owner, None, which, control.ANY_TIER, stream, missing)

    def _pin(
        self,
        owner: str,
        keys: Ids | None,
        ids: Ids | None,
        tier: int,
        stream: StreamLike,
        missing: Callable[[int], Answer],
        group: object = None,
    ) -> Lease | Answer:
        """A lease of the blocks of keys, or of blocks by id. If one cannot be pinned, raises what ``missing`` returns
        for its place."""
        owner, core = text_argument("owner", owner), self._core
        only = int(records.NONE) if group is None else core.config.group(group)
        now, on = core.now(), None if stream is None else core.as_stream(stream)
        core.refuse_inside("pin")
        with DeferSignals() as signals:
            with core.lock:
                core.check_open()
                lease = self._take_lease(owner, keys, ids, tier, only, now, on)
                if isinstance(lease, int):
                    return missing(lease)
                signals.undo = partial(self._close_open, lease)
                ids = self._open[lease.id].ids
                core.note(WILL_READ, on, ids)
                # Checked here: another thread may enqueue a copy, and lose it, right after this. That must be
                # noticed below.
                behind = core.transfer.collect() or core.transfer.waiting
            if behind:
                core.transfer.drain()
                lost = self._drop_lost(lease, ids, now)
                if lost is not None:
                    return missing(lost if keys is None else _place_of_key(keys, lease, lost))
            if on is None and core.transfer.order is not None:
                self._await(lease, ids)
            return lease

    def _close_open(self, lease: Lease) -> None:
        """After any error, nobody has got the lease."""
        if self.is_open(lease):
            self.close(lease)

    def _take_lease(
        self, owner: str, keys: Ids | None, ids: Ids | None, tier: int, only: int, now: int, stream: Stream | None
    ) -> Lease | int:
        """The state lock is held by the caller."""
        heads = self._core.states.heads
        if keys is None:
            assert ids is not None
            failed, groups = control.pin_blocks(heads, ids), None
        else:
            found = np.empty((len(heads), len(keys)), np.int64)
            failed = control.pin_keys(heads, only, keys, tier, found)
            groups, places = np.nonzero(found != records.NONE)
            ids, keys = found[groups, places], keys[places]
        if failed:
            return int(heads[0, records.H.detail])
        try:
            if groups is None:
                groups, _ = self._core.states.pool_ids.place(ids)
            generation, at = int(heads[0, records.H.generation]), self._pools.addresses(ids)
            named = None if keys is None else keys.view(np.uint64)
            lease = Lease(self, self._count + 1, owner, generation, now, ids.copy(), groups, named, at, stream)
            self._open[lease.id] = _Held(lease, ids, nullcontext())
        except BaseException:
            control.unpin(heads, ids, now)
            raise
        self._count += 1
        return lease

    def _drop_lost(self, lease: Lease, ids: Ids, now: int) -> int | None:
        """A copy that a lease waited for may have failed: then unpin, and return the place of the block that it would
        have filled."""
        with self._core.lock:
            lost = np.flatnonzero(self._core.states.gather("flags", ids) & records.LOST)
            if len(lost) == 0:
                return None
            if self._open.pop(lease.id, None) is not None:
                control.unpin(self._core.states.heads, ids, now)
            return int(lost[0])

    def _await(self, lease: Lease, ids: Ids) -> None:
        """Wait, with no lock held, until the host can read the bytes of a lease. Raises LeaseExpired if it was revoked
        meanwhile."""
        self._core.wait_for(self._core.transfer.pending(ids))
        with self._core.lock:
            # Under the lock: a pool that is being closed gives the memory back once no lease is open.
            if self.is_open(lease):
                access = self._core.device.host_access(reads=self._filled(ids))
                access.__enter__()
                self._open[lease.id] = _Held(lease, ids, access)
                return
        self._core.check_open()
        raise LeaseExpired(f"lease {lease.id} of {lease.owner!r} was revoked while it waited")

    def _filled(self, ids: Ids) -> Int64s:
        """The tokens that blocks have, as rows (block, first, end). The engine may write after them in an unfull
        block."""
        states = self._core.states
        # A block of a recurrent group holds one state, however many tokens it stands for.
        most = states.heads[states.pool_ids.place(ids)[0], records.H.block_tokens]
        filled = np.minimum(states.gather("filled", ids).astype(np.int64), most)
        return np.stack([ids, np.zeros_like(ids), filled], axis=1)[filled > 0]

    # -- leases that other operations come with -----------------------------------------------------

    def prepare(self, keys: object, owner: object, tier: object) -> tuple[Ids, str, int]:
        """The arguments of ``take``, checked. Raises TypeError, ValueError."""
        return key_rows(keys), text_argument("owner", owner), tier_number(tier)

    def take(self, keys: Ids, owner: str, tier: int, now: int, stream: Stream) -> Lease:
        """Take a lease for a stream, which waits for nothing. The caller holds the state lock, and calls ``settle``
        when the copies for the lease are enqueued. Raises BlockNotFound."""
        lease = self._take_lease(owner, keys, None, tier, int(records.NONE), now, stream)
        if isinstance(lease, int):
            raise BlockNotFound(f"key {keys[lease].tobytes().hex()} is not cached{_TIERS[tier]}")
        self._core.note(WILL_READ, stream, self._open[lease.id].ids)
        return lease

    def settle(self, lease: Lease, now: int) -> bool:
        """Whether the copies for which a lease waits are enqueued. If the device has refused one, the lease is
        closed."""
        held = self._open.get(lease.id)
        # One that others have closed meanwhile waits for nothing.
        return held is None or self._drop_lost(lease, held.ids, now) is None

    def give_back(self, lease: Lease, now: int, stream: Stream | None) -> AbstractContextManager[Any]:
        """Close a lease. Returns the host access, to be ended when the decision is final. The caller holds the state
        lock. Raises LeaseExpired."""
        if not self.is_open(lease):
            raise LeaseExpired(f"lease {lease.id} of {lease.owner!r} was closed or revoked")
        held = self._open.pop(lease.id)
        control.unpin(self._core.states.heads, held.ids, now)
        self._core.note(ACCESSED, lease.stream if stream is None else stream, held.ids)
        return held.access

    def picture(self) -> tuple[dict[int, Any], int]:
        """Which leases are open. The caller holds the state lock."""
        return dict(self._open), self._count

    def restore(self, picture: tuple[dict[int, Any], int]) -> None:
        """Undo all that was opened and closed since the picture, except the pins. The caller holds the state lock."""
        self._open, self._count = picture

    # -- open leases --------------------------------------------------------------------------------

    @property
    def all(self) -> list[Lease]:
        """The open leases, oldest first. Safe in a destructor. Take the state lock for a list on which two calls must
        agree."""
        return [held.lease for held in list(self._open.values())]

    def is_open(self, lease: Lease) -> bool:
        held = self._open.get(lease.id)
        return held is not None and held.lease is lease

    def pinned(self) -> list[Ids]:
        """The blocks of each open lease. The caller holds the state lock."""
        return [held.ids for held in list(self._open.values())]

    def now(self) -> int:
        return self._core.now()

    def addresses(self, ids: Ids, part: object) -> Ids:
        most = max(len(group.layouts) for group in self._core.config.groups)
        return self._pools.addresses(ids, integer_argument("part", part, 0, most - 1))

    # -- closing ------------------------------------------------------------------------------------

    def close(self, lease: Lease, stream: StreamLike = None) -> None:
        """What ``Lease.close`` does. It enqueues nothing and waits for nothing, so a destructor may call it
        anywhere."""
        now, on = self.now(), lease.stream if stream is None else self._core.device.as_stream(stream)
        with DeferSignals(), self._core.lock:
            if self._core.closed:
                raise PoolClosed("the pool is closed")
            if not self.is_open(lease):
                raise LeaseExpired(f"lease {lease.id} of {lease.owner!r} was closed or revoked")
            self._end(self._open.pop(lease.id), now, on)

    def revoke(self, owner: str) -> int:
        """Close all leases of an owner; returns how many."""
        now = self.now()
        with DeferSignals(), self._core.lock:
            self._core.check_open()
            count = 0
            for number, held in list(self._open.items()):
                # A destructor may close one meanwhile.
                if held.lease.owner == owner and self._open.pop(number, None) is not None:
                    self._end(held, now, held.lease.stream)
                    count += 1
        return count

    def clear(self) -> None:
        """Forget all leases of a pool that is being closed. The caller holds the state lock."""
        while self._open:
            self._open.popitem()[1].access.__exit__(None, None, None)

    def _end(self, held: _Held, now: int, stream: Stream | None = None) -> None:
        """Unpin the blocks of a lease. The caller holds the state lock."""
        control.unpin(self._core.states.heads, held.ids, now)
        self._core.note(ACCESSED, stream, held.ids)
        held.access.__exit__(None, None, None)


_TIERS = {control.ANY_TIER: "", int(records.DEVICE): " on the device", int(records.HOST): " on the host"}


def _place_of_key(keys: Ids, lease: Lease, place: int) -> int:
    """Which of the requested keys has the block at ``place`` of a lease."""
    assert lease.keys is not None
    return int(np.flatnonzero((keys.view(np.uint64) == lease.keys[place]).all(axis=1))[0])
