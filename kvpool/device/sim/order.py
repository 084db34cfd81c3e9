"""What happens before what: clocks, the last accesses of every token, and the races among them.

Each access has a *key*. Keys grow with every enqueued access. A key includes the number of its stream, its *lane*. A
*clock* belongs to a point. For each lane, it has the last key that happens before that point. The order is decided when
work is enqueued, from streams, events and the waits of the host. It does not depend on when the work is done.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import numpy as np

from kvpool.common.arrays import Int64s
from kvpool.device.regions import ALL_LAYERS, SOURCE, TARGET, TOKENS, Layers
from kvpool.errors import KVPoolError

_SIM = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(_SIM))) + os.sep
_SHOWN = 5

Site = tuple[tuple[CodeType, int], ...]
"""The lines of a call, innermost first."""


def call_site() -> Site:
    """The frames from the first one outside this folder up to the first one outside the package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename.startswith(_SIM) or frame.f_code.co_filename == contextlib.__file__
    ):
        frame = frame.f_back
    lines = []
    while frame is not None:
        lines.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back if frame.f_code.co_filename.startswith(_PACKAGE) else None
    return tuple(lines)


def lines_of(site: Site) -> str:
    """The lines of a call, for people."""
    return "".join(f"\n        {code.co_filename}:{line} {code.co_name}" for code, line in site)


@dataclass(frozen=True)
class Access:
    """A call that reads or writes blocks.

    Attributes
    ----------
    kind : str
        The name of the call, such as "copy_blocks" or "launch".
    where : str
        The name of its stream; for an access of the host, of its thread.
    site : tuple of (code, int)
        Code and line of each frame of the caller, innermost first.
    """

    kind: str
    where: str
    site: Site

    def __str__(self) -> str:
        return f"{self.kind} on {self.where}, called at{lines_of(self.site)}"


def host_call(kind: str) -> Access:
    """The call that the calling thread of the host is in."""
    return Access(kind, f"thread {threading.current_thread().name!r}", call_site())


@dataclass(frozen=True)
class Race:
    """Two accesses to the same tokens, of which at least one writes, and that no event orders.

    Attributes
    ----------
    first : Access
        The access that was called first.
    second : Access
        The other one.
    does : tuple of (str, str)
        What each of them does: it reads or it writes.
    rows : tuple of (int, int, int)
        The tokens: block id, first token, and end of the tokens. Arrays outside the pools have the ids -1, -2, ... in
        the order in which they were first named.
    """

    first: Access
    second: Access
    does: tuple[str, str]
    rows: tuple[tuple[int, int, int], ...]

    def __str__(self) -> str:
        rows = self.rows[:_SHOWN]
        shown = [
            f"block {block} tokens {begin}..{end - 1}" if block >= 0 else f"array {-block}"
            for block, begin, end in rows
        ]
        more = f", and {len(self.rows) - _SHOWN} more" if len(self.rows) > _SHOWN else ""
        return (
            f"nothing orders two accesses to {', '.join(shown)}{more}:\n"
            f"    {self.does[0]} by {self.first}\n"
            f"    {self.does[1]} by {self.second}"
        )


class RaceError(KVPoolError, AssertionError):
    """Accesses that no event orders.

    Attributes
    ----------
    races : list of Race
        All of them. The message has the first few, and how to run the same schedule again.
    """

    def __init__(self, races: Sequence[Race], schedule: str) -> None:
        shown = "\n".join(str(race) for race in races[:_SHOWN])
        more = f"\n{len(races) - _SHOWN} more races" if len(races) > _SHOWN else ""
        super().__init__(f"{shown}{more}\n[{schedule}]")
        self.races = list(races)


class UndeclaredWrite(KVPoolError, AssertionError):
    """Bytes changed that no call had declared to write.

    Attributes
    ----------
    block : int
        The first such block; -1 outside the pools.
    tokens : list of int
        The tokens of the block that changed.
    """

    def __init__(self, what: str, block: int, tokens: Sequence[int], seen: str, schedule: str) -> None:
        super().__init__(f"{what} changed, and nobody had declared to write there; {seen}\n[{schedule}]")
        self.block, self.tokens = block, list(tokens)


class Deadlock(KVPoolError, AssertionError):
    """A wait that can never end: nothing can run, and its event is not complete."""


LANE_BITS = 16
LANES = (1 << LANE_BITS) - 1
Clock = Int64s
Rows = Int64s
_KEPT = 1 << 16
NO_ROWS: Rows = np.empty((0, 3), np.int64)


def new_clock(lanes: int = 1) -> Clock:
    """A clock before which nothing happens. Lane 0 is unused: the key 0 stands for no access."""
    return np.zeros(lanes, np.int64)


def joined(a: Clock, b: Clock) -> Clock:
    """The clock of a point that comes after the points of both clocks."""
    if len(a) < len(b):
        a, b = b, a
    both = a.copy()
    np.maximum(both[: len(b)], b, out=both[: len(b)])
    return both


