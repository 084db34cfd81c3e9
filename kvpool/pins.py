"""Pins: leases for readers on other threads and streams, and the way in for content that comes from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.device.base import Stream
from kvpool.errors import BlockNotFound, DeviceError, LeaseExpired, PoolClosed
from kvpool.groups import Group
from kvpool.interrupt import DeferInterrupt
from kvpool.layout import integer_argument
from kvpool.leases import Lease
from kvpool.retention import priority_argument
from kvpool.sequence import BlockKeys, id_array, key_row, key_rows, list_argument
from kvpool.staged_tables import TablePool
from kvpool.state import blocks, imports, pins
from kvpool.state.accesses import ACCESSED, WILL_READ
from kvpool.strided import in_numpy

Ids = npt.NDArray[np.int64]


class Held(NamedTuple):
    """An open lease, a private copy of its block ids, and what the device was told of the host's reading."""

    lease: Lease
    ids: Ids
    access: AbstractContextManager[Any]


class PinPool(TablePool):
    """A pool whose blocks can be pinned; ``KVCacheManager`` is one."""

    def pin(self, keys: Any, *, owner: str = "", tier: str | None = None, stream: Any = None) -> Lease:
        """Pin the block of each key on ``tier``, or (None) its host copy where there is one, else its device block.

        Of several groups of layers, all that have a block for a key, one of them at least, and those with attention to all tokens always.
        Returns when the bytes are there for the host to read, which is waited for outside the locks; with a ``stream``, at once: work
        enqueued there from now on waits. Raises BlockNotFound, naming the first key that is missing, with nothing pinned; DeviceError.
        """
        wanted = {None: pins.ANY_TIER, "device": blocks.DEVICE, "host": blocks.HOST}
        if not (tier is None or isinstance(tier, str)) or tier not in wanted:
            raise ValueError(f"tier={tier!r}: accepted are None, 'device' and 'host'")
        rows = key_rows(keys)
        lease = self._pin(owner, rows, None, wanted[tier], stream)
        if isinstance(lease, int):
            raise BlockNotFound(f"key {rows[lease].tobytes().hex()} is not cached{'' if tier is None else f' on the {tier}'}")
        return lease

    def find_and_pin_host(self, key: Any, *, owner: str = "", stream: Any = None) -> Lease | None:
        """Pin the host copy of one key (16 bytes or uint64[2]), or None if it has none. Finding and pinning are one step.

        Readiness is as for ``pin``.
        """
        lease = self._pin(owner, key_row(key), None, blocks.HOST, stream)
        return None if isinstance(lease, int) else lease

    def pin_blocks(self, ids: Any, *, owner: str = "", stream: Any = None) -> Lease:
        """Pin blocks by id; each must hold content or be held. Raises BlockNotFound with nothing pinned.

        Ids are those of all groups of layers, as leases have them: ``groups[g].first_device_block`` + the id in a table of group g.
        Readiness is as for ``pin``; of a block that a sequence is filling, only for its committed tokens, behind which the engine goes on;
        a running state, which the next token overwrites, is left to the lease: the sequence goes on in a copy.
        """
        which = id_array("ids", ids)
        lease = self._pin(owner, None, which.copy(), pins.ANY_TIER, stream)
        if isinstance(lease, int):
            raise BlockNotFound(f"block {which[lease]} is unknown or holds nothing")
        return lease

    def _pin(self, owner: str, keys: Ids | None, ids: Ids | None, tier: int, stream: Any) -> Lease | int:
        """A lease of the blocks of keys, or of blocks by id; or the place of the first that cannot be pinned."""
        if not isinstance(owner, str):
            raise TypeError(f"owner={owner!r:.80}: accepted is a string")
        now, on = self.now(), None if stream is None else self._device.as_stream(stream)
        self._refuse_inside("pin")
        lease: Lease | int | None = None
        try:
            with DeferInterrupt():
                with self._lock:
                    self._check_open()
                    lease = self._take_lease(owner, keys, ids, tier, now, on)
                    if isinstance(lease, int):
                        return lease
                    ids = self._leases[lease.id].ids
                    self._note(WILL_READ, on, ids)
                    # Asked here: a copy that another thread hands over, and loses, right after this must be seen below.
                    behind = self._transfer.collect() or self._transfer.waiting
                if behind:
                    self._transfer.drain()
                    lost = self._drop_lost(lease, ids, now)
                    if lost is not None:
                        return lost if keys is None else _place_of_key(keys, lease, lost)
            if on is None and self._transfer.order is not None:
                self._await(lease, ids)
        except BaseException:
            # Whatever went wrong, Ctrl-C included: nobody got the lease.
            if isinstance(lease, Lease) and self.is_leased(lease):
                self.close_lease(lease)
            raise
        return lease

    def _take_lease(self, owner: str, keys: Ids | None, ids: Ids | None, tier: int, now: int, stream: Stream | None) -> Lease | int:
        """The state lock is held by the caller."""
        heads = self._states.heads
        if keys is None:
            assert ids is not None
            failed, groups = pins.pin_blocks(heads, ids), self._states.groups_of(ids)
        else:
            found = np.empty((len(heads), len(keys)), np.int64)
            failed = pins.pin_keys(heads, keys, tier, found)
            groups, places = np.nonzero(found != blocks.NONE)
            ids, keys = found[groups, places], keys[places]
        if failed:
            return int(heads[0, blocks.DETAIL])
        try:
            generation, at = int(heads[0, blocks.GENERATION]), self._pools.addresses(ids)
            lease = Lease(self, self._lease_count + 1, owner, generation, now, ids, groups, keys, at, stream)
            self._leases[lease.id] = Held(lease, ids, nullcontext())
        except BaseException:
            pins.unpin(heads, ids, now)
            raise
        self._lease_count += 1
        return lease

    def _note(self, kind: int, stream: Stream | None, ids: Ids) -> None:
        """Have the next decision tell what a stream, if there is one, does to blocks. The state lock is held by the caller."""
        if stream is not None and self._transfer.order is not None:
            self._transfer.note(np.stack([np.full(len(ids), kind), np.full(len(ids), self._transfer.slot(stream)), ids], axis=1))

    def part_addresses(self, ids: Ids, part: Any) -> Ids:
        """What ``Lease.addresses_of`` gives."""
        most = max(len(group.layouts) for group in self._groups)
        return self._pools.addresses(ids, integer_argument("part", part, 0, most - 1))

    def _drop_lost(self, lease: Lease, ids: Ids, now: int) -> int | None:
        """A copy that a lease waited for may have failed: then unpin, and return the place of the block that it would have filled."""
        with self._lock:
            lost = np.flatnonzero(self._states.gather("flags", ids) & blocks.LOST)
            if len(lost) == 0:
                return None
            if self._leases.pop(lease.id, None) is not None:
                pins.unpin(self._states.heads, ids, now)
            return int(lost[0])

    def _await(self, lease: Lease, ids: Ids) -> None:
        """Wait, with no lock held, until the host can read the bytes of a lease. Raises LeaseExpired if it was revoked meanwhile."""
        self._wait_for(self._transfer.pending(ids))
        if self.is_leased(lease):
            access = self._device.host_access(reads=self._filled(ids))
            access.__enter__()
            with self._lock:
                if self.is_leased(lease):
                    self._leases[lease.id] = Held(lease, ids, access)
                    return
            access.__exit__(None, None, None)
        self._check_open()
        raise LeaseExpired(f"lease {lease.id} of {lease.owner!r} was revoked while it waited")

    def _wait_for(self, events: Sequence[Any]) -> None:
        try:
            for event in events:
                self._device.synchronize(event)
        except DeviceError as error:
            self._transfer.broken = self._transfer.broken or error
            raise

    def _filled(self, ids: Ids) -> npt.NDArray[np.int64]:
        """The tokens that blocks have, as rows (block, first, end) for the device: in an unfull one, the engine may go on behind them."""
        filled = self._states.gather("filled", ids).astype(np.int64)
        most = self._states.heads[self._states.groups_of(ids), blocks.BLOCK_TOKENS]  # 1 of a state, whatever tokens are behind it
        filled = np.minimum(filled, most)
        return np.stack([ids, np.zeros_like(ids), filled], axis=1)[filled > 0]

    def is_leased(self, lease: Lease) -> bool:
        """Whether a lease is open."""
        held = self._leases.get(lease.id)
        return held is not None and held.lease is lease

    def close_lease(self, lease: Lease, stream: Any = None) -> None:
        """What ``Lease.close`` does. Enqueues and waits for nothing, so that a destructor may call it anywhere."""
        now, on = self.now(), lease.stream if stream is None else self._device.as_stream(stream)
        with DeferInterrupt(), self._lock:
            if self._report is not None:
                raise PoolClosed("the pool is closed")
            if not self.is_leased(lease):
                raise LeaseExpired(f"lease {lease.id} of {lease.owner!r} was closed or revoked")
            self._end(self._leases.pop(lease.id), now, on)

    def _end(self, held: Held, now: int, stream: Stream | None = None) -> None:
        """Unpin what a lease held. The state lock is held by the caller."""
        pins.unpin(self._states.heads, held.ids, now)
        self._note(ACCESSED, stream, held.ids)
        held.access.__exit__(None, None, None)

    @property
    def leases(self) -> list[Lease]:
        """Open leases, oldest first."""
        with self._lock:
            return [held.lease for held in list(self._leases.values())]

    def revoke(self, owner: str) -> int:
        """Close all leases of an owner, whose readers then read memory that may be reused, but for what they have enqueued on the streams
        that they named; returns how many."""
        if not isinstance(owner, str):
            raise TypeError(f"owner={owner!r:.80}: accepted is a string")
        now = self.now()
        with DeferInterrupt(), self._lock:
            self._check_open()
            count = 0
            for number, held in list(self._leases.items()):
                # A destructor may close one meanwhile.
                if held.lease.owner == owner and self._leases.pop(number, None) is not None:
                    self._end(held, now, held.lease.stream)
                    count += 1
        return count

    # -- content from elsewhere ------------------------------------------------------------------

    def import_blocks(
        self, prompt: BlockKeys, data: Any, *, first: int = 0, priority: int = blocks.DEFAULT_PRIORITY, group: int | None = None
    ) -> int:
        """Store the KV of full blocks ``first``, ``first + 1``, ... of a prompt on the host, so that the next request with it hits.

        ``data``: for each block a buffer or array of ``layout.block_bytes``, laid out as a block of ``host_pool``. The keys are the
        prompt's, which this pool computed. Blocks that are cached already are skipped, and it stops where the host has no room; returns
        how many were stored. What is being written cannot be found; a reset meanwhile stores nothing. Waits, outside the locks, for
        copies out of the memory that it takes, and for other imports.

        ``group``: of layers, to be named where there are several; a request hits once all groups have what they need of a prefix. A
        buffer has ``groups[group].block_bytes``: the block in ``host_pools[group][0]``, behind it that in the next part. In a recurrent
        group, block i is the state behind the i-th full block. Groups for cross attention are refused. Thread-safe; changes the pool.
        Raises TypeError, ValueError, PoolClosed, DeviceError.
        """
        if not isinstance(prompt, BlockKeys):
            raise TypeError(f"prompt={prompt!r:.80}: accepted are the BlockKeys of this pool")
        keys, into = self._own_keys(prompt), self._groups[self._group(group)]
        if into.kind == "cross":
            raise ValueError(f"group={into.index}: what a group for cross attention holds is found by nobody; accepted are others")
        first = integer_argument("first", first, 0, (1 << 31) - 1)
        priority = priority_argument("priority", priority)
        buffers = [_block_bytes(i, buffer, into.block_bytes) for i, buffer in enumerate(list_argument("data", data))]
        full = len(keys) // self.tokens_per_block
        if first + len(buffers) > full:
            raise ValueError(f"data has {len(buffers)} blocks, first={first}: accepted are full blocks of the prompt's {full}")
        self._refuse_inside("import_blocks")
        now = self.now()
        with self._importing:
            ids, held = np.full(len(buffers), blocks.NONE, np.int64), np.full(full, blocks.NONE, np.int64)
            try:
                generation = self._take_imports(into, keys, first, priority, ids, held, now)
                self._fill(into, ids, buffers)
                return int(self._decide(0, None, self._publish, into, keys, first, priority, ids, generation, now))
            finally:
                self._give_back_imports(now)

    def _take_imports(self, into: Group, keys: BlockKeys, first: int, priority: int, ids: Ids, held: Ids, now: int) -> int:
        """The generation in which the blocks, ``ids`` and ``held`` as the group knows them, were taken."""
        if keys.extra_ids is not None:
            self._enable_extra()

        def take(heads: Ids, request: Ids) -> int:
            imports.take(heads[into.index], request, first, priority, ids, held, now)
            # In the order in which they go back: tail first so that leaves age first, and what was cached before last.
            self._imported = _outside(into, np.concatenate([_named(ids)[::-1], _named(held)[::-1]]))
            return int(heads[0, blocks.GENERATION])

        return int(self._decide(0, None, take, keys.request[0]))

    def _fill(self, into: Group, ids: Ids, buffers: list[npt.NDArray[np.uint8]]) -> None:
        taken = _outside(into, _named(ids))
        self._wait_for(self._transfer.pending(taken, writes=True))
        rows = [self._pools.flat("host", into.index, i).reshape(-1, layout.block_bytes) for i, layout in enumerate(into.layouts)]
        ends = np.cumsum([layout.block_bytes for layout in into.layouts])[:-1]
        tokens = int(self._states.heads[into.index, blocks.BLOCK_TOKENS])
        whole = np.stack([taken, np.zeros_like(taken), np.full_like(taken, tokens)], axis=1)
        with self._device.host_access(writes=whole):
            for block, buffer in zip(ids.tolist(), buffers, strict=True):
                for part, own in zip(rows, np.split(buffer, ends) if block != blocks.NONE else (), strict=False):
                    part[block - into.device_blocks] = own

    def _publish(
        self, heads: Ids, into: Group, keys: BlockKeys, first: int, priority: int, ids: Ids, generation: int, now: int
    ) -> int:
        """Blocks published: none if the pool was reset since they were taken. The state lock is held by the caller."""
        if generation != heads[0, blocks.GENERATION]:
            return 0
        self._names.learn([keys])
        return int(imports.publish(heads[into.index], keys.request[0], first, priority, ids, now))

    def _give_back_imports(self, now: int) -> None:
        """Unpin what an import has pinned."""
        with DeferInterrupt(), self._lock:
            if self._report is None:
                pins.unpin(self._states.heads, self._imported, now)
            self._imported = np.empty(0, np.int64)


def _outside(group: Group, ids: Ids) -> Ids:
    """Host blocks of a group by the ids that all behind the state knows them by."""
    return ids + (group.first_host_block - group.device_blocks)


def _place_of_key(keys: Ids, lease: Lease, place: int) -> int:
    """Which of the keys that were asked for has the block at ``place`` of a lease."""
    assert lease.keys is not None
    return int(np.flatnonzero((keys.view(np.uint64) == lease.keys[place]).all(axis=1))[0])


def _block_bytes(place: int, buffer: Any, size: int) -> npt.NDArray[np.uint8]:
    buffer = in_numpy(f"data[{place}]", buffer)
    try:
        if getattr(getattr(buffer, "dtype", None), "hasobject", False):
            raise TypeError("objects are no bytes")
        found = np.frombuffer(buffer, np.uint8)
    except (TypeError, ValueError, BufferError):
        raise TypeError(f"data[{place}] is a {type(buffer).__name__}: accepted are contiguous buffers") from None
    if found.nbytes != size:
        raise ValueError(f"data[{place}] has {found.nbytes} bytes: accepted are the {size} of a block")
    return found


def _named(ids: Ids) -> Ids:
    return ids[ids != blocks.NONE]
