"""HostCacheAdapter: a HostCache as a ``TierStorage`` sees it; which of its blocks are saved, and which stores have got
them."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import compress, groupby, islice
from typing import NamedTuple

import numpy as np

from kvpool.errors import BlockNotFound, KVPoolError, OutOfBlocks
from kvpool.hostcache.host_cache import HostCache
from kvpool.hostcache.host_lease import HostLease
from kvpool.storage.mac import BlockNames
from kvpool.storage.store import ABSENT, DAMAGED, Bytes, Rows
from kvpool.storage.store_requests import Lend
from kvpool.storage.store_worker import StoreWorker
from kvpool.storage.tier_storage import COMMIT, EVICT, READ_AT_ONCE, REUSE, pin_those_here, victims_margin

AT_ONCE, VICTIMS_AT_ONCE = 256, 64
"""Most blocks of one save; of what is to be saved before it is evicted."""
REPORTED_MAX = 65_536
"""The most changes that are kept for a reader, and keys of each store that were reported."""
OWNER = "kvpool stores"
"""Of the leases under which blocks are saved."""


class StoreChange(NamedTuple):
    """A store, by its number, has these keys now, or has them no more."""

    store: int
    keys: tuple[bytes, ...]
    stored: bool


@dataclass(eq=False)
class _Run:
    """Keys that came together, all of them of one prompt, and how many are ``left`` to be saved in a store."""

    keys: Sequence[bytes]
    prompt: Sequence[bytes]
    left: int


class HostCacheAdapter:
    """A ``HostCache`` as a ``TierStorage`` sees it. Stores read and write its own rows.

    ``save``: when blocks are saved. The cache's state knows which it was asked for before. ``room``: so many blocks may
    be pinned for saves. ``limit``: so many may be in each store. Blocks are pinned by threads of the stores; all else
    is the scheduler's thread's.
    """

    def __init__(self, cache: HostCache, workers: Sequence[StoreWorker], save: str, room: int, limit: int) -> None:
        self.cache, self._save, self._limit = cache, save, limit
        self._cursor = cache.open_dirty_cursor(pending=save == EVICT)
        self._before = cache.unsaved_blocks
        self._margin = victims_margin(cache.host_blocks, VICTIMS_AT_ONCE)
        # By store: what is to be saved, by its last key.
        self._runs: list[dict[bytes, _Run]] = [{} for _ in workers]
        # So many blocks are saved by one call, under one lease.
        self._in_one = min(worker.piece_blocks for worker in workers)
        # What is reported of stores, and by store the keys that were reported as stored.
        self.changes: deque[StoreChange] = deque(maxlen=REPORTED_MAX)
        self._reported: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in workers]
        self.reports = False
        most = VICTIMS_AT_ONCE if save == EVICT else AT_ONCE
        self._at_once = max(1, min(most, room // sum(worker.savers for worker in workers)))
        # Of each store: how long the queue was that waits for more.
        self._held = dict.fromkeys(workers, 0)

    def names(self, blocks: Iterable[bytes], *, with_contexts: bool) -> BlockNames:
        return BlockNames(blocks)

    def space(self, worker: StoreWorker, block: bytes) -> tuple[None, int]:
        return None, self._limit

    def reserve(self, worker: StoreWorker, blocks: Sequence[bytes]) -> tuple[Sequence[bytes], Rows]:
        """Others may need the last blocks: no more than half of what is free is taken if not all have room.

        The reservation has no deadline of its own. The load has one, and the manager reports its keys as ABSENT from
        then on; the blocks stay reserved until no call of the store can write them.
        """
        while blocks:
            try:
                taken = self.cache.reserve(blocks)
                return taken.keys, taken.blocks
            except OutOfBlocks as full:
                blocks = blocks[: full.free // 2]
        return (), np.empty(0, np.int64)

    def publish(self, worker: StoreWorker, blocks: Sequence[bytes], rows: Rows) -> list[bool]:
        self.cache.publish(blocks)
        if self._save != COMMIT:
            # A store has them.
            self.cache.read_dirty(self._cursor, blocks)
        return [True] * len(blocks)

    def abort(self, worker: StoreWorker, blocks: Iterable[bytes], rows: Rows) -> None:
        left = list(blocks)
        try:
            self.cache.abort(left)
        except BlockNotFound:
            # A call in which a signal handler has raised has ended some of them.
            for block in left if len(left) > 1 else ():
                self.abort(worker, (block,), rows)

    def victims(self) -> list[bytes]:
        """What is to be saved before it is evicted."""
        if self._save != EVICT:
            return []
        return self.cache.eviction_candidates(self._cursor, self._margin, READ_AT_ONCE)

    def leave_unsaved(self, keys: Sequence[bytes]) -> None:
        """No store gets these, unless it has them."""
        self.cache.read_dirty(self._cursor, keys)

    def first_used(self, lease: HostLease) -> list[bytes]:
        """Which of these blocks are to be saved, as they are used now."""
        if self._save != REUSE:
            return []
        return self.cache.read_dirty(self._cursor, lease.keys)

    @property
    def lost(self) -> int:
        """Blocks that were evicted before they were to be saved."""
        return self.cache.unsaved_blocks - self._before if self._save == EVICT else 0

    def close(self) -> None:
        """No store is asked any more, and none reads or writes blocks."""
        if self._cursor >= 0:
            self.cache.close_dirty_cursor(self._cursor)
            self._cursor = -1

    def take(self, worker: StoreWorker, queued: Mapping[bytes, _Run]) -> int:
        """A save costs the thread of the scheduler more than its blocks do. So what would have to wait for the store
        waits for more blocks, as long as each step brings some. What came together is saved together, if it fits."""
        held, self._held[worker] = self._held[worker], len(queued)
        if held < len(queued) < self._at_once and self._save != EVICT and worker.is_backlogged:
            return 0
        self._held[worker] = count = 0
        for _, run in groupby(islice(queued.values(), self._at_once + 1), id):
            size = len([*run])
            if count and count + size > self._at_once:
                break
            count += size
        return min(count, self._at_once)

    def pin(self, worker: StoreWorker, chosen: Mapping[bytes, _Run]) -> tuple[Mapping[bytes, _Run], Lend]:
        """They are pinned when a call of the store begins, and not while they wait for it."""
        return chosen, partial(self.lend, chosen)

    def ended(self, number: int, chosen: Mapping[bytes, _Run], kept: Sequence[bool]) -> None:
        """A prompt whose saves have ended comes back into its order. Each of its leases counted as a use, so that the
        end of the prompt would be evicted last."""
        if self.reports and (kept_keys := tuple(compress(chosen, kept))):
            reported = self._reported[number]
            reported.update(dict.fromkeys(kept_keys))
            self.changes.append(StoreChange(number, kept_keys, True))
            # A reader is to keep no key for ever of which nothing will be reported any more.
            self._take_back(number, [*islice(reported, max(0, len(reported) - REPORTED_MAX))])
        waiting = self._runs[number]
        had = Counter[int]()
        prompts: dict[int, Sequence[bytes]] = {}
        for run, count in Counter(chosen.values()).items():
            prompts[id(run.prompt)] = run.prompt
            had[id(run.prompt)] += count
            run.left -= count
            if not run.left and waiting.get(last := run.keys[-1]) is run:
                del waiting[last]
        for which, prompt in prompts.items():
            at_once = len(kept) <= self._in_one and had[which] == len(prompt)
            if prompt and not at_once and not any(waiting[last].prompt is prompt for last in waiting.keys() & prompt):
                self.cache.touch(prompt)

    def answered(self, number: int, blocks: Sequence[bytes], codes: Bytes) -> None:
        if not (reported := self._reported[number]):
            return
        gone = compress(blocks, np.isin(codes, (ABSENT, DAMAGED)).tolist())
        self._take_back(number, [block for block in gone if block in reported])

    def cleared(self) -> None:
        """Stores have nothing any more of what they had."""
        for number, reported in enumerate(self._reported):
            self._take_back(number, list(reported))

    def _take_back(self, number: int, keys: Sequence[bytes]) -> None:
        """Report keys as gone that were reported as stored."""
        if keys:
            reported = self._reported[number]
            self.changes.append(StoreChange(number, tuple(key for key in keys if reported.pop(key, 0) is None), False))

    def to_save(self, prompt: Sequence[bytes], number: int, blocks: Sequence[bytes]) -> Mapping[bytes, _Run]:
        """Blocks of a prompt are to be saved in a store, or of none, since they are evicted next."""
        run = _Run(blocks, prompt, len(blocks))
        if prompt and blocks:
            self._runs[number][blocks[-1]] = run
        return dict.fromkeys(blocks, run)

    def touch(self, prompt: Sequence[bytes], turn: bool) -> None:
        """What ``HostStorageManager.touch`` does."""
        self.cache.touch(prompt, turn=turn)
        for waiting in self._runs if any(self._runs) else ():
            prompt_keys = set(prompt)
            for last in waiting.keys() & prompt_keys:
                if waiting[last].keys[0] in prompt_keys:
                    waiting[last].prompt = prompt

    def recover(self) -> None:
        """A signal handler has raised in a call. It may have taken keys from a queue, whose saves never end."""
        for waiting in self._runs:
            waiting.clear()

    @property
    def pinned(self) -> int:
        """Blocks that stores read now."""
        return sum(len(lease.blocks) for lease in self.cache.leases if lease.owner == OWNER)

    @contextmanager
    def lend(self, chosen: Mapping[bytes, _Run], names: BlockNames) -> Iterator[Rows]:
        """Rows of those of the blocks that are in the cache, pinned. On a thread of a worker.

        A lease ends with its last block first, which is then the first victim. So its last prompt comes first.
        ``chosen``: those of the store request, with their runs, whose prompts a touch may change meanwhile.
        """
        rows, order, keys = np.full(len(names), -1, np.int64), np.arange(len(names)), names.names
        prompts = [id(chosen[key].prompt) for key in keys]
        if prompts.count(prompts[0]) < len(prompts):
            runs = [[*run] for _, run in groupby(order.tolist(), prompts.__getitem__)]
            order = np.array([place for run in reversed(runs) for place in run])
            keys = tuple(keys[place] for place in order.tolist())
        places, lease = pin_those_here(
            len(keys),
            lambda wanted: self.cache.pin([keys[place] for place in wanted.tolist()], owner=OWNER),
            lambda: self.cache.lookup(keys) == self.cache.HERE,
        )
        if lease is None:
            yield rows
            return
        rows[order[places]] = lease.blocks
        try:
            yield rows
        finally:
            if lease.closed:
                raise BlockNotFound("others have closed the lease under which the blocks were saved")
            with suppress(KVPoolError):
                lease.close(used=self._save != EVICT)
