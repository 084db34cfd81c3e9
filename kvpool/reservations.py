"""Reservations: device blocks that a loader fills from elsewhere, published as a whole or given back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvpool.device.base import Stream
from kvpool.errors import DeviceError, KVPoolError, PoolClosed, ReservationExpired
from kvpool.groups import group_argument
from kvpool.interrupt import DeferInterrupt
from kvpool.layout import integer_argument
from kvpool.pins import PinPool
from kvpool.sequence import BlockKeys, address, encoder_argument, id_array
from kvpool.state import answers, blocks, groups, live, requests

Ids = npt.NDArray[np.int64]


class Loader(Protocol):
    """The pool, as far as a reservation knows it."""

    def now(self) -> int: ...
    def is_reserved(self, reservation: Reservation) -> bool: ...
    def commit_reserved(self, reservation: Reservation, tokens: int | None = None, stream: Any = None) -> None: ...
    def abort_reserved(self, reservation: Reservation, stream: Any = None) -> None: ...


class Share(NamedTuple):
    """What a prompt has in one group of layers: the blocks of its row, -1 where there is none, and how its tokens lie in them."""

    blocks: npt.NDArray[np.int32]
    kind: str
    width: int
    tokens: int
    skip: int

    def slots(self) -> Ids:
        """See ``Loadable.slot_mapping_of``."""
        if self.kind == "recurrent":
            places = np.flatnonzero(self.blocks >= 0)
            slots = np.full(self.tokens, -1, np.int64)
            slots[np.minimum((places + 1) * self.width, self.tokens) - 1] = self.blocks[places]
        else:
            slots = (self.blocks.astype(np.int64)[:, None] * self.width + np.arange(self.width)).reshape(-1)[: self.tokens]
        slots[: self.skip] = -1  # a window passes no other blocks
        return slots

    def to_fill(self) -> npt.NDArray[np.int32]:
        """The blocks that a loader writes to."""
        behind = self.blocks[self.skip // self.width :]
        return behind[behind >= 0]


class Loadable:
    """What a store may fill of a prompt: that of a live sequence, see ``KVCacheManager.loadable``, or of a ``Reservation``.

    ``tokens`` of the prompt, and ``skip_prefix_n_tokens``, how many of them the pool has: those are not to be written, to the token, since
    others may read them now. Both are the same in all groups of layers. ``blocks`` int32[n] and ``slot_mapping`` int64[tokens] are those of
    the only group, ValueError where there are several. Immutable, thread-safe.
    """

    __slots__ = ("_shares", "skip_prefix_n_tokens", "tokens")

    def __init__(self, shares: Sequence[Share], tokens: int, skip: int) -> None:
        self._shares, self.tokens, self.skip_prefix_n_tokens = tuple(shares), tokens, skip

    @property
    def blocks(self) -> npt.NDArray[np.int32]:
        return self.blocks_of()

    @property
    def slot_mapping(self) -> Ids:
        return self.slot_mapping_of()

    def blocks_of(self, group: int | None = None) -> npt.NDArray[np.int32]:
        """The blocks of the whole prompt in its order, int32[n]: ids in the device tier of a group of layers, to be named where there are
        several; -1 where there is none. In a group for cross attention, those of the encoder's tokens. Raises TypeError, ValueError.
        """
        return self._shares[group_argument(group, len(self._shares))].blocks

    def slot_mapping_of(self, group: int | None = None) -> Ids:
        """Where each token goes in a group of layers, to be named where there are several: int64[tokens], a new array each time.

        That is block * tokens_per_block + place, or -1 where nothing is to be written. ``scatter_kv`` takes it, for
        ``PagedKV.of_pool(layout, cache.device_pools[group][part])``. In a group for cross attention, int64[encoder_tokens], none left out.
        In a recurrent group the slot of a token is the block of the state behind it, and -1 where none is kept.

        Of a sliding window, all tokens that the pool lacks have a slot, since what is committed is published; of those, what no token
        behind sees goes back with the commit. Raises TypeError, ValueError.
        """
        return self._shares[group_argument(group, len(self._shares))].slots()

    def __repr__(self) -> str:
        return f"Loadable(tokens={self.tokens}, skip_prefix_n_tokens={self.skip_prefix_n_tokens}, groups={len(self._shares)})"


class Reservation(Loadable):
    """Device blocks for a prompt, which a loader fills and then commits or aborts. A context manager that aborts what was not committed.

    What is to be filled is said as by every ``Loadable``: all tokens of the prompt have a place. ``prompt`` has the tokens and keys.
    ``owner``, ``since`` in ms on the pool's clock, ``stream`` the loader's or None. Thread-safe.
    """

    __slots__ = ("_pool", "id", "owner", "prompt", "since", "stream")

    def __init__(
        self, pool: Loader, number: int, owner: str, since: int, prompt: BlockKeys, shares: Sequence[Share], skip: int,
        stream: Stream | None,
    ) -> None:  # fmt: skip
        super().__init__(shares, len(prompt), skip)
        self._pool, self.id, self.owner, self.since, self.prompt, self.stream = pool, number, owner, since, prompt, stream

    @property
    def age_ms(self) -> int:
        return self._pool.now() - self.since

    @property
    def closed(self) -> bool:
        """Whether it was committed, aborted or revoked, or given back by a reset."""
        return not self._pool.is_reserved(self)

    def commit(self, tokens: int | None = None, stream: Any = None) -> None:
        """Publish the first ``tokens`` of the prompt (default: all), which the loader has written, and let go of all blocks.

        Full blocks are found from now on under their keys, an unfull last one only as a partial match; blocks behind are given back
        empty. Content that has been cached meanwhile is not cached twice. Changes the pool.

        ``stream``: where the loader has enqueued its writes, by default the reservation's; whoever uses the blocks waits for it.
        Without either, the bytes are there: the loader has waited for its own writes, and they can be seen by this process's device.

        Raises ReservationExpired; ValueError and TypeError, for tokens outside ``skip_prefix_n_tokens`` to all; DeviceError if a copy
        that was to bring a part of it failed, and the reservation can only be aborted.
        """
        self._pool.commit_reserved(self, tokens, stream)

    def abort(self, stream: Any = None) -> None:
        """Give the blocks back: those to be filled empty, in front of all others, and what was held of the prompt as before.

        ``stream``: where the loader has enqueued writes, by default the reservation's; the blocks' next writer waits for it. Without
        either, the loader writes no more. Changes the pool. Raises ReservationExpired.
        """
        self._pool.abort_reserved(self, stream)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
            f"Reservation(owner={self.owner!r}, blocks={sum(len(share.blocks) for share in self._shares)}, tokens={self.tokens}, "
            f"skip_prefix_n_tokens={self.skip_prefix_n_tokens}, age_ms={self.age_ms}, closed={self.closed})"
        )


class ReservePool(PinPool):
    """A pool whose blocks can be filled by others; ``KVCacheManager`` is one."""

    def _reserve(self, prompt: BlockKeys, ranges: Ids | None, owner: str, stream: Any, encoder_tokens: Any) -> Reservation:
        if not isinstance(owner, str):
            raise TypeError(f"owner={owner!r:.80}: accepted is a string")
        now, on = self.now(), None if stream is None else self._device.as_stream(stream)
        row, count = prompt.request.copy(), -(-len(prompt) // self.tokens_per_block)
        row[0, requests.R_RESERVES], row[0, requests.R_PRIORITY], row[0, requests.R_TTL] = 1, blocks.DEFAULT_PRIORITY, blocks.NONE
        moves = 2 * count
        if self._crosses or encoder_tokens is not None:
            row[:, requests.R_ENCODER] = encoder_argument("encoder_tokens", encoder_tokens, 1, self._crosses)
            moves += self._encoder_blocks(row)
        if ranges is not None:
            row[0, requests.R_RANGES], row[0, requests.R_RANGE_COUNT] = address(ranges), len(ranges)
        self._check_columns(count)
        self._refuse_inside("reserve")
        if prompt.extra_ids is not None:
            self._enable_extra()
        new: list[Reservation] = []

        def take(heads: Ids, rows: Ids) -> int:
            out = np.zeros((len(heads), 1, requests.OUTCOME), np.int64)
            self._names.learn([prompt])
            result = int(answers.admit(heads, rows, out, now, False))
            if result == 1:
                number, skip = int(out[0, 0, requests.O_ID]), int(out[int(self._state.header[blocks.GROUP]), 0, requests.O_CACHED])
                new.append(Reservation(self, number, owner, now, prompt, self._shares(number & 0xFFFFFFFF, skip), skip, on))
                self._reservations[number] = new[0]
            return result

        try:
            self._decide(moves, on, take, row)
            if on is None and self._transfer.order is not None:
                self._wait_until_free(new)
                self._check_reserved(new[0])
        except BaseException:
            # Ctrl-C is delivered behind the decision: nobody gets the reservation. What went wrong may have broken the device, too.
            if new and self.is_reserved(new[0]):
                with suppress(KVPoolError):
                    self.abort_reserved(new[0])
            raise
        return new[0]

    def _encoder_blocks(self, rows: Ids) -> int:
        """Blocks for cross attention that requests take, as far as a row has columns; what passes the device is refused by the decision.

        Raises ValueError for an encoder whose blocks would fit on the device, but have no place in a row of the block table.
        """
        needed = -(-rows[:, requests.R_ENCODER] // self.tokens_per_block)
        fewest = min(group.device_blocks for group in self._groups if group.kind == "cross")
        wide = np.flatnonzero(np.minimum(needed, fewest) > self._columns)
        if len(wide):
            tokens = int(rows[wide[0], requests.R_ENCODER])
            raise ValueError(f"encoder_tokens={tokens} passes max_sequence_tokens={self._columns * self.tokens_per_block}")
        return int(np.minimum(needed, self._columns).sum())

    def _shares(self, row: int, skip: int) -> list[Share]:
        """What a sequence has in each group, of whose tokens the first ``skip`` are there. The state lock is held by the caller."""
        found = []
        for group, state, table in zip(self._groups, self._states, self._tables, strict=True):
            own, length = table[row, : state.sequences["blocks"][row]].copy(), int(state.sequences["length"][row])
            found.append(Share(own, group.kind, self.tokens_per_block, length, 0 if group.kind == "cross" else skip))
        return found

    def _wait_until_free(self, loadable: Sequence[Loadable]) -> None:
        """Wait, with no lock held, until nothing that is enqueued touches what is to be filled."""
        free = [np.empty(0, np.int64)]
        for one in loadable:
            for group, share in zip(self._groups, one._shares, strict=True):
                free.append(group.first_device_block + share.to_fill().astype(np.int64))
        self._wait_for(self._transfer.pending(np.concatenate(free), writes=True))
        self._check_open()

    def is_reserved(self, reservation: Reservation) -> bool:
        """Whether a reservation is open."""
        return self._reservations.get(reservation.id) is reservation

    def _check_reserved(self, reservation: Reservation) -> None:
        if not self.is_reserved(reservation):
            raise ReservationExpired(f"reservation {reservation.id} of {reservation.owner!r} was committed, aborted or revoked")

    def commit_reserved(self, reservation: Reservation, tokens: int | None = None, stream: Any = None) -> None:
        """What ``Reservation.commit`` does."""
        count = reservation.tokens
        if tokens is not None:
            count = integer_argument("tokens", tokens, reservation.skip_prefix_n_tokens, reservation.tokens)
        self._end_reserved(reservation, groups.publish_reserved, count, stream)

    def abort_reserved(self, reservation: Reservation, stream: Any = None) -> None:
        """What ``Reservation.abort`` does."""
        self._end_reserved(reservation, groups.abort_reserved, 0, stream)

    def _end_reserved(self, reservation: Reservation, verb: Any, count: int, stream: Any) -> None:
        def end(heads: Ids, ids: Ids, counts: Ids, now: int) -> int:
            self._check_reserved(reservation)
            result = int(verb(heads, ids, counts, now, self._needs))
            if result == live.FAILED:
                raise DeviceError(f"reservation {reservation.id} of {reservation.owner!r} lost a block to a failed copy: abort it")
            if result == 0:
                del self._reservations[reservation.id]
            return result

        which = np.array([reservation.id], np.int64)
        moves = max(len(share.blocks) for share in reservation._shares)
        self._decide(moves, stream, end, which, np.array([count], np.int64), self.now(), ids=which)

    @property
    def reservations(self) -> list[Reservation]:
        """Open reservations, oldest first."""
        with self._lock:
            return list(self._reservations.values())

    def loadable(self, ids: Any, *, stream: Any = None) -> list[Loadable]:
        """What a store may fill of live sequences, in place of the engine: for each, in all groups, all behind its committed tokens.

        ``stream``: the loader's, which takes these sequences over; without one, waits as ``reserve`` does. Then ``commit`` says how
        much came, on the loader's stream or when the bytes are there, and the engine goes on with ``block_table(ids, stream)``, or
        any other call that names its own. Nothing else changes, whether a store took part or not. Thread-safe as long as nobody else
        changes these sequences. Raises UnknownSequence, DeviceError, ValueError, TypeError.
        """
        which = id_array("ids", ids)
        self._refuse_inside("loadable")
        self._decide(0, stream, live.use, which, ids=which)
        with self._lock:
            rows = self._rows(which)
            found = []
            for row in rows.tolist():
                sequence = self._state.sequences[row]
                skip = int(sequence["committed"])
                found.append(Loadable(self._shares(row, skip), int(sequence["length"]), skip))
        if stream is None and self._transfer.order is not None:
            self._wait_until_free(found)
        return found

    def revoke(self, owner: str) -> int:
        """Close all leases and abort all reservations of an owner that is gone; returns how many.

        Its readers then read memory that may be reused, and its loaders must not write any more, both but for what they have enqueued
        on the streams that they named.
        """
        with DeferInterrupt():
            count = super().revoke(owner)
            for reservation in self.reservations:
                # Its loader may end one meanwhile.
                with suppress(ReservationExpired):
                    if reservation.owner == owner:
                        self.abort_reserved(reservation)
                        count += 1
        return count
