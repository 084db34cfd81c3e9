"""KV events as callers see them: what was stored, removed, updated or cleared, in the order of the decisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from kvpool.state.blocks import DEVICE_BLOCKS, EVENT, EVENT_NEXT, EVENT_READ, EVENTS, EXTRA, NONE, PUBLISHED
from kvpool.state.requests import R_ROOT0, R_ROOT1
from kvpool.state.ring import CLEARED, CREATED, STORED
from kvpool.state.states import States

if TYPE_CHECKING:
    from kvpool.sequence import BlockKeys

KINDS = ("created", "stored", "removed", "updated", "cleared")
TIERS = ("device", "host")
Rows = npt.NDArray[np.int64]
Rows3 = tuple[npt.NDArray[np.void], npt.NDArray[np.int32], Rows | None]
"""Records, tokens, and extra ids where some block has any."""


@dataclass(eq=False, slots=True)
class Event:
    """One change of what is cached.

    ``number`` counts blocks, not events: a reader that has seen everything finds it equal to ``next`` of the event before; a larger one
    is a gap, and the difference is what was lost. ``keys`` uint64[n, 2], a chain for "stored"; ``parent`` uint64[2] of its first
    block, None where that begins a prompt; ``tokens`` int32[n, tokens_per_block], for "stored" only, and ``extra_ids``, int64 of the same
    shape, if some token has one; ``namespace``, ``salt`` and ``adapter_id`` as in BlockKeys. "created" has the capacities.
    """

    kind: str
    number: int
    tier: str | None = None
    keys: npt.NDArray[np.uint64] | None = None
    parent: npt.NDArray[np.uint64] | None = None
    tokens: npt.NDArray[np.int32] | None = None
    extra_ids: npt.NDArray[np.int64] | None = None
    namespace: int = 0
    salt: bytes | str | None = None
    adapter_id: int | str | None = None
    priority: int = 0
    device_blocks: int = 0
    host_blocks: int = 0

    @property
    def next(self) -> int:
        return self.number + (1 if self.keys is None else len(self.keys))


class Name(NamedTuple):
    """What a namespace tag stands for, and the key that its prompts begin with."""

    salt: bytes | str | None
    adapter_id: int | str | None
    root: tuple[int, int]


NAMELESS = Name(None, None, (0, 0))


class Names:
    """The namespaces of all content that a pool holds; what it no longer holds is forgotten now and then. The state lock guards it."""

    LEAST = 1024

    def __init__(self, states: States) -> None:
        self._states, self._limit = states, self.LEAST
        self.known: dict[int, Name] = {}

    def learn(self, prompts: Sequence[BlockKeys]) -> None:
        """Note the namespaces of prompts whose content the decision under way may store; nothing where nobody asked for events."""
        if not self._states.heads[0, EVENTS]:
            return
        if len(self.known) + len(prompts) > self._limit:
            self._forget()
        for prompt in prompts:
            if prompt.namespace not in self.known:
                root0, root1 = prompt.request[0, R_ROOT0 : R_ROOT1 + 1].tolist()
                self.known[prompt.namespace] = Name(prompt.salt, prompt.adapter_id, (root0, root1))

    def _forget(self) -> None:
        """Keep what blocks, sequences or events name; whoever decodes events meanwhile keeps the old dictionary."""
        parts = [part for state in self._states for part in (state.blocks, state.sequences)]
        named = np.concatenate([part["namespace"] for part in (*parts, self._states.ring.events)])
        kept = set(np.unique(named).tolist())
        self.known = {tag: name for tag, name in self.known.items() if tag in kept}
        self._limit = max(self.LEAST, 2 * len(self.known))


class Events(Sequence[Event]):
    """The events of one call, as a sequence; an ``Event`` is made when it is asked for.

    The columns are for readers of many: ``records`` [n], the ring's own, one for each block; ``keys`` uint64[n, 2]; ``tokens``
    int32[n, tokens_per_block]; ``extra`` int64 of the same shape, or None; ``bounds`` int64[m + 1], event i is rows
    ``bounds[i]:bounds[i + 1]``. ``number`` is that of the first event; ``before_snapshot`` says how many events come before the "cleared"
    of a snapshot (without one: all).
    """

    def __init__(
        self, records: npt.NDArray[np.void], tokens: npt.NDArray[np.int32], extra: Rows | None, number: int, names: dict[int, Name],
        capacities: tuple[int, int], snapshot_row: int | None = None,
    ) -> None:  # fmt: skip
        self.records, self.tokens, self.extra, self.number, self.capacities = records, tokens, extra, number, capacities
        starts = records["joined"] == 0
        if len(records):
            starts[0] = True
        self.bounds = np.append(np.flatnonzero(starts), len(records))
        self.keys = np.stack([records["key0"], records["key1"]], axis=1).view(np.uint64)
        self.before_snapshot = len(self) if snapshot_row is None else int(np.searchsorted(self.bounds, snapshot_row))
        self._names = names

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def next(self) -> int:
        """The number that the next event will have if none is lost."""
        return self.number + len(self.records)

    def name(self, namespace: int) -> Name | None:
        """What a record's namespace stands for; None where nothing with a key was ever stored in it."""
        return self._names.get(namespace)

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
        for head, start, end, parent, has_extra in zip(heads.tolist(), starts.tolist(), ends, parents, extra, strict=True):
            kind, tier, priority, _, _, _, _, _, parent0, parent1, namespace = head
            number = self.number + start
            if kind in (CREATED, CLEARED):
                sizes = self.capacities if kind == CREATED else (0, 0)
                yield Event(KINDS[kind], number, device_blocks=sizes[0], host_blocks=sizes[1])
                continue
            salt, adapter_id, root = self._names.get(namespace, NAMELESS)
            yield Event(
                KINDS[kind], number, TIERS[tier], self.keys[start:end], None if root == (parent0, parent1) else parent,
                self.tokens[start:end] if kind == STORED else None, self.extra[start:end] if has_extra and self.extra is not None else None,
                namespace, salt, adapter_id, priority,
            )  # fmt: skip


