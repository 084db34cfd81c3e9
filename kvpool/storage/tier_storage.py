"""TierStorage: blocks that a host tier and its stores exchange. It looks blocks up in stores, saves blocks, and loads
blocks, as many as the tier has room for, while that is faster than computing them. HostTierAdapter: the host tier."""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, islice
from typing import Any, Final, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvpool.common.arrays import Bools
from kvpool.errors import BlockNotFound, StoreBusy
from kvpool.storage.choice import LoadAttempt, LoadPolicy
from kvpool.storage.mac import BlockNames
from kvpool.storage.store import NO_LIMIT, OK, Bytes, Rows, Store
from kvpool.storage.store_requests import FIND, SAVE, Lend, StoreRequest
from kvpool.storage.store_worker import StoreWorker
from kvpool.storage.urls import naming, place_of

Block = TypeVar("Block", bound=Hashable)
Lease = TypeVar("Lease")
SaveMode: TypeAlias = Literal["commit", "evict", "reuse"]
COMMIT: Final = "commit"
EVICT: Final = "evict"
REUSE: Final = "reuse"
SAVES: tuple[SaveMode, ...] = (COMMIT, EVICT, REUSE)
"""When a block is saved: as soon as it has its content, before it is evicted, or when it has been used again."""
VICTIMS = 1024
READ_AT_ONCE = 256
"""Blocks that are looked at under the lock of a tier at once."""
NOTED = 4096
"""Blocks whose last trouble with a store is remembered, the latest. About 400 KB at the most."""
NO_STORE = -1
"""in place of the number of a store"""
NO_ROWS: Rows = np.empty(0, np.int64)
WAITED_MAX = 65_536
"""Requests that are remembered to have waited for room in vain."""


class HostTierAdapter(Protocol[Block]):
    """A host tier as a ``TierStorage`` sees it. A block is what the tier knows it by. Blocks of one call are alike:
    they have one tag. ``worker``: of the store that they come from or go to. ``number``: of that store."""

    def names(self, blocks: Iterable[Block], *, with_contexts: bool) -> BlockNames:
        """What stores know blocks by. ``with_contexts``: with what they depend on besides."""

    def space(self, worker: StoreWorker, block: Block) -> tuple[bytes | None, int]:
        """Its namespace in the store: the tag, if it has one, and how many blocks the store may have of it."""

    def answered(self, number: int, blocks: Sequence[Block], codes: Bytes) -> None:
        """A store has answered what it has of these blocks, or has loaded them."""

    def reserve(self, worker: StoreWorker, blocks: Sequence[Block]) -> tuple[Sequence[Block], Rows]:
        """Take a row that the store may write for each of the first blocks that have room."""

    def publish(self, worker: StoreWorker, blocks: Sequence[Block], rows: Rows) -> list[bool]:
        """Blocks have come into rows that were reserved. Returns which of them the tier has now."""

    def abort(self, worker: StoreWorker, blocks: Iterable[Block], rows: Rows) -> None:
        """Blocks will not come, and no store writes their rows any more."""

    def take(self, worker: StoreWorker, queued: Mapping[Block, Any]) -> int:
        """How many of the first blocks that are queued, alike, one save can have now. There may be none."""

    def pin(self, worker: StoreWorker, chosen: Mapping[Block, Any]) -> tuple[Mapping[Block, Any], Rows | Lend]:
        """Hold blocks for a store that reads them. Returns those that are there, and their rows."""

    def ended(self, number: int, chosen: Mapping[Block, Any], kept: Sequence[bool]) -> None:
        """Saves have ended. ``kept``: which of the blocks the store has now."""


@dataclass(eq=False)
class Search(Generic[Block]):
    """Blocks that one store after the other is asked for, until ``end``.

    ``found(number, blocks, store request)``: a store has answered. It returns those that the next one is asked for.
    ``over(blocks, reason)``: nobody is asked for what is left. ``store request``: of the store that is asked now.
    """

    end: float
    found: Callable[[int, Sequence[Block], StoreRequest], Sequence[Block]]
    over: Callable[[Sequence[Block], str], None]
    request: StoreRequest | None = None


