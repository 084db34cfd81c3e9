"""PoolAdapter: a pool's host tier, as a ``TierStorage`` sees it. Which of its content is saved, and when; which content
stores are known to have; and what readers of a storage manager's events learn of that."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from itertools import compress, groupby, islice
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvpool.common.arguments import Namespace
from kvpool.common.arrays import Bools, Int32s, Uint64s
from kvpool.common.arrays.layout import Tier
from kvpool.errors import KVPoolError, PoolClosed
from kvpool.pool.events import NAMELESS, TIERS, Events, Name, Rows, Rows3, joined, parents_first
from kvpool.pool.keys import BlockKeys
from kvpool.pool.leases import Lease
from kvpool.pool.manager import KVCacheManager
from kvpool.state import control, saving
from kvpool.state.records import EVENT, EXTRA, NONE, H, N
from kvpool.state.tiers import CLEARED, REMOVED, STORED
from kvpool.storage.mac import BlockNames, block_context
from kvpool.storage.store import ABSENT, DAMAGED, NO_LIMIT, OK, Bytes
from kvpool.storage.store_requests import LOAD, SAVE
from kvpool.storage.store_worker import StoreWorker
from kvpool.storage.tier_storage import EVICT, READ_AT_ONCE, REUSE, pin_those_here, victims_margin

OWNER = "kvpool storage manager"
"""of the leases under which blocks are copied"""
SAVE_BYTES = 4 << 20
"""About what one save has."""
T = TypeVar("T", np.int32, np.int64, np.uint64)


class Content:
    """A full block of a prompt in one group of layers.

    ``key``: the pool's key of it, 16 bytes. ``name``: whose it is. ``fields``: the key of its parent, its tokens and
    its extra ids, as bytes; b"" before they are known, and if there are no extra ids. ``prompt`` and ``place``: of a
    block that was asked for with a prompt. Equal ones have one key in one group."""

    __slots__ = ("fields", "group", "id", "key", "name", "namespace", "place", "prompt")

    def __init__(self, group: int, key: bytes, namespace: int = 0, name: Name = NAMELESS) -> None:
        self.group, self.key = group, key
        self.id = group, key
        self.namespace, self.name = namespace, name
        self.fields = b"", b"", b""
        self.prompt: BlockKeys | None = None
        self.place = 0

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Content) and self.id == other.id

    @property
    def whose(self) -> Namespace:
        return self.name.salt, self.name.adapter_id

    @property
    def context(self) -> bytes:
        """All that its bytes depend on: part of its MAC in a store."""
        parent, tokens, extra = self.fields[0], _rows(self.fields[1:2], np.int32), _rows(self.fields[2:], np.int64)
        return block_context(parent, tokens, extra, namespace_bytes(self.whose), self.group)

    def without_prompt(self) -> Content:
        kept = Content(self.group, self.key, self.namespace, self.name)
        kept.fields = self.fields
        return kept


class Unsaved:
    """Which content of a pool is to be saved now. The pool's state knows which it was asked for before.

    ``save``: "commit" follows the pool's events. If it comes too late for some (``missed``), and at first, it looks at
    all blocks. "reuse" looks at all blocks, over and over. "evict" looks at the next victims of a host that is full:
    see ``victims_margin``.
    """

    def __init__(self, pool: KVCacheManager, save: str, least: int) -> None:
        self._core, self._save = pool.core, save
        self._margins = np.array([victims_margin(group.host_blocks, least) for group in pool.groups])
        self._found = np.empty((READ_AT_ONCE, saving.FOUND), np.int64)
        check = partial(saving.check_cursors, self._core.states.groups)
        self._number = self._core.decide(None, saving.open_dirty_cursor, save != REUSE, first=check)
        self._before = self._lost()
        self._at = np.array([self._core.states.ring.numbers[N.next], 0, 0])

    def next(self, whole: bool) -> tuple[list[Content], bool]:
        """Content that nobody was asked to save, a bounded part of it, and whether there may be more now. ``whole``:
        there is, until all blocks were looked at. Raises PoolClosed."""
        at = self._at
        if self._save == EVICT:
            victims = self._contents(saving.victims, self._margins)
            return victims, len(victims) == READ_AT_ONCE
        if self._save == REUSE:
            at[saving.PLACE] = max(0, at[saving.PLACE])
            return self._contents(saving.sweep, 2, at), whole and at[saving.PLACE] != NONE
        before = at[saving.CURSOR]
        contents = self._contents(saving.stored, at)
        if at[saving.PLACE] != NONE:
            contents += self._contents(saving.sweep, 1, at)
        return contents, at[saving.CURSOR] - before == READ_AT_ONCE or at[saving.PLACE] != NONE

    def _contents(self, verb: Callable[..., int], *args: object) -> list[Content]:
        # Under one lock, since names of content that has gone are forgotten.
        with self._core.lock:
            rows = self._found[: self._core.decide(None, verb, self._number, *args, self._found)]
            names = self._core.names.known
        columns = zip(rows[:, 0].tolist(), split(rows[:, 1:3].tobytes(), 16), rows[:, 3].tolist(), strict=True)
        return [Content(group, key, tag, names.get(tag, NAMELESS)) for group, key, tag in columns]

    @property
    def missed(self) -> int:
        """Events that it came too late for."""
        return int(self._at[saving.MISSED])

    @property
    def lost(self) -> int:
        """Content that the host has evicted before it was to be saved, with "commit" and "evict"."""
        return 0 if self._save == REUSE else self._lost() - self._before

    def _lost(self) -> int:
        return int(self._core.states.groups[:, H.unsaved].sum())

    def close(self) -> None:
        with suppress(PoolClosed):
            self._core.decide(None, saving.close_dirty_cursor, self._number)


class PoolAdapter:
    """The host tier of a pool. Blocks pass through staging rows of the store's worker. The storage manager's thread
    owns it.

    ``stored``: what stores are known to have. ``quotas``: bytes by namespace. ``victims``: whether what is saved is
    what the host evicts next.
    """

    def __init__(
        self, pool: KVCacheManager, stored: StoredContent, quotas: Mapping[Namespace, int], victims: bool
    ) -> None:
        self._pool, self._stored = pool, stored
        self._quotas, self._victims = quotas, victims
        self.saved_bytes = self.loaded_blocks = self.loaded_bytes = 0
        # Views keep this memory alive, even if the pool is closed meanwhile.
        self._parts = [
            [rows.reshape(len(rows), -1).view(np.uint8) for rows in parts if len(rows)]
            for parts in pool.memory.host_pools
        ]
        # Blocks of another layout, or of layers that see other tokens, have other names.
        self._kinds = [
            blake2b(
                ascii(
                    (
                        group.index,
                        group.kind,
                        group.window,
                        group.sinks,
                        pool.tokens_per_block,
                        [layout.fingerprint for layout in group.layouts],
                    )
                ).encode(),
                digest_size=16,
            ).digest()
            for group in pool.groups
        ]

    def names(self, blocks: Iterable[Content], *, with_contexts: bool) -> BlockNames:
        names = [self._kinds[content.group] + content.key for content in blocks]
        return BlockNames(names, [content.context for content in blocks] if with_contexts else None)

    def space(self, worker: StoreWorker, block: Content) -> tuple[bytes, int]:
        nbytes = self._quotas.get(block.whose)
        limit = NO_LIMIT if nbytes is None else nbytes // worker.block_bytes
        return worker.secret.tag(namespace_bytes(block.whose)), limit

    def to_save(self, number: int, blocks: Sequence[Content]) -> Mapping[Content, None]:
        """Those of the blocks that a store is not known to have."""
        return dict.fromkeys(content for content in blocks if not self._stored.has(content, number))

    def answered(self, number: int, blocks: Sequence[Content], codes: Bytes) -> None:
        self._stored.note(number, compress(blocks, (codes == OK).tolist()), True)
        self._stored.note(number, compress(blocks, np.isin(codes, (ABSENT, DAMAGED)).tolist()), False)

    def here(self, contents: Sequence[Content], tier: Tier | None = None) -> list[bool]:
        """Which contents the pool has now. Raises PoolClosed."""
        if not contents:
            return []
        groups = [content.group for content in contents]
        return self._pool.content.cached_blocks(_keys(contents), tier=tier)[groups, np.arange(len(contents))].tolist()

    # -- prompts -------------------------------------------------------------------------------------

    def of_prompt(self, prompt: BlockKeys, count: int) -> list[list[Content]]:
        """The first ``count`` full blocks of a prompt, for each group of layers; none for cross attention."""
        width, name = self._pool.tokens_per_block, Name(prompt.salt, prompt.adapter_id, prompt.root)
        keys = np.concatenate([np.array([prompt.root], np.int64), prompt.keys[:count].view(np.int64)])
        tokens = prompt.tokens[: count * width].reshape(count, width)
        extra = None if prompt.extra_ids is None else prompt.extra_ids[: count * width].reshape(count, width)
        chains: list[list[Content]] = [[] for _ in self._pool.groups]
        for group in cached_groups(self._pool):
            chains[group] = [Content(group, key, prompt.namespace, name) for key in split(keys[1:].tobytes(), 16)]
            note_fields(chains[group], keys[:-1], tokens, extra)
            for place, content in enumerate(chains[group]):
                content.prompt, content.place = prompt, place
        return chains

    def of_keys(self, keys: Rows) -> list[Content]:
        """The contents with these keys of the pool, int64[n, 2], in all groups that cache some."""
        return [Content(group, key) for group in cached_groups(self._pool) for key in split(keys.tobytes(), 16)]

    # -- blocks that come ----------------------------------------------------------------------------

    def reserve(self, worker: StoreWorker, blocks: Sequence[Content]) -> tuple[Sequence[Content], Rows]:
        rows = worker.take(LOAD, len(blocks))
        return blocks[: len(rows)], rows

    def abort(self, worker: StoreWorker, blocks: Iterable[Content], rows: Rows) -> None:
        worker.give_back(rows)

    def publish(self, worker: StoreWorker, blocks: Sequence[Content], rows: Rows) -> list[bool]:
        """Import blocks of a prompt. It ends where the host is full. Raises DeviceError and PoolClosed."""
        published = dict.fromkeys(blocks, False)
        ordered = sorted(zip(blocks, rows.tolist(), strict=True), key=lambda entry: (entry[0].group, entry[0].place))
        follows = groupby(enumerate(ordered), lambda entry: (entry[1][0].group, entry[1][0].place - entry[0]))
        for _, entries in follows:
            run = dict(entry for _, entry in entries)
            first = next(iter(run))
            group, prompt = self._pool.groups[first.group], first.prompt
            if prompt is None:
                break
            data = [worker.memory[row][: group.block_bytes] for row in run.values()]
            stored = self._pool.imports.import_blocks(prompt, data, first=first.place, group=group.index)
            self.loaded_blocks += stored
            self.loaded_bytes += stored * group.block_bytes
            imported = [True] * stored if stored == len(run) else self.here(list(run))
            published.update(zip(run, imported, strict=True))
            if not all(imported):
                break
        return list(published.values())

    # -- blocks that are saved -----------------------------------------------------------------------

    def take(self, worker: StoreWorker, queued: Mapping[Content, None]) -> int:
        most = min(worker.free(SAVE), max(1, SAVE_BYTES // worker.block_bytes))
        kinds = groupby(islice(queued, most), lambda content: (content.namespace, content.group))
        return next((len(list(alike)) for _, alike in kinds), 0)

    def pin(self, worker: StoreWorker, chosen: Mapping[Content, None]) -> tuple[Mapping[Content, None], Rows]:
        """Copy contents of one group of layers into rows. Raises PoolClosed."""
        blocks = list(chosen)
        rows = worker.take(SAVE, len(blocks))
        is_copied = self.copy(blocks, worker.memory, rows.tolist())
        worker.give_back(rows[~is_copied])
        return dict.fromkeys(compress(blocks, is_copied.tolist())), rows[is_copied]

    def ended(self, number: int, chosen: Mapping[Content, None], kept: Sequence[bool]) -> None:
        saved = list(compress(chosen, kept))
        self.saved_bytes += sum(self._pool.groups[content.group].block_bytes for content in saved)
        self._stored.note(number, saved, True)

    def copy(self, contents: Sequence[Content], memory: Bytes, rows: Sequence[int]) -> Bools:
        """Copy contents of one group of layers into rows, and note what they say. Returns which of them were there:
        bool[n].

        What is only on the device is copied to the host first. There it is a redundant copy, the first to be evicted.
        Raises PoolClosed.
        """
        pool, group, copied = self._pool, self._pool.groups[contents[0].group], np.zeros(len(contents), np.bool_)
        keys = _keys(contents)

        def pin(places: Rows) -> Lease:
            return pool.pin(keys[places], owner=OWNER, tier="host", group=group.index)

        try:
            on_host = np.array(self.here(contents, "host"))
            if not on_host.all():
                pool.content.offload(keys[~on_host])
            places, lease = pin_those_here(len(keys), pin, lambda: self.here(contents, "host"))
            if lease is not None:
                blocks = lease.blocks - group.first_host_block
                for place, block in zip(places.tolist(), blocks.tolist(), strict=True):
                    self._copy(group.index, block, memory[rows[place]])
                ids = blocks + group.device_blocks
                same, before = self._read([contents[place] for place in places.tolist()], ids)
                # Of a lease that somebody has revoked, the rows may have other bytes.
                copied[places] = same & _ended(lease)
                # A lease that ends makes its blocks the last victims. But to be copied for a store is no use of them.
                if self._victims:
                    pool.core.decide(None, saving.put_back, group.index, ids, before)
            if not self._victims:
                key_words, now_ms = keys.view(np.int64), pool.core.now()
                pool.core.decide(None, control.evict_first, group.index, key_words, False, now_ms)
        except PoolClosed:
            raise
        except KVPoolError:
            # The device has failed.
            copied[:] = False
        return copied

    def _read(self, contents: Sequence[Content], blocks: Rows) -> tuple[Bools, Rows]:
        """Note what pinned blocks say. Returns which of them are of the namespace in which the content was stored:
        bool[n], and their ``saving.places``. Of two prompts with one key, it is the one that the pool has now."""
        state = self._pool.core.states[contents[0].group]
        with self._pool.core.lock:
            records, tokens = state.blocks[blocks], state.tokens[blocks]
            has = records["flags"] & EXTRA != 0
            extra = state.extra[np.where(has, blocks, 0)] * has[:, None] if has.any() else None
        note_fields(contents, np.stack([records["parent0"], records["parent1"]], axis=1), tokens, extra)
        return records["namespace"] == contents[0].namespace, saving.places(records)

    def _copy(self, group: int, block: int, row: Bytes) -> None:
        at = 0
        for part in self._parts[group]:
            row[at : at + part.shape[1]] = part[block]
            at += part.shape[1]
        # What the row had before belongs to somebody else.
        row[at:] = 0


class StoredContent:
    """Which content stores are known to have, about ``limit`` of it, the latest. And the events of a pool joined with
    what stores have got and lost, in numbers of its own.

    ``stores``: their names, which are tiers after the pool's. As many rows of theirs are kept as the pool keeps of its
    own. Who comes too late for some sees a gap in the numbers; ``dropped`` counts these rows. One thread changes it,
    any may ask.

    A reader that has applied all events knows exactly the content that is known here. So content that exceeds the
    limit is removed for readers too, and after "cleared", which says that nothing is cached anywhere, readers get
    again what stores have.
    """

    def __init__(self, pool: KVCacheManager, stores: Sequence[str], limit: int) -> None:
        self._pool, self._tiers, self._limit = pool, (*TIERS, *stores), limit
        self._capacity = int(pool.core.states.groups[0, H.event_capacity])
        # By group and key: the content, and which stores have it, as bits. A dict looks for its first key behind all
        # that have gone: that took longer than the rest of a save.
        self._known: OrderedDict[tuple[int, bytes], tuple[Content, int]] = OrderedDict()
        # What is known and the rows that say so change together, so that no reader gets one without the other.
        self._lock = threading.Lock()
        self._pending: deque[tuple[Rows3, dict[int, Name]]] = deque()
        self._rows = self._lost = self._cursor = self._next = self.dropped = 0

    def has(self, content: Content, number: int) -> bool:
        """Whether a store is known to have a content."""
        known = self._known.get(content.id)
        return known is not None and known[1] & 1 << number != 0

    def known(self, prompt: BlockKeys, count: int) -> Bools:
        """Which of the first full blocks of a prompt some store is known to have: bool[groups, count]."""
        keys, groups = split(prompt.keys[:count].tobytes(), 16), range(len(self._pool.groups))
        is_known = [[(group, key) in self._known for key in keys] for group in groups]
        return np.array(is_known, np.bool_).reshape(len(groups), count)

    def all(self) -> list[Content]:
        """Content that some store is known to have."""
        with self._lock:
            return [content for content, _ in self._known.values()]

    def note(self, number: int, contents: Iterable[Content], stored: bool) -> None:
        """A store has contents, or has them no more. Readers get what is new."""
        news, bit = [], 1 << number
        with self._lock:
            for reported in contents:
                content, bits = self._known.get(reported.id, (reported, 0))
                if bool(bits & bit) != stored:
                    # Prompts are not kept, nor what a content says of others.
                    content, bits = reported.without_prompt() if stored else content, bits ^ bit
                    news.append(content)
                self._known.pop(reported.id, None)
                if bits:
                    self._known[reported.id] = content, bits
            self._report(STORED if stored else REMOVED, number, news)
            excess = max(0, len(self._known) - self._limit)
            oldest = [self._known.popitem(last=False)[1] for _ in range(excess)]
            for store in range(len(self._tiers) - len(TIERS)):
                self._report(REMOVED, store, [content for content, bits in oldest if bits & 1 << store])

    def _report(self, kind: int, number: int, contents: Sequence[Content]) -> None:
        """Keep rows for readers. The caller holds the lock."""
        if not contents:
            return
        self._pending.append((self._rows_of(kind, number, contents), _names(contents)))
        self._rows += len(contents)
        while self._rows > self._capacity and len(self._pending) > 1:
            old = len(self._pending.popleft()[0][0])
            self._rows, self._lost = self._rows - old, self._lost + old

    def read(self, snapshot: bool) -> Events:
        """What no reader has got. Then, with a ``snapshot``, what the pool has, and what stores have. Raises
        PoolClosed."""
        with self._lock:
            events = self._pool.events(since=self._cursor, snapshot=snapshot)
            cut = int(events.bounds[events.before_snapshot])
            cleared = bool((events.records["kind"][:cut] == CLEARED).any())
            held = list(self._held()) if snapshot or cleared else []
            of_pool, of_stores = _cut(events, 0, cut), [rows for rows, _ in self._pending]
            again = [rows for rows, _ in held]
            # "cleared" takes from readers what they knew of stores too: they get it again. What stores got and lost
            # until now comes before it.
            parts = [*of_stores, of_pool, *again] if cleared else [of_pool, *of_stores]
            row, names = None, dict(events.names)
            if snapshot:
                row = sum(len(records) for records, *_ in parts)
                parts += [_cut(events, cut, len(events.records)), *again]
            for _, of_rows in (*self._pending, *held):
                names.update(of_rows)
            records, tokens, extra = joined(parts)
            gone = events.missed + self._lost
            number, self._next = self._next + gone, self._next + gone + len(records)
            self._cursor, self._rows, self._lost = events.cursor, 0, 0
            self._pending.clear()
            self.dropped += gone
            return Events(records, tokens, extra, number, names, events.capacities, row, self._tiers)

    def _held(self) -> Iterator[tuple[Rows3, dict[int, Name]]]:
        """What each store has of each group of layers, parents first. The caller holds the lock."""
        for number in range(len(self._tiers) - len(TIERS)):
            of_groups: dict[int, list[Content]] = {}
            for content, bits in self._known.values():
                if bits & 1 << number:
                    of_groups.setdefault(content.group, []).append(content)
            for contents in of_groups.values():
                order = parents_first(self._rows_of(STORED, number, contents)[0])
                yield self._rows_of(STORED, number, [contents[place] for place in order]), _names(contents)

    def _rows_of(self, kind: int, number: int, contents: Sequence[Content]) -> Rows3:
        """What a store has got or lost, as rows of events. Neighbours that follow each other are one event."""
        parents, tokens, extra = zip(*[content.fields for content in contents], strict=True)
        size, records = len(tokens[0]) // 4, np.zeros(len(contents), EVENT)
        records["kind"], records["tier"] = kind, len(TIERS) + number
        records["group"], records["namespace"] = zip(
            *[(content.group, content.namespace) for content in contents], strict=True
        )
        records["key0"], records["key1"] = _rows([content.key for content in contents], np.int64, 2).T
        records["parent0"], records["parent1"] = _rows(parents, np.int64, 2).T
        extras = _rows([ids or bytes(8 * size) for ids in extra], np.int64, size)
        records["extra"] = extras.any(axis=1)
        after, before = records[1:], records[:-1]
        follows = (after["parent0"] == before["key0"]) & (after["parent1"] == before["key1"])
        after["joined"] = follows & (after["group"] == before["group"]) & (kind == STORED)
        return records, _rows(tokens, np.int32, size), extras if extras.any() else None


def cached_groups(pool: KVCacheManager) -> list[int]:
    """Groups of layers whose blocks can be found: not those for cross attention."""
    return [group.index for group in pool.groups if group.kind != "cross"]


def note_fields(contents: Sequence[Content], parents: Rows, tokens: Int32s, extra: Rows | None) -> None:
    """Note what blocks say: ``parents`` int64[n, 2], ``tokens`` int32[n, T], ``extra`` int64[n, T]."""
    size = tokens.shape[1]
    extras = [b""] * len(contents) if extra is None else split(extra.tobytes(), 8 * size)
    fields = zip(split(parents.tobytes(), 16), split(tokens.tobytes(), 4 * size), extras, strict=True)
    for content, values in zip(contents, fields, strict=True):
        content.fields = values


def _names(contents: Iterable[Content]) -> dict[int, Name]:
    return {content.namespace: content.name for content in contents}


def _cut(events: Events, first: int, last: int) -> Rows3:
    extra = None if events.extra is None else events.extra[first:last]
    return events.records[first:last], np.asarray(events.tokens[first:last]), extra


def _keys(contents: Iterable[Content]) -> Uint64s:
    return _rows((content.key for content in contents), np.uint64, 2)


def _rows(parts: Iterable[bytes], dtype: type[T], width: int | None = None) -> npt.NDArray[T]:
    """Bytes as an array of one dimension, or as rows of so many numbers."""
    flat = np.frombuffer(b"".join(parts), dtype)
    return flat if width is None else flat.reshape(-1, width)


def _ended(lease: Lease) -> bool:
    """Close a lease. Returns whether it was open until now."""
    try:
        lease.close()
    except KVPoolError:
        return False
    return True


def namespace_bytes(namespace: Namespace) -> bytes:
    """A namespace as bytes, which differ for all salts and adapters, of all types."""
    return ascii(namespace).encode()


def split(data: bytes, size: int) -> list[bytes]:
    """Bytes in parts of a size."""
    return [data[i : i + size] for i in range(0, len(data), size)]
