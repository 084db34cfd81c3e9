"""Loading: what stores have of the prompts of waiting requests is brought to the host tier, in bounded amounts."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.entry.interrupt import Bell
from kvpool.entry.process import Process
from kvpool.errors import DeviceError, StoreBusy
from kvpool.keepers.bridge_events import BridgeEvents
from kvpool.keepers.choice import Load, LoadOrCompute
from kvpool.keepers.known_content import ON_DEVICE, ON_HOST, Content, KnownContent
from kvpool.keepers.staged_store import StagedStore
from kvpool.pool.keys import BlockKeys
from kvpool.pool.manager import KVCacheManager
from kvpool.state.records import H
from kvpool.state.ring import REMOVED, STORED
from kvpool.stores.jobs import FIND, LOAD, Job
from kvpool.stores.seals import BlockNames
from kvpool.stores.store import ABSENT, DAMAGED, LATE, OK

CHUNK_BYTES = 4 << 20
CHUNKS_UNDER_WAY = 4
"""of one prompt, so that a long one leaves rows to others"""
OF_STORES = ("loaded", "late", "failed")
"""How a prefetch ends that says something of the stores that it loaded from."""
EVENT_SECONDS = 1.0
"""An imported block counts as being on its way until the pool's event comes, at most so long."""
PREFETCHES = 1024
"""under way at once; more get nothing"""
UNUSED_SECONDS = 60.0
"""After this time a promoted block that nobody used counts as any other cached block."""


class Prefetch:
    """What became of ``Keeper.prefetch``. Thread-safe.

    ``prompt``: the BlockKeys. ``deadline``: in seconds on the keeper's clock. ``blocks``: blocks that have entered the
    host tier so far, in all groups of layers. ``ended``: why there is no more to come: "" while it goes on, "loaded",
    "cached" (the pool has all), "absent" (no store has more), "declined" (to compute is faster), "late", "full" (no
    room before the deadline, or no more than what has come), "failed", "cancelled", "forgotten", "reset" or "closed".
    """

    __slots__ = (
        "__weakref__", "_bell", "_blocks", "_cancelled", "_deadline", "_ended", "_over", "_process", "_prompt",
    )  # fmt: skip

    def __init__(self, prompt: BlockKeys, deadline: float) -> None:
        self._prompt, self._deadline = prompt, deadline
        self._blocks, self._ended = 0, ""
        self._over, self._cancelled, self._process, self._bell = False, False, Process(), Bell()

    @property
    def prompt(self) -> BlockKeys:
        return self._prompt

    @property
    def deadline(self) -> float:
        return self._deadline

    @property
    def blocks(self) -> int:
        return self._blocks

    @property
    def ended(self) -> str:
        return self._ended

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self._over

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done, at most ``timeout`` seconds. Returns whether it is. Raises ForkedProcess in a child of
        ``os.fork()``."""
        self._process.check(self)
        return self._bell.wait_for(lambda: self._over, timeout)

    def cancel(self) -> None:
        """Bring no more. What has come stays."""
        self._cancelled = True

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def came(self, blocks: int) -> None:
        """Called by the keeper: so many more blocks have entered the host tier."""
        self._blocks += blocks

    def end(self, why: str) -> None:
        """Called by the keeper."""
        self._ended = self._ended or why
        self._over = True
        self._bell.ring()

    def __repr__(self) -> str:
        return f"Prefetch(blocks={self.blocks}, ended={self.ended!r})"


class _Wanted(NamedTuple):
    """A block to load, and the store to load it from."""

    place: int
    content: Content
    store: int


class _Chunk(NamedTuple):
    """Blocks of one prompt that one job loads into rows, which are held until they have entered the pool."""

    wanted: list[_Wanted]
    store: StagedStore
    job: Job


@dataclass(eq=False)
class _Race:
    """What one prefetch loads from one store against the engine, which may compute it sooner. ``items``: blocks to load
    in all groups of layers, of which so many ``came``. ``at``: when it was chosen; ``began``: when its first job
    did."""

    choice: LoadOrCompute
    load: Load
    items: int
    at: float
    came: int = 0
    began: float = math.inf

    @property
    def places(self) -> int:
        """Blocks of the prompt that have come, in all groups of layers."""
        return self.load.blocks * self.came // self.items

    @property
    def until(self) -> float:
        """When it is given up if nothing comes, on the keeper's clock."""
        return self.at + self.load.until

    def lost(self, now: float) -> bool:
        """Whether to give it up: the engine computes the rest sooner."""
        return self.choice.late(self.load, self.places, max(0.0, now - self.at))

    def end(self, now: float) -> None:
        """It has ended. What it took is learned from."""
        took = max(0.0, now - self.at)
        self.choice.end(self.load, self.places, took, min(took, max(0.0, self.began - self.at)))


