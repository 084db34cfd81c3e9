"""KV events as callers see them: what was stored, removed, updated or cleared, in the order of the decisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from kvpool.common.arrays import Bools, Int32s, Int64s, Uint64s
from kvpool.state.arrays import State, States
from kvpool.state.records import COUNTERS, DEVICE, EVENT, EXTRA, HOST, NONE, PUBLISHED, H, N
from kvpool.state.tiers import CLEARED, CREATED, STORED

KINDS = ("created", "stored", "removed", "updated", "cleared")
TIERS = ("device", "host")
Rows = Int64s
Rows3 = tuple[npt.NDArray[np.void], Int32s, Rows | None]
"""Records, tokens, and extra ids if some block has any."""
Capacities = tuple[tuple[int, int], ...]
"""(device blocks, host blocks) of each group of layers."""


@dataclass(eq=False, slots=True)
class Event:
    """One change of what is cached.

    ``number`` counts blocks, not events. For a reader that has seen everything, it equals ``next`` of the event before.
    A larger number is a gap; the difference is how many were lost.

    ``keys`` uint64[n, 2]: of "stored", a chain of blocks. ``parent`` uint64[2]: the key before the first of them, None
    if it begins a prompt. ``tokens`` int32[n, tokens_per_block]: for "stored" only. ``extra_ids``: int64 of the same
    shape, if some token has one. ``namespace``, ``salt`` and ``adapter_id`` are as in BlockKeys. ``group``: the group
    of layers of these blocks; 0 in a pool with one group. "created" has the capacities: ``blocks`` has (device, host)
    of each group, the other fields their sums. "cleared" concerns all groups.
    """

    kind: str
    number: int
    tier: str | None = None
    keys: Uint64s | None = None
    parent: Uint64s | None = None
    tokens: Int32s | None = None
    extra_ids: Int64s | None = None
    namespace: int = 0
    salt: bytes | str | None = None
    adapter_id: int | str | None = None
    priority: int = 0
    device_blocks: int = 0
    host_blocks: int = 0
    group: int = 0
    blocks: Capacities = ()

    @property
    def next(self) -> int:
        return self.number + (1 if self.keys is None else len(self.keys))


class Name(NamedTuple):
    """The salt and adapter of a namespace tag, and the key with which its prompts begin."""

    salt: bytes | str | None
    adapter_id: int | str | None
    root: tuple[int, int]


NAMELESS = Name(None, None, (0, 0))


class Events(Sequence[Event]):
    """The events of one call, as a sequence. An ``Event`` is made when it is read.

    To read many events fast, use the columns: ``records`` [n], one for each block; ``keys`` uint64[n, 2]; ``tokens``
    int32[n, tokens_per_block]; ``extra`` int64 of the same shape, or None; ``bounds`` int64[m + 1]: event i is rows
    ``bounds[i]:bounds[i + 1]``. ``number`` is that of the first event. ``tiers`` has the names of the tiers by the
    number that records have, ``names`` the ``Name`` of each namespace. ``before_snapshot``: how many events come before
    the "cleared" of a snapshot; without a snapshot, all. ``cursor``: where a reader goes on with ``events(since=)``.
    ``missed``: how many rows, of those that ``since`` asked for, were not kept so long.
    """

    def __init__(
        self,
        records: npt.NDArray[np.void],
        tokens: Int32s,
        extra: Rows | None,
        number: int,
        names: dict[int, Name],
        capacities: Capacities,
        snapshot_row: int | None = None,
        tiers: tuple[str, ...] = TIERS,
        cursor: int = 0,
        missed: int = 0,
    ) -> None:
        self.records = records
        self.tokens = tokens
        self.extra = extra
        self.number = number
        self.capacities = capacities
        self.tiers, self.names = tiers, names
        self.cursor, self.missed = cursor, missed
        starts = records["joined"] == 0
        if len(records):
            starts[0] = True
        self.bounds = np.append(np.flatnonzero(starts), len(records))
        self.keys = np.stack([records["key0"], records["key1"]], axis=1).view(np.uint64)
        self.before_snapshot = len(self) if snapshot_row is None else int(np.searchsorted(self.bounds, snapshot_row))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def next(self) -> int:
        """The number that the next event will have if none is lost."""
        return self.number + len(self.records)

    def name(self, namespace: int) -> Name | None:
        """The name of a record's namespace. None if no content with a key was ever stored in it."""
        return self.names.get(namespace)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        if isinstance(index, slice):
            return list(self._made(np.arange(len(self))[index]))
        if not -len(self) <= index < len(self):
            raise IndexError(f"event {index} of {len(self)}")
        return next(self._made(np.array([index % len(self)])))

    def __iter__(self) -> Iterator[Event]:
        return self._made(np.arange(len(self)))

    def _made(self, which: Rows) -> Iterator[Event]:
        starts = self.bounds[which]
        heads = self.records[starts]
        parents = np.stack([heads["parent0"], heads["parent1"]], axis=1).view(np.uint64)
        extra = np.logical_or.reduceat(self.records["extra"], self.bounds[:-1])[which].tolist() if len(which) else []
        ends = self.bounds[which + 1].tolist()
        for head, start, end, parent, has_extra in zip(
            heads.tolist(), starts.tolist(), ends, parents, extra, strict=True
        ):
            kind, tier, priority, _, group, _, _, _, parent0, parent1, namespace = head
            number = self.number + start
            if kind in (CREATED, CLEARED):
                sizes = self.capacities if kind == CREATED else ()
                device, host = (sum(of_group[tier] for of_group in sizes) for tier in (DEVICE, HOST))
                yield Event(KINDS[kind], number, device_blocks=device, host_blocks=host, blocks=sizes)
                continue
            salt, adapter_id, root = self.names.get(namespace, NAMELESS)
            yield Event(
                KINDS[kind],
                number,
                self.tiers[tier],
                self.keys[start:end],
                None if root == (parent0, parent1) else parent,
                self.tokens[start:end] if kind == STORED else None,
                self.extra[start:end] if has_extra and self.extra is not None else None,
                namespace,
                salt,
                adapter_id,
                priority,
                group=group,
            )