def rows_of_copies(copy_ops: Rows) -> tuple[Rows, Rows]:
    """What block copies read, and what they write."""
    begin = np.zeros(len(copy_ops), np.int64)
    reads, writes = (np.stack([copy_ops[:, end], begin, copy_ops[:, TOKENS]], axis=1) for end in (SOURCE, TARGET))
    return reads, writes


class Waits:
    """What the host has waited for: what any thread has, and what each thread has."""

    def __init__(self) -> None:
        self.of_any = self._of_all = new_clock()
        self._local = threading.local()

    def of_thread(self) -> Clock:
        """What the calling thread has waited for."""
        return joined(self._of_all, getattr(self._local, "clock", self._of_all))

    def add(self, clock: Clock) -> None:
        """The calling thread has waited for ``clock``."""
        self.of_any, self._local.clock = joined(self.of_any, clock), joined(self.of_thread(), clock)

    def add_known(self, clock: Clock) -> None:
        """Any thread has seen that ``clock`` is complete. A pool queries under its lock, and the lock orders every
        later thread after that."""
        self.of_any, self._of_all = joined(self.of_any, clock), joined(self._of_all, clock)

    def add_for_all(self, clocks: Iterable[Clock]) -> None:
        """Everything has been waited for, and every thread may rely on it. A thread that starts later has no other way
        to know."""
        for clock in clocks:
            self.of_any = joined(self.of_any, clock)
        self._of_all = self.of_any


def rows_argument(name: str, rows: Any, lengths: Int64s) -> Rows:
    """``rows`` as int64[n, 3] of (block id, first token, last token exclusive). ``lengths`` are the tokens of each
    block. None means no rows.

    Raises TypeError, ValueError.
    """
    if rows is None:
        return NO_ROWS
    array = np.asarray(rows)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name}: expected integer rows (block, first token, last token exclusive), got {array.dtype}")
    if array.size == 0:
        return NO_ROWS
    if array.ndim != 2 or array.shape[1] != 3:
        raise ValueError(f"{name}: expected shape [n, 3], got {list(array.shape)}")
    array = array.astype(np.int64)
    block, first, last = array.T
    outside = (block < 0) | (block >= len(lengths))
    tokens = np.append(lengths, 0)[np.where(outside, -1, block)]
    bad = np.flatnonzero(outside | (first < 0) | (first >= last) | (last > tokens))
    if len(bad):
        row, most = array[bad[0]].tolist(), tokens[bad[0]] or lengths.max(initial=0)
        raise ValueError(
            f"{name}[{bad[0]}]: expected a block of [0, {len(lengths)}) and 0 <= first < last <= {most}, got {row}"
        )
    return array


@dataclass(eq=False)
class HostAccess:
    """Rows that a thread of the host reads and writes between two calls. ``thread`` is its identifier, or 0 for any
    thread."""

    access: Access
    reads: Rows
    writes: Rows
    thread: int = 0


