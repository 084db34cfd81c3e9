"""Calls: what a store is asked, in copies that it may write to. What it answers is checked, and believed only then."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from kvpool.common.arguments import id_array
from kvpool.errors import BlockNotFound, PoolClosed, StoreBusy
from kvpool.storage.mac import BlockNames, Secret
from kvpool.storage.store import (
    ABSENT,
    CODES,
    DAMAGED,
    EPOCH_BYTES,
    FAILED,
    KEY_BYTES,
    MAC_BYTES,
    OK,
    Bytes,
    Rows,
    Store,
)
from kvpool.storage.store_requests import CLEAR, FIND, FORGET, SAVE, Keys, Lend, StoreRequest, rows_argument

NO_ROWS: Rows = np.empty(0, np.int64)
NO_CODES: Bytes = np.empty(0, np.uint8)
Contexts = Sequence[bytes] | None


class StoreCalls:
    """The calls of one store, on the threads of its worker. ``forget`` has the worker drop blocks. Thread-safe, as far
    as the store is."""

    def __init__(self, store: Store, secret: Secret, memory: Bytes, forget: Callable[[Keys], object]) -> None:
        self._store, self._secret, self._memory, self._forget = store, secret, memory, forget
        self._lock = threading.Lock()
        self._epoch: bytes | None = None

    def find(self, keys: Keys) -> Bytes:
        """What the store answers to a find. Raises what it raises, and ValueError for what it must not answer."""
        stored_keys = self._stored(keys)
        return _codes(self._store.find(stored_keys.copy()), len(stored_keys))

    def do(self, request: StoreRequest, places: Rows) -> tuple[Bytes, str]:
        """One call of the store, for these places of a request. Returns the codes, and the text of an error."""
        try:
            if request.kind == FORGET:
                keys = np.frombuffer(b"".join(request.key_bytes), np.uint8).reshape(-1, KEY_BYTES)
                request.dropped += int(self._store.forget(self._stored(keys).copy()))
                return NO_CODES, ""
            if request.kind == CLEAR:
                self._clear(request)
                return NO_CODES, ""
            job_keys = request.keys if len(places) == len(request.keys) else request.keys[places]
            if request.kind == FIND:
                return self.find(job_keys), ""
            keys = self._stored(job_keys)
            if request.lend is not None and isinstance(job_keys, BlockNames):
                return self._lent(request, request.lend, job_keys, keys), ""
            call = self._saved if request.kind == SAVE else self._checked
            return call(request, keys, request.rows[places], _contexts(job_keys)), ""
        except BaseException as error:  # A store that fails in any way must not end the thread.
            return np.full(len(places), FAILED, np.uint8), _text_of(error)

    def _clear(self, request: StoreRequest) -> None:
        """The epoch comes first: whatever happens then, the blocks of the one before are not asked for any more."""
        epoch = self._asked(new=True) if request.renews else b""
        if self._store.clears_prefix >= len(request.tag):
            request.dropped += int(self._store.clear(request.tag))
        if request.renews:
            with self._lock:
                self._epoch = epoch or os.urandom(EPOCH_BYTES)

    def _asked(self, new: bool = False) -> bytes:
        """The epoch that the store remembers; b"" if it remembers none."""
        epoch = self._store.epoch(self._secret.model, new)
        if epoch is None:
            return b""
        if not isinstance(epoch, bytes) or len(epoch) not in (0, EPOCH_BYTES):
            raise ValueError(f"answer: expected {EPOCH_BYTES} bytes or none from the store, got {epoch!r:.80}")
        return epoch

    def _stored(self, blocks: Keys) -> Bytes:
        """What the store has blocks by, in this epoch. A store that cannot be reached at first is asked again."""
        if self._epoch is None:
            epoch = self._asked()
            with self._lock:
                self._epoch = epoch if self._epoch is None else self._epoch
        return self._secret.in_epoch(self._secret.keys(blocks), self._epoch)

    def _saved(self, request: StoreRequest, keys: Bytes, rows: Rows, contexts: Contexts) -> Bytes:
        """MAC rows and save them."""
        saved = keys.copy(), rows.copy(), self._secret.mac(keys, rows, self._memory, contexts)
        return _codes(self._store.save(*saved, request.tag, request.limit, lambda: request.done), len(keys))

    def _lent(self, request: StoreRequest, lend: Lend, names: BlockNames, keys: Bytes) -> Bytes:
        """Save rows that are lent, but not while names are hashed."""
        codes = np.full(len(keys), ABSENT, np.uint8)
        try:
            with lend(names) as rows:
                lent_rows = id_array("rows", rows)
                if len(lent_rows) != len(names):
                    raise ValueError(f"rows: expected one for each of {len(names)} names, got {len(lent_rows)}")
                present = np.flatnonzero(lent_rows >= 0)
                # What was lent after a request was given up may be something else under the same name.
                if len(present) and not request.done:
                    present_rows = rows_argument(lent_rows[present], len(present), len(self._memory), False)
                    codes[present] = self._saved(request, keys[present], present_rows, names[present].contexts)
        except BlockNotFound:
            # The rows may have got other bytes before the store had read them, and their MACs would be right.
            codes[:] = ABSENT
            with suppress(StoreBusy, PoolClosed):
                self._forget(names)
        return codes

    def _checked(self, request: StoreRequest, keys: Bytes, rows: Rows, contexts: Contexts) -> Bytes:
        """Load, and compare each block with its MAC. Have the store forget those that differ."""
        answer, stored_macs = self._store.load(keys.copy(), rows.copy(), lambda: request.done)
        codes, macs = _codes(answer, len(keys)), np.asarray(stored_macs, np.uint8).reshape(len(keys), MAC_BYTES)
        loaded = np.flatnonzero(codes == OK)
        if len(loaded) and not request.done:
            known = contexts and [contexts[place] for place in loaded.tolist()]
            right = self._secret.mac(keys[loaded], rows[loaded], self._memory, known)
            wrong = loaded[(macs[loaded] != right).any(axis=1)]
            if len(wrong):
                codes[wrong] = DAMAGED
                with suppress(Exception):
                    self._store.forget(keys[wrong])
        return codes

    def figures(self) -> dict[str, int]:
        """What the store counts itself; nothing, if it does not say it."""
        try:
            return {str(name): operator.index(value) for name, value in dict(self._store.stats()).items()}
        except Exception:
            return {}


def _contexts(blocks: Keys) -> Contexts:
    return blocks.contexts if isinstance(blocks, BlockNames) else None


def _codes(answer: object, count: int) -> Bytes:
    """A private copy of what a store has answered. Raises ValueError for what it must not answer."""
    codes = np.array(answer)
    fits = codes.shape == (count,) and (codes.dtype.kind in "iu" or not count)
    # Before it becomes a byte: 257 would be one, and OK.
    if not fits or (count and not 0 <= int(codes.min()) <= int(codes.max()) < len(CODES)):
        raise ValueError(f"answer: expected one code for each of {count} keys from the store, got {codes!r:.80}")
    return codes.astype(np.uint8)


def _text_of(error: BaseException) -> str:
    """What an error of a store says of itself, if it says anything."""
    try:
        return f"{type(error).__name__}: {error}"[:1000]
    except BaseException:  # Whatever it says: the thread goes on.
        return type(error).__name__