class Unread(NamedTuple):
    """Of a block that waits for its reader: for how long it takes room from others at most, and the number of its
    store, or ``NO_STORE`` once a request has read it."""

    until: float
    number: int


@dataclass(eq=False)
class Loading(Generic[Block]):
    """Blocks on their way from the store with this number into rows of the tier. ``over``: its end was noted."""

    number: int
    blocks: Sequence[Block]
    rows: Rows
    attempt: LoadAttempt | None
    request: StoreRequest = field(init=False)
    over: bool = False


class TierStorage(Generic[Block]):
    """Moves blocks between a host tier and its stores, the nearest first. Whoever polls owns it. Nothing waits.

    ``queued_blocks``: the most blocks that wait to be saved, for each store. ``save_seconds``: a save that takes longer
    is given up. ``policies``: of each store, how much of a hit is loaded from it; None loads all that is there.
    ``room``: the most blocks that are on their way or wait for their reader. So loads displace no more than that of
    what the tier has, however many requests wait. ``unread_seconds``: so long a block that has come, and that nobody
    reads, takes room.

    A block that is to be saved is queued for each store, unpinned, with a note of its tier. It leaves the queue when
    its save begins. It is queued once, so that content which comes and goes leaves room for other.
    """

    def __init__(
        self,
        tier: HostTierAdapter[Block],
        workers: Sequence[StoreWorker],
        queued_blocks: int,
        save_seconds: float,
        policies: Sequence[LoadPolicy | None],
        room: int,
        unread_seconds: float,
    ) -> None:
        self._tier, self.workers, self.clock = tier, workers, workers[0].now
        self._queued_blocks, self._save_seconds = queued_blocks, save_seconds
        self._policies, self._room, self._unread_seconds = policies, room, unread_seconds
        self._queues: list[dict[Block, Any]] = [{} for _ in workers]
        self.saved_blocks = 0
        self.dropped: Counter[tuple[str, str]] = Counter()
        """saves that were given up, by store and reason"""
        # Saves that have begun and whose end is not noted, with what notes it.
        self._saves: dict[StoreRequest, Callable[[StoreRequest], None]] = {}
        self._trouble: OrderedDict[tuple[int, int], str] = OrderedDict()
        self._loadings: set[Loading[Block]] = set()
        # Blocks that get rows, and their store.
        self._reserving: tuple[int, Sequence[Block]] = 0, ()
        self.coming: dict[Block, Loading[Block]] = {}
        self.unread: OrderedDict[Block, Unread] = OrderedDict()
        # The requests that wait for a block, and the blocks that a request waits for.
        self._users: dict[Block, set[Hashable]] = {}
        self._wanted: dict[Hashable, set[Block]] = {}
        # Requests that have waited for room in vain, the earliest first.
        self._waited: OrderedDict[Hashable, None] = OrderedDict()

    # -- what stores have ----------------------------------------------------------------------------

    def search(self, search: Search[Block], blocks: Sequence[Block], first: int = 0) -> None:
        """Ask the stores from this one on, the nearest first, for what those before do not have."""
        reason = "absent" if first else "suspended"
        for number, worker in enumerate(self.workers[first:] if blocks else (), first):
            if not worker.usable(FIND):
                continue
            now_s, end = self.clock(), search.end
            # One store that hangs leaves time for those behind it.
            deadline = end if number + 1 == len(self.workers) else now_s + (end - now_s) / 2
            names, (tag, _) = self._tier.names(blocks, with_contexts=False), self._tier.space(worker, blocks[0])
            try:
                done = partial(self._searched, search, number, blocks)
                search.request = worker.find(names, done, tag=tag, deadline=deadline)
                return
            except StoreBusy:
                reason = reason if first else "busy"
        search.over(blocks, reason)

    def _searched(self, search: Search[Block], number: int, blocks: Sequence[Block], request: StoreRequest) -> None:
        search.request = None
        self._tier.answered(number, blocks, request.codes)
        self.search(search, search.found(number, blocks, request), number + 1)

    def find_now(self, number: int, blocks: Sequence[Block]) -> Bytes | None:
        """The codes of blocks in a store, where that takes no I/O. None if only a search can tell."""
        codes = self.workers[number].find_now(self._tier.names(blocks, with_contexts=False))
        if codes is not None:
            self._tier.answered(number, blocks, codes)
        return codes

    def note(self, number: int, blocks: Iterable[Block], reasons: Iterable[str]) -> None:
        """Remember why a store did not take or bring blocks: "ok" where it did. Who cancels has said why before."""
        for block, reason in zip(blocks, reasons, strict=True):
            if reason != "cancelled":
                self._trouble.pop((number, hash(block)), None)
            if reason not in ("ok", "cancelled"):
                self._trouble[number, hash(block)] = reason
        while len(self._trouble) > NOTED:
            self._trouble.popitem(last=False)

    def _note(self, number: int, blocks: Iterable[Block], request: StoreRequest) -> None:
        if self._trouble or request.counts.keys() != {"ok"}:
            self.note(number, blocks, request.reasons)

    def trouble(self, number: int, block: Block) -> str:
        """What was last noted of a block; "" if nothing is remembered. Any thread may ask."""
        return self._trouble.get((number, hash(block)), "")

    # -- what stores are to have ---------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Blocks that wait to be saved: no call of a store has begun with them. Those that wait for two stores count
        twice."""
        requests = [request for worker in self.workers for request in worker.requests if request.kind == SAVE]
        return sum(map(len, self._queues)) + sum(request.queued for request in requests)

    @property
    def has_pending(self) -> bool:
        """Whether ``save`` has something to begin."""
        return any(self._queues)

    def enqueue(self, blocks: Sequence[Block], to_save: Callable[[int, Sequence[Block]], Mapping[Block, Any]]) -> None:
        """Have blocks saved in every store for which they do not wait. ``to_save``: those of the blocks that are to be
        saved in the store with a number, and what the tier notes of each."""
        for number, queue in enumerate(self._queues if blocks else ()):
            queue.update(to_save(number, [block for block in dict.fromkeys(blocks) if block not in queue]))
            excess = len(queue) - self._queued_blocks
            self._give_up(number, dict(queue.popitem() for _ in range(excess)), "crowded")

    def save(self, most: int = sys.maxsize) -> bool:
        """Begin to save what waits, for each store at most about so many blocks. Returns whether more could begin
        now."""
        more = False
        for number, queue in enumerate(self._queues):
            left = most
            while queue and left > 0 and (count := self._save(number, queue)):
                left -= count
            more = more or bool(queue) and left <= 0
        return more

    def _save(self, number: int, queue: dict[Block, Any]) -> int:
        """Save the first blocks of a queue. Returns how many left it."""
        worker = self.workers[number]
        count = self._tier.take(worker, queue)
        if not count:
            return 0
        usable = worker.usable(SAVE)
        # All at once: a dict looks for its first key after all that have gone.
        chosen = {block: queue.pop(block) for block in list(islice(queue, count if usable else None))}
        if not usable:
            return self._give_up(number, chosen, "suspended")
        tag, limit = self._tier.space(worker, next(iter(chosen)))
        if limit < 1:
            return self._give_up(number, chosen, "quota")
        pinned, rows = self._tier.pin(worker, chosen)
        if len(pinned) < count:
            gone = {block: note for block, note in chosen.items() if block not in pinned}
            self._give_up(number, gone, "evicted")
        if not pinned:
            return count
        names, done = self._tier.names(pinned, with_contexts=True), partial(self._saved, number, pinned)
        end = self.clock() + self._save_seconds
        try:
            self._saves[worker.save(names, rows, done, tag=tag, limit=limit, deadline=end)] = done
        except StoreBusy:
            if not callable(rows):
                worker.give_back(rows)
            self._give_up(number, pinned, "busy")
        return count

    def _saved(self, number: int, chosen: Mapping[Block, Any], request: StoreRequest) -> None:
        """A save is done. ``recover`` calls this again if an exception of a signal handler leaves it, or came before
        it."""
        self._tier.ended(number, chosen, (request.codes == OK).tolist())
        self._note(number, chosen, request)
        self._saves.pop(request, None)
        for code, count in request.counts.items():
            if code == "ok":
                self.saved_blocks += count
                continue
            limited = code == "refused" and request.limit != NO_LIMIT
            reason = "quota" if limited else "evicted" if code == "absent" else code
            self.dropped[self.workers[number].name, reason] += count

    def not_saved(self, lost: int) -> Counter[tuple[str, str]]:
        """``dropped``, with so many blocks that the tier has lost before any store could take them."""
        return Counter(dict(self.dropped)) + Counter({(worker.name, "evicted"): lost for worker in self.workers})

    def give_up(self, reason: str, concerns: Callable[[Block], bool] = lambda _: True) -> None:
        """Give up what waits of these blocks."""
        for number, queue in enumerate(self._queues):
            gone = {block: queue.pop(block) for block in [*filter(concerns, queue)]}
            self._give_up(number, gone, reason)

    def _give_up(self, number: int, blocks: Mapping[Block, Any], reason: str) -> int:
        """Blocks have left the queue, and are not saved. Returns how many they are."""
        if blocks:
            self.dropped[self.workers[number].name, reason] += len(blocks)
            self.note(number, blocks, [reason] * len(blocks))
            self._tier.ended(number, blocks, [False] * len(blocks))
        return len(blocks)

    # -- requests that wait for blocks ---------------------------------------------------------------

    @property
    def free(self) -> int:
        """How many blocks may be loaded now."""
        now_s = self.clock()
        while self.unread and next(iter(self.unread.values())).until <= now_s:
            self.drop(next(iter(self.unread)))
        return max(0, self._room - len(self.unread) - len(self.coming))

    def may_wait(self, user: Hashable) -> bool:
        """Return whether a request may wait for room that others hold: it is named, has not waited in vain before, and
        holds no room itself, so that it does not wait for its own blocks. With policies for all stores nobody waits:
        they compare the time of a load with that of the computation, and do not know of the wait."""
        if not user or user in self._waited or None not in self._policies:
            return False
        return not any(block in self.unread or block in self.coming for block in self._wanted.get(user, ()))

    def waits(self, number: int, user: Hashable, free: int, blocks: int) -> bool:
        """Return whether blocks of a request wait until others have read theirs, instead of being loaded in part."""
        return free < min(blocks, self._room) and self._policies[number] is None and self.may_wait(user)

    def end_wait(self, user: Hashable) -> None:
        """A request has waited as long as it may. It does not wait again before it has read blocks or ended."""
        self._waited[user] = None
        if len(self._waited) > WAITED_MAX:
            self._waited.popitem(last=False)

    @property
    def users(self) -> list[Hashable]:
        """Requests that wait for a block."""
        return list(self._wanted)

    def wanted(self, block: Block) -> bool:
        """Return whether a live request waits for this block."""
        return block in self._users

    def add_user(self, block: Block, user: Hashable) -> None:
        """Note that a request waits for a block, which is searched for, on its way, or unread."""
        self._users.setdefault(block, set()).add(user)
        self._wanted.setdefault(user, set()).add(block)

    def add_user_of_unread(self, blocks: Iterable[Block], user: Hashable) -> None:
        """Note that a request waits for those of the blocks that have come for others, who have not read them yet."""
        for block in blocks if self.unread else ():
            if block in self.unread:
                self.add_user(block, user)

    def drop(self, block: Block) -> None:
        """Stop counting a block against the room for loads, whoever waits for it."""
        self.unread.pop(block, None)
        for user in self._users.pop(block, ()):
            self._discard(user, block)

    def read(self, blocks: Iterable[Block], user: Hashable) -> None:
        """A request has taken these blocks, and takes no others that it waited for. A reader without a name ends the
        wait of all requests for them."""
        for block in blocks if self._users else ():
            if not (users := self._users.get(block)):
                continue
            satisfied = users & {user, ""} if user else users
            if satisfied == users:
                self.drop(block)
                continue
            users -= satisfied
            for each in satisfied:
                self._discard(each, block)
            if block in self.unread:
                self.unread[block] = self.unread[block]._replace(number=NO_STORE)
        if user:
            self.leave(user)

    def leave(self, user: Hashable) -> None:
        """A request has ended. Blocks that no other request waits for stop counting; those on their way count until
        they have arrived, since a store writes into them."""
        self._waited.pop(user, None)
        for block in self._wanted.pop(user, ()):
            users = self._users[block]
            users.discard(user)
            if not users:
                self.drop(block)

    def forget_requests(self) -> None:
        """Stop counting what has come. Nobody waits for a block any more."""
        self.unread.clear()
        self._users.clear()
        self._wanted.clear()
        self._waited.clear()

    def _discard(self, user: Hashable, block: Block) -> None:
        blocks = self._wanted.get(user, set())
        blocks.discard(block)
        if not blocks:
            self._wanted.pop(user, None)

    # -- loads ---------------------------------------------------------------------------------------

    def attempt(
        self, number: int, places: int, items: int = 0, before: int = 0, spare: float = 0.0
    ) -> LoadAttempt | None:
        """What the policy of a store says of so many leading places of a hit, which it has. None if it has no policy.
        ``items``: their blocks in all groups of layers, if there are several. ``before``: blocks that wait to be loaded
        from it. ``spare``: seconds that the request waits for the engine in any case."""
        policy = self._policies[number]
        if policy is None:
            return None
        others = [loading for loading in self._loadings if loading.number == number]
        ahead = before + sum(len(loading.blocks) for loading in others)
        now_s = self.clock()
        begun = [loading.attempt.at for loading in others if loading.attempt and not loading.over]
        waited = max(0.0, now_s - min(begun, default=now_s))
        load = policy.choose(places, ahead * self.workers[number].block_bytes, spare, waited)
        return LoadAttempt(policy, load, items or max(1, load.blocks), now_s)

    def load(
        self,
        number: int,
        blocks: Sequence[Block],
        deadline: float,
        attempt: LoadAttempt | None,
        done: Callable[[Loading[Block]], None],
        returned: Callable[[Loading[Block]], None] = lambda _: None,
    ) -> Loading[Block] | None:
        """Load the first of these blocks, as many as have rows in the tier; None if there is no row for one. Who is
        called when it is done calls ``enter``, and ``end`` when its blocks are not on their way any more: the rows are
        kept until then. Raises StoreBusy."""
        worker = self.workers[number]
        self._reserving = number, blocks
        reserved, rows = self._tier.reserve(worker, blocks)
        loading = Loading(number, reserved, rows, attempt)
        self._loadings.add(loading)
        self.coming.update(dict.fromkeys(reserved, loading))
        self._reserving = 0, ()
        if not len(reserved):
            self._loadings.discard(loading)
            return None
        names, (tag, _) = self._tier.names(reserved, with_contexts=True), self._tier.space(worker, reserved[0])

        def ended(request: StoreRequest) -> None:
            loading.request = request
            self._tier.answered(number, reserved, request.codes)
            self._note(number, reserved, request)
            done(loading)

        def over(request: StoreRequest) -> None:
            loading.request = request
            returned(loading)

        try:
            loading.request = worker.load(
                names, rows, ended, over, tag=tag, deadline=deadline, hold=True, owner=loading
            )
        except StoreBusy:
            self._tier.abort(worker, reserved, rows)
            self._remove(loading)
            raise
        for block in reserved:
            # It was evicted before its request read it, and counts once.
            self.unread.pop(block, None)
        return loading

    def enter(self, loading: Loading[Block], ok: Bools) -> list[Block]:
        """Publish blocks of a load that is done, bool[n] of them. Returns those that the tier has now, which wait for
        their reader. Raises what ``HostTierAdapter.publish`` raises."""
        chosen, now_s = list(compress(loading.blocks, ok.tolist())), self.clock()
        loading.over = True
        published = self._tier.publish(self.workers[loading.number], chosen, loading.rows[ok])
        arrived = list(compress(chosen, published))
        arrival = Unread(now_s + self._unread_seconds, loading.number)
        for block in arrived:
            del self.coming[block]
            if block in self._users:
                self.unread[block] = arrival
        if loading.attempt is not None:
            loading.attempt.note(len(arrived), loading.request.began, now_s)
        return arrived

    def end(self, loading: Loading[Block]) -> None:
        """A load has ended, or is given up."""
        loading.request.cancel()
        self.workers[loading.number].release(loading.request)
        self._remove(loading)

    def give_back(self, loading: Loading[Block], request: StoreRequest | None) -> None:
        """No call of a store can write to the rows of a load any more: have the tier take back those without blocks.
        ``store request``: of the load, if it has begun."""
        left, worker = (
            [block for block in loading.blocks if self.coming.get(block) is loading],
            self.workers[loading.number],
        )
        self._tier.abort(worker, left, loading.rows)
        # Before the load is removed: ``recover`` looks for what a signal handler has kept from being released.
        if request is not None:
            worker.release(request)
        self._remove(loading)

    def _remove(self, loading: Loading[Block]) -> None:
        for block in loading.blocks:
            if self.coming.get(block) is loading:
                del self.coming[block]
                self.drop(block)
        self._loadings.discard(loading)

    def recover(self) -> None:
        """After a call in which a signal handler has raised: nobody waits for a block any more, loads are given up, and
        saves that have ended are noted."""
        self.forget_requests()
        number, blocks = self._reserving
        self._tier.abort(self.workers[number], [block for block in blocks if block not in self.coming], NO_ROWS)
        self._reserving = 0, ()
        for save, note in list(self._saves.items()):
            if save.done and not save.on_done:
                note(save)
        begun = {request.owner: request for worker in self.workers for request in worker.requests}
        for loading in list(self._loadings):
            loading.over = True
            if loading.attempt is not None:
                loading.attempt.end(self.clock(), measured=False)
            request = begun.get(loading)
            if request is not None:
                request.cancel()
            if request is None or request.returned:
                self.give_back(loading, request)

    # -- all stores ----------------------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        """Whether some store request has not returned."""
        return any(worker.in_flight for worker in self.workers)

    @property
    def has_results(self) -> bool:
        """Whether ``poll`` has something to note."""
        return any(worker.has_results for worker in self.workers)

    def poll(self) -> bool:
        """Note what the stores have done. Returns whether they had."""
        return sum([worker.poll() for worker in self.workers if worker.has_results]) > 0

    def close(self, timeout: float, *, call_back: bool = True) -> bool:
        """Close the stores. Returns False if a call hangs still after ``timeout`` seconds. ``call_back``: whoever waits
        for a store request learns that it was cancelled."""
        end = time.monotonic() + timeout
        for worker in self.workers:
            # All end at the same time.
            worker.close(0.0, call_back=False)
        over = [worker.close(max(0.0, end - time.monotonic()), call_back=call_back) for worker in self.workers]
        return all(over)


@contextmanager
def open_workers(
    stores: Sequence[Store], worker_of: Callable[[Store, str], StoreWorker]
) -> Iterator[list[StoreWorker]]:
    """Open the stores, each under a name of its own: all, or none. They are closed if the block raises."""
    workers: list[StoreWorker] = []
    try:
        for place, store in enumerate(stores):
            with naming(place_of(store, place)):
                workers.append(worker_of(store, _new_name(store.name, [worker.name for worker in workers])))
        yield workers
    except BaseException:
        for worker in reversed(workers):
            worker.close(call_back=False)
        raise


def _new_name(name: str, taken: Sequence[str]) -> str:
    """A name that no store before has: "disk", "disk-2", ..."""
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    return next(new for new in itertools.chain([name], numbered) if new not in taken)


def pin_those_here(
    count: int, pin: Callable[[Rows], Lease], here: Callable[[], npt.ArrayLike]
) -> tuple[Rows, Lease | None]:
    """Pin those of so many blocks that are in the tier. Returns their places, and the lease if there is one."""
    places = np.arange(count)
    while len(places):
        try:
            return places, pin(places)
        except BlockNotFound:
            places = np.flatnonzero(here())
    return places, None


def victims_margin(blocks: int, least: int) -> int:
    """How many of the blocks that a tier evicts next are saved: a quarter, but no more than VICTIMS; ``least`` if that
    is more, but no more than half."""
    return max(1, min(max(least, min(blocks // 4, VICTIMS)), blocks // 2))