def announce(states: States) -> None:
    """Write the first event of a pool into the ring."""
    if states.heads[0, EVENTS]:
        states.ring.events[0]["kind"] = CREATED
        states.ring.numbers[EVENT_NEXT] = 1


class Taken(NamedTuple):
    """What was copied under the state lock: rows of the ring, of the cached blocks for a snapshot, and what decodes them."""

    ring: Rows3
    cached: Rows3 | None
    """The same, with rows of ``State.blocks`` in place of records."""
    ids: Rows
    number: int
    names: dict[int, Name]
    capacities: tuple[int, int]


def take(states: States, names: Names, snapshot: bool) -> Taken:
    """Copy and empty the ring, and with ``snapshot`` copy what is cached. The state lock is held by the caller."""
    state, numbers, told = states[0], states.ring.numbers, states.ring
    first, last = int(numbers[EVENT_READ]), int(numbers[EVENT_NEXT])
    places = np.arange(first, last) % max(1, len(told.events))
    records = _whole(told.events, places)
    ring = records, told.tokens[places], _extra_rows(told.extra, places, records["extra"] != 0)
    ids = np.flatnonzero(state.blocks["flags"] & PUBLISHED) if snapshot else np.empty(0, np.int64)
    cached = None
    if snapshot:
        blocks = _whole(state.blocks, ids)
        cached = blocks, state.tokens.take(ids, axis=0), _extra_rows(state.extra, ids, blocks["flags"] & EXTRA != 0)
        # A snapshot is numbered like any other events, so that its reader goes on without a gap.
        numbers[EVENT_NEXT] += 1 + len(ids)
    numbers[EVENT_READ] = numbers[EVENT_NEXT]
    device_blocks = int(state.header[DEVICE_BLOCKS])
    return Taken(ring, cached, ids, first, names.known, (device_blocks, len(state.blocks) - device_blocks))


def _whole(table: npt.NDArray[np.void], which: Rows) -> npt.NDArray[np.void]:
    """Some rows of a table, as bytes: NumPy's own way copies them field by field, which takes five times as long."""
    return table.view(f"V{table.dtype.itemsize}").take(which).view(table.dtype)


