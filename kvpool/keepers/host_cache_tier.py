"""HostCacheTier: a HostCache as a bridge to stores sees it. Which of its blocks are saved, and what stores have got of
them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import compress, islice
from typing import NamedTuple

import numpy as np

from kvpool.errors import BlockNotFound, KVPoolError, OutOfBlocks
from kvpool.hostcache.host_cache import HostCache, HostLease
from kvpool.keepers.bridge import COMMIT, EVICT, REUSE, TOLD_AT_ONCE, pin_those_here, victims_margin
from kvpool.stores.jobs import Lend
from kvpool.stores.seals import BlockNames
from kvpool.stores.store import ABSENT, DAMAGED, Bytes, Rows
from kvpool.stores.store_client import StoreClient

AT_ONCE = 64
"""Most blocks of one save."""
TOLD_MAX = 65_536
"""Changes that nobody has asked for, and keys of each store that were told, are forgotten beyond so many."""
OWNER = "kvpool stores"
"""Of the leases under which blocks are saved."""


class StoreChange(NamedTuple):
    """A store, by its number, has these keys now, or has them no more."""

    store: int
    keys: tuple[bytes, ...]
    stored: bool


class HostCacheTier:
    """A ``HostCache`` as a bridge to stores sees it. Stores read and write its own rows.

    ``save``: when blocks are saved. The cache's state knows which it was asked for before. ``room``: so many blocks may
    be pinned for saves. ``limit``: so many may be in each store. Blocks are pinned by threads of the stores; all else
    is the scheduler's thread's.
    """

    def __init__(self, cache: HostCache, clients: Sequence[StoreClient], save: str, room: int, limit: int) -> None:
        self.cache = cache
        self._save, self._limit = save, limit
        self._saver = cache.open_saver(owed=save == EVICT)
        self._before = cache.unsaved_blocks
        self._margin = victims_margin(cache.host_blocks, AT_ONCE)
        # By store: the blocks that are to be saved, with all of their prompt, in its order.
        self._prompts: list[dict[bytes, Sequence[bytes]]] = [{} for _ in clients]
        # So many blocks are saved by one call, under one lease.
        self._in_one = min(client.queue.piece_blocks for client in clients)
        # What is told of stores, and by store the keys that were told to be there.
        self.changes: deque[StoreChange] = deque(maxlen=TOLD_MAX)
        self._told: list[dict[bytes, None]] = [{} for _ in clients]
        self.tells = False
        self._at_once = max(1, min(AT_ONCE, room // sum(client.queue.savers for client in clients)))

    def names(self, blocks: Sequence[bytes], *, sealed: bool) -> BlockNames:
        return BlockNames(blocks)

    def space(self, client: StoreClient, block: bytes) -> tuple[None, int]:
        return None, self._limit

    def reserve(self, client: StoreClient, blocks: Sequence[bytes]) -> tuple[Sequence[bytes], Rows]:
        """Others may need the last blocks: no more than half of what is free is taken if not all have room."""
        while blocks:
            try:
                taken = self.cache.reserve(blocks)
                return taken.keys, taken.blocks
            except OutOfBlocks as full:
                blocks = blocks[: full.free // 2]
        return (), np.empty(0, np.int64)

    def publish(self, client: StoreClient, blocks: Sequence[bytes], rows: Rows) -> list[bool]:
        self.cache.publish(blocks)
        if self._save != COMMIT:
            # A store has them.
            self.cache.tell_saver(self._saver, blocks)
        return [True] * len(blocks)

    def abort(self, client: StoreClient, blocks: Iterable[bytes], rows: Rows) -> None:
        self.cache.abort(blocks)

    def lacking(self, number: int, blocks: Sequence[bytes]) -> Sequence[bytes]:
        return blocks

    def victims(self) -> list[bytes]:
        """What is to be saved before it is evicted."""
        if self._save != EVICT:
            return []
        return self.cache.next_victims(self._saver, self._margin, TOLD_AT_ONCE)

    def leave_unsaved(self, keys: Sequence[bytes]) -> None:
        """No store gets these, unless it has them."""
        self.cache.tell_saver(self._saver, keys)

    def first_used(self, lease: HostLease) -> list[bytes]:
        """Which of these blocks are to be saved, as they are used now."""
        if self._save != REUSE:
            return []
        return self.cache.tell_saver(self._saver, lease.keys)

    @property
    def lost(self) -> int:
        """Blocks that were evicted before they were to be saved."""
        return self.cache.unsaved_blocks - self._before if self._save == EVICT else 0

    def close(self) -> None:
        """No store is asked any more, and none reads or writes blocks."""
        if self._saver >= 0:
            self.cache.close_saver(self._saver)
            self._saver = -1

    def take(self, client: StoreClient, line: Iterable[bytes]) -> list[bytes]:
        return list(islice(line, self._at_once))

    def pin(self, client: StoreClient, blocks: Sequence[bytes]) -> tuple[Sequence[bytes], BlockNames, Lend]:
        """They are pinned when a call of the store begins, and not while they wait for it."""
        return blocks, self.names(blocks, sealed=True), self.lend

    def ended(self, number: int, blocks: Sequence[bytes], kept: Sequence[bool]) -> None:
        """A prompt whose saves have ended comes back into its order. Each of its leases counted as a use, so that the
        end of the prompt would be evicted last."""
        waiting = self._prompts[number]
        prompts = {id(prompt): prompt for prompt in (waiting.pop(block, ()) for block in blocks)}.values()
        here = list(compress(blocks, kept)) if self.tells else []
        if here:
            told = self._told[number]
            told.update(dict.fromkeys(here))
            while len(told) > TOLD_MAX:
                del told[next(iter(told))]
            self.changes.append(StoreChange(number, tuple(here), True))
        for prompt in prompts:
            at_once = len(prompt) <= len(blocks) <= self._in_one
            if not at_once and waiting.keys().isdisjoint(prompt):
                self.cache.touch(prompt)

    def said(self, number: int, blocks: Sequence[bytes], codes: Bytes) -> None:
        if not (told := self._told[number]):
            return
        gone = compress(blocks, np.isin(codes, (ABSENT, DAMAGED)).tolist())
        if lost := tuple(block for block in gone if told.pop(block, 0) is None):
            self.changes.append(StoreChange(number, lost, False))

    def to_save(self, blocks: Sequence[bytes], prompt: Sequence[bytes]) -> None:
        """Blocks of a prompt are to be saved."""
        for waiting in self._prompts:
            waiting.update(dict.fromkeys(blocks, prompt))

    def touch(self, prompt: Sequence[bytes]) -> None:
        """What ``HostKeeper.touch`` does."""
        self.cache.touch(prompt)
        for waiting in self._prompts:
            waiting.update(dict.fromkeys(waiting.keys() & set(prompt), prompt))

    @property
    def pinned(self) -> int:
        """Blocks that stores read now."""
        return sum(len(lease.blocks) for lease in self.cache.leases if lease.owner == OWNER)

    @contextmanager
    def lend(self, names: BlockNames) -> Iterator[Rows]:
        """Rows of those of the blocks that are in the cache, pinned. On a thread of a queue."""
        rows = np.full(len(names), -1, np.int64)
        keys = names.names
        places, lease = pin_those_here(
            len(keys), lambda own: self.cache.pin([keys[place] for place in own.tolist()], owner=OWNER),
            lambda: self.cache.lookup(keys) == self.cache.HERE,
        )  # fmt: skip
        if lease is None:
            yield rows
            return
        rows[places] = lease.blocks
        try:
            yield rows
        finally:
            if lease.closed:
                raise BlockNotFound("others have closed the lease under which the blocks were saved")
            with suppress(KVPoolError):
                lease.close(used=self._save != EVICT)
