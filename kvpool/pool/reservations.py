"""Reservations: device blocks that a loader fills from elsewhere. They are published together or given back.
Imports: the KV of full blocks from elsewhere, stored on the host under keys that this pool has computed."""

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
    """The part of a prompt in one group of layers: the blocks of its row, -1 if there is none, and how its tokens lie
    in them."""

    blocks: Int32s
    kind: str
    width: int
    tokens: int
    skip: int

    def writes(self, first_block: int) -> Ids:
        """Rows (block, first token, end of tokens) that a loader writes. The group's blocks begin at
        ``first_block``."""
        begins = np.arange(len(self.blocks)) * self.width
        first, end = np.maximum(self.skip - begins, 0), np.minimum(self.tokens - begins, self.width)
        kept = (self.blocks >= 0) & (first < end)
        if self.kind == "recurrent":  # a block is one state
            first, end = np.zeros_like(first), np.ones_like(end)
        return np.stack([self.blocks + first_block, first, end], axis=1)[kept].astype(np.int64)

    def slots(self) -> Ids:
        """See ``LoadTarget.slot_mapping_of``."""
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
    """Where a store may write a prompt's KV: of a live sequence (``Imports.load_targets``), or of a
    ``Reservation``.

    ``tokens``: how many tokens the prompt has. ``skip_prefix_n_tokens``: how many of them the pool has already. Do not
    write those, since others may be reading them. Both are the same in all groups of layers. ``blocks`` int32[n] and
    ``slot_mapping`` int64[tokens] are those of the only group; a ValueError where there are several. Immutable,
    thread-safe.
    """

    shares: tuple[Share, ...]
    """What the prompt has in each group of layers."""
    tokens: int
    skip_prefix_n_tokens: int

    @property
    def blocks(self) -> Int32s:
        return self.blocks_of()

    @property
    def slot_mapping(self) -> Ids:
        return self.slot_mapping_of()

    def blocks_of(self, group: int | None = None) -> Int32s:
        """The blocks of the whole prompt in its order, int32[n]: device block ids of a group, -1 where there is none.

        In a group for cross attention they are those of the encoder's tokens. ``group`` is required where there are
        several. Raises TypeError, ValueError.
        """
        return self.shares[group_argument(group, len(self.shares))].blocks

    def slot_mapping_of(self, group: int | None = None) -> Ids:
        """Where each token is to be written in a group of layers: int64[tokens], a new array each time.

        A slot is block * tokens_per_block + place in the block, or -1 where nothing is to be written. ``scatter_kv``
        takes the slots, with ``PagedKV.of_pool(layout, cache.memory.device_pools[group][part])``. For cross attention
        it is int64[encoder_tokens], none left out. In a recurrent group the slot of a token is the block of the state
        after it, and -1 where no state is kept.

        With a sliding window, all tokens that the pool lacks have a slot, since what is committed is published. The
        commit then gives back blocks that no later token sees. ``group`` is required where there are several. Raises
        TypeError, ValueError.
        """
        return self.shares[group_argument(group, len(self.shares))].slots()

    def __repr__(self) -> str:
        return (
            f"LoadTarget(tokens={self.tokens}, skip_prefix_n_tokens={self.skip_prefix_n_tokens}, "
            f"groups={len(self.shares)})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Reservation(LoadTarget):
    """Device blocks for a prompt, which a loader fills and then commits or aborts. A context manager that aborts what
    was not committed.

    It is a ``LoadTarget``: ``slot_mapping`` says where each token is to be written. ``prompt`` has the tokens and keys.
    ``owner`` names the loader, ``since`` and ``deadline`` (or None) are in ms on the pool's clock, ``stream`` is the
    loader's or None. Thread-safe.

    Once its deadline has passed, a reservation is *overdue*: ``commit`` is refused, so nobody ever finds what comes
    late. The pool cannot take back an address that a loader has. So the blocks stay out of use, and a late write
    reaches nobody else's, until ``abort``, or ``revoke`` of its owner, reports that nobody writes them any more.
    """

    id: int
    owner: str
    since: int
    deadline: int | None
    prompt: BlockKeys
    stream: Stream | None
    _reservations: Reservations
    writing: ExitStack = field(default_factory=ExitStack, init=False)
    """What a device that looks for races was told of the loader."""

    @property
    def age_ms(self) -> int:
        return self._reservations.core.now() - self.since

    @property
    def closed(self) -> bool:
        """Whether it was committed, aborted or revoked, or given back by a reset."""
        return not self._reservations.is_open(self)

    @property
    def overdue(self) -> bool:
        """Whether its deadline has passed, and it was not ended. Its blocks wait for ``abort``."""
        return self._reservations.is_overdue(self)

    def commit(self, tokens: int | None = None, stream: StreamLike = None) -> None:
        """Publish the first ``tokens`` tokens (default: all), which the loader has written, and end the reservation.

        From now on prompts find the full blocks under their keys, and an unfull last block only as a partial match.
        Blocks after it are given back empty. Content that was cached meanwhile is not cached twice. Changes the pool.

        ``stream``: where the loader has enqueued its writes (default: the reservation's). Whoever uses the blocks waits
        for it. Without a stream, the bytes must be there: the loader has waited for its own writes, and this process's
        device can see them.

        Raises ReservationExpired if the reservation has ended or its deadline has passed, ValueError and TypeError for
        tokens below ``skip_prefix_n_tokens`` or above the prompt's, and DeviceError if a copy of the cached prefix
        failed. After a passed deadline or a failed copy the reservation stays open until ``abort``.
        """
        count = self.tokens
        if tokens is not None:
            count = integer_argument("tokens", tokens, self.skip_prefix_n_tokens, self.tokens)
        self._reservations.end(self, verbs.publish_reserved, count, stream)

    def abort(self, stream: StreamLike = None) -> None:
        """Give the blocks back.

        Those that were to be filled are empty again, and are taken next. The cached prefix stays cached.
        Allowed before and after the deadline.

        ``stream``: where the loader has enqueued writes (default: the reservation's). The next writer of the blocks
        waits for it. Without a stream, the loader must have stopped writing. Changes the pool. Raises
        ReservationExpired.
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
    """The open reservations of one pool, and the places of live sequences that a loader may fill. Thread-safe."""

    def __init__(self, core: Core, pools: MemoryPools) -> None:
        self.core, self._pools = core, pools
        self._open: dict[int, Reservation] = {}
        self.deadlines = Deadlines[int]()
        """of open reservations, by id. The state lock guards it."""

    def take(self, arrivals: Arrivals, owner: str, stream: StreamLike, lifetime: int | None) -> Reservation:
        """Reserve the blocks of one prompt. It expires after ``lifetime`` ms, or never."""
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
        """The parts of a sequence in each group. The KV of its first ``skip`` tokens is there. The caller holds the
        state lock."""
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
        """Rows (block, first token, end of tokens) that a loader writes in all groups."""
        each = zip(self.core.config.groups, target.shares, strict=True)
        return np.concatenate([share.writes(group.first_device_block) for group, share in each])

    def _expect_writes(self, reservation: Reservation) -> None:
        """If the loader is in another process, tell a device that looks for races what it writes until the reservation
        ends.

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
        """Oldest first."""
        with self.core.lock, self.core.changes:
            return list(self._open.values())

    def is_open(self, reservation: Reservation) -> bool:
        return self._open.get(reservation.id) is reservation

    def ids(self) -> set[int]:
        """The reserved rows, as sequence ids. The caller holds the state lock."""
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
        """Abort all reservations of an owner; returns how many."""
        count = 0
        for reservation in self.all:
            # Its loader may end one meanwhile.
            with suppress(ReservationExpired):
                if reservation.owner == owner:
                    reservation.abort()
                    count += 1
        return count

    def clear(self, now_ms: int) -> None:
        """Forget all reservations: their rows are given back, or the pool is closed. The caller holds the state
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
        self.pinned = NO_IDS
        """The blocks that the present import holds. The state lock guards it."""

    def store(self, into: Group, keys: BlockKeys, first: int, priority: int, buffers: list[Uint8s]) -> int:
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
                raise _Reset
            core.names.learn([keys])

        at = into.index, request, first, priority
        with self._one:
            try:
                self._give_back(now_ms)  # What an import has left that was interrupted twice.
                core.decide(None, control.take_missing, *at, ids, held, now_ms, finish=note)
                self._fill(into, ids, buffers)
                return int(core.decide(None, control.publish_taken, *at, ids, now_ms, first=check))
            except _Reset:  # The pool was reset since they were taken.
                return 0
            finally:
                self._give_back(now_ms)

    def _give_back(self, now_ms: int) -> None:
        """Unpin what the import has taken."""
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


class _Reset(Exception):
    """The pool was reset while an import was running."""


def block_buffer(place: int, buffer: Any, size: int) -> Uint8s:
    """The bytes of one block from the caller, in place. Raises TypeError or ValueError, which name ``data[place]``."""
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