class AccessOrder:
    """The last write, and the last read of each lane, of every token. Blocks have ``lengths`` tokens. Arrays have ids
    after those of the blocks, and count as blocks of the most tokens. ``layers`` are the layers of a block, which
    are distinguished from the first access on that is to some of them."""

    def __init__(self, lengths: Int64s, layers: Int64s) -> None:
        blocks, tokens = len(lengths), int(lengths.max(initial=1))
        self._blocks, self._tokens, self._lengths = blocks, tokens, lengths
        self._layers_of, self._layers = layers, 1
        # The keys of the last writes at 0, those of the last reads of a lane at its number.
        self._last = {0: np.zeros(blocks * tokens, np.int64)}
        self._accesses: dict[int, Access] = {}
        self._kept = _KEPT
        self._owner = np.zeros(blocks, np.int64)
        self.open: list[HostAccess] = []

    def enqueue(
        self, access: Access, key: int, clock: Clock, reads: Rows, writes: Rows, layers: Layers = ALL_LAYERS
    ) -> list[Race]:
        """Note an access of a stream that comes after ``clock``. Returns its races with all earlier accesses."""
        if layers != ALL_LAYERS and self._layers == 1:
            self._layers = int(self._layers_of.max(initial=1))
            self._last = {lane: keys.repeat(self._layers) for lane, keys in self._last.items()}
        read, written = self._cells(reads, layers), self._cells(writes, layers)
        races = self._unordered(access, clock, read, written) + self._with_open(access, read, written)
        self._last[0][written] = key
        if len(read):
            self._last.setdefault(key & LANES, np.zeros_like(self._last[0]))[read] = key
        self._accesses[key] = access
        if len(self._accesses) > self._kept:
            self._forget()
        return races

    def begin(self, opened: HostAccess, clock: Clock) -> list[Race]:
        """A thread whose waits are ``clock`` begins to access memory. Returns the races. What is enqueued before
        ``end`` is a race too."""
        read, written = self._cells(opened.reads), self._cells(opened.writes)
        races = self._unordered(opened.access, clock, read, written)
        races += self._with_open(opened.access, read, written, opened.thread)
        self.open.append(opened)
        return races

    def end(self, opened: HostAccess) -> None:
        """End an access: whatever is enqueued from now on comes after it."""
        self.open.remove(opened)

    def not_open(self, cells: Int64s) -> Int64s:
        """The rows (block, token) of ``cells`` that no open access of the host writes."""
        for opened in self.open:
            written = self._cells(opened.writes) // self._layers
            cells = cells[~np.isin(cells[:, 0] * self._tokens + cells[:, 1], written)]
        return cells

    def dependent_rows(self, access: Access, sources: Int64s, targets: Int64s) -> list[Race]:
        """The race of an access with itself, if one of its copy ops writes a block that another one reads or writes."""
        places = np.arange(1, len(targets) + 1)
        self._owner[targets] = places
        bad = np.concatenate([sources[self._owner[sources] != 0], targets[self._owner[targets] != places]])
        self._owner[targets] = 0
        if not len(bad):
            return []
        rows = tuple((int(block), 0, int(self._lengths[block])) for block in np.unique(bad))
        return [Race(access, access, ("a write of one row", "an access of another row of the same call"), rows)]

    def _fit(self, places: int) -> None:
        """Make room for arrays that were named after this object was made."""
        more = places - len(self._owner)
        if more > 0:
            cells = (0, more * self._tokens * self._layers)
            self._owner = np.pad(self._owner, (0, more))
            self._last = {lane: np.pad(keys, cells) for lane, keys in self._last.items()}

    def _cells(self, rows: Rows, layers: Layers = ALL_LAYERS) -> Int64s:
        """The numbers of the tokens in rows, in each of these layers."""
        if len(rows):
            self._fit(int(rows[:, 0].max()) + 1)
        tokens = np.arange(self._tokens)
        inside = (tokens >= rows[:, 1:2]) & (tokens < rows[:, 2:3])
        cells: Int64s = (rows[:, :1] * self._tokens + tokens)[inside]
        if self._layers == 1:
            return cells
        blocks, each = np.repeat(rows[:, 0], inside.sum(axis=1)), np.arange(self._layers)
        total = np.append(self._layers_of, self._layers)[np.minimum(blocks, self._blocks)][:, None]
        first, end = total * layers.part // layers.parts, total * (layers.part + 1) // layers.parts
        return (cells[:, None] * self._layers + each)[(each >= first) & (each < end)]

    def _unordered(self, access: Access, clock: Clock, read: Int64s, written: Int64s) -> list[Race]:
        """The races with enqueued accesses that ``clock`` does not include: one for each access."""
        suspects = [(self._last[0], read, ("a write", "a read"))]
        suspects += [(last, written, ("a read" if lane else "a write", "a write")) for lane, last in self._last.items()]
        conflicts: dict[int, tuple[tuple[str, str], list[Int64s]]] = {}
        for last, cells, does in suspects:
            if len(cells):
                keys = last[cells]
                lanes = keys & LANES
                seen = np.where(lanes < len(clock), clock[np.minimum(lanes, len(clock) - 1)], 0)
                late = keys > seen
                for key in np.unique(keys[late]) if late.any() else ():
                    conflicts.setdefault(int(key), (does, []))[1].append(cells[keys == key])
        return [
            Race(self._accesses[key], access, does, self._rows(np.unique(np.concatenate(cells))))
            for key, (does, cells) in sorted(conflicts.items())
        ]

    def _with_open(self, access: Access, read: Int64s, written: Int64s, thread: int = 0) -> list[Race]:
        """The races with accesses of the host that have not ended. Those of ``thread`` itself are left out, since a
        thread does one thing after another."""
        races = []
        for other in self.open if not thread else [other for other in self.open if other.thread != thread]:
            writes = self._cells(other.writes)
            both = np.intersect1d(written, np.concatenate([writes, self._cells(other.reads)]))
            does = ("a write" if np.isin(both, writes).any() else "a read", "a write")
            if not len(both):
                both, does = np.intersect1d(read, writes), ("a write", "a read")
            if len(both):
                races.append(Race(other.access, access, does, self._rows(both)))
        return races

    def _rows(self, cells: Int64s) -> tuple[tuple[int, int, int], ...]:
        """Sorted cells as rows of neighbours in one block. Arrays have the ids -1, -2, ..."""
        cells = np.unique(cells // self._layers)
        breaks = np.flatnonzero((np.diff(cells) > 1) | (cells[1:] % self._tokens == 0)) + 1
        rows = []
        for part in np.split(cells, breaks):
            (block, first), last = divmod(int(part[0]), self._tokens), int(part[-1]) % self._tokens
            rows.append((block if block < self._blocks else self._blocks - block - 1, first, last + 1))
        return tuple(rows)

    def _forget(self) -> None:
        """Drop accesses that are not the last of any token."""
        live = np.unique(np.concatenate([*self._last.values()]))
        self._accesses = {int(key): self._accesses[int(key)] for key in live[live > 0]}
        self._kept = 2 * len(self._accesses) + _KEPT
