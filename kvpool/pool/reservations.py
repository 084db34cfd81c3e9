"""Reservations: device blocks that a loader fills, and that are published together or given back. ImportWriter: stores
the KV of full blocks on the host, under keys that this pool has computed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arrays import Int32s, Int64s, Uint8s
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.arrays.strided import in_numpy, read_only
from kvpool.device.base import Stream, StreamLike
from kvpool.device.memory.pools import MemoryPools
from kvpool.errors import DeviceError, KVPoolError, PoolClosed, ReservationExpired
from kvpool.pool.config import Group, group_argument
from kvpool.pool.core import Core
from kvpool.pool.deadlines import Deadlines
from kvpool.pool.keys import BlockKeys, request_of
from kvpool.pool.prompt_requests import Arrivals
from kvpool.state import admit, control, records, verbs
from kvpool.state.sequences import use

Ids = Int64s
NO_IDS: Ids = np.empty(0, np.int64)


class Share(NamedTuple):
    """The blocks of a prompt in one group of layers, -1 where there is none, and the slots of its tokens in them."""

    blocks: Int32s
    kind: str
    width: int
    tokens: int
    skip: int

    def writes(self, first_block: int) -> Ids:
        """Return rows (block, first token, end of tokens) that a loader writes. The group's blocks begin at
        ``first_block``."""
        begins = np.arange(len(self.blocks)) * self.width
        first, end = np.maximum(self.skip - begins, 0), np.minimum(self.tokens - begins, self.width)
        kept = (self.blocks >= 0) & (first < end)
        if self.kind == "recurrent":  # a block is one state
            first, end = np.zeros_like(first), np.ones_like(end)
        return np.stack([self.blocks + first_block, first, end], axis=1)[kept].astype(np.int64)

    def slots(self) -> Ids:
        """Return the slots: see ``LoadTarget.slot_mapping_of``."""
        if self.kind == "recurrent":
            places = np.flatnonzero(self.blocks >= 0)
            slots = np.full(self.tokens, -1, np.int64)
            slots[np.minimum((places + 1) * self.width, self.tokens) - 1] = self.blocks[places]
        else:
            slots = (self.blocks.astype(np.int64)[:, None] * self.width + np.arange(self.width)).reshape(-1)[
                : self.tokens
            ]
        slots[: self.skip] = -1  # a window passes no other blocks
        return slots


@dataclass(frozen=True, eq=False, repr=False)
class LoadTarget:
    """The device blocks of a prompt into which a loader writes KV.

    ``Imports.load_targets`` returns one for each live sequence. A ``Reservation`` is one too.

    Attributes
    ----------
    tokens : int
        Number of tokens of the prompt.
    skip_prefix_n_tokens : int
        How many of them the pool has already, in all groups of layers. Do not write those: others may be reading them.

    Notes
    -----
    Immutable and thread-safe.
    """

    # What the prompt has in each group of layers.
    shares: tuple[Share, ...]
    tokens: int
    skip_prefix_n_tokens: int

    @property
    def blocks(self) -> Int32s:
        """The blocks in a pool with one group of layers, int32 of shape (n,): see ``blocks_of``."""
        return self.blocks_of()

    @property
    def slot_mapping(self) -> Ids:
        """The slots in a pool with one group of layers, int64 of shape (tokens,): see ``slot_mapping_of``."""
        return self.slot_mapping_of()

    def blocks_of(self, group: int | None = None) -> Int32s:
        """Return the blocks of the whole prompt in a group of layers.

        Parameters
        ----------
        group : int, optional
            The index of the group, required where there are several.

        Returns
        -------
        ndarray of int32, shape (n,)
            Block ids in the device tier of the group; -1 where there is no block. In a group for cross attention, the
            blocks of the encoder's tokens.

        Raises
        ------
        TypeError, ValueError
            For a wrong group.
        """
        return self.shares[group_argument(group, len(self.shares))].blocks

    def slot_mapping_of(self, group: int | None = None) -> Ids:
        """Return the slot of each token in a group of layers.

        ``scatter_kv`` takes the slots, with ``PagedKV.of_pool(layout, cache.memory.device_pools[group][part])``.

        Parameters
        ----------
        group : int, optional
            The index of the group, required where there are several.

        Returns
        -------
        ndarray of int64, shape (tokens,)
            ``block * tokens_per_block + position in the block``; -1 for a token that must not be written, such as one
            of the first ``skip_prefix_n_tokens``. In a group for cross attention, the slots of the encoder's tokens,
            of shape (encoder_tokens,). In a recurrent group, the slot of a token is the block of the state after it,
            and -1 where no state is kept.

        Raises
        ------
        TypeError, ValueError
            For a wrong group.

        Notes
        -----
        In a group with a sliding window, every token that the pool does not have has a slot, since the commit publishes
        all of them. The commit then gives back the blocks that no later token sees.
        """
        return self.shares[group_argument(group, len(self.shares))].slots()

    def __repr__(self) -> str:
        return (
            f"LoadTarget(tokens={self.tokens}, skip_prefix_n_tokens={self.skip_prefix_n_tokens}, "
            f"groups={len(self.shares)})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Reservation(LoadTarget):
    """Device blocks for a prompt, which a loader fills and then commits or aborts.

    ``Imports.reserve`` returns it. It is a ``LoadTarget``: ``slot_mapping`` has the slot of each token to write. It is
    also a context manager, which aborts it at the end unless it was committed.

    Attributes
    ----------
    tokens : int
        Number of tokens of the prompt.
    skip_prefix_n_tokens : int
        How many of them the pool has already. Do not write those.
    prompt : BlockKeys
        The prompt.
    owner : str
        Name of the loader.
    stream : Stream or None
        The stream of the loader, if it has named one.
    since : int
        When it was made, in milliseconds on the pool's clock.
    deadline : int or None
        When it expires, on the same clock.
    id : int
        The id of its row, which no sequence has.

    Notes
    -----
    Thread-safe.

    A reservation whose deadline has passed is *overdue*, and ``commit`` is refused. The pool cannot take back an
    address that a loader has. So the blocks stay out of use until ``abort``, or ``KVCacheManager.revoke`` of the owner,
    and a late write changes no other content.
    """

    id: int
    owner: str
    since: int
    deadline: int | None
    prompt: BlockKeys
    stream: Stream | None
    _reservations: Reservations
    # The access of the loader that the device checks for races.
    writing: ExitStack = field(default_factory=ExitStack, init=False)

    @property
    def age_ms(self) -> int:
        """The time since it was made, in milliseconds."""
        return self._reservations.core.now() - self.since

    @property
    def closed(self) -> bool:
        """Whether it was committed, aborted or revoked, or ended by ``clear``."""
        return not self._reservations.is_open(self)

    @property
    def overdue(self) -> bool:
        """Whether its deadline has passed, and it has not ended. Its blocks stay out of use until ``abort``."""
        return self._reservations.is_overdue(self)

    def commit(self, tokens: int | None = None, stream: StreamLike = None) -> None:
        """Publish the tokens that the loader has written, and end the reservation.

        Parameters
        ----------
        tokens : int, optional
            The number of tokens of the prompt that are written, those of ``skip_prefix_n_tokens`` included. By default
            all. Blocks after them are given back empty.
        stream : Stream, int, or stream of another package, optional
            Where the loader has enqueued its writes: later users of the blocks wait for it. By default the stream of
            the reservation. Without any, the loader must have finished, and the device of this process must see the
            bytes.

        Raises
        ------
        TypeError, ValueError
            For a number of tokens below ``skip_prefix_n_tokens`` or above the prompt's.
        ReservationExpired
            If the reservation has ended or its deadline has passed. It stays open until ``abort`` in the second case.
        DeviceError
            If a copy of the cached prefix has failed. The reservation stays open until ``abort``.
        PoolClosed
            After the pool was closed.

        Notes
        -----
        Changes the pool. From now on, prompts find the full blocks by their keys. A last block that is not full is
        reused by a partial match only. Content that was cached meanwhile is not cached twice.
        """
        count = self.tokens
        if tokens is not None:
            count = integer_argument("tokens", tokens, self.skip_prefix_n_tokens, self.tokens)
        self._reservations.end(self, verbs.publish_reserved, count, stream)

    def abort(self, stream: StreamLike = None) -> None:
        """Give the blocks back, and end the reservation. It is allowed before and after the deadline.

        Parameters
        ----------
        stream : Stream, int, or stream of another package, optional
            Where the loader has enqueued writes: the next writer of the blocks waits for it. By default the stream of
            the reservation. Without any, the loader must have stopped writing.

        Raises
        ------
        ReservationExpired
            If the reservation has ended.
        PoolClosed
            After the pool was closed.

        Notes
        -----
        Changes the pool: blocks to be filled are empty, and are taken next. The cached prefix stays cached.
        """
        self._reservations.end(self, verbs.abort_reserved, 0, stream)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: object = None, *error: object) -> None:
        if not self.closed:
            try:
                # Somebody may revoke it meanwhile.
                with suppress(ReservationExpired):
                    self.abort()
            except PoolClosed:
                if kind is None:
                    raise

    def __repr__(self) -> str:
        return (
            f"Reservation(owner={self.owner!r}, blocks={sum(len(share.blocks) for share in self.shares)}, "
            f"tokens={self.tokens}, "
            f"skip_prefix_n_tokens={self.skip_prefix_n_tokens}, age_ms={self.age_ms}, closed={self.closed})"
        )


class Reservations:
    """The open reservations of one pool, and the load targets of live sequences. Thread-safe."""

    def __init__(self, core: Core, pools: MemoryPools) -> None:
        self.core, self._pools = core, pools
        self._open: dict[int, Reservation] = {}
        # By the id of an open reservation. The state lock guards it.
        self.deadlines = Deadlines[int]()

    def take(self, arrivals: Arrivals, owner: str, stream: StreamLike, lifetime: int | None) -> Reservation:
        """Reserve the blocks of one prompt. The reservation expires after ``lifetime`` ms, or never."""
        core, ((prompt,), row, *_) = self.core, arrivals
        now_ms, on = core.now(), None if stream is None else core.as_stream(stream)
        deadline = None if lifetime is None else now_ms + lifetime
        core.refuse_inside("reserve")
        new: list[Reservation] = []
        out = np.zeros((len(core.states), 1, records.OUTCOME_COLUMNS), np.int64)

        def open_reservation(admitted: int) -> None:
            if admitted != 1:
                return
            number, skip = int(out[0, 0, records.OUT.id]), int(out[int(core.tokens.group), 0, records.OUT.cached])
            if not new:
                shares = self._shares(number & 0xFFFFFFFF, skip)
                new.append(Reservation(shares, len(prompt), skip, number, owner, now_ms, deadline, prompt, on, self))
            self._open[number] = new[0]
            if deadline is not None:
                self.deadlines.add([number], deadline)

        def learn() -> None:
            core.names.learn([prompt])

        try:
            core.decide(on, admit.admit, row, out, now_ms, False, first=learn, finish=open_reservation)
            if on is None and core.transfer.order is not None:
                self._wait_until_free(new)
                self._expect_writes(new[0])
        except BaseException:
            # Nobody gets the reservation. The error may have broken the device, too. If this is interrupted, it is
            # listed.
            if new and self.is_open(new[0]):
                with suppress(KVPoolError):
                    new[0].abort()
            raise
        return new[0]

    def load_targets(self, which: Ids, stream: StreamLike) -> list[LoadTarget]:
        core = self.core
        core.refuse_inside("load_targets")
        core.decide(stream, use, which, ids=which)
        with core.lock, core.changes:
            targets = []
            for row in core.rows(which).tolist():
                sequence = core.tokens.sequences[row]
                skip = int(sequence["committed"])
                targets.append(LoadTarget(self._shares(row, skip), int(sequence["length"]), skip))
        if stream is None and core.transfer.order is not None:
            self._wait_until_free(targets)
        return targets

    def _shares(self, row: int, skip: int) -> tuple[Share, ...]:
        """Return the blocks of a sequence in each group. The pool has the KV of its first ``skip`` tokens. The caller
        holds the state lock."""
        core, shares = self.core, []
        for group, state, table in zip(core.config.groups, core.states, core.tables, strict=True):
            blocks, length = (int(state.sequences[name][row]) for name in ("blocks", "length"))
            group_skip = 0 if group.kind == "cross" else skip
            block_row = read_only(table[row, :blocks].copy())
            shares.append(Share(block_row, group.kind, core.config.tokens_per_block, length, group_skip))
        return tuple(shares)

    def _wait_until_free(self, targets: Sequence[LoadTarget]) -> None:
        """Wait, with no lock held, until no enqueued work touches the blocks to be filled."""
        written = [self._writes(target)[:, 0] for target in targets]
        self.core.wait_for(self.core.transfer.pending(np.concatenate([NO_IDS, *written]), writes=True))
        self.core.check_open()

    def _writes(self, target: LoadTarget) -> Ids:
        """Return rows (block, first token, end of tokens) that a loader writes in all groups."""
        each = zip(self.core.config.groups, target.shares, strict=True)
        return np.concatenate([share.writes(group.first_device_block) for group, share in each])

    def _expect_writes(self, reservation: Reservation) -> None:
        """If the loader is in another process, have the device check its writes for races until the reservation ends.

        Raises ReservationExpired if it was revoked meanwhile.
        """
        access: AbstractContextManager[Any] = nullcontext()
        if self._pools.shared:
            access = self.core.device.host_access(writes=self._writes(reservation), outside=True)
        with self.core.lock, self.core.changes:
            self._check_open(reservation)
            reservation.writing.enter_context(access)

    # -- open reservations --------------------------------------------------------------------------

    @property
    def all(self) -> list[Reservation]:
        """The open reservations, oldest first."""
        with self.core.lock, self.core.changes:
            return list(self._open.values())

    def is_open(self, reservation: Reservation) -> bool:
        return self._open.get(reservation.id) is reservation

    def ids(self) -> set[int]:
        """Return the reserved rows, as sequence ids. The caller holds the state lock."""
        return set(self._open)

    def is_overdue(self, reservation: Reservation) -> bool:
        now_ms = 0 if reservation.deadline is None else self.core.now()
        with self.core.lock, self.core.changes:
            self.expire(now_ms)
            return reservation.id in self.deadlines.overdue

    def expire(self, now_ms: int) -> None:
        """Count the reservations whose deadline has passed as expired. Their blocks stay with their loaders, which may
        still write them. The caller holds the state lock."""
        late = self.deadlines.passed(now_ms)
        if late:
            self.deadlines.expire(late)

    # -- ending -------------------------------------------------------------------------------------

    def revoke(self, owner: str) -> int:
        """Abort all reservations of an owner, and return how many."""
        count = 0
        for reservation in self.all:
            # Its loader may end one meanwhile.
            with suppress(ReservationExpired):
                if reservation.owner == owner:
                    reservation.abort()
                    count += 1
        return count

    def clear(self, now_ms: int) -> None:
        """Drop all reservations, since their rows are given back or the pool is closed. The caller holds the state
        lock."""
        self.expire(now_ms)
        self.deadlines.end(self._open)
        while self._open:
            self._open.popitem()[1].writing.close()

    def _check_open(self, reservation: Reservation) -> None:
        if not self.is_open(reservation):
            raise ReservationExpired(
                f"reservation {reservation.id} of {reservation.owner!r} was committed, aborted or revoked"
            )

    def end(self, reservation: Reservation, verb: Any, count: int, stream: Any) -> None:
        """Commit or abort a reservation by this verb."""
        now_ms = self.core.now()

        def check() -> None:
            self._check_open(reservation)
            self.expire(now_ms)
            if verb is verbs.publish_reserved and reservation.id in self.deadlines.overdue:
                raise ReservationExpired(
                    f"reservation {reservation.id} of {reservation.owner!r} was not committed before its deadline: "
                    "abort it"
                )
            if verb is verbs.publish_reserved and self.core.tokens.sequences["failed"][reservation.id & 0xFFFFFFFF]:
                raise DeviceError(
                    f"reservation {reservation.id} of {reservation.owner!r} lost a block to a failed copy: abort it"
                )

        def close(result: int) -> None:
            if result == 0:
                reservation.writing.close()
                self._open.pop(reservation.id, None)
                self.deadlines.end([reservation.id])

        which, counts = np.array([reservation.id], np.int64), np.array([count], np.int64)
        self.core.decide(stream, verb, which, counts, now_ms, ids=which, first=check, finish=close)


class ImportWriter:
    """Stores blocks in the host tier. One import runs at a time. The memory stays while an import writes to it.
    Thread-safe."""

    def __init__(self, core: Core, pools: MemoryPools) -> None:
        self._core, self._pools = core, pools
        self._one = threading.Lock()
        core.transfer.forks.guard(self, "_one")
        # The blocks that the present import holds. The state lock guards it.
        self.pinned = NO_IDS

    def store(self, into: Group, keys: BlockKeys, first: int, priority: int, buffers: list[Uint8s]) -> int:
        """Store blocks of a prompt in a group, from its full block ``first`` on, and return how many were stored."""
        core, full = self._core, len(keys) // self._core.config.tokens_per_block
        core.refuse_inside("import_blocks")
        now_ms, ids = core.now(), np.full(len(buffers), records.NONE, np.int64)
        held, request, generation = np.full(full, records.NONE, np.int64), request_of(keys), [-1]
        if keys.has_extra:
            core.enable_extra()

        def note(_: object) -> None:
            # They are given back in this order: the last block first, so that leaves age first, and what was cached
            # before last.
            taken = np.concatenate([_named(ids)[::-1], _named(held)[::-1]])
            self.pinned = core.states.pool_ids.of(into.index, taken)
            generation[0] = int(core.states.groups[0, records.H.generation])

        def check() -> None:
            if generation[0] != core.states.groups[0, records.H.generation]:
                raise _Cleared
            core.names.learn([keys])

        at = into.index, request, first, priority
        with self._one:
            try:
                self._give_back(now_ms)  # Blocks of an import that was interrupted twice.
                core.decide(None, control.take_missing, *at, ids, held, now_ms, finish=note)
                self._fill(into, ids, buffers)
                return int(core.decide(None, control.publish_taken, *at, ids, now_ms, first=check))
            except _Cleared:  # The pool was cleared since they were taken.
                return 0
            finally:
                self._give_back(now_ms)

    def _give_back(self, now_ms: int) -> None:
        """Unpin the blocks that the import has taken."""
        core = self._core
        with core.lock, core.changes:
            if core.closed:
                self.pinned = NO_IDS
            elif len(self.pinned):
                core.changes.run(
                    partial(setattr, self, "pinned", NO_IDS),
                    partial(control.end_pins, core.states.groups, self.pinned, now_ms),
                )

    def close(self) -> None:
        """Free the pool's memory, once no import writes to it any more."""
        with self._one:
            self._pools.close()

    def _fill(self, into: Group, ids: Ids, buffers: list[Uint8s]) -> None:
        taken = self._core.states.pool_ids.of(into.index, _named(ids))
        self._core.wait_for(self._core.transfer.pending(taken, writes=True))
        rows = [
            self._pools.flat("host", into.index, i).reshape(-1, layout.block_bytes)
            for i, layout in enumerate(into.layouts)
        ]
        ends = np.cumsum([layout.block_bytes for layout in into.layouts])[:-1]
        tokens = int(self._core.states.groups[into.index, records.H.block_tokens])
        whole = np.stack([taken, np.zeros_like(taken), np.full_like(taken, tokens)], axis=1)
        with self._core.device.host_access(writes=whole):
            for block, buffer in zip(ids.tolist(), buffers, strict=True):
                for part, piece in zip(rows, np.split(buffer, ends) if block != records.NONE else (), strict=False):
                    part[block - into.device_blocks] = piece


class _Cleared(Exception):
    """The pool was cleared while an import was running."""


def block_buffer(place: int, buffer: Any, size: int) -> Uint8s:
    """Return the caller's bytes of one block, in place. Raises TypeError or ValueError, which name ``data[place]``."""
    buffer = in_numpy(f"data[{place}]", buffer)
    try:
        if getattr(getattr(buffer, "dtype", None), "hasobject", False):
            raise TypeError("objects are no bytes")
        view = np.frombuffer(buffer, np.uint8)
    except (TypeError, ValueError, BufferError):
        raise TypeError(f"data[{place}]: expected a contiguous buffer, got {type(buffer).__name__}") from None
    if view.nbytes != size:
        raise ValueError(f"data[{place}]: expected the {size} bytes of a block, got {view.nbytes}")
    return view


def _named(ids: Ids) -> Ids:
    return ids[ids != records.NONE]
