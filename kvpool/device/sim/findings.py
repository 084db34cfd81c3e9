"""Findings: what went wrong so far, and the comparison of the pools with what declared operations should have left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.device.sim.mirror import Mirror
from kvpool.device.sim.order import Order
from kvpool.device.sim.reports import Access, Race, RaceError, UndeclaredWrite, call_site, lines_of

POISON = 0xA5
"""What freed memory is filled with."""

COMPARE = ("auto", "all", "sample")
# Pools up to this size are compared whole after each operation, of larger ones so many blocks.
_WHOLE_BYTES = 256 << 10
_SAMPLE = 4


class Bound(NamedTuple):
    """A pool that the device serves."""

    mirror: Mirror
    order: Order


class Findings:
    """Races, undeclared writes and errors of launched functions. Each is raised once. Nothing here locks."""

    def __init__(self, mode: str, seed: int, schedule: Callable[[], str]) -> None:
        self.races: list[Race] = []
        self._mode, self._schedule = mode, schedule
        self._failures: list[Race | Exception] = []
        self._random = np.random.default_rng(seed)
        self._freed: list[tuple[NDArray[np.uint8], Access]] = []
        self._last: Access | None = None

    def note(self, found: Sequence[Race | Exception]) -> None:
        self._failures += found
        self.races += [race for race in found if isinstance(race, Race)]

    def freed(self, array: NDArray[np.uint8], access: Access) -> None:
        """Poison memory that nobody may write any more."""
        array.fill(POISON)
        self._freed.append((array, access))

    def entered(self, bound: Bound | None) -> None:
        """At a call of the device, before it changes anything."""
        if bound is not None and self._whole(bound):
            self.compare(bound, None)

    def finished(self, bound: Bound, access: Access) -> None:
        """After an operation has been done."""
        if self._whole(bound):
            self.compare(bound, access)
        else:
            sample = self._random.integers(0, bound.mirror.blocks, _SAMPLE)
            self._compare(bound, access, lambda: bound.mirror.differences_in(sample))
        self._last = access

    def compare(self, bound: Bound | None, access: Access | None) -> None:
        """Compare everything, right after ``access`` or (None) at the call that is under way."""
        if bound is not None:
            self._compare(bound, access, bound.mirror.differences)
        for array, freed in list(self._freed):
            if (array != POISON).any():
                self._freed = [kept for kept in self._freed if kept[0] is not array]
                self.note([UndeclaredWrite(f"memory given back by {freed}", -1, (), f"seen {_moment(access)}", self._schedule())])

    def _whole(self, bound: Bound) -> bool:
        return self._mode == "all" or (self._mode == "auto" and bound.mirror.nbytes <= _WHOLE_BYTES)

    def _compare(self, bound: Bound, access: Access | None, differences: Callable[[], NDArray[np.int64]]) -> None:
        for opened in bound.order.open:
            bound.mirror.adopt(opened.writes)
        cells = differences()
        if not len(cells):
            return
        block = int(cells[0, 0])
        tokens = [int(token) for token in np.unique(cells[cells[:, 0] == block, 1])]
        others = len(np.unique(cells[:, 0])) - 1
        what = f"block {block} tokens {tokens}" + (f" and {others} more blocks" if others else "")
        seen = f"seen {_moment(access)}\n    after {self._last or 'nothing was done'}"
        if not self._whole(bound):
            seen += "\n    (of a pool of this size few blocks are compared after each operation: compare='all' finds the culprit)"
        self.note([UndeclaredWrite(what, block, tokens, seen, self._schedule())])
        bound.mirror.adopt(np.stack([cells[:, 0], cells[:, 1], cells[:, 1] + 1], axis=1))

    def raise_first(self) -> None:
        """Raise the oldest failure, if there is one: all races together, anything else by itself."""
        if not self._failures:
            return
        first = self._failures[0]
        if not isinstance(first, Race):
            del self._failures[0]
            raise first
        races = [race for race in self._failures if isinstance(race, Race)]
        self._failures = [failure for failure in self._failures if not isinstance(failure, Race)]
        raise RaceError(races, self._schedule())


def _moment(access: Access | None) -> str:
    return f"right after {access}" if access is not None else f"by the call at{lines_of(call_site())}"
