"""KnownContent: which content a pool has, by the pool's own keys, and which stores are known to have it. And what
readers of a keeper's events learn of that."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvpool.pool.config import Group
from kvpool.pool.events import NAMELESS, TIERS, Events, Name, Rows, Rows3, joined, parents_first
from kvpool.pool.keys import BlockKeys
from kvpool.pool.manager import KVCacheManager
from kvpool.state.effects import CLEARED, REMOVED, STORED, UPDATED
from kvpool.state.records import DEVICE, EVENT, HOST, H
from kvpool.stores.seals import block_context

ON_DEVICE, ON_HOST = 1 << DEVICE, 1 << HOST
Namespace = tuple[bytes | str | None, int | str | None]
"""Salt and adapter."""


class Content:
    """A full block of a prompt in one group of layers.

    ``key``: the pool's key of it, 16 bytes. ``name``: whose it is. ``on``: the tiers of the pool that have it, as bits.
    ``saved``: the stores that are known to have it, as bits; ``saving``: those that are asked to save it, or wait to
    be. ``row``: what it says, as an event; None for what no store was known to have. ``prompt`` and ``place``: of a
    block that was asked for with a prompt. Equal ones have one key in one group.
    """

    __slots__ = ("group", "key", "name", "namespace", "on", "place", "priority", "prompt", "row", "saved", "saving")

    def __init__(self, group: int, key: bytes, namespace: int = 0, name: Name = NAMELESS) -> None:
        self.group, self.key, self.namespace, self.name = group, key, namespace, name
        self.on = self.saved = self.saving = self.priority = self.place = 0
        self.row: Rows3 | None = None
        self.prompt: BlockKeys | None = None

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Content) and (self.key, self.group) == (other.key, other.group)

    @property
    def whose(self) -> Namespace:
        return self.name.salt, self.name.adapter_id

    @property
    def context(self) -> bytes:
        """All that its bytes depend on: part of its seal in a store."""
        if self.row is None:
            return b""
        record, tokens, extra = self.row
        parent = record["parent0"].tobytes() + record["parent1"].tobytes()
        return block_context(parent, tokens, extra, namespace_bytes(self.whose), self.group)


Change = Callable[[Content, int, int], None]
"""Called after the tiers of a content have changed: (content, tiers before, its priority before)."""


class KnownContent:
    """Contents by group of layers and key, fed by the events of the pool.

    ``limit``: about how many contents it keeps. Those that the pool has are always kept, and of the others the latest.
    One thread changes it; others may ask ``known`` and ``all``.
    """

    def __init__(self, groups: Sequence[Group], width: int, limit: int) -> None:
        self._width, self._limit = width, limit
        self._contents: list[dict[bytes, Content]] = [{} for _ in groups]
        self._cached = [group.index for group in groups if group.kind != "cross"]
        # Blocks of another layout, or of layers that see other tokens, have other names.
        self._kinds = [
            hashlib.blake2b(
                ascii((group.index, group.kind, group.window, group.sinks, width,
                       [layout.fingerprint for layout in group.layouts])).encode(), digest_size=16,
            ).digest() for group in groups
        ]  # fmt: skip

    def __len__(self) -> int:
        return sum(map(len, self._contents))

    def all(self) -> list[Content]:
        """All contents, in the order in which they came."""
        return [one for of_group in self._contents for one in list(of_group.values())]

    def name(self, content: Content) -> bytes:
        """What stores make their keys of."""
        return self._kinds[content.group] + content.key

    # -- what the pool tells -------------------------------------------------------------------------

    def apply(self, events: Events, first: int, last: int, changed: Change) -> None:
        """Learn from the rows ``first`` to ``last`` of events. Whole columns are read: to ask an array for one field of
        one row takes as long as all else."""
        keys = split(events.keys[first:last].tobytes(), 16)
        for key, row in zip(keys, events.records[first:last].tolist(), strict=True):
            kind, tier, priority, group, namespace = row[0], row[1], row[2], row[4], row[10]
            if kind == CLEARED:
                self._cleared(changed)
            of_group = self._contents[group] if kind in (STORED, REMOVED, UPDATED) else {}
            content = of_group.get(key)
            if content is None:
                if kind != STORED:
                    continue
                content = of_group[key] = Content(group, key)
            before, valued = content.on, content.priority
            if kind == STORED:
                content.namespace, content.name = namespace, events.names.get(namespace, NAMELESS)
                content.on, content.priority = before | 1 << tier, priority
            elif kind == REMOVED:
                content.on = before & ~(1 << tier)
                if not content.on:
                    # It is kept as one of the latest.
                    of_group[key] = of_group.pop(key)
            else:
                content.priority = priority
            changed(content, before, valued)
        self._trim()

    def replace(self, events: Events, first: int, last: int, changed: Change) -> None:
        """Learn from the rows of a snapshot, after events were missed. Only what has changed is told."""
        before = {content: (content.on, content.priority) for content in self.all() if content.on}
        for content in before:
            content.on = 0
        seen: dict[Content, tuple[int, int]] = {}

        def note(content: Content, _: int, valued: int) -> None:
            seen.setdefault(content, (0, valued))

        # The first row is the "cleared" of the snapshot.
        self.apply(events, first + 1, last, note)
        for content, (on, valued) in {**seen, **before}.items():
            if (content.on, content.priority) != (on, valued):
                changed(content, on, valued)

    def _cleared(self, changed: Change) -> None:
        for content in self.all():
            if content.on:
                before, content.on = content.on, 0
                changed(content, before, content.priority)

    def _trim(self) -> None:
        """Forget the oldest contents that the pool does not have, many at a time."""
        over = len(self) - self._limit
        for of_group in self._contents if over > self._limit // 8 else ():
            gone = [key for key, one in of_group.items() if not one.on and not one.saving]
            for key in gone[:over]:
                del of_group[key]
            over -= len(gone[:over])

    # -- prompts, and what stores have ---------------------------------------------------------------

    def of_prompt(self, prompt: BlockKeys, count: int) -> list[list[Content]]:
        """The first ``count`` full blocks of a prompt, for each group of layers; none for cross attention. All are new,
        and not kept: ``now`` has what is known of them."""
        name, shape = Name(prompt.salt, prompt.adapter_id, prompt.root), (count, self._width)
        keys = np.concatenate([np.array([prompt.root], np.int64), prompt.keys[:count].view(np.int64)])
        size = count * self._width
        tokens = prompt.tokens[:size].reshape(shape)
        extra = None if prompt.extra_ids is None else prompt.extra_ids[:size].reshape(shape)
        chains: list[list[Content]] = [[] for _ in self._contents]
        for group in self._cached:
            rows = event_rows(group, prompt.namespace, keys[1:], keys[:-1], tokens, extra)
            chains[group] = [Content(group, key.tobytes(), prompt.namespace, name) for key in keys[1:]]
            for place, one in enumerate(chains[group]):
                one.prompt, one.place, one.row = prompt, place, rows[place]
        return chains

    def of_keys(self, keys: npt.NDArray[np.int64]) -> list[Content]:
        """The contents with these keys of the pool, int64[n, 2], in all groups that cache some."""
        return [Content(group, key) for group in self._cached for key in split(keys.tobytes(), 16)]

    def now(self, content: Content) -> Content:
        """What is kept of a content."""
        return self._contents[content.group].get(content.key, content)

    def note(self, content: Content, store: int, there: bool) -> bool:
        """Note whether a store has a content. Returns whether that is news."""
        known, bit = self.now(content), 1 << store
        if bool(known.saved & bit) == there:
            return False
        if there and known is content and content.prompt is not None:
            # Prompts are not kept, nor what a content says of others.
            known = Content(content.group, content.key, content.namespace, content.name)
        if there and content.row is not None:
            record, tokens, extra = content.row
            known.row = record.copy(), tokens.copy(), None if extra is None else extra.copy()
            self._contents[content.group][content.key] = known
        known.saved ^= bit
        return True

    def known(self, prompt: BlockKeys, count: int) -> npt.NDArray[np.bool_]:
        """Which of the first full blocks of a prompt a store is known to have: bool[groups, count]. On any thread."""
        keys = split(prompt.keys[:count].tobytes(), 16)
        found = [[(one := of_group.get(key)) is not None and one.saved != 0 for key in keys]
                 for of_group in self._contents]  # fmt: skip
        return np.array(found, np.bool_).reshape(len(self._contents), count)


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

    def tell(self, kind: int, store: int, contents: Sequence[Content]) -> None:
        """Note that a store has got contents (STORED), or lost them (REMOVED)."""
        if not contents:
            return
        rows = self._rows_of(kind, store, contents)
        with self._lock:
            self._told.append((rows, _names(contents)))
            self._rows += len(contents)
            while self._rows > self._capacity and len(self._told) > 1:
                old = len(self._told.popleft()[0][0])
                self._rows, self._lost = self._rows - old, self._lost + old

    def read(self, snapshot: Sequence[Content] | None = None) -> Events:
        """What no reader has got. Then, with a ``snapshot``, what the pool has, and which of these contents stores
        have. Raises PoolClosed."""
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
                names.update(_names(snapshot))
            records, tokens, extra = joined(parts)
            self._next = number + len(records)
            return Events(records, tokens, extra, number, names, events.capacities, row, self._tiers)

    def _held(self, contents: Sequence[Content]) -> Iterator[Rows3]:
        """What stores have, parents first."""
        for store in range(len(self._tiers) - len(TIERS)):
            own = [content for content in contents if content.saved & 1 << store]
            order = parents_first(self._rows_of(STORED, store, own)[0]) if own else ()
            if own:
                yield self._rows_of(STORED, store, [own[i] for i in order])

    def _rows_of(self, kind: int, store: int, contents: Sequence[Content]) -> Rows3:
        """What a store has got or lost, as rows of events. Neighbours that follow each other are one event."""
        records, tokens, extra = joined([one.row for one in contents if one.row is not None])
        records["kind"], records["tier"] = kind, len(TIERS) + store
        after, before = records[1:], records[:-1]
        follows = (after["parent0"] == before["key0"]) & (after["parent1"] == before["key1"])
        after["joined"] = follows & (after["group"] == before["group"]) & (kind == STORED)
        return records, tokens, extra


def event_rows(
    group: int, namespace: int, keys: Rows, parents: Rows, tokens: npt.NDArray[np.int32], extra: Rows | None
) -> list[Rows3]:
    """What blocks say, each as the row of an event. ``keys``, ``parents``: int64[n, 2]."""
    records = np.zeros(len(keys), EVENT)
    records["key0"], records["key1"], records["parent0"], records["parent1"] = np.hstack([keys, parents]).T
    records["group"], records["namespace"] = group, namespace
    records["extra"] = extra is not None and extra.any(axis=1)
    places = range(len(keys))
    own = [None if extra is None else extra[i : i + 1] for i in places]
    return [(records[i : i + 1], tokens[i : i + 1], own[i]) for i in places]


def _names(contents: Iterable[Content]) -> dict[int, Name]:
    return {content.namespace: content.name for content in contents}


def _cut(events: Events, first: int, last: int) -> Rows3:
    extra = None if events.extra is None else events.extra[first:last]
    return events.records[first:last], np.asarray(events.tokens[first:last]), extra


def namespace_bytes(namespace: Namespace) -> bytes:
    """A namespace as bytes, which differ for all salts and adapters, of all types."""
    return ascii(namespace).encode()


def split(data: bytes, size: int) -> list[bytes]:
    """Bytes in parts of a size."""
    return [data[i : i + size] for i in range(0, len(data), size)]
