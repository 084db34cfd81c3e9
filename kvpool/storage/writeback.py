"""Queues between a host tier and its stores. ``WritebackQueue`` looks blocks up in stores and saves blocks.
``LoadQueue`` loads blocks, as many as the tier has room for, while that is faster than computing them. ``CacheTier`` is
the adapter that a pool's host tier and a ``HostCache`` implement."""

from __future__ import annotations

import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, compress
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvpool.common.arrays import Bools
from kvpool.common.errors import BlockNotFound, StoreBusy
from kvpool.common.interrupt import DeferSignals
from kvpool.storage.choice import LoadAttempt, LoadPolicy
from kvpool.storage.mac import BlockNames
from kvpool.storage.store import OK, Bytes, Rows, Store
from kvpool.storage.store_client import StoreClient
from kvpool.storage.store_requests import FIND, SAVE, Lend, StoreRequest
from kvpool.storage.store_worker import NO_LIMIT

Block = TypeVar("Block", bound=Hashable)
Lease = TypeVar("Lease")
COMMIT, EVICT, REUSE = SAVES = "commit", "evict", "reuse"
"""When a block is saved: as soon as it has its content, before it is evicted, or when it has been used again."""
VICTIMS = 1024
TOLD_AT_ONCE = 256
"""Blocks that are looked at under the lock of a tier at once."""


Pieces = Sequence[tuple[Sequence[Block], Any]]
"""Blocks that came together, with what their tier notes of them."""


def blocks_in(pieces: Pieces[Block]) -> list[Block]:
    return list(chain.from_iterable(blocks for blocks, _ in pieces))


