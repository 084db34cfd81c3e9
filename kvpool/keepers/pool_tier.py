"""PoolTier: a pool's host tier, as a bridge to stores sees it. And which of its content is saved, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpool.errors import BlockNotFound, KVPoolError, PoolClosed
from kvpool.keepers.known_content import (
    ON_HOST,
    BridgeEvents,
    Content,
    KnownContent,
    Namespace,
    event_rows,
    namespace_bytes,
)
from kvpool.pool.leases import Lease
from kvpool.pool.manager import KVCacheManager
from kvpool.state import control
from kvpool.state.effects import REMOVED, STORED
from kvpool.state.records import EXTRA
from kvpool.stores.jobs import LOAD, SAVE
from kvpool.stores.queue import NO_LIMIT
from kvpool.stores.seals import BlockNames
from kvpool.stores.store import Bytes, Rows
from kvpool.stores.store_client import StoreClient

OWNER = "kvpool keeper"
"""of the leases under which blocks are copied"""
SAVE_BYTES = 4 << 20
"""About what one save has."""


class PoolTier:
    """The host tier of a pool. Blocks pass through staging rows of the store's client. The keeper's thread owns it.

    ``quotas``: bytes by namespace. ``victims``: whether what is saved is what the host evicts next.
    """

    def __init__(
        self, pool: KVCacheManager, known: KnownContent, told: BridgeEvents, quotas: Mapping[Namespace, int],
        victims: bool,
    ) -> None:  # fmt: skip
        self._pool, self.known, self._told, self._quotas, self._victims = pool, known, told, quotas, victims
        self.saved_bytes = self.loaded_blocks = self.loaded_bytes = 0
        # Views keep this memory alive, also if the pool is closed meanwhile.
        self._parts = [
            [rows.reshape(len(rows), -1).view(np.uint8) for rows in parts if len(rows)] for parts in pool.host_pools
        ]

    def names(self, blocks: Sequence[Content], *, sealed: bool) -> BlockNames:
        contexts = [content.context for content in blocks] if sealed else None
        return BlockNames(map(self.known.name, blocks), contexts=contexts)

    def space(self, client: StoreClient, block: Content) -> tuple[bytes, int]:
        nbytes = self._quotas.get(block.whose)
        limit = NO_LIMIT if nbytes is None else nbytes // client.queue.block_bytes
        return client.secret.tag(namespace_bytes(block.whose)), limit

    def note(self, number: int, contents: Iterable[Content], there: bool) -> None:
        """A store has contents, or has them no more. What is news is told."""
        news = [one for one in contents if self.known.note(one, number, there)]
        self._told.tell(STORED if there else REMOVED, number, news)

    # -- blocks that come ----------------------------------------------------------------------------

    def reserve(self, client: StoreClient, blocks: Sequence[Content]) -> tuple[Sequence[Content], Rows]:
        rows = client.take(LOAD, len(blocks))
        return blocks[: len(rows)], rows

    def abort(self, client: StoreClient, blocks: Iterable[Content], rows: Rows) -> None:
        client.give_back(rows)

    def publish(self, client: StoreClient, blocks: Sequence[Content], rows: Rows) -> list[bool]:
        """Import blocks of a prompt. It ends where the host is full. Raises DeviceError and PoolClosed."""
        ordered = sorted(zip(blocks, rows.tolist(), strict=True), key=lambda one: (one[0].group, one[0].place))
        here = dict.fromkeys(blocks, False)
        follows = groupby(enumerate(ordered), lambda one: (one[1][0].group, one[1][0].place - one[0]))
        for _, own in follows:
            run = [one for _, one in own]
            there = self._import([content for content, _ in run], [client.memory[row] for _, row in run])
            here.update(zip((content for content, _ in run), there, strict=True))
            if not all(there):
                break
        return list(here.values())

    def _import(self, run: Sequence[Content], rows: Sequence[Bytes]) -> list[bool]:
        """Import blocks that follow each other in one group of layers. Returns which of them the pool has now."""
        group, prompt = self._pool.groups[run[0].group], run[0].prompt
        if prompt is None:
            return [False] * len(run)
        data = [row[: group.block_bytes] for row in rows]
        stored = self._pool.import_blocks(prompt, data, first=run[0].place, group=group.index)
        self.loaded_blocks += stored
        self.loaded_bytes += stored * group.block_bytes
        return [True] * len(run) if stored == len(run) else self._pool.cached_blocks(_keys(run))[group.index].tolist()

    # -- blocks that are saved -----------------------------------------------------------------------

    def take(self, client: StoreClient, line: Iterable[Content]) -> list[Content]:
        most = min(client.free(SAVE), max(1, SAVE_BYTES // client.queue.block_bytes))
        kinds = groupby(islice(line, most), lambda one: (one.namespace, one.group))
        return next((list(alike) for _, alike in kinds), [])

    def pin(self, client: StoreClient, blocks: Sequence[Content]) -> tuple[list[Content], BlockNames, Rows]:
        """Copy contents of one group of layers into rows. Raises PoolClosed."""
        rows = client.take(SAVE, len(blocks))
        there = self.copy(blocks, client.memory, rows.tolist())
        client.give_back(rows[~there])
        own = [content for content, copied in zip(blocks, there.tolist(), strict=True) if copied]
        return own, self.names(own, sealed=True), rows[there]

    def ended(self, number: int, blocks: Sequence[Content], kept: Sequence[bool]) -> None:
        for content in blocks:
            content.saving &= ~(1 << number)
        own = [content for content, there in zip(blocks, kept, strict=True) if there]
        self.saved_bytes += sum(self._pool.groups[content.group].block_bytes for content in own)
        self.note(number, own, True)

    def copy(self, contents: Sequence[Content], memory: Bytes, rows: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Copy contents of one group of layers into rows, and note what they say. Returns which of them were there:
        bool[n].

        What is only on the device is copied to the host first. There it is a redundant copy, the first to be evicted.
        Raises PoolClosed.
        """
        group, copied = self._pool.groups[contents[0].group], np.zeros(len(contents), np.bool_)
        keys = _keys(contents)
        try:
            here = self._pool.cached_blocks(keys, tier="host")[group.index]
            if not here.all():
                self._pool.offload(keys[~here])
            for places, lease in self._leases(keys, group.index):
                blocks = lease.blocks - group.first_host_block
                for place, block in zip(places.tolist(), blocks.tolist(), strict=True):
                    self._copy(group.index, block, memory[rows[place]])
                same = self._read([contents[place] for place in places.tolist()], blocks + group.device_blocks)
                # Of a lease that somebody has revoked, the rows may have other bytes.
                copied[places] = same & _ended(lease)
            # A lease that ends makes its blocks the last victims. But to be copied for a store is no use of them.
            core, own = self._pool.core, keys.view(np.int64)
            core.decide(None, control.evict_first, group.index, own, self._victims, core.now())
        except PoolClosed:
            raise
        except KVPoolError:
            # The device has failed.
            copied[:] = False
        return copied

    def _leases(self, keys: npt.NDArray[np.uint64], group: int) -> Iterator[tuple[Rows, Lease]]:
        """Leases of host blocks, with the places of their keys."""
        with suppress(BlockNotFound):
            yield np.arange(len(keys)), self._pool.pin(keys, owner=OWNER, tier="host", group=group)
            return
        for place, key in enumerate(keys):
            lease = self._pool.find_and_pin_host(key, owner=OWNER, group=group)
            if lease is not None:
                yield np.array([place]), lease

    def _read(self, contents: Sequence[Content], blocks: Rows) -> npt.NDArray[np.bool_]:
        """Note what pinned blocks say. Returns which of them are of the namespace that the pool's event has named:
        bool[n]. Of two prompts with one key, it is the one that the pool has now."""
        group, namespace = contents[0].group, contents[0].namespace
        state = self._pool.core.states[group]
        with self._pool.core.lock:
            found, tokens = state.blocks[blocks], state.tokens[blocks]
            has = found["flags"] & EXTRA != 0
            extra = state.extra[np.where(has, blocks, 0)] * has[:, None] if has.any() else None
        parents = np.stack([found["parent0"], found["parent1"]], axis=1)
        rows = event_rows(group, namespace, _keys(contents).view(np.int64), parents, tokens, extra)
        for content, row in zip(contents, rows, strict=True):
            content.row = row
        return found["namespace"] == namespace

    def _copy(self, group: int, block: int, row: Bytes) -> None:
        at = 0
        for part in self._parts[group]:
            row[at : at + part.shape[1]] = part[block]
            at += part.shape[1]
        # What the row had before belongs to somebody else.
        row[at:] = 0

    def uses(self, contents: Sequence[Content]) -> list[int]:
        """How often contents of one group of layers were used, 0 for those that the pool does not have."""
        out = np.empty(len(contents), np.int64)
        with self._pool.core.lock:
            self._pool.core.check_open()
            control.uses(self._pool.core.states.heads, contents[0].group, _keys(contents).view(np.int64), out)
        return out.tolist()


