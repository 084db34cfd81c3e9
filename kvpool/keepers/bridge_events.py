"""BridgeEvents: the events of a pool and of the stores behind it, for who reads those of a keeper."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from kvpool.keepers.known_content import Content, event_rows
from kvpool.pool.events import TIERS, Events, Name, Rows3, joined, parents_first
from kvpool.pool.manager import KVCacheManager
from kvpool.state.records import H
from kvpool.state.ring import STORED


class BridgeEvents:
    """Joins the events of a pool with what stores have got and lost, in numbers of its own. Thread-safe.

    ``stores``: their names, which are tiers after the pool's. As many rows of theirs are kept as the pool keeps of its
    own. Who comes too late for some sees a gap in the numbers; ``dropped`` counts these rows.
    """

    def __init__(self, pool: KVCacheManager, stores: Sequence[str]) -> None:
        self._pool, self._tiers, self._width = pool, (*TIERS, *stores), pool.tokens_per_block
        self._capacity = int(pool.core.states.heads[0, H.event_capacity])
        self._lock = threading.Lock()
        self._told: deque[tuple[Rows3, dict[int, Name]]] = deque()
        self._rows = self._lost = self._cursor = self._next = self.dropped = 0

    def tell(self, kind: int, store: int, contents: Iterable[Content]) -> None:
        """Note that a store has got contents (STORED), or lost them (REMOVED)."""
        chosen = list(contents)
        if not chosen:
            return
        rows = event_rows(kind, len(TIERS) + store, chosen, self._width)
        with self._lock:
            self._told.append((rows, _names(chosen)))
            self._rows += len(chosen)
            while self._rows > self._capacity and len(self._told) > 1:
                old = len(self._told.popleft()[0][0])
                self._rows, self._lost = self._rows - old, self._lost + old

    def read(self, snapshot: Sequence[tuple[int, Content]] | None = None) -> Events:
        """What no reader has got. Then, with a ``snapshot``, what the pool has, and what stores have: (store, content).
        Raises PoolClosed."""
        with self._lock:
            events = self._pool.events(since=self._cursor, snapshot=snapshot is not None)
            cut = int(events.bounds[events.before_snapshot])
            told, gone = list(self._told), events.missed + self._lost
            self._told.clear()
            self._cursor, self._rows, self._lost = events.cursor, 0, 0
            self.dropped += gone
            number = self._next + gone
            parts, row, names = [_cut(events, 0, cut), *(rows for rows, _ in told)], None, dict(events.names)
            for _, own in told:
                names.update(own)
            if snapshot is not None:
                row = sum(len(records) for records, *_ in parts)
                parts += [_cut(events, cut, len(events.records)), *self._held(snapshot)]
                names.update(_names([content for _, content in snapshot]))
            records, tokens, extra = joined(parts)
            self._next = number + len(records)
            return Events(records, tokens, extra, number, names, events.capacities, row, self._tiers)

    def _held(self, contents: Sequence[tuple[int, Content]]) -> list[Rows3]:
        """What stores have, parents first."""
        found = []
        for store in sorted({store for store, _ in contents}):
            own = [content for other, content in contents if other == store]
            order = parents_first(event_rows(STORED, len(TIERS) + store, own, self._width)[0])
            found.append(event_rows(STORED, len(TIERS) + store, [own[i] for i in order.tolist()], self._width))
        return found


def _names(contents: Iterable[Content]) -> dict[int, Name]:
    return {content.namespace: content.name for content in contents}


def _cut(events: Events, first: int, last: int) -> Rows3:
    extra = None if events.extra is None else events.extra[first:last]
    return events.records[first:last], np.asarray(events.tokens[first:last]), extra
