"""TroubleLog: what goes wrong with a store is told to people, and does not fill their logs."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable

REPEAT_SECONDS = 60.0
"""How long until trouble that goes on is told again."""
_MEANING = {
    "absent": "the store does not have them",
    "busy": "more waited than the queue takes",
    "crowded": "there was no room for them",
    "damaged": "the bytes were not those that were saved",
    "evicted": "they left the host before the store could take them",
    "failed": "the store raised an error",
    "late": "the store took longer than its deadline",
    "refused": "the store is full",
    "suspended": "after failures the store is not asked for a while",
}
_LOG = logging.getLogger("kvpool.stores")


class TroubleLog:
    """Blocks of a store by kind of job and by what went wrong. The first of each kind is a warning in the log. From
    then on they are counted, and their number is a warning at most every ``REPEAT_SECONDS``. Thread-safe."""

    def __init__(self, store: str, clock: Callable[[], float] = time.monotonic, log: logging.Logger = _LOG) -> None:
        self._store, self._clock, self._log, self._lock = store, clock, log, threading.Lock()
        self.counts: Counter[tuple[str, str]] = Counter()
        """by kind of job and by what went wrong"""
        self._told: dict[tuple[str, str], tuple[int, float]] = {}

    def note(self, kind: str, what: str, count: int, detail: str = "", quiet: bool = False) -> None:
        """Something went wrong with so many blocks. ``quiet``: it is the consequence of what was told before."""
        trouble, now = (kind, what), self._clock()
        with self._lock:
            self.counts[trouble] += count
            before, since = self._told.get(trouble, (0, -math.inf))
            if quiet or now - since < REPEAT_SECONDS:
                return
            more = self.counts[trouble] - before
            self._told[trouble] = self.counts[trouble], now
        why = f"{what} {detail}".strip() + (f" ({_MEANING[what]})" if what in _MEANING else "")
        text = "kvpool: store %s: %s of %d blocks%s: %s. From now on this is counted, and told once a minute."
        self._log.warning(text, self._store, kind, more, " more" if before else "", why)