class PendingBlocks(Generic[Block]):
    """Blocks that wait to be saved in one store, in the pieces in which they came: what a block costs is little. Each
    waits once, so that content which comes and goes leaves room for other."""

    def __init__(self) -> None:
        self.pieces: deque[tuple[Sequence[Block], Any]] = deque()
        self._waiting: set[Block] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Block]:
        return chain.from_iterable(blocks for blocks, _ in self.pieces)

    def unsaved(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """Those of the blocks that do not wait in it, each once."""
        if len({*blocks}) == len(blocks) and self._waiting.isdisjoint(blocks):
            return blocks
        return [block for block in dict.fromkeys(blocks) if block not in self._waiting]

    def add(self, blocks: Sequence[Block], note: Any) -> None:
        """Have blocks wait that do not yet."""
        if len(blocks):
            self.pieces.append((blocks, note))
            self._waiting.update(blocks)

    def take(self, count: int) -> Pieces[Block]:
        """The first so many blocks, which leave it."""
        taken = []
        while count > 0:
            blocks, note = self.pieces.popleft()
            if len(blocks) > count:
                self.pieces.appendleft((blocks[count:], note))
                blocks = blocks[:count]
            taken.append((blocks, note))
            self._waiting.difference_update(blocks)
            count -= len(blocks)
        return taken


class CacheTier(Protocol[Block]):
    """A host tier as a bridge sees it. A block is what the tier knows it by. Blocks of one call are alike: they have
    one tag. ``client``: of the store that they come from or go to."""

    def names(self, blocks: Sequence[Block], *, sealed: bool) -> BlockNames:
        """What stores know blocks by. ``sealed``: with what they depend on besides."""

    def space(self, client: StoreClient, block: Block) -> tuple[bytes | None, int]:
        """Its namespace in the store: the tag, if it has one, and how many blocks the store may have of it."""

    def said(self, number: int, blocks: Sequence[Block], codes: Bytes) -> None:
        """The store with this number has said what it has of these blocks, or has loaded them."""

    def reserve(self, client: StoreClient, blocks: Sequence[Block]) -> tuple[Sequence[Block], Rows]:
        """Take a row that the store may write for each of the first blocks that have room."""

    def publish(self, client: StoreClient, blocks: Sequence[Block], rows: Rows) -> list[bool]:
        """Blocks have come into rows that were reserved. Returns which of them the tier has now."""

    def abort(self, client: StoreClient, blocks: Iterable[Block], rows: Rows) -> None:
        """Blocks will not come, and no store writes their rows any more."""

    def unsaved(self, number: int, blocks: Sequence[Block]) -> Sequence[Block]:
        """Those of the blocks that the store with this number is not known to have."""

    def take(self, client: StoreClient, line: PendingBlocks[Block]) -> int:
        """How many of the first blocks of a line, alike, one save can have now. There may be none."""

    def pin(self, client: StoreClient, pieces: Pieces[Block]) -> tuple[Pieces[Block], BlockNames, Rows | Lend]:
        """Hold blocks for a store that reads them. Returns those that are there, their names and rows."""

    def ended(self, number: int, pieces: Pieces[Block], kept: Sequence[bool]) -> None:
        """Saves have ended. ``kept``: which of the blocks the store with this number has now."""


@dataclass(eq=False)
class Search(Generic[Block]):
    """Blocks that one store after the other is asked for, until ``end``.

    ``found(number, blocks, job)``: a store has answered. It returns those that the next one is asked for.
    ``over(blocks, reason)``: nobody is asked for what is left. ``job``: of the store that is asked now.
    """

    end: float
    found: Callable[[int, Sequence[Block], StoreRequest], Sequence[Block]]
    over: Callable[[Sequence[Block], str], None]
    job: StoreRequest | None = None


def open_clients(stores: Sequence[Store], client_of: Callable[[Store], StoreClient]) -> list[StoreClient]:
    """Open the stores: all, or none."""
    clients: list[StoreClient] = []
    try:
        clients.extend(map(client_of, stores))
    except BaseException:
        for client in clients:
            client.queue.close()
        raise
    return clients


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


NOTED = 4096
"""Blocks of which a bridge remembers what was wrong with them in a store, the latest. About 400 KB at the most."""


class WritebackQueue(Generic[Block]):
    """Moves blocks between a host tier and its stores, the nearest first. Whoever polls owns it. Nothing waits.

    ``queued_blocks``: the most blocks that wait to be saved, for each store. ``save_seconds``: a save that takes longer
    is given up.

    A block that is to be saved waits in a line for each store, unpinned. It leaves the line when its save begins.
    """

    def __init__(
        self,
        tier: CacheTier[Block],
        clients: Sequence[StoreClient],
        queued_blocks: int,
        save_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._tier = tier
        self.clients = clients
        self._clock = clock
        self._queued_blocks = queued_blocks
        self._save_seconds = save_seconds
        self._lines: list[PendingBlocks[Block]] = [PendingBlocks() for _ in clients]
        self._saves: set[StoreRequest] = set()
        self.saved_blocks = 0
        self.dropped: Counter[tuple[str, str]] = Counter()
        """saves that were given up, by store and reason"""
        self._trouble: OrderedDict[tuple[int, int], str] = OrderedDict()

    # -- what stores have ----------------------------------------------------------------------------

    def search(self, search: Search[Block], blocks: Sequence[Block], first: int = 0) -> None:
        """Ask the stores from this one on, the nearest first, for what those before do not have."""
        reason = "absent" if first else "suspended"
        for number, client in enumerate(self.clients[first:] if blocks else (), first):
            if not client.usable(FIND):
                continue
            now_s, end = self._clock(), search.end
            # One store that hangs leaves time for those behind it.
            deadline = end if number + 1 == len(self.clients) else now_s + (end - now_s) / 2
            names, (tag, _) = self._tier.names(blocks, sealed=False), self._tier.space(client, blocks[0])
            try:
                done = partial(self._searched, search, number, blocks)
                search.job = client.find(names, done, tag=tag, deadline=deadline)
            except StoreBusy:
                reason = reason if first else "busy"
                continue
            return
        search.over(blocks, reason)

    def _searched(self, search: Search[Block], number: int, blocks: Sequence[Block], job: StoreRequest) -> None:
        search.job = None
        self._tier.said(number, blocks, job.codes)
        self.search(search, search.found(number, blocks, job), number + 1)

    def find_now(self, number: int, blocks: Sequence[Block]) -> Bytes | None:
        """The codes of blocks in a store, where that takes no I/O. None if only a search can tell."""
        client = self.clients[number]
        if not client.queue.indexed or client.health.suspended():
            return None
        codes = client.queue.find_now(self._tier.names(blocks, sealed=False))
        if codes is not None:
            self._tier.said(number, blocks, codes)
        return codes

    def note(self, number: int, blocks: Sequence[Block], reasons: Sequence[str]) -> None:
        """Remember why a store did not take or bring blocks: "ok" where it did. Who cancels has said why before."""
        if not self._trouble and {*reasons} == {"ok"}:
            return
        for block, reason in zip(blocks, reasons, strict=True):
            if reason == "cancelled":
                continue
            self._trouble.pop((number, hash(block)), None)
            if reason != "ok":
                self._trouble[number, hash(block)] = reason
        while len(self._trouble) > NOTED:
            del self._trouble[next(iter(self._trouble))]

    def trouble(self, number: int, block: Block) -> str:
        """What was last noted of a block; "" if nothing is remembered. Any thread may ask."""
        return self._trouble.get((number, hash(block)), "")

    # -- what stores are to have ---------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Blocks that wait to be saved: no call of a store has begun with them. Those that wait for two stores count
        twice."""
        return sum(map(len, self._lines)) + sum(job.queued for job in list(self._saves))

    @property
    def has_pending(self) -> bool:
        """Whether ``save`` has something to begin."""
        return any(self._lines)

    def enqueue(self, blocks: Sequence[Block], note: Callable[[int, Sequence[Block]], Any] | None = None) -> None:
        """Have blocks saved in every store that is not known to have them, and for which they do not wait. ``note``:
        what the tier notes of those for the store with a number."""
        for number, line in enumerate(self._lines if blocks else ()):
            new = line.unsaved(self._tier.unsaved(number, blocks))
            noted = note(number, new) if note and new else None
            room = max(0, self._queued_blocks - len(line))
            line.add(new[:room], noted)
            if len(new) > room:
                self._leave(number, [(new[room:], noted)], "crowded")

    def save(self, most: int = sys.maxsize) -> bool:
        """Begin to save what waits, for each store at most about so many blocks. Returns whether more could begin
        now."""
        more = False
        for number, line in enumerate(self._lines):
            left = most
            while line and left > 0 and (count := self._save(number, line)):
                left -= count
            more = more or bool(line) and left <= 0
        return more

    def _save(self, number: int, line: PendingBlocks[Block]) -> int:
        """Save the first blocks of a line. Returns how many left it."""
        client = self.clients[number]
        count = self._tier.take(client, line)
        if not count:
            return 0
        if not client.usable(SAVE):
            return self._leave(number, line.take(len(line)), "suspended")
        chosen = line.take(count)
        if self._tier.space(client, chosen[0][0][0])[1] < 1:
            return self._leave(number, chosen, "quota")
        pinned, names, rows = self._tier.pin(client, chosen)
        if len(names) < count:
            kept = set(blocks_in(pinned))
            self._leave(number, [([block for block in blocks_in(chosen) if block not in kept], None)], "evicted")
        if len(names):
            self._begin(number, pinned, names, rows)
        return count

    def _begin(self, number: int, pieces: Pieces[Block], names: BlockNames, rows: Rows | Lend) -> None:
        client, end = self.clients[number], self._clock() + self._save_seconds
        tag, limit = self._tier.space(client, pieces[0][0][0])
        done = partial(self._saved, number, pieces)
        try:
            job = client.save(names, rows, done, self._saves.discard, tag=tag, limit=limit, deadline=end)
            self._saves.add(job)
        except StoreBusy:
            if not callable(rows):
                client.give_back(rows)
            self._leave(number, pieces, "busy")

    def _saved(self, number: int, pieces: Pieces[Block], job: StoreRequest) -> None:
        """A save is done."""
        counts = job.counts
        if self._trouble or counts.keys() != {"ok"}:
            self.note(number, blocks_in(pieces), job.reasons)
        for code, count in counts.items():
            if code == "ok":
                self.saved_blocks += count
                continue
            limited = code == "refused" and job.limit != NO_LIMIT
            reason = "quota" if limited else "evicted" if code == "absent" else code
            self.dropped[self.clients[number].name, reason] += count
        self._tier.ended(number, pieces, (job.codes == OK).tolist())

    def not_saved(self, lost: int) -> Counter[tuple[str, str]]:
        """``dropped``, with so many blocks that the tier has lost before any store could take them."""
        evicted = {(client.name, "evicted"): lost for client in self.clients if lost}
        return Counter(dict(self.dropped)) + Counter(evicted)

    def give_up(self, reason: str, concerns: Callable[[Block], bool] = lambda _: True) -> None:
        """Give up what waits of these blocks."""
        for number, line in enumerate(self._lines):
            gone = []
            for blocks, note in line.take(len(line)):
                gone.append(([block for block in blocks if concerns(block)], note))
                line.add([block for block in blocks if not concerns(block)], note)
            self._leave(number, gone, reason)

    def _leave(self, number: int, pieces: Pieces[Block], reason: str) -> int:
        """Blocks have left the line, and are not saved. Returns how many they are."""
        blocks = blocks_in(pieces)
        if blocks:
            self.dropped[self.clients[number].name, reason] += len(blocks)
            self.note(number, blocks, [reason] * len(blocks))
            self._tier.ended(number, pieces, [False] * len(blocks))
        return len(blocks)

    # -- all stores ----------------------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        """Whether some job has not returned."""
        return any(client.in_flight for client in self.clients)

    @property
    def has_results(self) -> bool:
        """Whether ``poll`` has something to note."""
        return any(client.has_results for client in self.clients)

    def poll(self) -> bool:
        """Note what the stores have done. Returns whether they had."""
        return sum([client.poll() for client in self.clients if client.has_results]) > 0

    def close(self, timeout: float, *, tell: bool = True) -> bool:
        """Close the stores. Returns False if a call hangs still after ``timeout`` seconds. ``tell``: whoever waits for
        a job learns that it was cancelled."""
        over, end = True, time.monotonic() + timeout
        for client in self.clients:
            # All end at the same time.
            client.queue.close(0.0)
        for client in self.clients:
            over = client.queue.close(max(0.0, end - time.monotonic())) and over
            if tell:
                with DeferSignals():
                    client.poll()
        return over


NO_STORE = -1
WAITED_MAX = 65_536
"""Requests that are remembered to have waited for room in vain."""
"""in place of the number of a store"""


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
    job: StoreRequest = field(init=False)
    over: bool = False


class LoadQueue(Generic[Block]):
    """Blocks that come from the stores of a bridge to its tier. Whoever polls the bridge owns it. Nothing waits.

    ``policies``: of each store, how much of a hit is loaded from it; None loads all that is there. ``room``: the most
    blocks that are on their way or wait for their reader. So loads displace no more than that of what the tier has,
    however many requests wait. ``unread_seconds``: so long a block that has come, and that nobody reads, takes room.
    """

    def __init__(
        self,
        tier: CacheTier[Block],
        bridge: WritebackQueue[Block],
        policies: Sequence[LoadPolicy | None],
        room: int,
        unread_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._tier, self._bridge, self._policies, self._clock = tier, bridge, policies, clock
        self._room, self._unread_seconds = room, unread_seconds
        self._under_way: set[Loading[Block]] = set()
        self.coming: dict[Block, Loading[Block]] = {}
        self.unread: OrderedDict[Block, Unread] = OrderedDict()
        # The requests that wait for a block, and the blocks that a request waits for.
        self._users: dict[Block, set[Hashable]] = {}
        self._wanted: dict[Hashable, set[Block]] = {}
        # Requests that have waited for room in vain, the earliest first.
        self._waited: dict[Hashable, None] = {}

    @property
    def free(self) -> int:
        """How many blocks may be loaded now."""
        now_s = self._clock()
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
            del self._waited[next(iter(self._waited))]

    # -- requests that wait for blocks ---------------------------------------------------------------

    @property
    def users(self) -> list[Hashable]:
        """Requests that wait for a block."""
        return list(self._wanted)

    def wanted(self, block: Block) -> bool:
        """Return whether a live request waits for this block."""
        return block in self._users

    def enqueue(self, block: Block, user: Hashable) -> None:
        """Note that a request waits for a block, which is searched for, on its way, or unread."""
        self._users.setdefault(block, set()).add(user)
        self._wanted.setdefault(user, set()).add(block)

    def drop(self, block: Block) -> None:
        """Stop counting a block against the room for loads, whoever waits for it."""
        self.unread.pop(block, None)
        for user in self._users.pop(block, ()):
            self._discard(user, block)

    def read(self, blocks: Iterable[Block], user: Hashable) -> None:
        """A request has taken these blocks, and takes no others that it waited for. A reader without a name ends the
        wait of all requests for them."""
        for block in blocks if self._users else ():
            users = self._users.get(block)
            if users is None:
                continue
            if not user or not users - {user, ""}:
                self.drop(block)
                continue
            for satisfied in users & {user, ""}:
                users.remove(satisfied)
                self._discard(satisfied, block)
            if block in self.unread:
                self.unread[block] = self.unread[block]._replace(number=NO_STORE)
        if user:
            self.leave(user)

    def leave(self, user: Hashable) -> None:
        """A request has ended. Blocks that no other request waits for stop counting; those on their way count until
        they have arrived, since a store writes into them."""
        self._waited.pop(user, None)
        for block in list(self._wanted.pop(user, ())):
            users = self._users[block]
            users.discard(user)
            if not users:
                self.drop(block)

    def clear(self) -> None:
        """Stop counting what has come. Nobody waits for a block any more."""
        self.unread.clear()
        self._users.clear()
        self._wanted.clear()
        self._waited.clear()

    def _discard(self, user: Hashable, block: Block) -> None:
        blocks = self._wanted.get(user)
        if blocks is not None:
            blocks.discard(block)
            if not blocks:
                del self._wanted[user]

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
        others = [loading for loading in self._under_way if loading.number == number]
        ahead = before + sum(len(loading.blocks) for loading in others)
        nbytes = ahead * self._bridge.clients[number].queue.block_bytes
        now_s = self._clock()
        begun = [loading.attempt.at for loading in others if loading.attempt and not loading.over]
        waited = max(0.0, now_s - min(begun, default=now_s))
        load = policy.choose(places, nbytes, spare, waited)
        return LoadAttempt(policy, load, items or max(1, load.blocks), now_s)

    def load(
        self,
        number: int,
        blocks: Sequence[Block],
        deadline: float,
        attempt: LoadAttempt | None,
        done: Callable[[Loading[Block]], None],
        returned: Callable[[Loading[Block]], None] | None = None,
    ) -> Loading[Block] | None:
        """Load the first of these blocks, as many as have rows in the tier; None if there is no row for one. Who is
        told that it is done calls ``enter``, and ``end`` when its blocks are not on their way any more: the rows are
        kept until then. Raises StoreBusy."""
        client = self._bridge.clients[number]
        reserved, rows = self._tier.reserve(client, blocks)
        if not len(reserved):
            return None
        names, (tag, _) = self._tier.names(reserved, sealed=True), self._tier.space(client, reserved[0])
        loading = Loading(number, reserved, rows, attempt)
        over = None if returned is None else lambda _: returned(loading)

        def ended(job: StoreRequest) -> None:
            self._tier.said(number, reserved, job.codes)
            self._bridge.note(number, reserved, job.reasons)
            done(loading)

        try:
            loading.job = client.load(names, rows, ended, over, tag=tag, deadline=deadline, hold=True)
        except StoreBusy:
            self._tier.abort(client, reserved, rows)
            raise
        self._under_way.add(loading)
        self.coming.update(dict.fromkeys(reserved, loading))
        for block in reserved:
            # It was evicted before its request read it, and counts once.
            self.unread.pop(block, None)
        return loading

    def enter(self, loading: Loading[Block], ok: Bools) -> list[Block]:
        """Publish blocks of a load that is done, bool[n] of them. Returns those that the tier has now, which wait for
        their reader. Raises what ``CacheTier.publish`` raises."""
        chosen, now_s = list(compress(loading.blocks, ok.tolist())), self._clock()
        loading.over = True
        published = self._tier.publish(self._bridge.clients[loading.number], chosen, loading.rows[ok])
        arrived = list(compress(chosen, published))
        for block in arrived:
            del self.coming[block]
        arrival = Unread(now_s + self._unread_seconds, loading.number)
        self.unread.update((block, arrival) for block in arrived if block in self._users)
        if loading.attempt is not None:
            loading.attempt.note(len(arrived), loading.job.began, now_s)
        return arrived

    def end(self, loading: Loading[Block]) -> list[Block]:
        """A load has ended, or is given up. Returns its blocks that did not come."""
        loading.job.cancel()
        self._bridge.clients[loading.number].release(loading.job)
        self._under_way.discard(loading)
        left = [block for block in loading.blocks if self.coming.get(block) is loading]
        for block in left:
            del self.coming[block]
            self.drop(block)
        return left