def announce(states: States) -> None:
    """Write the first event of a pool into the ring."""
    if states.groups[0, H.event_capacity]:
        states.ring.events[0]["kind"] = CREATED
        states.ring.numbers[N.next] = 1


class Cached(NamedTuple):
    """A copy of the cached blocks of one group, in the order of their ``ids``."""

    blocks: npt.NDArray[np.void]
    """rows of ``State.blocks``"""
    tokens: Int32s
    extra: Rows | None
    ids: Rows


class Taken(NamedTuple):
    """What was copied under the state lock: rows of the ring, the cached blocks of each group for a snapshot, and the
    data to decode them. ``first``, ``last``: places in the ring, counted from the first event of the pool."""

    ring: Rows3
    cached: list[Cached] | None
    number: int
    names: dict[int, Name]
    capacities: Capacities
    first: int
    last: int
    since: int | None

    @property
    def told(self) -> int:
        """Rows of the snapshot."""
        return 0 if self.cached is None else 1 + sum(len(of_group.ids) for of_group in self.cached)


def take(states: States, names: dict[int, Name], snapshot: bool, since: int | None = None) -> Taken:
    """Copy the ring: what was not read, and it counts as read then; or what came ``since``. With ``snapshot``, also
    copy what is cached. The caller holds the state lock. Raises ValueError for a place that was not reached."""
    numbers, kept = states.ring.numbers, states.ring
    first, last = int(numbers[N.read]), int(numbers[N.next])
    if since is not None:
        if since > last:
            raise ValueError(f"since: expected cursors of this pool, up to {last}, got {since}")
        first = max(since, last - len(kept.events))
    places = np.arange(first, last) % max(1, len(kept.events))
    records = _whole(kept.events, places)
    ring = records, kept.tokens[places], _extra_rows(kept.extra, places, records["extra"] != 0)
    cached = [_cached(state) for state in states] if snapshot else None
    device_blocks = [int(state.header.device_blocks) for state in states]
    capacities = tuple(
        (device, len(state.blocks) - device) for device, state in zip(device_blocks, states, strict=True)
    )
    # The one reader without a cursor gets a snapshot numbered like other events, and goes on without a gap.
    number = first + (int(numbers[N.snapshots]) if since is None else 0)
    taken = Taken(ring, cached, number, names, capacities, first, last, since)
    numbers[N.seen] = last
    if since is None:
        numbers[N.read] = last
        numbers[N.snapshots] += taken.told
    return taken


def put_back(states: States, taken: Taken) -> None:
    """Have the next call return events that nobody got. If others have read or recorded too much meanwhile, some cannot
    be kept, which is counted.

    The caller holds the state lock.
    """
    numbers, lost = states.ring.numbers, taken.last - taken.first
    if taken.since is not None:
        return
    if numbers[N.read] == taken.last:
        numbers[N.snapshots] -= taken.told
        numbers[N.read] = max(taken.first, int(numbers[N.next]) - len(states.ring.events))
        numbers[N.seen] = min(int(numbers[N.seen]), int(numbers[N.read]))
        lost = int(numbers[N.read]) - taken.first
    states[0].counters[COUNTERS.index("events_dropped")] += lost


def _cached(state: State) -> Cached:
    ids = np.flatnonzero(state.blocks["flags"] & PUBLISHED)
    blocks = _whole(state.blocks, ids)
    return Cached(
        blocks, state.tokens.take(ids, axis=0), _extra_rows(state.extra, ids, blocks["flags"] & EXTRA != 0), ids
    )


def _whole(table: npt.NDArray[np.void], which: Rows) -> npt.NDArray[np.void]:
    """Some rows of a table, as bytes. NumPy's own way copies them field by field, which takes five times as long."""
    return table.view(f"V{table.dtype.itemsize}").take(which).view(table.dtype)


