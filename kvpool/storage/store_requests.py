"""Requests: blocks that a store is asked for, saves, loads or drops. One may end in part, late, or not at all. Until a
drop is confirmed, nobody finds, loads or saves its blocks."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, Protocol, TypeAlias

import numpy as np

from kvpool.common.arguments import first_outside, id_array
from kvpool.common.arrays import Bools
from kvpool.common.arrays.strided import read_only
from kvpool.storage.mac import BlockNames, Secret
from kvpool.storage.store import CANCELLED, CODES, KEY_BYTES, MODEL_BYTES, OK, Bytes, Rows

WAITING = 255
"""The code of a block that is not decided yet."""
Keys = Bytes | BlockNames
Lend = Callable[[BlockNames], AbstractContextManager[Rows]]
"""Lends rows to one call of a store: int64[n], -1 for a block that is not there any more."""

Call = Callable[["StoreRequest"], None]
RequestKind: TypeAlias = Literal["find", "load", "save", "forget", "clear"]
FIND: Final = "find"
LOAD: Final = "load"
SAVE: Final = "save"
FORGET: Final = "forget"
CLEAR: Final = "clear"
KINDS: tuple[RequestKind, ...] = (FIND, LOAD, SAVE, FORGET, CLEAR)
DROPS: tuple[RequestKind, ...] = (FORGET, CLEAR)


class RequestOwner(Protocol):
    """What a request needs of the queue that it is in."""

    def wait_until(self, condition: Callable[[], bool], timeout: float | None) -> bool: ...
    def cancel(self, request: StoreRequest) -> None: ...


@dataclass(eq=False, repr=False)
class StoreRequest:
    """The state of some blocks that were requested from a store. Calls of a ``StoreWorker`` return it.

    A request is *done* when every block has a code. It is *returned* when, besides, no call of the store uses its rows
    any more. Only then may the rows be written or freed: a call that hangs may still write to them.

    Attributes
    ----------
    kind : {"find", "load", "save", "forget", "clear"}
        What was requested. A clear has one code and no keys.
    keys : BlockNames or ndarray of uint8, shape (n, 32)
        The blocks.
    rows : ndarray of int64, shape (n,)
        Of a load or save; empty where they are lent.
    codes : ndarray of uint8, shape (n,)
        The result of each block, 255 while it is not known. Read-only, like the other arrays.
    deadline : float
        Seconds on the worker's clock.
    dropped : int
        Number of blocks that the store has dropped, for a forget or a clear.
    began : float
        When the store began with it, in seconds on the worker's clock. NaN before.
    seconds : float
        How long it took.
    error : str
        The text of the store's last error, or "".
    owner : hashable
        What the caller identifies it by.

    Notes
    -----
    Any thread may use it.
    """

    _queue: RequestOwner
    _secret: Secret
    kind: RequestKind
    keys: Keys
    rows: Rows
    deadline: float
    tag: bytes
    limit: int = 0
    """The most blocks with this tag that the store may have: of a save."""
    lend: Lend | None = None
    renews: bool = False
    """Whether it begins an epoch: of a clear."""
    error: str = ""
    began: float = math.nan
    seconds: float = 0.0
    dropped: int = 0
    on_done: list[Call] = field(default_factory=list)
    on_returned: list[Call] = field(default_factory=list)
    """Calls that are still to be made."""
    in_callback: bool = False
    """Whether such a call is made now."""
    counted: bool = False
    """Whether the figures have it."""
    owner: Hashable = None
    """What the caller identifies it by."""
    held: bool = False
    """Whether the caller reads the rows."""
    hurried: bool = False
    """Whether it had less time than the patience with its store."""
    suspends: bool = False
    """Whether it was the failure that suspended its store."""
    begun: int = 0
    """How many blocks calls of the store have begun with, the first ones."""
    _running: int = 0
    _counted: dict[str, int] | None = None

    def __post_init__(self) -> None:
        count = 1 if self.kind == CLEAR else len(self.keys)
        self._codes = np.full(count, WAITING, np.uint8)
        self.codes, self._settled = read_only(self._codes), not count

    @property
    def queued(self) -> int:
        """Number of blocks that a call of the store will begin with later."""
        return 0 if self._settled else len(self._codes) - self.begun

    @property
    def done(self) -> bool:
        """Whether every block has a code."""
        return self._settled

    @property
    def returned(self) -> bool:
        """Whether it is done, and no call of the store uses the rows any more."""
        return self._settled and not self._running

    @property
    def ok(self) -> int:
        """Number of blocks that are OK."""
        return int(np.count_nonzero(self._codes == OK))

    @property
    def counts(self) -> dict[str, int]:
        """Number of blocks by code, once it is done, such as ``{"ok": 3, "absent": 1}``."""
        if self._counted is None or not self._settled:
            counted = enumerate(np.bincount(self._codes).tolist())
            self._counted = {CODES[code]: count for code, count in counted if count}
        return dict(self._counted)

    @property
    def reasons(self) -> list[str]:
        """The codes in words, once it is done: "ok", or what is wrong."""
        return [CODES[code] for code in self._codes.tolist()]

    @property
    def leading(self) -> int:
        """Number of blocks that are OK before the first that is not: those that a prefix can use."""
        wrong = np.flatnonzero(self._codes != OK)
        return int(wrong[0]) if len(wrong) else len(self._codes)

    def wait(self, timeout: float | None = None, *, returned: bool = False) -> bool:
        """Wait until the request is done, or returned.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait. By default as long as it takes.
        returned : bool, default False
            Whether to wait until it is returned.

        Returns
        -------
        bool
            Whether it is.
        """
        return self._queue.wait_until(lambda: self.returned if returned else self.done, timeout)

    def cancel(self) -> None:
        """Give up the blocks that have no code yet. Calls in flight are asked to stop.

        Raises
        ------
        ValueError
            For a forget or a clear, which cannot be taken back.
        """
        if self.kind in DROPS:
            raise ValueError(f"request: expected a find, load or save, got {self!r}, which cannot be cancelled")
        self._queue.cancel(self)

    def __repr__(self) -> str:
        state = f"blocks={len(self._codes)}, ok={self.ok}, done={self.done}, returned={self.returned}"
        return f"StoreRequest({self.kind}, {state})"

    # -- called by the worker: all but the keys with its lock held ------------------------------------

    @cached_property
    def key_bytes(self) -> list[bytes]:
        """The keys of its blocks in the store, in order. The first use hashes them."""
        return [key.tobytes() for key in self._secret.keys(self.keys)]

    @cached_property
    def key_set(self) -> frozenset[bytes]:
        """``key_bytes`` as a set."""
        return frozenset(self.key_bytes)

    def call_begins(self, part: slice, now: float) -> Rows:
        """A call of the store begins with these blocks. Returns the places of those that are not decided yet."""
        self.begun += part.stop - part.start
        self._running += 1
        if math.isnan(self.began):
            self.began = now
        return part.start + np.flatnonzero(self._codes[part] == WAITING)

    def call_ends(self, places: Rows, codes: Bytes, error: str) -> None:
        """A call has returned. Its codes count where nothing else was decided meanwhile."""
        left = self._codes[places] == WAITING
        self._codes[places[left]] = codes[left]
        self.error = error or self.error
        self._running -= 1
        self._settled = self._settled or WAITING not in self._codes

    def decide(self, code: int, which: Bools | bool = True) -> bool:
        """Give this code to those of these blocks that have none. Returns whether all blocks have one now."""
        self._codes[which & (self._codes == WAITING)] = code
        return WAITING not in self._codes

    def settle(self, code: int) -> None:
        """Give this code to all blocks that have none. No further call begins."""
        self.decide(code)
        self._settled = True


def keys_argument(keys: object) -> Keys:
    """A copy, which nobody changes."""
    if isinstance(keys, BlockNames):
        return keys
    array = np.array(keys) if isinstance(keys, np.ndarray) else None
    if array is None or array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != KEY_BYTES:
        raise ValueError(
            f"keys: expected uint8[n, {KEY_BYTES}] that the worker's secret has made, or BlockNames, got {keys!r:.80}"
        )
    return read_only(array)


def rows_argument(rows: object, count: int, slots: int, distinct: bool) -> Rows:
    """A copy, which nobody changes."""
    row_ids = id_array("rows", rows)
    if len(row_ids) != count:
        raise ValueError(f"rows: expected one for each of the {count} keys, got {len(row_ids)}")
    if first_outside(row_ids, slots - 1) >= 0:
        raise ValueError(f"rows: expected 0 to {slots - 1}, got {row_ids!r:.80}")
    if distinct and len(np.unique(row_ids)) != count:
        raise ValueError(f"rows: expected rows that differ, as each gets one block, got {row_ids!r:.80}")
    return read_only(row_ids)


Running = Mapping[int, tuple[StoreRequest, Rows]]
"""By thread: the request that a call of the store is for, and the places of its blocks."""
RETRY_SECONDS, RETRY_SECONDS_MAX = 0.05, 30.0


class Tombstones:
    """The forgets and clears of a worker that its store has not confirmed. The caller holds the worker's lock.

    A drop begins when no call is under way that may save what it drops. Saves that begin later leave out these blocks.
    So when the store has dropped them, nothing brings them back. A drop that fails is tried again, after 50 ms at
    first, and then after twice as long each time, up to 30 s.

    However many drops wait, a request costs one look-up a block. A drop that waits for a call to end is looked at again
    when that call has ended. To add or to remove a drop twice is the same as once.
    """

    def __init__(self) -> None:
        self._pauses: dict[StoreRequest, float] = {}  # of every drop: until it is tried again
        self._by_key: dict[bytes, dict[StoreRequest, None]] = {}  # which forgets name a key
        # By the beginning of a tag, and whether it begins an epoch.
        self._cleared: dict[tuple[bytes, bool], StoreRequest] = {}
        self._due: list[tuple[float, int, StoreRequest]] = []
        self._held: dict[int, list[StoreRequest]] = {}  # by the thread whose call they wait for
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._pauses)

    def add(self, request: StoreRequest) -> None:
        self._pauses[request] = RETRY_SECONDS
        if request.kind == CLEAR:
            self._cleared[request.tag, request.renews] = request
        else:
            for key in request.key_set:
                self._by_key.setdefault(key, {})[request] = None
        self._put(request, -math.inf)

    def clearing(self, request: StoreRequest) -> StoreRequest | None:
        """The same clear, which waits. No block was saved since it was added, so that it does for a later one."""
        return self._cleared.get((request.tag, request.renews))

    def remove(self, request: StoreRequest) -> None:
        """The store has confirmed it, or the worker is closed."""
        if request not in self._pauses:
            return
        if request.kind == CLEAR:
            self._cleared.pop((request.tag, request.renews), None)
        else:
            for key in request.key_set:
                forgets = self._by_key.get(key, {})
                forgets.pop(request, None)
                if not forgets:
                    self._by_key.pop(key, None)
        del self._pauses[request]

    def screen(self, request: StoreRequest) -> bool:
        """Cancel those blocks of a request that are to be dropped. Returns whether all blocks of the request are
        decided now.

        They are not called absent, since the store has said nothing: its health is judged by what it answers.
        """
        tags = (request.tag, request.tag[:MODEL_BYTES])
        cleared = any((tag, renews) in self._cleared for tag in tags for renews in (False, True))
        concerned = np.full(len(request.codes), cleared)
        if self._by_key and not concerned.all():
            concerned[:] = [key in self._by_key for key in request.key_bytes]
        return request.decide(CANCELLED, concerned)

    def next(self, now: float, running: Running) -> StoreRequest | None:
        """A drop that may begin now, if there is one."""
        while self._due and self._due[0][0] <= now:
            drop = heapq.heappop(self._due)[2]
            if drop in self._pauses:
                saver = next((thread for thread, call in running.items() if _saves(drop, *call)), None)
                if saver is None:
                    return drop
                self._held.setdefault(saver, []).append(drop)
        return None

    def returned(self, thread: int) -> None:
        """The call of this thread has ended."""
        for drop in self._held.pop(thread, ()):
            self._put(drop, -math.inf)

    def failed(self, request: StoreRequest, now: float) -> None:
        """The store has not dropped it. It is tried again."""
        self._put(request, now + self._pauses[request])
        self._pauses[request] = min(2 * self._pauses[request], RETRY_SECONDS_MAX)

    def left(self, now: float) -> float | None:
        """Seconds until a drop that has failed is tried again. None if there is none."""
        return self._due[0][0] - now if self._due and self._due[0][0] > now else None

    def _put(self, request: StoreRequest, at: float) -> None:
        heapq.heappush(self._due, (at, next(self._numbers), request))


def _saves(drop: StoreRequest, request: StoreRequest, places: Rows) -> bool:
    """Whether a call for these places of a request may save what is to be dropped."""
    if request.kind != SAVE:
        return False
    if drop.kind == CLEAR:
        return request.tag.startswith(drop.tag)
    return not drop.key_set.isdisjoint(request.key_bytes[place] for place in places.tolist())
