"""KV events: the blocks that were stored, removed or updated, and resets, in the order of the decisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from kvpool.common.arrays import Bools, Int32s, Int64s, Uint64s
from kvpool.state.arrays import State, States
from kvpool.state.records import COUNTERS, DEVICE, EVENT, EXTRA, HOST, NONE, PUBLISHED, H, N
from kvpool.state.tiers import CLEARED, CREATED, STORED

EventKind: TypeAlias = Literal["created", "stored", "removed", "updated", "cleared"]
KINDS: tuple[EventKind, ...] = ("created", "stored", "removed", "updated", "cleared")
TIERS = ("device", "host")
Rows = Int64s
Rows3 = tuple[npt.NDArray[np.void], Int32s, Rows | None]
"""Records, tokens, and extra ids if some block has any."""
Capacities = tuple[tuple[int, int], ...]
"""(device blocks, host blocks) of each group of layers."""


@dataclass(eq=False, slots=True)
class Event:
    """One change of the cached content.

    Attributes
    ----------
    kind : {"created", "stored", "removed", "updated", "cleared"}
        "created" is the first event of a pool. "stored" is a chain of blocks, each the child of the one before.
        "updated" blocks have another priority. "cleared" is a ``clear``, or the beginning of a snapshot, and is
        about all groups.
    number : int
        The number of blocks in all events before it. It equals ``next`` of the event before. If it is larger, the
        difference is the number of blocks whose events were lost.
    tier : str or None
        The tier of the blocks: "device", "host", or the name of a store in the events of a ``StorageManager``.
    keys : ndarray of uint64, shape (n, 2), or None
        The keys of the blocks. None for "created" and "cleared".
    parent : ndarray of uint64, shape (2,), or None
        The key before the first block; None if that block begins a prompt.
    tokens : ndarray of int32, shape (n, tokens_per_block), or None
        The tokens of the blocks, for "stored" only.
    extra_ids : ndarray of int64, shape (n, tokens_per_block), or None
        The extra ids of these tokens, if one has any.
    namespace : int
        The digest of salt and adapter.
    salt : bytes, str or None
        The salt of the prompts that the blocks are from.
    adapter_id : int, str or None
        The adapter, likewise.
    priority : int
        The eviction priority of the blocks.
    device_blocks : int
        For "created" only: number of device blocks, in all groups of layers.
    host_blocks : int
        For "created" only: number of host blocks, in all groups of layers.
    group : int
        The index of the group of layers.
    blocks : tuple of (int, int)
        For "created" only: device and host blocks of each group.
    """

    kind: EventKind
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
        """The number of the event that follows."""
        return self.number + (1 if self.keys is None else len(self.keys))


class Name(NamedTuple):
    """The salt and adapter of a namespace, and the key before the first block of its prompts."""

    salt: bytes | str | None
    adapter_id: int | str | None
    root: tuple[int, int]


NAMELESS = Name(None, None, (0, 0))


class Events(Sequence[Event]):
    """The events of one ``KVCacheManager.events`` call: a sequence of ``Event``, and the same events as arrays.

    An ``Event`` is made when it is read, so the arrays are faster for many events. They have a row for each block.

    Attributes
    ----------
    number : int
        The number of the first event.
    cursor : int
        Pass it to the next ``events`` call of this reader as ``since``.
    missed : int
        Number of rows after ``since`` that the pool no longer had.
    before_snapshot : int
        Number of events before the "cleared" of a snapshot; all if there is no snapshot.
    records : ndarray of void, shape (n,)
        The record of each row, such as ``records["kind"]`` and ``records["tier"]``.
    keys : ndarray of uint64, shape (n, 2)
        The key of each row.
    tokens : ndarray of int32, shape (n, tokens_per_block)
        The tokens of each row.
    extra : ndarray of int64, shape (n, tokens_per_block), or None
        The extra ids of each row, if one has any.
    bounds : ndarray of int64, shape (m + 1,)
        The rows of event i are ``bounds[i]`` to ``bounds[i + 1]``.
    names : dict of int to Name
        Salt, adapter and root key of each namespace.
    tiers : tuple of str
        The name of each tier number in ``records``.
    capacities : tuple of (int, int)
        Device and host blocks of each group of layers.

    Notes
    -----
    The arrays are private copies. Any thread may read them.

    Examples
    --------
    >>> import kvpool
    >>> layout = kvpool.BlockLayout(layers=2, kv_heads=2, head_dim=8, tokens_per_block=4)
    >>> with kvpool.KVCacheManager(layout, device_blocks=8, device="cpu", event_capacity=100) as cache:
    ...     sequence = cache.add_sequence(range(8))
    ...     cache.commit(sequence)
    ...     cache.release(sequence)
    ...     for event in cache.events():
    ...         print(event.kind, event.number, event.tokens)
    created 0 None
    stored 1 [[0 1 2 3]
     [4 5 6 7]]
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
        """Return the salt, the adapter and the root key of a namespace.

        Parameters
        ----------
        namespace : int
            The number that records have.

        Returns
        -------
        Name or None
            None if no content with a key was ever stored in it.
        """
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
    """A copy that was made under the state lock: rows of the ring, the cached blocks of each group for a snapshot, and
    the data to decode them. ``first``, ``last``: places in the ring, counted from the first event of the pool."""

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
    """Copy the events of the ring that were not read, which are read then, or those ``since`` a cursor. With
    ``snapshot``, also copy the cached blocks. The caller holds the state lock. Raises ValueError for a cursor that the
    ring has not reached."""
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
    """Have the next call return events that no caller has received. If others have read or recorded too many meanwhile,
    some are lost, which is counted.

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
    """Return rows of a table, copied as bytes. NumPy copies them field by field, which takes five times as long."""
    return table.view(f"V{table.dtype.itemsize}").take(which).view(table.dtype)


def _extra_rows(extra: Rows, places: Rows, has: Bools) -> Rows | None:
    """Return the extra ids of the rows that have some, zeros elsewhere; None if none has."""
    if not has.any():
        return None
    rows = np.zeros((len(places), extra.shape[1]), np.int64)
    rows[has] = extra[places[has]]
    return rows


def decode(taken: Taken) -> Events:
    """Return the events of a copy. Needs no lock."""
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
    """Return rows of events, one part after the other. Extra ids are zeros for a part that has none, and None if no
    part has any."""
    records, tokens, extra = zip(*parts, strict=True)
    both = None
    if any(part is not None for part in extra):
        both = np.concatenate(
            [np.zeros(ids.shape, np.int64) if part is None else part for ids, part in zip(tokens, extra, strict=True)]
        )
    return np.concatenate(records), np.concatenate(tokens), both


def _stored(group: int, cached: Cached, device_blocks: int) -> Rows3:
    """Return the events that describe the cached blocks of a group."""
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
    """Return an order of cached blocks, within each tier, in which the children of a block come after it, and its first
    child directly after it.

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
    """Return an order of the rows of one tier, in which the children of a block come after it."""
    ids = np.arange(len(blocks))
    return _parents_first(blocks, ids, np.full(len(blocks), NONE, np.int32))


def _steps_to_root(parent: Rows) -> tuple[Rows, Rows]:
    """Return, for each row, the steps to the row that is its own parent, and that row. It uses doubling, since chains
    are long."""
    root, steps = parent, (parent != np.arange(len(parent))).astype(np.int64)
    while (root[root] != root).any():
        steps, root = steps + steps[root], root[root]
    return steps, root
