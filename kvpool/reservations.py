"""Reservations: device blocks that a loader fills from elsewhere, published as a whole or given back."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvpool.device.base import Stream
from kvpool.errors import DeviceError, KVPoolError, PoolClosed, ReservationExpired
from kvpool.interrupt import DeferInterrupt
from kvpool.layout import integer_argument
from kvpool.pins import PinPool
from kvpool.sequence import BlockKeys, address, id_array
from kvpool.state import answers, blocks, groups, live, requests

Ids = npt.NDArray[np.int64]


class Loader(Protocol):
    """The pool, as far as a reservation knows it."""

    tokens_per_block: int

    def now(self) -> int: ...
    def is_reserved(self, reservation: Reservation) -> bool: ...
    def commit_reserved(self, reservation: Reservation, tokens: int | None = None, stream: Any = None) -> None: ...
    def abort_reserved(self, reservation: Reservation, stream: Any = None) -> None: ...


def _slots(blocks: npt.NDArray[np.int32], width: int, skip: int, tokens: int) -> Ids:
    """Slots of the tokens of a prompt that lies in ``blocks``; -1 for the first ``skip``."""
    slots = (blocks.astype(np.int64)[:, None] * width + np.arange(width)).reshape(-1)[:tokens]
    slots[:skip] = -1
    return slots


class Loadable(NamedTuple):
    """What a store may fill of a live sequence; the fields mean what those of a ``Reservation`` do."""

    blocks: npt.NDArray[np.int32]
    slot_mapping: npt.NDArray[np.int64]
    skip_prefix_n_tokens: int
    tokens: int


class Reservation:
    """Device blocks for a prompt, which a loader fills and then commits or aborts. A context manager that aborts what was not committed.

    ``blocks`` int32[n], those of the whole prompt in its order; ``tokens`` of the prompt, all of which have a place there, and
    ``skip_prefix_n_tokens``, how many of them the pool has: those are not to be written, to the token, since others may read them
    now. ``prompt`` has the tokens and keys. ``owner``, ``since`` in ms on the pool's clock, ``stream`` the loader's or None. Thread-safe.
    """

    __slots__ = ("_pool", "blocks", "id", "owner", "prompt", "since", "skip_prefix_n_tokens", "stream")

    def __init__(
        self, pool: Loader, number: int, owner: str, since: int, prompt: BlockKeys, blocks: npt.NDArray[np.int32], skip: int,
        stream: Stream | None,
    ) -> None:  # fmt: skip
        self._pool, self.id, self.owner, self.since, self.prompt = pool, number, owner, since, prompt
        self.blocks, self.skip_prefix_n_tokens, self.stream = blocks, skip, stream

    @property
    def tokens(self) -> int:
        return len(self.prompt)

    @property
    def slot_mapping(self) -> Ids:
        """Where each token goes, int64[tokens]: block * tokens_per_block + place, or -1 where the pool has it; a new array each time.

        ``scatter_kv`` takes it, for ``PagedKV.of_pool(cache.layout, cache.device_pool)``.
        """
        return _slots(self.blocks, self._pool.tokens_per_block, self.skip_prefix_n_tokens, self.tokens)

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
            f"Reservation(owner={self.owner!r}, blocks={len(self.blocks)}, tokens={self.tokens}, "
            f"skip_prefix_n_tokens={self.skip_prefix_n_tokens}, age_ms={self.age_ms}, closed={self.closed})"
        )


class ReservePool(PinPool):
    """A pool whose blocks can be filled by others; ``KVCacheManager`` is one."""

    def _reserve(self, prompt: BlockKeys, ranges: Ids | None, owner: str, stream: Any) -> Reservation:
        if not isinstance(owner, str):
            raise TypeError(f"owner={owner!r:.80}: accepted is a string")
        now, on = self.now(), None if stream is None else self._device.as_stream(stream)
        row, count = prompt.request.copy(), -(-len(prompt) // self.tokens_per_block)
        row[0, requests.R_RESERVES], row[0, requests.R_PRIORITY], row[0, requests.R_TTL] = 1, blocks.DEFAULT_PRIORITY, blocks.NONE
        if ranges is not None:
            row[0, requests.R_RANGES], row[0, requests.R_RANGE_COUNT] = address(ranges), len(ranges)
        self._check_columns(count)
        self._refuse_inside("reserve")
        if prompt.extra_ids is not None:
            self._enable_extra()
        new: list[Reservation] = []

        def take(heads: Ids, rows: Ids) -> int:
            out = np.zeros((len(heads), 1, requests.OUTCOME), np.int64)
            ids = np.empty(count, np.int32)
            self._names.learn([prompt])
            result = int(answers.admit(heads, rows, out, now, False))
            if result == 1:
                number = int(out[0, 0, requests.O_ID])
                ids[:] = self._tables[0, number & 0xFFFFFFFF, :count]
                new.append(Reservation(self, number, owner, now, prompt, ids, int(out[0, 0, requests.O_CACHED]), on))
                self._reservations[number] = new[0]
            return result

        try:
            self._decide(2 * count, on, take, row)
            if on is None and self._transfer.order is not None:
                self._wait_until_free(new[0].blocks[new[0].skip_prefix_n_tokens // self.tokens_per_block :])
                self._check_reserved(new[0])
        except BaseException:
            # Ctrl-C is delivered behind the decision: nobody gets the reservation. What went wrong may have broken the device, too.
            if new and self.is_reserved(new[0]):
                with suppress(KVPoolError):
                    self.abort_reserved(new[0])
            raise
        return new[0]

    def _wait_until_free(self, which: npt.NDArray[np.int32]) -> None:
        """Wait, with no lock held, until nothing that is enqueued touches these blocks."""
        self._wait_for(self._transfer.pending(which.astype(np.int64), writes=True))
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
        self._decide(len(reservation.blocks), stream, end, which, np.array([count], np.int64), self.now(), ids=which)

    @property
    def reservations(self) -> list[Reservation]:
        """Open reservations, oldest first."""
        with self._lock:
            return list(self._reservations.values())

    def loadable(self, ids: Any, *, stream: Any = None) -> list[Loadable]:
        """What a store may fill of live sequences, in place of the engine: for each, all behind its committed tokens.

        ``stream``: the loader's, which takes these sequences over; without one, waits as ``reserve`` does. Then ``commit`` says how
        much came, on the loader's stream or when the bytes are there, and the engine goes on with ``block_table(ids, stream)``, or
        any other call that names its own. Nothing else changes, whether a store took part or not. Thread-safe as long as nobody else
        changes these sequences. Raises UnknownSequence, DeviceError, ValueError, TypeError.
        """
        which, width = id_array("ids", ids), self.tokens_per_block
        self._refuse_inside("loadable")
        self._decide(0, stream, live.use, which, ids=which)
        with self._lock:
            rows = self._rows(which)
            found = []
            for row in rows.tolist():
                sequence = self._state.sequences[row]
                own = self._tables[0, row, : sequence["blocks"]].copy()
                skip, tokens = int(sequence["committed"]), int(sequence["length"])
                found.append(Loadable(own, _slots(own, width, skip, tokens), skip, tokens))
        if stream is None and self._transfer.order is not None:
            free = [one.blocks[one.skip_prefix_n_tokens // width :] for one in found]
            self._wait_until_free(np.concatenate([np.empty(0, np.int32), *free]))
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