@dataclass(eq=False)
class _Fetch:
    """A prefetch under way. ``first``: the first place that the pool did not have. ``chains``: the blocks of the
    prompt, for each group of layers; ``source``: the store that has each, -1 if none has it."""

    handle: Prefetch
    generation: int
    first: int
    chains: list[list[Content]]
    source: list[npt.NDArray[np.int64]]
    finding: Job | None = None
    wanted: deque[_Wanted] = field(default_factory=deque)
    chunks: deque[_Chunk] = field(default_factory=deque)
    races: dict[int, _Race] = field(default_factory=dict)


class Loader:
    """The prefetches of a keeper. The keeper's thread owns it.

    ``promotion_blocks``: the most blocks that wait on the host for their requests, or are on their way there. So
    prefetches displace no more than that of what the host has, however many requests wait. ``choices``: of each store,
    whether to load from it; None loads all that is there.
    """

    def __init__(
        self, pool: KVCacheManager, stores: Sequence[StagedStore], known: KnownContent, told: BridgeEvents,
        choices: Sequence[LoadOrCompute | None], promotion_blocks: int, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._pool, self._stores, self._known, self._told, self._clock = pool, stores, known, told, clock
        self._choices, self._most = choices, promotion_blocks
        self._fetches: list[_Fetch] = []
        # Until when a block counts as on its way; since when it has waited for its request.
        self._coming: dict[Content, float] = {}
        self._promoted: dict[Content, float] = {}
        self.ended: Counter[str] = Counter()
        self.found_blocks = self.loaded_blocks = self.loaded_bytes = 0

    @property
    def under_way(self) -> int:
        """Prefetches that have not ended."""
        return len(self._fetches)

    @property
    def promoted(self) -> int:
        """Blocks that were brought and not used yet."""
        return len(self._promoted)

    @property
    def _room(self) -> int:
        """Blocks that may still be brought now."""
        return self._most - len(self._coming.keys() | self._promoted.keys())

    def next_deadline(self) -> float | None:
        ends = [fetch.handle.deadline for fetch in self._fetches]
        return min(ends + [race.until for fetch in self._fetches for race in fetch.races.values()], default=None)

    # -- finding -------------------------------------------------------------------------------------

    def begin(self, handle: Prefetch) -> None:
        """Begin with a prompt."""
        prompt, width = handle.prompt, self._pool.tokens_per_block
        if len(self._fetches) >= PREFETCHES:
            return self._end(handle, "full")
        # The last token of a prompt is never reused.
        last = (len(prompt) - 1) // width
        first = self._pool.match_prefix(prompt).full_tokens // width if prompt.reuse else last
        if first >= last:
            return self._end(handle, "cached")
        chains = self._known.of_prompt(prompt, last)
        sources = [np.full(len(chain), -1, np.int64) for chain in chains]
        fetch = _Fetch(handle, self._generation(), first, chains, sources)
        self._fetches.append(fetch)
        self._find(fetch, 0)

    def _find(self, fetch: _Fetch, first: int) -> None:
        """Ask the stores from this one on, the nearest first, for what those before do not have."""
        for store in self._stores[first:]:
            asked = [(i, chain[i]) for chain, source in zip(fetch.chains, fetch.source, strict=True)
                     for i in np.flatnonzero(source < 0).tolist() if i >= fetch.first and not chain[i].on]  # fmt: skip
            if not asked:
                break
            if not store.client.usable(FIND):
                continue
            now, end = self._clock(), fetch.handle.deadline
            # One store that hangs leaves time for those behind it.
            deadline = end if store is self._stores[-1] else now + (end - now) / 2
            names, tag = BlockNames(self._known.name(content) for _, content in asked), store.tag(asked[0][1].whose)
            try:
                done = partial(self._found, fetch, store, asked)
                fetch.finding = store.client.find(names, done, tag=tag, deadline=deadline)
            except StoreBusy:
                continue
            return
        self._plan(fetch)

    def _found(self, fetch: _Fetch, store: StagedStore, asked: list[tuple[int, Content]], job: Job) -> None:
        fetch.finding = None
        for (place, content), code in zip(asked, job.codes.tolist(), strict=True):
            if code == OK:
                fetch.source[content.group][place] = store.index
        self.found_blocks += job.ok
        self._note(store, [content for _, content in asked], job, (OK,), (ABSENT,))
        if fetch in self._fetches:
            self._find(fetch, store.index + 1)

    def _note(
        self, store: StagedStore, contents: Sequence[Content], job: Job, there: Sequence[int], gone: Sequence[int]
    ) -> None:
        """Note what a job has told of its blocks by these codes, and tell what is news."""
        for kind, codes in ((STORED, there), (REMOVED, gone)):
            told = [content for content, code in zip(contents, job.codes.tolist(), strict=True)
                    if code in codes and self._known.note(content, store.index, kind == STORED)]  # fmt: skip
            self._told.tell(kind, store.index, told)

    def _plan(self, fetch: _Fetch) -> None:
        """Choose what to load."""
        prompt = fetch.handle.prompt
        there = np.zeros((len(fetch.chains), len(prompt) // self._pool.tokens_per_block), np.bool_)
        for group, source in enumerate(fetch.source):
            there[group, : len(source)] = source >= 0
        wanted = self._wanted(fetch, there)
        if not wanted:
            # Others may have brought it meanwhile.
            more = self._pool.match_prefix(prompt).full_tokens > fetch.first * self._pool.tokens_per_block
            return self._stop(fetch, "cached" if more else "absent")
        refused = self._race(fetch, wanted)
        if refused is not None:
            # The engine computes from there on.
            there[:, refused:] = False
            wanted = self._wanted(fetch, there)
        if not wanted:
            return self._stop(fetch, "declined")
        fetch.wanted = deque(wanted)

    def _wanted(self, fetch: _Fetch, there: npt.NDArray[np.bool_]) -> list[_Wanted]:
        """What to load of what is there, in the order of the prompt."""
        lacking = self._pool.lacking(fetch.handle.prompt, there)
        found = [
            _Wanted(place, fetch.chains[group][place], int(fetch.source[group][place]))
            for group, places in enumerate(lacking.blocks)
            for place in places.tolist()
        ]
        return sorted(found, key=lambda one: (one.place, one.content.group))

    def _race(self, fetch: _Fetch, wanted: list[_Wanted]) -> int | None:
        """Choose for each store whether to load from it. Returns the first place that is not worth it, or None."""
        for store in dict.fromkeys(one.store for one in wanted):
            choice, own = self._choices[store], [one for one in wanted if one.store == store]
            if choice is None:
                continue
            ahead = sum(one.store == store for other in self._fetches for one in other.wanted)
            ahead += sum(len(chunk.wanted) for other in self._fetches for chunk in other.chunks
                         if chunk.store.index == store)  # fmt: skip
            places = len({one.place for one in own})
            load = choice.choose(places, ahead * self._stores[store].client.queue.block_bytes)
            if not load.blocks:
                return own[0].place
            fetch.races[store] = _Race(choice, load, len(own), self._clock())
        return None

    # -- loading -------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Begin the loads for which there is room, and end what is over."""
        now = self._clock()
        while self._promoted and next(iter(self._promoted.values())) < now - UNUSED_SECONDS:
            del self._promoted[next(iter(self._promoted))]
        for content in [content for content, until in self._coming.items() if until <= now]:
            del self._coming[content]
        for fetch in list(self._fetches):
            if fetch.handle.cancelled:
                self._stop(fetch, "cancelled")
            elif any(race.lost(now) for race in fetch.races.values()):
                self._stop(fetch, "late")
            elif now >= fetch.handle.deadline:
                self._stop(fetch, "full" if fetch.wanted and not fetch.chunks else "late")
            else:
                while fetch.wanted and len(fetch.chunks) < CHUNKS_UNDER_WAY and self._load(fetch):
                    pass
                if fetch.handle.blocks and not fetch.chunks and self._room < 1:
                    # It has its share. Others may be waiting for theirs.
                    self._stop(fetch, "full")

    def _load(self, fetch: _Fetch) -> bool:
        """Begin to load the next blocks. Returns False if there is no room now."""
        while fetch.wanted and self._known.now(fetch.wanted[0].content).on:
            # Another prompt has brought it, or a request has computed it.
            self._came(fetch, fetch.wanted.popleft().store, 1, self._clock())
        if not fetch.wanted:
            if not fetch.chunks:
                self._stop(fetch, "loaded")
            return False
        store = self._stores[fetch.wanted[0].store]
        client, queue = store.client, store.client.queue
        size, share = max(1, CHUNK_BYTES // queue.block_bytes), max(1, queue.slots // (2 * CHUNKS_UNDER_WAY))
        count = min(size, share, client.free(LOAD), self._room)
        chosen: list[_Wanted] = []
        while fetch.wanted and len(chosen) < count and fetch.wanted[0].store == store.index:
            if fetch.wanted[0].content in self._coming:
                # It is on its way for another prompt.
                break
            chosen.append(fetch.wanted.popleft())
        if not chosen:
            return False
        contents, rows, deadline = (
            [one.content for one in chosen],
            client.take(LOAD, len(chosen)),
            fetch.handle.deadline,
        )
        names = BlockNames(map(self._known.name, contents), contexts=[content.context for content in contents])
        try:
            done = partial(self._loaded, fetch, store, contents)
            job = client.load(names, rows, done, tag=store.tag(contents[0].whose), deadline=deadline, hold=True)
        except StoreBusy:
            client.give_back(rows)
            fetch.wanted.extendleft(reversed(chosen))
            return False
        fetch.chunks.append(_Chunk(chosen, store, job))
        self._coming.update(dict.fromkeys(contents, deadline))
        return True

    def _loaded(self, fetch: _Fetch, store: StagedStore, contents: list[Content], job: Job) -> None:
        """A job is done. Blocks enter the pool in the order of the prompt."""
        self._note(store, contents, job, (), (ABSENT, DAMAGED))
        while fetch in self._fetches and fetch.chunks and fetch.chunks[0].job.done:
            self._enter(fetch, fetch.chunks[0])

    def _enter(self, fetch: _Fetch, chunk: _Chunk) -> None:
        """Import the leading blocks of the first chunk of a prompt."""
        if fetch.generation != self._generation():
            return self._stop(fetch, "reset")
        leading, memory = chunk.job.leading, chunk.store.client.memory
        try:
            for run in _runs(list(zip(chunk.wanted[:leading], chunk.job.rows.tolist(), strict=False))):
                if not self._import(fetch, [one for one, _ in run], [memory[row] for _, row in run]):
                    return self._stop(fetch, "full")
        except DeviceError:
            leading = 0
        self._came(fetch, chunk.store.index, leading, chunk.job.began)
        if leading < len(chunk.wanted):
            return self._stop(fetch, "late" if chunk.job.codes[leading] == LATE else "failed")
        chunk.store.client.release(fetch.chunks.popleft().job)
        if not fetch.wanted and not fetch.chunks:
            self._stop(fetch, "loaded")

    def _import(self, fetch: _Fetch, run: list[_Wanted], rows: list[npt.NDArray[np.uint8]]) -> bool:
        """Import blocks that follow each other. Returns whether the pool has all of them now. It has not if the host is
        full of what must stay, such as the blocks before these."""
        group = self._pool.groups[run[0].content.group]
        data = [row[: group.block_bytes] for row in rows]
        stored = self._pool.import_blocks(fetch.handle.prompt, data, first=run[0].place, group=group.index)
        fetch.handle.came(stored)
        self.loaded_blocks += stored
        self.loaded_bytes += stored * group.block_bytes
        keys = np.frombuffer(b"".join(one.content.key for one in run), np.uint64).reshape(-1, 2)
        here = [True] * len(run) if stored == len(run) else self._pool.cached_blocks(keys)[group.index].tolist()
        for content, there in zip((one.content for one in run), here, strict=True):
            if there and not self._known.now(content).on & ON_DEVICE:
                self._promoted[content] = self._clock()
            if there:
                # An event will say that it is there. Nobody waits for an event that was lost.
                self._coming[content] = self._clock() + EVENT_SECONDS
            else:
                self._coming.pop(content, None)
        return all(here)

    def _came(self, fetch: _Fetch, store: int, items: int, began: float) -> None:
        """So many blocks of a race are in the pool, by a job that began then."""
        race = fetch.races.get(store)
        if race is not None:
            race.came, race.began = race.came + items, min(race.began, began)
            race.lost(self._clock())

    # -- ending --------------------------------------------------------------------------------------

    def used(self, content: Content) -> None:
        """The tiers of a content have changed. What is on the device, or gone, does not wait for a request any more."""
        self._coming.pop(content, None)
        if content.on & ON_DEVICE or not content.on & ON_HOST:
            self._promoted.pop(content, None)

    def stop_all(self, why: str, concerns: Callable[[Content], bool] = lambda _: True) -> None:
        """End the prefetches that may bring these contents."""
        for fetch in list(self._fetches):
            if any(concerns(content) for chain in fetch.chains for content in chain):
                self._stop(fetch, why)

    def _stop(self, fetch: _Fetch, why: str) -> None:
        if fetch not in self._fetches:
            return
        self._fetches.remove(fetch)
        for chunk in fetch.chunks:
            chunk.job.cancel()
            chunk.store.client.release(chunk.job)
            for one in chunk.wanted:
                if one.content not in self._promoted:
                    self._coming.pop(one.content, None)
        if fetch.finding is not None:
            fetch.finding.cancel()
        for race in fetch.races.values():
            if why in OF_STORES:
                race.end(self._clock())
            else:
                # It was ended for a reason that says nothing of the store.
                race.choice.drop(race.load)
        self._end(fetch.handle, why)

    def _end(self, handle: Prefetch, why: str) -> None:
        self.ended[why] += 1
        handle.end(why)

    def _generation(self) -> int:
        return int(self._pool.core.states.heads[0, H.generation])


def _runs(blocks: list[tuple[_Wanted, int]]) -> list[list[tuple[_Wanted, int]]]:
    """Blocks that follow each other in one group of layers, together."""
    ordered = sorted(blocks, key=lambda block: (block[0].content.group, block[0].place))
    starts = groupby(enumerate(ordered), lambda one: (one[1][0].content.group, one[1][0].place - one[0]))
    return [[block for _, block in run] for _, run in starts]
