"""Shutdown: the end of a pool, and the report of what it still held."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from kvpool.errors import DeviceError, PoolBusy, counted
from kvpool.pool.core import Core
from kvpool.pool.leases import Leases
from kvpool.pool.reservations import Reservations
from kvpool.state import records


class CloseReport(NamedTuple):
    """What was still held when a pool was closed.

    ``KVCacheManager.close`` returns it.

    Attributes
    ----------
    sequences : list of int
        The ids of live sequences.
    leases : list of (str, int)
        Owner and age in milliseconds of each open lease.
    reservations : list of (str, int)
        Owner and age in milliseconds of each open reservation.
    """

    sequences: list[int]
    leases: list[tuple[str, int]]
    reservations: list[tuple[str, int]]


class Shutdown:
    """Closes one pool. Thread-safe. ``loans`` are the live views of its memory. ``frees`` are the calls that free it,
    in this order."""

    def __init__(
        self,
        core: Core,
        leases: Leases,
        reservations: Reservations,
        loans: Collection[object],
        frees: Sequence[Callable[[], object]],
    ) -> None:
        self._core, self._leases, self._reservations = core, leases, reservations
        self._loans, self._frees = loans, frees
        # What was held, once the pool is closed.
        self.report: CloseReport | None = None
        self._one, self._freed = threading.RLock(), False
        core.transfer.forks.guard(self, "_one")

    def close(self, force: bool) -> CloseReport:
        """Close the pool: see ``KVCacheManager.close``."""
        core = self._core
        core.refuse_inside("close")
        if self._loans:
            gc.collect()  # A view that nobody can reach does not count.
        now_ms = core.now() if self._leases.all or self._reservations.ids() else 0
        with core.lock, core.changes:
            views = len(self._loans)
            if self.report is None and views and not force:
                raise PoolBusy(
                    f"views of exported memory live: {views}; delete arrays made of exports, or close(force=True)"
                )
            if self.report is None:
                held = (
                    [(holder.owner, max(0, now_ms - holder.since)) for holder in holders]
                    for holders in (self._leases.all, self._reservations.all)
                )
                self.report = CloseReport(core.live(records.LIVE | records.SWAPPED).tolist(), *held)
            core.closed = True
            self._leases.clear()
            self._reservations.clear(now_ms)
        # A call that was interrupted here goes on at the next call.
        with self._one:
            if not self._freed:
                self._free()
                self._freed = True
        return self.report

    def warn(self, what: str, stacklevel: int) -> None:
        """Warn if the pool ended while something was held. ``stacklevel`` counts from here.

        Takes no lock, since a destructor calls it.
        """
        report, core = self.report, self._core
        if report is None:
            sequences, reservations = core.live(records.LIVE | records.SWAPPED), core.live(records.RESERVED)
            numbers = [len(sequences), len(self._leases.all), len(reservations)]
        else:
            numbers = [len(report.sequences), len(report.leases), len(report.reservations)]
        held = [counted(number, name[:-1]) for number, name in zip(numbers, CloseReport._fields, strict=True) if number]
        views = len(self._loans)
        held += [counted(views, "view") + " of exported memory"] if views else []
        if held:
            details = "" if report is None else f": {f'{report}':.400}"
            warnings.warn(f"the pool was {what} while it held {', '.join(held)}{details}", ResourceWarning, stacklevel)

    def _free(self) -> None:
        """Free all memory, once nobody uses it."""
        core = self._core
        try:
            # Nothing is decided any more. Once everything decided is enqueued, no thread is inside a copy.
            core.transfer.close()
            core.device.synchronize()
        except DeviceError as error:
            if not error.sticky and core.transfer.broken is None:
                raise
        finally:
            for free in self._frees:
                free()
