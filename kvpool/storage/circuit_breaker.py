"""CircuitBreaker: stop using a store that fails, and try it again later. TroubleLog: log what failed."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.common.arguments import number_argument
from kvpool.common.arrays.layout import integer_argument
from kvpool.storage.store_requests import DROPS, FIND, LOAD, SAVE, StoreRequest

_READS, _WRITES = (FIND, LOAD), (SAVE,)


@dataclass(frozen=True)
class BreakerStats:
    """Totals of a ``CircuitBreaker``, and its state now.

    Attributes
    ----------
    reads_suspended : bool
        Whether finds and loads are suspended.
    writes_suspended : bool
        Whether saves are suspended.
    failed_requests : int
        Requests that counted as failures.
    suspensions : int
        Number of suspensions.
    probes : int
        Requests that were allowed, one at a time, while the store was suspended.
    """

    reads_suspended: bool
    writes_suspended: bool
    failed_requests: int
    suspensions: int
    probes: int


class _Kind:
    """What is known of a store's requests of one kind. The lock of the owner guards it.

    ``found``, of loads: a find that probes has found blocks, and none of their loads is done yet.
    """

    def __init__(self, wait: float) -> None:
        self.wait_first = wait
        self.answered()

    def answered(self) -> None:
        """A request was answered."""
        self.failures, self.suspended, self.probing, self.found = 0, False, False, False
        self.wait, self.probe_at = self.wait_first, 0.0

    def probe(self, now: float) -> None:
        """A probe may begin. If it is never begun, or never ends, the next one comes after another wait."""
        self.probing, self.found, self.probe_at = True, False, now + self.wait


class CircuitBreaker:
    """Suspends a store after consecutive failures, and tries it again with one request after a while.

    A request that the store answers ends the suspension.

    Parameters
    ----------
    failures : int, default 3
        Number of failed requests in a row that suspend the store.
    probe_seconds : float, default 5.0
        Time until the next request is tried. It doubles with every probe that fails.
    probe_seconds_max : float, default 60.0
        The longest such time.
    clock : callable, optional
        ``() -> float``, monotonic seconds.

    Raises
    ------
    TypeError, ValueError
        For a bad argument.

    Notes
    -----
    A request has failed if no block of it was answered: all are FAILED, LATE or DAMAGED. A block that is absent, or
    refused because the store is full, is an answer. A request that was cancelled does not count. Nor does a save of
    blocks that were evicted before the store got them; as a probe, it leaves the next request to be one.

    Reads and writes are suspended apart, since a disk that is full or read-only still returns what it has. Failures are
    counted for each kind of request: a find that is answered does not excuse loads that fail. Reads are suspended when
    finds or loads are. A probe of loads begins with a find. If that finds nothing, the next find is a probe too, until
    blocks are found and loaded. Drops do not count.

    Any thread may use it. It never waits.
    """

    def __init__(
        self,
        failures: int = 3,
        probe_seconds: float = 5.0,
        *,
        probe_seconds_max: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = integer_argument("failures", failures, 1, 1 << 20)
        self._wait = number_argument("probe_seconds", probe_seconds)
        self._wait_max = max(self._wait, number_argument("probe_seconds_max", probe_seconds_max))
        self._clock, self._lock = clock, threading.Lock()
        self._kinds = {kind: _Kind(self._wait) for kind in (*_READS, *_WRITES)}
        self._failed, self._suspensions, self._probes = 0, 0, 0

    def usable(self, *, writes: bool = False, found: bool = False) -> bool:
        """Return whether a request may be begun now.

        While the store is suspended, this is true once after each wait: the request that is begun then is the probe.

        Parameters
        ----------
        writes : bool, default False
            Whether the request saves blocks.
        found : bool, default False
            Whether the request loads blocks that a find has found. It may then be begun with the probe of that find.

        Returns
        -------
        bool
            Whether it may.
        """
        with self._lock:
            down = self._suspended(writes)
            if not down:
                return True
            now_s, loads = self._clock(), self._kinds[LOAD]
            if found and loads.found:
                return True
            if any(now_s < kind.probe_at for kind in down):
                return False
            # A load that is answered does not end what finds that failed have begun: their probe stays to a find.
            probed = [kind for kind in down if not found or kind is loads]
            for kind in probed:
                kind.probe(now_s)
            self._probes += bool(probed)
            return True

    def suspended(self, *, writes: bool = False) -> bool:
        """Return whether the store is suspended. Allows no probe.

        Parameters
        ----------
        writes : bool, default False
            Whether for saves. Otherwise for finds and loads.

        Returns
        -------
        bool
            Whether it is.
        """
        with self._lock:
            return bool(self._suspended(writes))

    @property
    def is_suspended(self) -> bool:
        """Whether it is suspended for reads or for writes."""
        return self.suspended() or self.suspended(writes=True)

    def note(self, request: StoreRequest) -> None:
        """Count a request that is done. Call it once for each request.

        Parameters
        ----------
        request : StoreRequest
            The request.
        """
        failed = _failed(request)
        if request.kind in DROPS:
            return
        with self._lock:
            kind = self._kinds[request.kind]
            if failed is None:
                if kind.probing and "absent" in request.counts:
                    kind.probing, kind.probe_at = False, self._clock()
                return
            self._failed += failed
            if failed:
                self._failure(kind)
                return
            kind.answered()
            loads = self._kinds[LOAD]
            if request.kind == FIND and loads.probing and not loads.found:
                loads.found = "ok" in request.counts
                if not loads.found:
                    loads.probing, loads.probe_at = False, self._clock()

    def resume(self) -> None:
        """End the suspensions, as if the store had answered."""
        with self._lock:
            for kind in self._kinds.values():
                kind.answered()

    def stats(self) -> BreakerStats:
        """Return the figures.

        Returns
        -------
        BreakerStats
            Totals, and the state now.
        """
        with self._lock:
            reads, writes = bool(self._suspended(False)), bool(self._suspended(True))
            return BreakerStats(reads, writes, self._failed, self._suspensions, self._probes)

    def _suspended(self, writes: bool) -> list[_Kind]:
        """The kinds of requests that are suspended. The lock is held."""
        return [self._kinds[kind] for kind in (_WRITES if writes else _READS) if self._kinds[kind].suspended]

    def _failure(self, kind: _Kind) -> None:
        """A request of this kind has failed. The lock is held."""
        kind.failures += 1
        if not kind.suspended and kind.failures >= self._most:
            kind.suspended, kind.probe_at = True, self._clock() + kind.wait
            self._suspensions += 1
        elif kind.probing:
            kind.wait = min(2 * kind.wait, self._wait_max)
            kind.probing, kind.found, kind.probe_at = False, False, self._clock() + kind.wait


def _failed(request: StoreRequest) -> bool | None:
    """Whether a request has failed. None if it says nothing."""
    # The store was not asked to save what is absent.
    codes = request.counts.keys() - {"cancelled", "absent" if request.kind == SAVE else ""}
    return codes <= {"failed", "late", "damaged"} if codes else None


REPEAT_SECONDS = 60.0
"""How long until trouble that goes on is logged again."""
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
_LOG = logging.getLogger("kvpool.storage")


class TroubleLog:
    """Blocks of a store by kind of request and by what went wrong. The first of each kind is a warning in the log. From
    then on they are counted, and their number is a warning at most every ``REPEAT_SECONDS``. Thread-safe."""

    def __init__(self, store: str, clock: Callable[[], float] = time.monotonic, log: logging.Logger = _LOG) -> None:
        self._store, self._clock, self._log, self._lock = store, clock, log, threading.Lock()
        self.counts: Counter[tuple[str, str]] = Counter()
        """by kind of request and by what went wrong"""
        self._logged: dict[tuple[str, str], tuple[int, float]] = {}

    def note(self, kind: str, what: str, count: int, detail: str = "", quiet: bool = False) -> None:
        """Something went wrong with so many blocks. ``quiet``: it is the consequence of what was logged before."""
        trouble, now_s = (kind, what), self._clock()
        with self._lock:
            self.counts[trouble] += count
            before, since = self._logged.get(trouble, (0, -math.inf))
            if quiet or now_s - since < REPEAT_SECONDS:
                return
            more = self.counts[trouble] - before
            self._logged[trouble] = self.counts[trouble], now_s
        why = f"{what} {detail}".strip() + (f" ({_MEANING[what]})" if what in _MEANING else "")
        text = "kvpool: store %s: %s of %d blocks%s: %s. From now on this is counted, and logged once a minute."
        self._log.warning(text, self._store, kind, more, " more" if before else "", why)
