"""Feed: the events of a pool for two readers: the keeper, and whoever reads the keeper's events. It adds what the
stores have."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvpool.keepers.ledger import Content, tokens_of
from kvpool.pool.events import TIERS, Events, Name
from kvpool.pool.manager import KVCacheManager
from kvpool.state.records import EVENT, H
from kvpool.state.ring import STORED

Tokens = npt.NDArray[np.int32]
Extra = npt.NDArray[np.int64]


class Part:
    """Rows of events with their numbers."""

    def __init__(self, number: int, records: npt.NDArray[np.void], tokens: Tokens, extra: Extra | None) -> None:
        self.number, self.records, self.tokens, self.extra = number, records, tokens, extra

    @property
    def next(self) -> int:
        return self.number + len(self.records)


LATE_ROWS = 65_536
"""Rows that the keeper may be late with, beside as many as the pool keeps. Then it learns anew what there is."""
NAMES = 65_536
"""Names of namespaces that are kept. With more, those that no kept event has are forgotten."""


class Feed:
    """Takes the events of a pool and passes them on. Thread-safe.

    ``stores``: the names of the stores, which are tiers after the pool's. ``capacity``: rows that are kept for a
    reader; older ones are dropped then, which leaves a gap in the numbers.
    """

    def __init__(self, pool: KVCacheManager, stores: Sequence[str]) -> None:
        self._pool, self._tiers = pool, (*TIERS, *stores)
        self._width = pool.tokens_per_block
        self._capacity = int(pool.core.states.heads[0, H.event_capacity])
        self._lock = threading.Lock()
        self._new: deque[tuple[Events, int, int, bool]] = deque()
        self._kept: deque[Part] = deque()
        self._new_rows, self._kept_rows, self._expected, self._next, self.dropped = 0, 0, 0, 0, 0
        self._names: dict[int, Name] = {}
        self._capacities: tuple[tuple[int, int], ...] = ()
        with self._lock:
            events = pool.events(snapshot=True)
            self._expected, self._capacities = events.next, events.capacities
            cut = int(events.bounds[events.before_snapshot])
            self._tell_keeper(events, cut, len(events.records), True)
            self._learn(events)
            self._keep(events.records[:cut], events.tokens[:cut], _cut(events.extra, 0, cut))

    def poll(self) -> None:
        """Take what is new from the pool. Raises PoolClosed."""
        with self._lock:
            self._poll()

    def new(self, rows: int) -> tuple[Events, int, int, bool] | None:
        """What the keeper has not seen: events, the first and last of their rows that it should apply, and whether
        these are a snapshot. About ``rows`` of them at a time, but a whole snapshot. None if there is nothing."""
        with self._lock:
            if not self._new:
                return None
            events, first, last, whole = self._new.popleft()
            if last - first > rows and not whole:
                self._new.appendleft((events, first + rows, last, False))
                last = first + rows
            self._new_rows -= 0 if whole else last - first
            return events, first, last, whole

    def tell(self, kind: int, store: int, contents: Iterable[Content]) -> None:
        """Note that a store has got contents (STORED), or lost them (REMOVED)."""
        chosen = list(contents)
        if chosen:
            with self._lock:
                self._keep(*self._rows(kind, store, chosen))

    def read(self) -> Events:
        """What no reader has got. Ends at a gap."""
        with self._lock:
            self._poll()
            parts: list[Part] = []
            while self._kept and (not parts or self._kept[0].number == parts[-1].next):
                parts.append(self._kept.popleft())
                self._kept_rows -= len(parts[-1].records)
            return self._joined(parts, None)

    def snapshot(self, contents: Sequence[tuple[int, Content]]) -> Events:
        """What no reader has got, then all that the pool has, and what stores have: (store, content), parents first."""
        with self._lock:
            events, cut = self._poll(snapshot=True)
            parts = _unbroken(self._kept)
            self._kept.clear()
            self._kept_rows = 0
            row = sum(len(part.records) for part in parts)
            parts.append(self._numbered(events.records[cut:], events.tokens[cut:], _cut(events.extra, cut)))
            for store in sorted({store for store, _ in contents}):
                parts.append(self._numbered(*self._rows(STORED, store, [one for own, one in contents if own == store])))
            return self._joined(parts, row)

    # -- with the lock held --------------------------------------------------------------------------

    def _poll(self, snapshot: bool = False) -> tuple[Events, int]:
        """Take new events. Returns them, and the row where their snapshot begins."""
        events = self._pool.events(snapshot=snapshot)
        lost, self._expected = events.number - self._expected, events.next
        self._next += lost
        cut = int(events.bounds[events.before_snapshot])
        behind = self._new_rows + cut > self._capacity + LATE_ROWS
        if (lost or behind) and not snapshot:
            # The keeper needs to know what there is now. If events were lost, its reader sees the gap.
            self.dropped += self._new_rows
            self._new.clear()
            self._new_rows = 0
            self._learn(events)
            self._keep(events.records, events.tokens, events.extra)
            again = self._pool.events(snapshot=True)
            self._next += again.number - self._expected
            self._expected, start = again.next, int(again.bounds[again.before_snapshot])
            self._learn(again)
            self._tell_keeper(again, start, len(again.records), True)
            self._keep(again.records[:start], again.tokens[:start], _cut(again.extra, 0, start))
            return again, start
        self._learn(events)
        self._tell_keeper(events, *((cut, len(events.records)) if lost else (0, cut)), lost > 0)
        self._keep(events.records[:cut], events.tokens[:cut], _cut(events.extra, 0, cut))
        return events, cut

    def _tell_keeper(self, events: Events, first: int, last: int, whole: bool) -> None:
        if first < last:
            self._new.append((events, first, last, whole))
            self._new_rows += 0 if whole else last - first

    def _learn(self, events: Events) -> None:
        """Keep the names of the namespaces of these events."""
        if len(self._names) > NAMES:
            kept = [part.records["namespace"] for part in self._kept]
            named = set(np.unique(np.concatenate(kept)).tolist()) if kept else set()
            self._names = {tag: name for tag, name in self._names.items() if tag in named}
        for tag in np.unique(events.records["namespace"]).tolist():
            name = events.name(tag)
            if name is not None:
                self._names[tag] = name

    def _numbered(self, records: npt.NDArray[np.void], tokens: Tokens, extra: Extra | None) -> Part:
        part = Part(self._next, records, tokens, extra)
        self._next = part.next
        return part

    def _keep(self, records: npt.NDArray[np.void], tokens: Tokens, extra: Extra | None) -> None:
        if not len(records):
            return
        self._kept.append(self._numbered(records, tokens, extra))
        self._kept_rows += len(records)
        while self._kept_rows > self._capacity and len(self._kept) > 1:
            old = len(self._kept.popleft().records)
            self._kept_rows, self.dropped = self._kept_rows - old, self.dropped + old

    def _rows(
        self, kind: int, store: int, contents: Sequence[Content]
    ) -> tuple[npt.NDArray[np.void], Tokens, Extra | None]:
        """Events of a store as the rows of a pool's. Neighbours that follow each other are one event."""
        records = np.zeros(len(contents), EVENT)
        tokens = np.zeros((len(contents), self._width), np.int32)
        extra = np.zeros((len(contents), self._width), np.int64)
        keys = np.frombuffer(b"".join(one.link.key + one.link.parent for one in contents), np.int64).reshape(-1, 4)
        records["key0"], records["key1"], records["parent0"], records["parent1"] = keys.T
        records["kind"], records["tier"] = kind, len(TIERS) + store
        records["namespace"], records["group"] = zip(
            *((one.link.namespace, one.group) for one in contents), strict=True
        )
        for i, one in enumerate(contents):
            self._names.setdefault(one.link.namespace, one.link.name)
            tokens[i], own = tokens_of(one.link, self._width)
            if own is not None:
                extra[i], records["extra"][i] = own, 1
        follows = [a.key == b.link.parent and a.group == b.group for a, b in zip(contents, contents[1:], strict=False)]
        records["joined"][1:] = np.array(follows, np.int8) * (kind == STORED)
        return records, tokens, extra if records["extra"].any() else None

    def _joined(self, parts: Sequence[Part], snapshot_row: int | None) -> Events:
        number = parts[0].number if parts else self._next
        if not parts:
            parts = [Part(number, np.zeros(0, EVENT), np.zeros((0, self._width), np.int32), None)]
        extra = None
        if any(part.extra is not None for part in parts):
            shapes = [(len(part.records), self._width) for part in parts]
            each = [np.zeros(shape, np.int64) if part.extra is None else part.extra
                    for part, shape in zip(parts, shapes, strict=True)]  # fmt: skip
            extra = np.concatenate(each)
        records, tokens = np.concatenate([part.records for part in parts]), np.concatenate([p.tokens for p in parts])
        return Events(records, tokens, extra, number, self._names, self._capacities, snapshot_row, self._tiers)


def _unbroken(parts: Iterable[Part]) -> list[Part]:
    """The last parts, without a gap between them. Those before a gap are of no use to a reader who gets everything."""
    found: list[Part] = []
    for part in parts:
        found = [*found, part] if not found or found[-1].next == part.number else [part]
    return found


def _cut(extra: Extra | None, start: int, stop: int | None = None) -> Extra | None:
    return None if extra is None else extra[start:stop]
