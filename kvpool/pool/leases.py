"""Leases: blocks that readers on other threads and streams have pinned, with the name of each reader."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvpool.common.arguments import text_argument
from kvpool.common.arrays import Int64s, Uint64s
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.arrays.strided import read_only
from kvpool.common.changes import LockHold
from kvpool.common.process import Closing
from kvpool.device.base import Stream, StreamLike
from kvpool.device.memory.pools import MemoryPools
from kvpool.errors import BlockNotFound, LeaseExpired, PoolClosed
from kvpool.pool.core import Core
from kvpool.pool.exclusive import allowed_inside
from kvpool.state import control, records
from kvpool.state.tiers import ACCESSED, WILL_READ

Ids = Int64s


@dataclass(eq=False, repr=False, slots=True)
class Lease(Closing):
    """Blocks that are pinned for a reader: they are not moved, overwritten or evicted until the lease is closed.

    A context manager, which closes the lease. ``KVCacheManager.pin``, ``pin_blocks`` and ``find_and_pin_host`` return
    it.

    Attributes
    ----------
    blocks : ndarray of int64, shape (n,)
        The pool ids of the blocks, read-only. With several groups of layers, each group that has a key has a block for
        it, group after group.
    groups : ndarray of int64, shape (n,)
        The group of layers of each block.
    keys : ndarray of uint64, shape (n, 2), or None
        The key of each block; None for a lease by block id.
    owner : str
        Name of the reader.
    stream : Stream or None
        The stream of the reader, if it has named one.
    since : int
        When the lease was opened, in milliseconds on the pool's clock.
    generation : int
        How often the pool was cleared before.
    id : int
        Its number in the pool.

    Notes
    -----
    Thread-safe.

    The bytes can be read as soon as the caller has the lease: by the host, or for a lease with a ``stream``, by work
    that is enqueued on that stream. A lease that was taken inside ``KVCacheManager.exclusive`` can be read after that
    block.
    """

    _leases: Leases
    id: int
    owner: str
    generation: int
    since: int
    blocks: Ids
    groups: Ids
    keys: Uint64s | None
    _addresses: Ids
    stream: Stream | None
    # Only a lease of ``exclusive`` has one: its copies are enqueued when the block ends.
    hold: LockHold | None
    # The blocks that are still to be unpinned.
    pins: Ids
    # The access of the host that the device checks for races.
    access: ExitStack = field(default_factory=ExitStack, init=False)

    @property
    def addresses(self) -> Int64s:
        """The address of each block's first byte, int64 of shape (n,).

        It is the address in the first layout of the block's group. For a device block, it is that of its first segment.

        Raises
        ------
        RuntimeError
            Inside the ``exclusive`` block in which the lease was taken.
        BlockNotFound
            After that block, if the device has refused a copy into one of the blocks.
        """
        if self.hold is not None:
            self._leases.check_readable(self)
        return self._addresses

    def addresses_of(self, part: int) -> Int64s:
        """Return the address of each block's first byte in one layout of its group.

        Parameters
        ----------
        part : int
            The index of the layout. ``addresses`` has those of layout 0.

        Returns
        -------
        ndarray of int64, shape (n,)
            The addresses; 0 for a block whose group has no such layout.

        Raises
        ------
        TypeError, ValueError
            For a bad index.
        PoolClosed
            After the pool was closed.
        RuntimeError, BlockNotFound
            As for ``addresses``.
        """
        if self.hold is not None:
            self._leases.check_readable(self)
        return self._leases.addresses(self.blocks, part)

    @property
    def age_ms(self) -> int:
        """The time since the lease was opened, in milliseconds."""
        return self._leases.core.now() - self.since

    @property
    def closed(self) -> bool:
        """Whether it was closed or revoked, or the pool was closed."""
        return not self._leases.is_open(self)

    @allowed_inside
    def close(self, stream: StreamLike = None) -> None:
        """Unpin the blocks.

        Parameters
        ----------
        stream : Stream, int, or stream of another package, optional
            Where the reader has enqueued copies out of the blocks: the blocks are not overwritten before those are
            done. By default the stream of the lease. Without any, the reader must have finished.

        Raises
        ------
        LeaseExpired
            If the lease was closed or revoked before.
        PoolClosed
            After the pool was closed.

        Notes
        -----
        Changes the pool. It does not wait, so that destructors can call it.
        """
        self._leases.close(self, stream)

    def __exit__(self, kind: object = None, *error: object) -> None:
        if kind is None or not self.closed:
            self.close()

    def __repr__(self) -> str:
        return (
            f"Lease(id={self.id}, owner={self.owner!r}, blocks={len(self.blocks)}, age_ms={self.age_ms}, "
            f"closed={self.closed})"
        )


class Leases:
    """The open leases of one pool. Thread-safe."""

    def __init__(self, core: Core, pools: MemoryPools) -> None:
        self.core, self._pools = core, pools
        self._open: dict[int, Lease] = {}
        self._count = 0

    # -- opening ------------------------------------------------------------------------------------

    def pin(
        self, keys: Ids | None, ids: Ids | None, tier: int, owner: str, stream: StreamLike, group: int | None = None
    ) -> Lease:
        """Pin the blocks of keys int64[n, 2], or blocks by id. Raises BlockNotFound if one cannot be pinned."""
        owner, core = text_argument("owner", owner), self.core
        only = records.NONE if group is None else core.config.group(group)
        now_ms, on = core.now(), None if stream is None else core.as_stream(stream)
        exclusive = core.is_exclusive
        if not exclusive:
            core.refuse_inside("pin")
        elif on is None:
            core.check_open()
            raise RuntimeError("stream: expected the stream that reads the blocks, inside exclusive, got None")
        with core.lock, core.changes:
            core.check_open()
            lease = self.take(keys, ids, tier, owner, only, now_ms, on)
            # Checked here: another thread may enqueue a copy, and lose it, right after this. That must be noticed
            # below.
            behind = core.transfer.collect() or core.transfer.waiting
        if exclusive:
            return lease
        try:
            if behind:
                core.transfer.drain()
                lost = self._lost(lease, now_ms)
                if lost is not None:
                    raise _not_found(lease.keys, lost, tier, lease.blocks)
            if core.changes.torn is not None:
                core.check_open()
            if on is None and core.transfer.order is not None:
                self._await(lease)
        except BaseException:
            # Nobody gets the lease. If this is interrupted too, it is listed.
            with suppress(LeaseExpired, PoolClosed):
                self.close(lease)
            raise
        return lease

    def take(
        self, keys: Ids | None, ids: Ids | None, tier: int, owner: str, only: int, now_ms: int, stream: Stream | None
    ) -> Lease:
        """Open a lease without waiting. The caller holds the state lock, enqueues the copies for the lease, and then
        checks whether the device accepted them. Raises BlockNotFound."""
        core, states, groups, new = self.core, self.core.states, self.core.states.groups, list[Lease]()
        block_ids = np.empty((len(groups), 0 if keys is None else len(keys)), np.int64)
        verb: partial[Any]
        if keys is None:
            verb = partial(control.pin_blocks, groups, ids)
        else:
            verb = partial(control.pin_keys, groups, only, keys, tier, block_ids)

        def made() -> Lease:
            if keys is None:
                assert ids is not None
                blocks, named = ids, None
                block_groups, _ = states.pool_ids.place(ids)
            else:
                block_groups, places = np.nonzero(block_ids != records.NONE)
                blocks, named = block_ids[block_groups, places], keys[places].view(np.uint64)
            what = read_only(blocks), block_groups, named, self._pools.addresses(blocks)
            generation = int(groups[0, records.H.generation])
            pins, hold = blocks.copy(), core.changes.hold
            return Lease(self, self._count + 1, owner, generation, now_ms, *what, stream, hold, pins)

        def open_lease(error: int) -> None:
            if error:
                return
            if not new:
                new.append(made())
            lease = new[0]
            self._count = max(self._count, lease.id)
            self._open[lease.id] = lease
            core.note(WILL_READ, stream, lease.blocks)

        if core.changes.run(verb, finish=open_lease):
            raise _not_found(keys, int(groups[0, records.H.detail]), tier, ids)
        return new[0]

    def settle(self, hold: LockHold) -> list[Exception]:
        """Close the open leases that were taken under a hold, and whose copies the device has refused. All copies are
        enqueued. Returns the exceptions that reading them raises."""
        refused: list[Exception] = []
        for lease in self.all:
            if lease.hold is hold:
                try:
                    self.check_readable(lease)
                except (BlockNotFound, LeaseExpired) as error:
                    refused.append(error)
        return refused

    def check_readable(self, lease: Lease) -> None:
        """Raise unless the copies of a lease that was taken under a hold are enqueued. If the device has refused one,
        the lease is closed."""
        core, hold = self.core, lease.hold
        if hold is None:
            return
        core.refuse_inside("addresses")
        if hold.is_held:
            raise RuntimeError(f"lease {lease.id}: expected a read after the exclusive block, got one before its end")
        core.flush()
        if core.changes.torn is not None:
            core.check_open()
        lost = self._lost(lease, core.now())
        if lost is not None:
            raise _not_found(lease.keys, lost, control.ANY_TIER, lease.blocks)
        if not self.is_open(lease):
            raise LeaseExpired(f"lease {lease.id} of {lease.owner!r} was closed or revoked")
        lease.hold = None

    def _lost(self, lease: Lease, now_ms: int) -> int | None:
        """If a copy into a block of a lease has failed, unpin the lease, and return the index of the block."""
        with self.core.lock, self.core.changes:
            lost = np.flatnonzero(self.core.states.gather("flags", lease.blocks) & records.LOST)
            if len(lost) == 0:
                return None
            if self.is_open(lease):
                self._unpin(lease, now_ms)
            return int(lost[0])

    def _unpin(self, lease: Lease, now_ms: int, finish: Callable[[Any], object] | None = None) -> None:
        """End an open lease. The caller holds the state lock. A destructor may have ended it by now."""
        self.core.changes.run(
            partial(self._open.pop, lease.id, None),
            partial(control.end_pins, self.core.states.groups, lease.pins, now_ms),
            finish=finish,
        )

    def _await(self, lease: Lease) -> None:
        """Wait, with no lock held, until the host can read the bytes of a lease. Raises LeaseExpired if it was revoked
        meanwhile."""
        ids = lease.blocks.copy()
        self.core.wait_for(self.core.transfer.pending(ids))
        with self.core.lock, self.core.changes:
            # Under the lock: a pool that is being closed gives the memory back once no lease is open.
            if self.is_open(lease):
                lease.access.enter_context(self.core.device.host_access(reads=self._filled(ids)))
                return
        self.core.check_open()
        raise LeaseExpired(f"lease {lease.id} of {lease.owner!r} was revoked while it waited")

    def _filled(self, ids: Ids) -> Int64s:
        """Return the tokens that blocks have, as rows (block, first, end). The engine may write after them in an unfull
        block."""
        states = self.core.states
        # A block of a recurrent group holds one state, however many tokens it stands for.
        most = states.groups[states.pool_ids.place(ids)[0], records.H.block_tokens]
        filled = np.minimum(states.gather("filled", ids).astype(np.int64), most)
        return np.stack([ids, np.zeros_like(ids), filled], axis=1)[filled > 0]

    # -- open leases --------------------------------------------------------------------------------

    @property
    def all(self) -> list[Lease]:
        """The open leases, oldest first. Safe in a destructor. Hold the state lock where the list must not change."""
        return list(self._open.values())

    def is_open(self, lease: Lease) -> bool:
        return self._open.get(lease.id) is lease

    def pinned(self) -> list[Ids]:
        """Return the blocks of each open lease. The caller holds the state lock."""
        return [lease.blocks for lease in self.all]

    def addresses(self, ids: Ids, part: object) -> Ids:
        most = max(len(group.layouts) for group in self.core.config.groups)
        return self._pools.addresses(ids, integer_argument("part", part, 0, most - 1))

    # -- closing ------------------------------------------------------------------------------------

    def close(self, lease: Lease, stream: StreamLike = None) -> None:
        """Close a lease. It enqueues nothing and waits for nothing, so a destructor may call it anywhere."""
        now_ms, on = self.core.now(), None if stream is None else self.core.device.as_stream(stream)
        with self.core.lock, self.core.changes:
            if self.core.closed or self.core.changes.torn is not None:
                self.core.check_open()
            self.give_back(lease, now_ms, on).close()

    def give_back(self, lease: Lease, now_ms: int, stream: Stream | None) -> ExitStack:
        """Close a lease, and return its host access, which ends when the decision is final. The caller holds the state
        lock. Raises LeaseExpired."""
        if not self.is_open(lease):
            raise LeaseExpired(f"lease {lease.id} of {lease.owner!r} was closed or revoked")
        on = lease.stream if stream is None else stream
        self._unpin(lease, now_ms, lambda _: self.core.note(ACCESSED, on, lease.blocks))
        return lease.access

    def revoke(self, owner: str) -> int:
        """Close all leases of an owner, and return how many."""
        now_ms, count = self.core.now(), 0
        with self.core.lock, self.core.changes:
            self.core.check_open()
            for lease in self.all:
                # A destructor may close one meanwhile.
                if lease.owner == owner and self.is_open(lease):
                    self.give_back(lease, now_ms, None).close()
                    count += 1
        return count

    def clear(self) -> None:
        """Drop all leases of a pool that is being closed. The caller holds the state lock."""
        while self._open:
            self._open.popitem()[1].access.close()


_TIERS = {control.ANY_TIER: "", records.DEVICE: " on the device", records.HOST: " on the host"}


def _not_found(keys: Int64s | Uint64s | None, place: int, tier: int, ids: Ids | None = None) -> BlockNotFound:
    """Return the exception for the key, or else the block, at this index."""
    if keys is not None:
        return BlockNotFound(f"key {keys[place].tobytes().hex()} is not cached{_TIERS[tier]}")
    assert ids is not None
    return BlockNotFound(f"block {ids[place]} is unknown or holds nothing")
