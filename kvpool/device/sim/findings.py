"""Findings: the failures so far, and the comparison of the pools with what declared operations should have left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvpool.arrays import Array, Int64s, Uint8s
from kvpool.arrays.strided import StridedArray
from kvpool.device.copy_plan import Regions
from kvpool.device.sim.order import (
    Access,
    AccessOrder,
    HostAccess,
    Race,
    RaceError,
    Rows,
    UndeclaredWrite,
    call_site,
    lines_of,
    rows_argument,
)
from kvpool.device.sim.shadow import Arrays, Mirrors

POISON = 0xA5
"""The byte that fills freed memory."""

COMPARE = ("auto", "all", "sample")
# Pools up to this size are compared whole after each operation; of larger ones, so many blocks.
_WHOLE_BYTES = 256 << 10
_SAMPLE = 4
_SAMPLED = "(of a pool of this size few blocks are compared after each operation: compare='all' finds the culprit)"


class Bound(NamedTuple):
    """The pool that the device serves, and the arrays outside it."""

    regions: Regions
    mirrors: Mirrors
    order: AccessOrder
    arrays: Arrays

    @classmethod
    def of(cls, regions: Regions) -> Bound:
        order = AccessOrder(regions.lengths, regions.layers)
        return cls(regions, Mirrors(regions), order, Arrays(regions.blocks, regions.width))

    def rows(self, names: tuple[str, str], rows: Any, arrays: Sequence[Array]) -> Rows:
        """Rows of blocks and the places of arrays, from two arguments with these names. Raises TypeError,
        ValueError."""
        found = rows_argument(names[0], rows, self.regions.lengths)
        return np.concatenate([found, self.arrays.rows(names[1], arrays)]) if len(arrays) else found

    def rows_of_memory(self, spans: Rows) -> Rows:
        """The places of bytes, int64[n, 2] of (address, bytes): whole blocks of the host tier, and arrays for all that
        is elsewhere, each as a whole."""
        found, elsewhere = [], []
        for address, nbytes in spans.tolist():
            blocks = self.regions.host_blocks_at(address, nbytes)
            if blocks is None:
                elsewhere.append(StridedArray(address, (nbytes,), 1, kind="u").host_view())
            else:
                found += [(block, 0, int(self.regions.lengths[block])) for block in blocks]
        rows = np.array(found, np.int64).reshape(-1, 3)
        return np.concatenate([rows, self.arrays.rows("fragments", elsewhere)]) if elsewhere else rows

    def everything(self) -> Rows:
        """Rows of all tokens of all blocks, and of all arrays."""
        blocks = np.arange(self.regions.blocks)
        whole = np.stack([blocks, np.zeros_like(blocks), self.regions.lengths], axis=1)
        return np.concatenate([whole, self.arrays.everything()])

    def adopt(self, rows: Rows) -> None:
        """Accept the present content of these rows."""
        is_array = rows[:, 0] >= self.regions.blocks
        self.mirrors.adopt(rows[~is_array])
        self.arrays.adopt(rows[is_array, 0])


class Findings:
    """Races, undeclared writes and errors of launched functions. Each is raised once. Takes no lock."""

    def __init__(self, mode: str, seed: int, schedule: Callable[[], str]) -> None:
        self.races: list[Race] = []
        self._mode, self._schedule = mode, schedule
        self._failures: list[Race | Exception] = []
        self._random = np.random.default_rng(seed)
        self._freed: list[tuple[Uint8s, Access]] = []
        self._last: Access | None = None
        self._lent: list[Uint8s] = []

    def note(self, found: Sequence[Race | Exception]) -> None:
        self._failures += found
        self.races += [race for race in found if isinstance(race, Race)]

    def freed(self, array: Uint8s, access: Access) -> None:
        """Fill memory that nobody may write any more with poison."""
        if self.poison(array):
            self._freed.append((array, access))

    def lent(self, array: Uint8s) -> Uint8s:
        """Note that the array is the caller's memory, which keeps its content when it is freed. Returns it."""
        self._lent.append(array)
        return array

    def poison(self, array: Uint8s) -> bool:
        """Overwrite memory that is freed. Returns False for memory of the caller."""
        kept = [other for other in self._lent if other is not array]
        if len(kept) == len(self._lent):
            array.fill(POISON)
            return True
        self._lent = kept
        return False

    def forget_freed(self) -> None:
        """Let go of the memory that was freed."""
        self._freed.clear()

    def entered(self, bound: Bound | None) -> None:
        """Called at the start of each call of the device, before it changes anything."""
        if bound is not None:
            self._adopt_open(bound)
            if self._whole(bound):
                self.compare(bound, None)

    def settle(self, bound: Bound | None, ended: deque[HostAccess]) -> None:
        """End the accesses of the host whose end came after the last call."""
        while ended:
            opened = ended.popleft()
            if bound is not None and opened in bound.order.open:
                self.entered(bound)
                bound.order.end(opened)

    def finished(self, bound: Bound, access: Access) -> None:
        """Called after an operation has been done."""
        if self._whole(bound):
            self.compare(bound, access)
        else:
            sample = self._random.integers(0, bound.regions.blocks, _SAMPLE)
            self._compare(bound, access, lambda: bound.mirrors.differences_in(sample))
        self._last = access

    def compare(self, bound: Bound | None, access: Access | None) -> None:
        """Compare everything, right after ``access``, or (None) at the start of the current call."""
        if bound is not None:
            self._compare(bound, access, bound.mirrors.differences)
            for place in bound.arrays.differences():
                self._undeclared(f"array {place - bound.regions.blocks + 1}", access, self._after())
                bound.arrays.adopt(np.array([place]))
        for array, freed in list(self._freed):
            if (array != POISON).any():
                self._freed = [kept for kept in self._freed if kept[0] is not array]
                self._undeclared(f"memory given back by {freed}", access)

    def _undeclared(
        self, what: str, access: Access | None, more: str = "", block: int = -1, tokens: Sequence[int] = ()
    ) -> None:
        moment = f"right after {access}" if access is not None else f"by the call at{lines_of(call_site())}"
        self.note([UndeclaredWrite(what, block, tokens, f"seen {moment}{more}", self._schedule())])

    def _after(self) -> str:
        return f"\n    after {self._last or 'nothing was done'}"

    def _whole(self, bound: Bound) -> bool:
        return self._mode == "all" or (self._mode == "auto" and bound.mirrors.nbytes <= _WHOLE_BYTES)

    def _compare(self, bound: Bound, access: Access | None, differences: Callable[[], Int64s]) -> None:
        self._adopt_open(bound)
        # Declared writes may have followed.
        cells = bound.order.not_open(differences())
        if not len(cells):
            return
        block = int(cells[0, 0])
        tokens = [int(token) for token in np.unique(cells[cells[:, 0] == block, 1])]
        others = len(np.unique(cells[:, 0])) - 1
        what = f"block {block} tokens {tokens}" + (f" and {others} more blocks" if others else "")
        more = self._after() if self._whole(bound) else f"{self._after()}\n    {_SAMPLED}"
        self._undeclared(what, access, more, block, tokens)
        bound.adopt(np.stack([cells[:, 0], cells[:, 1], cells[:, 1] + 1], axis=1))

    def _adopt_open(self, bound: Bound) -> None:
        """Accept whatever a thread of the host may be writing now."""
        for opened in bound.order.open:
            bound.adopt(opened.writes)

    def raise_first(self) -> None:
        """Raise the oldest failure, if there is one. All races are raised together, every other failure by itself."""
        if not self._failures:
            return
        first = self._failures[0]
        if not isinstance(first, Race):
            del self._failures[0]
            raise first
        races = [race for race in self._failures if isinstance(race, Race)]
        self._failures = [failure for failure in self._failures if not isinstance(failure, Race)]
        raise RaceError(races, self._schedule())
