"""StoreHealth: whether a store that has failed is asked again."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.arrays.layout import integer_argument
from kvpool.stores import jobs
from kvpool.stores.base import CANCELLED, DAMAGED, FAILED, LATE
from kvpool.stores.jobs import Job

READS, WRITES = False, True


@dataclass(frozen=True)
class HealthStats:
    """Totals since a StoreHealth was made, and its state now."""

    reads_suspended: bool
    writes_suspended: bool
    failed_jobs: int
    """jobs that counted as failures"""
    suspensions: int
    probes: int
    """jobs that were allowed, one at a time, while the store was suspended"""


class _Side:
    """What is known of the reads of a store, or of its writes. The lock of the owner guards it."""

    def __init__(self, wait: float) -> None:
        self.failures, self.suspended, self.probing, self.wait, self.probe_at = 0, False, False, wait, 0.0


class StoreHealth:
    """Suspends a store after consecutive failures, and tries it again with one job after a while.

    ``failures``: so many failed jobs in a row suspend it. ``probe_seconds``: how long until the next job is tried. It
    doubles with every probe that fails, up to ``probe_seconds_max``. A job that the store answers ends the suspension.
    ``clock``: () -> float, monotonic seconds.

    A job has failed if no block of it was answered: all are FAILED, LATE or DAMAGED. A block that is absent, or refused
    because the store is full, is an answer. A job that was cancelled says nothing.

    Reads (find, load) and writes (save, forget) are judged apart, since a disk that is full or read-only still gives
    what it has. Thread-safe; never waits. Raises TypeError, ValueError.
    """

    def __init__(
        self, failures: int = 3, probe_seconds: float = 5.0, *, probe_seconds_max: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._most = integer_argument("failures", failures, 1, 1 << 20)
        self._wait = seconds_argument("probe_seconds", probe_seconds)
        self._wait_max = max(self._wait, seconds_argument("probe_seconds_max", probe_seconds_max))
        self._clock, self._lock = clock, threading.Lock()
        self._sides = {READS: _Side(self._wait), WRITES: _Side(self._wait)}
        self._failed, self._suspensions, self._probes = 0, 0, 0

    def usable(self, *, writes: bool = False) -> bool:
        """Whether a job may be begun now. While the store is suspended, this is true once after each wait: the job that
        is begun then is the probe."""
        with self._lock:
            side = self._sides[writes]
            if not side.suspended:
                return True
            now = self._clock()
            if now < side.probe_at:
                return False
            # If this probe is never begun, or never ends, the next one comes after another wait.
            side.probing, side.probe_at = True, now + side.wait
            self._probes += 1
            return True

    def suspended(self, *, writes: bool = False) -> bool:
        """Whether it is suspended. Asks for no probe."""
        with self._lock:
            return self._sides[writes].suspended

    def note(self, job: Job) -> None:
        """Learn from a job that is done. Call it once for each job."""
        failed = _failed(job)
        if failed is None:
            return
        with self._lock:
            side = self._sides[job.kind in (jobs.SAVE, jobs.FORGET)]
            self._failed += failed
            if not failed:
                side.failures, side.suspended, side.probing, side.wait = 0, False, False, self._wait
                return
            side.failures += 1
            if not side.suspended and side.failures >= self._most:
                side.suspended, side.probe_at = True, self._clock() + side.wait
                self._suspensions += 1
            elif side.probing:
                side.wait = min(2 * side.wait, self._wait_max)
                side.probing, side.probe_at = False, self._clock() + side.wait

    def stats(self) -> HealthStats:
        """Figures of now."""
        with self._lock:
            return HealthStats(
                self._sides[READS].suspended, self._sides[WRITES].suspended, self._failed, self._suspensions,
                self._probes,
            )  # fmt: skip


def seconds_argument(name: str, value: Any, least: float = 0.0) -> float:
    """A time in seconds, finite and not below ``least``. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}={value!r:.80}: accepted are seconds")
    found = float(value)
    if not least <= found < math.inf:
        raise ValueError(f"{name}={value!r:.80}: accepted are finite seconds from {least:g}")
    return found


def _failed(job: Job) -> bool | None:
    """Whether a job has failed. None if it says nothing."""
    codes = job.codes[job.codes != CANCELLED]
    return bool(np.isin(codes, (FAILED, LATE, DAMAGED)).all()) if len(codes) else None