def _extra_rows(extra: Rows, places: Rows, has: Bools) -> Rows | None:
    """Extra ids of the rows that have some, zeros elsewhere; None if none has."""
    if not has.any():
        return None
    rows = np.zeros((len(places), extra.shape[1]), np.int64)
    rows[has] = extra[places[has]]
    return rows


def decode(taken: Taken) -> Events:
    """The events of a copy. Needs no lock."""
    missed = 0 if taken.since is None else taken.first - taken.since
    (records, tokens, extra), row = taken.ring, None
    if taken.cached is not None:
        row, nothing = len(records), np.zeros((1, tokens.shape[1]), np.int32)
        cleared = np.zeros(1, EVENT)
        cleared["kind"] = CLEARED
        told = [_stored(g, cached, taken.capacities[g][DEVICE]) for g, cached in enumerate(taken.cached)]
        records, tokens, extra = joined([taken.ring, (cleared, nothing, None), *told])
    return Events(
        records, tokens, extra, taken.number, taken.names, taken.capacities, row, cursor=taken.last, missed=missed
    )


def joined(parts: Sequence[Rows3]) -> Rows3:
    """Rows of events, one part after the other. Extra ids are zeros for a part that has none, and None if no part has
    any."""
    records, tokens, extra = zip(*parts, strict=True)
    both = None
    if any(part is not None for part in extra):
        both = np.concatenate(
            [np.zeros(ids.shape, np.int64) if part is None else part for ids, part in zip(tokens, extra, strict=True)]
        )
    return np.concatenate(records), np.concatenate(tokens), both


def _stored(group: int, cached: Cached, device_blocks: int) -> Rows3:
    """The events that describe what a group has cached."""
    blocks = np.zeros(len(cached.ids), EVENT)
    for field in ("key0", "key1", "parent0", "parent1", "namespace", "priority"):
        blocks[field] = cached.blocks[field]
    blocks["kind"], blocks["tier"], blocks["group"] = STORED, cached.ids >= device_blocks, group
    blocks["extra"] = cached.blocks["flags"] & EXTRA != 0
    order = _parents_first(blocks, cached.ids, cached.blocks["other_copy"])
    blocks = _whole(blocks, order)
    blocks["joined"][1:] = _continues(blocks[1:], blocks[:-1])
    return blocks, cached.tokens.take(order, axis=0), None if cached.extra is None else cached.extra[order]


def _continues(after: npt.NDArray[np.void], before: npt.NDArray[np.void]) -> Bools:
    same = (after["tier"] == before["tier"]) & (after["priority"] == before["priority"])
    return same & (after["parent0"] == before["key0"]) & (after["parent1"] == before["key1"])


def _parents_first(blocks: npt.NDArray[np.void], ids: Rows, twins: Int32s) -> Rows:
    """An order of cached blocks, within each tier. The children of a block come after it, its first child right after
    it.

    Each content joins the chain of its parent if it is the parent's first child. Else it begins a chain. Chains are
    sorted by where they begin.
    """
    place = np.full(int(ids[-1]) + 1 if len(ids) else 0, NONE)
    place[ids] = np.arange(len(ids))
    first = (twins == NONE) | (twins > ids)
    content = np.where(first, np.arange(len(ids)), place[np.where(first, ids, twins)])
    unique = np.unique(content)
    by_key = unique[np.argsort(blocks["key0"][unique], kind="stable")]
    keys = blocks["key0"][by_key]
    guess = by_key[np.minimum(np.searchsorted(keys, blocks["parent0"]), len(by_key) - 1)] if len(by_key) else unique
    known = (blocks["key0"][guess] == blocks["parent0"]) & (blocks["key1"][guess] == blocks["parent1"])
    parent = np.where(known, guess, np.arange(len(ids)))
    depth = _steps_to_root(parent)[0][content]
    first_child = np.full(len(ids), NONE)
    mine = unique[known[unique]]
    first_child[parent[mine][::-1]] = mine[::-1]
    follows = np.zeros(len(ids), np.bool_)
    follows[mine] = first_child[parent[mine]] == mine
    head = _steps_to_root(np.where(follows, parent, np.arange(len(ids))))[1][content]
    return np.lexsort((depth, blocks["tier"], head, depth[head]))


def parents_first(blocks: npt.NDArray[np.void]) -> Rows:
    """An order of the rows of one tier: the children of a block come after it."""
    ids = np.arange(len(blocks))
    return _parents_first(blocks, ids, np.full(len(blocks), NONE, np.int32))


def _steps_to_root(parent: Rows) -> tuple[Rows, Rows]:
    """For each row, the steps to the row that is its own parent, and that row. It uses doubling, since chains are
    long."""
    root, steps = parent, (parent != np.arange(len(parent))).astype(np.int64)
    while (root[root] != root).any():
        steps, root = steps + steps[root], root[root]
    return steps, root