def _keys(contents: Iterable[Content]) -> npt.NDArray[np.uint64]:
    return np.frombuffer(b"".join(one.key for one in contents), np.uint64).reshape(-1, 2)


def _ended(lease: Lease) -> bool:
    """Close a lease. Returns whether it was open until now."""
    try:
        lease.close()
    except KVPoolError:
        return False
    return True


class SaveRule(Protocol):
    """Decides which contents are saved, and when. ``want(content)`` has one saved."""

    def changed(self, content: Content, before: int, valued: int) -> None:
        """A content is on other tiers than ``before``, or its priority was ``valued``."""

    def turn(self) -> None:
        """Want what is due now."""


class OnCommit:
    """Saves each content as soon as the pool has it."""

    def __init__(self, want: Callable[[Content], None]) -> None:
        self._want = want

    def changed(self, content: Content, before: int, valued: int) -> None:
        if not before and content.on:
            self._want(content)

    def turn(self) -> None:
        """Nothing is due later."""


class OnEviction:
    """Saves each content before the host evicts it.

    The events tell what is only on the host, and in which order it came there: this is the order in which the host
    evicts, the lowest priority first. What is among the next victims of a full host is saved: the next quarter of its
    blocks, or the next ``least``, at most half. Where content is evicted earlier, since others hold host blocks, the
    host counts as full that early. ``missed(content)``: it is gone, and was not wanted in time.
    """

    def __init__(
        self, want: Callable[[Content], None], missed: Callable[[Content], None], host_blocks: Sequence[int],
        least: int,
    ) -> None:  # fmt: skip
        self._want, self._missed = want, missed
        self._margins = [max(1, min(max(least, blocks // 4), blocks // 2)) for blocks in host_blocks]
        self._room = list(host_blocks)
        self._order: list[list[dict[Content, None]]] = [[{} for _ in range(101)] for _ in host_blocks]
        self._count = [0] * len(host_blocks)
        self._due = [False] * len(host_blocks)

    def changed(self, content: Content, before: int, valued: int) -> None:
        g = content.group
        if before == ON_HOST and content in self._order[g][valued]:
            del self._order[g][valued][content]
            if not content.on:
                self._missed(content)
                self._room[g] = min(self._room[g], self._count[g])
            self._count[g] -= 1
        if content.on == ON_HOST:
            self._order[g][content.priority][content] = None
            self._count[g] += 1
            self._room[g] = max(self._room[g], self._count[g])
            self._due[g] = True

    def turn(self) -> None:
        for g, due in enumerate(self._due):
            if due:
                self._due[g] = False
                excess = self._count[g] - (self._room[g] - self._margins[g])
                victims = (content for order in self._order[g] for content in order)
                for content in islice(victims, max(0, excess)):
                    self._want(content)


class OnReuse:
    """Saves each content when it has been used twice.

    The pool counts uses. It is asked about so many contents in a turn, one after the other, so that nobody waits long
    for its lock.
    """

    ASKED = 256

    def __init__(self, want: Callable[[Content], None], tier: PoolTier, groups: int) -> None:
        self._want, self._tier = want, tier
        self._watched: list[dict[Content, None]] = [{} for _ in range(groups)]

    def changed(self, content: Content, before: int, valued: int) -> None:
        if content.on:
            self._watched[content.group].setdefault(content)
        else:
            self._watched[content.group].pop(content, None)

    def turn(self) -> None:
        for watched in filter(None, self._watched):
            asked = list(islice(watched, self.ASKED))
            for content, count in zip(asked, self._tier.uses(asked), strict=True):
                # What was not used again is asked about last.
                del watched[content]
                if count > 1:
                    self._want(content)
                elif content.on:
                    watched[content] = None
