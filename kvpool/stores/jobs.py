"""Job: some blocks that a store is asked for, saves, loads or forgets. It may end in part, late, or not at all."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from kvpool.stores.base import OK, Bytes, Rows

if TYPE_CHECKING:
    from kvpool.stores.queue import StoreQueue

WAITING = 255
"""The code of a block that is not decided yet."""

FIND, LOAD, SAVE, FORGET = "find", "load", "save", "forget"
KINDS = (FIND, LOAD, SAVE, FORGET)


class Job:
    """What became of some blocks. Made by the calls of a ``StoreQueue``. Thread-safe.

    ``kind``: "find", "load", "save" or "forget". ``keys`` uint8[n, 32]. ``rows`` int64[n]: of a load or save.
    ``deadline``: in seconds on the queue's clock. ``began``, ``seconds``: when the store began with it, and how long it
    took. ``error``: the text of the store's last error, or "".

    A job is *done* when every block has a code. It is *returned* when, besides, no call of the store uses its rows any
    more. Only then may the rows be written or freed: a call that hangs may still write to them.
    """

    __slots__ = (
        "__weakref__", "_calls", "_queue", "_queued", "_settled", "began", "codes", "deadline", "error",
        "keys", "kind", "limit", "rows", "seconds", "tag",
    )  # fmt: skip

    def __init__(
        self, queue: StoreQueue, kind: str, keys: Bytes, rows: Rows, deadline: float,
        tag: bytes, limit: int,
    ) -> None:  # fmt: skip
        self._queue = queue
        self.kind, self.keys, self.rows, self.deadline, self.tag, self.limit = kind, keys, rows, deadline, tag, limit
        self.codes = np.full(len(keys), WAITING, np.uint8)
        self.error, self.began, self.seconds = "", math.nan, 0.0
        self._calls, self._queued, self._settled = 0, len(keys), not len(keys)

    @property
    def done(self) -> bool:
        """Whether every block has a code."""
        return self._settled

    @property
    def returned(self) -> bool:
        """Whether no call of the store uses the rows any more. It is done too, then."""
        return self._settled and not self._calls

    @property
    def queued(self) -> int:
        """How many blocks no call of the store has begun with, and one will."""
        return self._queued

    @property
    def ok(self) -> int:
        """How many blocks are OK."""
        return int(np.count_nonzero(self.codes == OK))

    @property
    def leading(self) -> int:
        """How many blocks are OK before the first that is not: what a prefix can use."""
        wrong = np.flatnonzero(self.codes != OK)
        return int(wrong[0]) if len(wrong) else len(self.codes)

    def wait(self, timeout: float | None = None, *, returned: bool = False) -> bool:
        """Wait until the job is done, or returned. ``timeout``: in seconds; None waits as long as it takes. Returns
        whether it is. Raises ForkedProcess in a child of ``os.fork()``."""
        return self._queue.wait_until(lambda: self.returned if returned else self.done, timeout)

    def cancel(self) -> None:
        """Give up the blocks that are not decided yet. Calls under way are asked to stop."""
        self._queue.cancel(self)

    def __repr__(self) -> str:
        return f"Job({self.kind}, blocks={len(self.codes)}, ok={self.ok}, done={self.done}, returned={self.returned})"

    # -- called by the queue, which holds the lock ---------------------------------------------------

    def call_begins(self, part: slice, now: float) -> None:
        """A call of the store begins with these blocks."""
        self._queued -= part.stop - part.start
        self._calls += 1
        if math.isnan(self.began):
            self.began = now

    def call_ends(self, part: slice, codes: Bytes, error: str) -> None:
        """A call has returned. Its codes count where nothing else was decided meanwhile."""
        own = self.codes[part]
        own[own == WAITING] = codes[own == WAITING]
        self.error = error or self.error
        self._calls -= 1
        self._settled = self._settled or not (self.codes == WAITING).any()

    def settle(self, code: int) -> None:
        """Give this code to all blocks that have none. No further call begins."""
        self.codes[self.codes == WAITING] = code
        self._queued, self._settled = 0, True