def _extra_rows(extra: Rows, places: Rows, has: npt.NDArray[np.bool_]) -> Rows | None:
    """Extra ids of the rows that have some, zeros elsewhere; None if none has."""
    if not has.any():
        return None
    rows = np.zeros((len(places), extra.shape[1]), np.int64)
    rows[has] = extra[places[has]]
    return rows


def decode(taken: Taken) -> Events:
    """The events of what was taken. Needs no lock."""
    records, tokens, extra = taken.ring
    if taken.cached is None:
        return Events(records, tokens, extra, taken.number, taken.names, taken.capacities)
    rows, own_tokens, own_extra = taken.cached
    blocks = np.zeros(len(rows), EVENT)
    for field in ("key0", "key1", "parent0", "parent1", "namespace", "priority"):
        blocks[field] = rows[field]
    blocks["kind"], blocks["tier"], blocks["extra"] = STORED, taken.ids >= taken.capacities[0], rows["flags"] & EXTRA != 0
    order = _parents_first(blocks, taken.ids, rows["twin"])
    blocks, own_tokens = _whole(blocks, order), own_tokens.take(order, axis=0)
    blocks["joined"][1:] = _continues(blocks[1:], blocks[:-1])
    cleared = np.zeros(1, EVENT)
    cleared["kind"] = CLEARED
    if extra is not None or own_extra is not None:
        before = np.zeros((len(records) + 1, tokens.shape[1]), np.int64)
        if extra is not None:
            before[:-1] = extra
        extra = np.concatenate([before, np.zeros_like(own_tokens, np.int64) if own_extra is None else own_extra[order]])
    tokens = np.concatenate([tokens, np.zeros_like(tokens, shape=(1, tokens.shape[1])), own_tokens])
    everything = np.concatenate([records, cleared, blocks])
    return Events(everything, tokens, extra, taken.number, taken.names, taken.capacities, snapshot_row=len(records))


def _continues(after: npt.NDArray[np.void], before: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    same = (after["tier"] == before["tier"]) & (after["priority"] == before["priority"])
    return same & (after["parent0"] == before["key0"]) & (after["parent1"] == before["key1"])


def _parents_first(blocks: npt.NDArray[np.void], ids: Rows, twins: npt.NDArray[np.int32]) -> Rows:
    """An order of cached blocks in which the children of a block come behind it, its first child next to it, within each tier.

    Every content goes to the chain of its parent, if it is the parent's first child, or begins one; chains are sorted by where they begin.
    """
    place = np.full(int(ids[-1]) + 1 if len(ids) else 0, NONE)
    place[ids] = np.arange(len(ids))
    content = np.where((twins == NONE) | (twins > ids), np.arange(len(ids)), place[np.where(twins > ids, ids, twins)])
    own = np.unique(content)
    by_key = own[np.argsort(blocks["key0"][own], kind="stable")]
    keys = blocks["key0"][by_key]
    found = by_key[np.minimum(np.searchsorted(keys, blocks["parent0"]), len(by_key) - 1)] if len(by_key) else own
    known = (blocks["key0"][found] == blocks["parent0"]) & (blocks["key1"][found] == blocks["parent1"])
    parent = np.where(known, found, np.arange(len(ids)))
    depth = _steps_to_root(parent)[0][content]
    first_child = np.full(len(ids), NONE)
    mine = own[known[own]]
    first_child[parent[mine][::-1]] = mine[::-1]
    follows = np.zeros(len(ids), np.bool_)
    follows[mine] = first_child[parent[mine]] == mine
    head = _steps_to_root(np.where(follows, parent, np.arange(len(ids))))[1][content]
    return np.lexsort((depth, blocks["tier"], head, depth[head]))


def _steps_to_root(parent: Rows) -> tuple[Rows, Rows]:
    """Steps from each row to the row that is its own parent, and that row; by doubling, since chains are long."""
    root, steps = parent, (parent != np.arange(len(parent))).astype(np.int64)
    while (root[root] != root).any():
        steps, root = steps + steps[root], root[root]
    return steps, root
