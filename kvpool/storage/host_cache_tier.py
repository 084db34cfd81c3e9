"""A HostCache in front of stores. HostCacheTier: the cache as a bridge sees it; which of its blocks are saved, and what
stores have got of them. HostLoads: keys that the cache does not have, which stores are asked for."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import compress, groupby
from typing import NamedTuple, TypeAlias

import numpy as np

from kvpool.common.errors import BlockNotFound, KVPoolError, OutOfBlocks, StoreBusy
from kvpool.hostcache.host_cache import HostCache, HostLease
from kvpool.storage.mac import BlockNames
from kvpool.storage.store import ABSENT, CODES, DAMAGED, OK, Bytes, Rows
from kvpool.storage.store_client import StoreClient
from kvpool.storage.store_requests import Lend, StoreRequest
from kvpool.storage.writeback import (
    COMMIT,
    EVICT,
    REUSE,
    TOLD_AT_ONCE,
    Loading,
    LoadQueue,
    PendingBlocks,
    Pieces,
    Search,
    WritebackQueue,
    blocks_in,
    pin_those_here,
    victims_margin,
)

AT_ONCE, VICTIMS_AT_ONCE = 256, 64
"""Most blocks of one save; of what is to be saved before it is evicted."""
TOLD_MAX = 65_536
"""Changes that nobody has asked for, and keys of each store that were told, are forgotten beyond so many."""
OWNER = "kvpool stores"
"""Of the leases under which blocks are saved."""
ASKED_MAX = 65_536
"""Keys that are asked for at once, and keys that are remembered as absent."""
ROOM_SHARE = 0.5
"""The part of the time for a key for which it may wait for room that other requests hold. The rest is for its load."""
NOW_MAX = 64
"""Keys that are asked for at once, on the thread of the scheduler."""
Lines: TypeAlias = dict[tuple[int, bool, str], list[bytes]]
"""Keys by the number of a store, whether it is known to have them, and the hit that they are of."""


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


class HostCacheTier:
    """A ``HostCache`` as a bridge to stores sees it. Stores read and write its own rows.

    ``save``: when blocks are saved. The cache's state knows which it was asked for before. ``room``: so many blocks may
    be pinned for saves. ``limit``: so many may be in each store. Blocks are pinned by threads of the stores; all else
    is the scheduler's thread's.
    """

    def __init__(self, cache: HostCache, clients: Sequence[StoreClient], save: str, room: int, limit: int) -> None:
        self.cache, self._clients = cache, clients
        self._save, self._limit = save, limit
        self._cursor = cache.open_dirty_cursor(pending=save == EVICT)
        self._before = cache.unsaved_blocks
        self._margin = victims_margin(cache.host_blocks, VICTIMS_AT_ONCE)
        # By store: what is to be saved, by its last key.
        self._runs: list[dict[bytes, _Run]] = [{} for _ in clients]
        # So many blocks are saved by one call, under one lease.
        self._in_one = min(client.queue.piece_blocks for client in clients)
        # What is told of stores, and by store the keys that were told to be there.
        self.changes: deque[StoreChange] = deque(maxlen=TOLD_MAX)
        self._told: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in clients]
        self.tells = False
        most = VICTIMS_AT_ONCE if save == EVICT else AT_ONCE
        self._at_once = max(1, min(most, room // sum(client.queue.savers for client in clients)))
        # Of each store: how long the line was that waits for more.
        self._held = dict.fromkeys(clients, 0)

    def names(self, blocks: Sequence[bytes], *, sealed: bool) -> BlockNames:
        return BlockNames(blocks)

    def space(self, client: StoreClient, block: bytes) -> tuple[None, int]:
        return None, self._limit

    def reserve(self, client: StoreClient, blocks: Sequence[bytes]) -> tuple[Sequence[bytes], Rows]:
        """Others may need the last blocks: no more than half of what is free is taken if not all have room.

        The reservation has no deadline of its own. The load has one, and ``HostLoads`` reports its keys as ABSENT from
        then on; the blocks stay reserved until no call of the store can write them.
        """
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
            self.cache.read_dirty(self._cursor, blocks)
        return [True] * len(blocks)

    def abort(self, client: StoreClient, blocks: Iterable[bytes], rows: Rows) -> None:
        self.cache.abort(blocks)

    def unsaved(self, number: int, blocks: Sequence[bytes]) -> Sequence[bytes]:
        return blocks

    def victims(self) -> list[bytes]:
        """What is to be saved before it is evicted."""
        if self._save != EVICT:
            return []
        return self.cache.eviction_candidates(self._cursor, self._margin, TOLD_AT_ONCE)

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

    def take(self, client: StoreClient, line: PendingBlocks[bytes]) -> int:
        """A save costs the thread of the scheduler more than its blocks do. So what would have to wait for the store
        waits for more blocks, as long as each step brings some. What came together is saved together, if it fits."""
        held, self._held[client] = self._held[client], len(line)
        if held < len(line) < self._at_once and self._save != EVICT and client.queue.is_backlogged:
            return 0
        self._held[client] = count = 0
        for blocks, _ in line.pieces:
            if count and count + len(blocks) > self._at_once:
                break
            count += len(blocks)
        return min(count, self._at_once)

    def pin(self, client: StoreClient, pieces: Pieces[bytes]) -> tuple[Pieces[bytes], BlockNames, Lend]:
        """They are pinned when a call of the store begins, and not while they wait for it."""
        return pieces, self.names(blocks_in(pieces), sealed=True), partial(self.lend, pieces)

    def ended(self, number: int, pieces: Pieces[bytes], kept: Sequence[bool]) -> None:
        """A prompt whose saves have ended comes back into its order. Each of its leases counted as a use, so that the
        end of the prompt would be evicted last."""
        if self.tells and (kept_keys := tuple(compress(blocks_in(pieces), kept))):
            told = self._told[number]
            told.update(dict.fromkeys(kept_keys))
            self.changes.append(StoreChange(number, kept_keys, True))
            # A reader is to keep no key for ever of which nothing will be reported any more.
            self._take_back(number, [key for key, _ in zip(told, range(len(told) - TOLD_MAX), strict=False)])
        waiting = self._runs[number]
        had = Counter[int]()
        prompts: dict[int, Sequence[bytes]] = {}
        for blocks, run in pieces:
            if run is not None:
                prompts[id(run.prompt)] = run.prompt
                had[id(run.prompt)] += len(blocks)
                run.left -= len(blocks)
                if not run.left and waiting.get(last := run.keys[-1]) is run:
                    del waiting[last]
        for which, prompt in prompts.items():
            at_once = len(kept) <= self._in_one and had[which] == len(prompt)
            if not at_once and not any(waiting[last].prompt is prompt for last in waiting.keys() & prompt):
                self.cache.touch(prompt)

    def said(self, number: int, blocks: Sequence[bytes], codes: Bytes) -> None:
        if not (told := self._told[number]):
            return
        gone = compress(blocks, np.isin(codes, (ABSENT, DAMAGED)).tolist())
        self._take_back(number, [block for block in gone if block in told])

    def cleared(self) -> None:
        """Stores have nothing any more of what they had."""
        for number, told in enumerate(self._told):
            self._take_back(number, list(told))

    def _take_back(self, number: int, keys: Sequence[bytes]) -> None:
        """Report keys as gone that were reported as stored."""
        if keys:
            told = self._told[number]
            self.changes.append(StoreChange(number, tuple(key for key in keys if told.pop(key, 0) is None), False))

    def to_save(self, prompt: Sequence[bytes], number: int, blocks: Sequence[bytes]) -> _Run:
        """Blocks of a prompt are to be saved in a store. Returns what is noted of them."""
        run = self._runs[number][blocks[-1]] = _Run(blocks, prompt, len(blocks))
        return run

    def touch(self, prompt: Sequence[bytes], turn: bool) -> None:
        """What ``HostStorageManager.touch`` does."""
        self.cache.touch(prompt, turn=turn)
        for waiting in self._runs if any(self._runs) else ():
            prompt_keys = set(prompt)
            for last in waiting.keys() & prompt_keys:
                if waiting[last].keys[0] in prompt_keys:
                    waiting[last].prompt = prompt

    @property
    def pinned(self) -> int:
        """Blocks that stores read now."""
        return sum(len(lease.blocks) for lease in self.cache.leases if lease.owner == OWNER)

    @contextmanager
    def lend(self, pieces: Pieces[bytes], names: BlockNames) -> Iterator[Rows]:
        """Rows of those of the blocks that are in the cache, pinned. On a thread of a queue.

        A lease ends with its last block first, which is then the first victim. So its last prompt comes first.
        ``pieces``: those of the job.
        """
        rows, order = np.full(len(names), -1, np.int64), np.arange(len(names))
        of = dict[bytes, Sequence[bytes] | None]()
        for blocks, run in pieces:
            prompt = run and run.prompt  # a touch may change it meanwhile
            of.update(dict.fromkeys(blocks, prompt))
        keys, prompts = names.names, [*map(of.__getitem__, names.names)]
        if not _alike(prompts):
            runs = [list(run) for _, run in groupby(order.tolist(), lambda place: id(prompts[place]))]
            order = np.array([place for run in reversed(runs) for place in run])
            keys = tuple(map(keys.__getitem__, order.tolist()))
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


def _alike(prompts: Sequence[object]) -> bool:
    """Whether there is one prompt. To count takes a tenth of the time of a set."""
    return prompts.count(prompts[0]) == len(prompts)


class _Absence:
    """That no store had keys that were asked for together.

    ``until``: when they may be asked for again. It is unknown until one of them is read: whoever asked learns of it,
    however long that takes, as it would otherwise ask for ever.
    """

    def __init__(self, reason: str, unread: Iterable[bytes] = (), until: float = math.inf) -> None:
        self.reason = reason
        self._unread = set(unread)
        self._until = until

    def read(self, key: bytes, now: float, retry_seconds: float) -> bool:
        """Whether the key counts as absent."""
        self._until = min(self._until, now + retry_seconds)
        if key in self._unread:
            self._unread.remove(key)
            return now <= self._until
        return now < self._until


class HostLoads:
    """Keys that a host cache does not have, and what becomes of them. The thread of the scheduler owns it.

    ``seconds``: time for a key from ``find`` until it is HERE. ``retry_seconds``: so long a key that did not come is
    not asked for again. ``spare``: for how many seconds the engine is busy with what it has.
    """

    def __init__(
        self,
        tier: HostCacheTier,
        bridge: WritebackQueue[bytes],
        loader: LoadQueue[bytes],
        seconds: float,
        retry_seconds: float,
        clock: Callable[[], float],
        spare: Callable[[], float],
    ) -> None:
        self._tier = tier
        self._bridge = bridge
        self._loader = loader
        self._clock = clock
        self._spare = spare
        self._seconds, self._retry_seconds = seconds, retry_seconds
        # Keys that are looked for, with their deadlines, and what the next ``turn`` is to do for them.
        self.searching: dict[bytes, float] = {}
        self._lines: Lines = {}
        # Keys that did not come, and what was learned of them.
        self._absent: OrderedDict[bytes, _Absence] = OrderedDict()
        self.asked = self.loaded = self.refused = 0
        self.missed: Counter[str] = Counter()
        self._stopped = False
        self._forgotten_before = tier.cache.forgotten_blocks

    def answers(self, keys: Sequence[bytes], found: Sequence[int], hit: str) -> list[int]:
        """What ``HostStorageManager.find`` says of keys of a hit that are not HERE. ``found``: what the cache says.
        Stores are asked for what is not known yet."""
        self._drop_unread(keys)
        said = list(map(self._known, keys, found))
        if None in said:
            self._ask(dict.fromkeys(key for key, known in zip(keys, said, strict=True) if known is None), hit)
        for key, answer in zip(keys, said, strict=True):
            awaited = key in self.searching or answer == HostCache.PENDING and key in self._loader.coming
            if awaited:
                self._loader.enqueue(key, hit)
        return [
            known if known is not None else HostCache.PENDING if key in self.searching else HostCache.ABSENT
            for key, known in zip(keys, said, strict=True)
        ]

    def _known(self, key: bytes, state: int) -> int | None:
        """What is said of a key; None if the stores are to be asked."""
        if state == HostCache.PENDING:
            loading = self._loader.coming.get(key)
            return HostCache.ABSENT if loading is not None and loading.over else state
        if key in self.searching:
            return HostCache.PENDING
        absence = self._absent.get(key)
        if absence is not None and absence.read(key, self._clock(), self._retry_seconds):
            return HostCache.ABSENT
        return None

    def looked_up(self, key: bytes, hit: str) -> None:
        """A request has found a key HERE. It waits for the key too, if that has come and was not read yet."""
        if key in self._loader.unread:
            self._loader.enqueue(key, hit)

    def published(self, keys: Iterable[bytes]) -> None:
        """The engine has written blocks itself. A store may have them soon."""
        self._drop_unread(keys)
        if self._absent:
            for key in keys:
                self._absent.pop(key, None)

    def drop_evicted(self) -> None:
        """Stop counting unread blocks that the cache no longer has: they occupy no room."""
        forgotten = self._tier.cache.forgotten_blocks
        if forgotten != self._forgotten_before:
            self._forgotten_before = forgotten
            unread = list(self._loader.unread)
            self._drop_unread(compress(unread, (self._tier.cache.lookup(unread) != HostCache.HERE).tolist()))

    def _drop_unread(self, keys: Iterable[bytes]) -> None:
        """Stop counting those of the keys that count as unread. They were evicted since they came."""
        unread = self._loader.unread
        for key in keys if unread else ():
            if key in unread:
                self._loader.drop(key)

    def _free(self, wanted: int) -> int:
        """Return how many blocks may be loaded now. The cache is searched for evicted ones only if that is fewer than
        ``wanted``, since the search takes time for each unread block."""
        if self._loader.free < wanted:
            self.drop_evicted()
        return self._loader.free

    def leave(self, keys: Iterable[bytes]) -> None:
        """Do not ask for these keys for a while, nor bring those that are on their way."""
        self._miss(keys, "cancelled")
        for key in keys:
            self._loader.drop(key)
        self._remember(keys, _Absence("forgotten", until=self._clock() + self._retry_seconds))

    def trouble(self, key: bytes) -> str:
        """Why a key did not come, if it is remembered."""
        absence = self._absent.get(key)
        return "" if absence is None else absence.reason

    def _remember(self, keys: Iterable[bytes], absence: _Absence) -> None:
        for key in keys:
            self._absent.pop(key, None)
            self._absent[key] = absence
        while len(self._absent) > ASKED_MAX:
            del self._absent[next(iter(self._absent))]

    def stop(self) -> None:
        """Give up the keys that are looked for, and look for no others."""
        self._stopped = True
        self._cancel()

    def _cancel(self) -> None:
        self.missed["cancelled"] += len(self.searching)
        self.searching.clear()
        self._lines.clear()

    def clear(self) -> None:
        """Give up the keys that are looked for, and know nothing of others."""
        self._cancel()
        self._absent.clear()
        self._loader.clear()

    def turn(self) -> None:
        """Load keys that stores are known to have, and ask them for others."""
        lines, self._lines = self._lines, {}
        for (number, is_stored, hit), keys in sorted(lines.items(), key=lambda line: not line[0][1]):
            # A load from before a ``clear`` may have brought one of them.
            left = [key for key in keys if key in self.searching]
            if is_stored:
                self._miss([key for key in left if not self._loader.wanted(key)], "cancelled", remember=False)
                left = [key for key in left if key in self.searching]
            if not left:
                continue
            if not is_stored:
                found = partial(self._found, hit)
                self._bridge.search(Search(self._deadline(left), found, self._miss), left, number)
            elif not self._loader.waits(number, hit, self._free(len(left)), len(left)):
                self._load(number, left)
            elif self._clock() < self._deadline(left) - self._seconds * (1 - ROOM_SHARE):
                self._lines[number, True, hit] = left
            else:
                self._loader.end_wait(hit)
                self._miss(left, "crowded", remember=False)

    def _ask(self, wanted: Iterable[bytes], hit: str) -> None:
        """Ask the stores for keys of a hit. Of a store with an index in memory, the first keys are asked at once: who
        needs a prefix learns that it is not there. While there is no room, and the hit cannot wait for it, nobody is
        asked."""
        keys = list(wanted)
        is_open = not self._stopped and (self._free(1) or self._loader.may_wait(hit))
        room = max(0, ASKED_MAX - len(self.searching)) if is_open else 0
        self.refused += len(keys[room:])
        self.asked += len(keys[:room])
        left, later = keys[: min(room, NOW_MAX)], keys[NOW_MAX:room]
        for number in range(len(self._bridge.clients)):
            codes = self._bridge.find_now(number, left) if left else None
            if codes is None:
                self._line_up(number, False, left, hit)
                left = []
                break
            stored = (codes == OK).tolist()
            self._line_up(number, True, compress(left, stored), hit)
            left = [key for key, ok in zip(left, stored, strict=True) if not ok]
        self._line_up(0, False, later, hit)
        if left:
            self.missed["absent"] += len(left)
            self._remember(left, _Absence("absent", until=self._clock() + self._retry_seconds))

    def _line_up(self, number: int, is_stored: bool, keys: Iterable[bytes], hit: str) -> None:
        """Have the next ``turn`` ask a store for keys, or load them."""
        key_list = list(keys)
        if key_list:
            self._lines.setdefault((number, is_stored, hit), []).extend(key_list)
            self.searching.update(dict.fromkeys(key_list, self._clock() + self._seconds))

    def _found(self, hit: str, number: int, keys: Sequence[bytes], job: StoreRequest) -> list[bytes]:
        """A store has returned which keys of a hit it has. The next ``turn`` loads them. Returns those that the next
        store is asked for."""
        # A key that is not looked for any more was dropped by ``clear``.
        answered = [
            (key, ok) for key, ok in zip(keys, (job.codes == OK).tolist(), strict=True) if key in self.searching
        ]
        stored, others = [key for key, ok in answered if ok], [key for key, ok in answered if not ok]
        if stored:
            self._lines.setdefault((number, True, hit), []).extend(stored)
        if number + 1 < len(self._bridge.clients):
            return others
        self._miss_by_code(keys, job)
        return []

    def _miss(self, keys: Iterable[bytes], reason: str, remember: bool = True) -> None:
        """These keys do not come."""
        missed = [key for key in keys if self.searching.pop(key, None) is not None]
        for key in missed:
            self._loader.drop(key)
        self.missed[reason] += len(missed)
        self._remember(missed if remember else (), _Absence(reason, missed))

    def _miss_by_code(self, keys: Iterable[bytes], job: StoreRequest) -> None:
        """Those of the keys of a job that the store has not given do not come."""
        for code in job.counts.keys() - {CODES[OK]}:
            self._miss(compress(keys, (job.codes == CODES.index(code)).tolist()), code)

    def _deadline(self, keys: Iterable[bytes]) -> float:
        return min(self.searching[key] for key in keys)

    # -- blocks that come ----------------------------------------------------------------------------

    def _load(self, number: int, keys: Sequence[bytes]) -> None:
        """Load keys that a store has, as many as its policy takes. What has no room is missed. It may be asked for as
        soon as what has come was read: so a prompt that is longer than the room comes window by window."""
        end, room = self._deadline(keys), keys[: self._free(len(keys))]
        self._miss(keys[len(room) :], "crowded", remember=False)
        try:
            attempt = self._loader.attempt(number, len(room), spare=self._spare()) if room else None
        except BaseException:  # of a policy, or of what says how busy the engine is: others than the pool's own
            self._miss(room, "failed")
            raise
        if attempt is not None:
            self._miss(room[attempt.load.blocks :], "declined")
            room, end = room[: attempt.load.blocks], min(end, attempt.until)
        try:
            loading = self._loader.load(number, room, end, attempt, self._came, self._returned)
        except StoreBusy:
            loading = None
            self._miss(room, "busy")
        if loading is None and attempt is not None and attempt.load.blocks:
            attempt.end(self._clock(), told=False)
        # Keys of an older load may be on their way, and end with this one all the same.
        for key in self.searching.keys() & set(keys).difference(() if loading is None else loading.blocks):
            if self._tier.cache.find(key) == HostCache.ABSENT:
                self._miss([key], "crowded")
            else:
                # It may be asked for as soon as it is gone again.
                del self.searching[key]
                self.missed["taken"] += 1
                if key not in self._loader.coming:
                    self._loader.drop(key)

    def _came(self, loading: Loading[bytes]) -> None:
        """A load is done. What has come can be found."""
        job = loading.job
        for key in self._loader.enter(loading, job.codes == OK):
            # ``clear`` drops a block that comes after it.
            if self.searching.pop(key, None) is None:
                self._loader.drop(key)
            else:
                self.loaded += 1
        self._miss_by_code(loading.blocks, job)
        if loading.attempt is not None:
            loading.attempt.end(self._clock(), told="cancelled" not in job.counts)

    def _returned(self, loading: Loading[bytes]) -> None:
        """No call can write to the blocks of a load any more. Those that have not come are given back."""
        self._tier.abort(self._bridge.clients[loading.number], self._loader.end(loading), loading.rows)
