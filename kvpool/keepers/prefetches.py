"""Prefetches: what stores have of the prompts of waiting requests is brought to a pool's host tier, in bounded
amounts."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, islice, takewhile

import numpy as np

from kvpool.arrays import Bools
from kvpool.entry.interrupt import Bell
from kvpool.entry.process import Process
from kvpool.errors import DeviceError, StoreBusy
from kvpool.keepers.bridge import Bridge, Loading, Search
from kvpool.keepers.choice import LoadAttempt, LoadPolicy
from kvpool.keepers.pool_tier import Content, PoolTier
from kvpool.pool.keys import BlockKeys
from kvpool.pool.manager import KVCacheManager
from kvpool.state.records import H
from kvpool.stores.jobs import Job
from kvpool.stores.store import LATE, OK

CHUNK_BYTES = 4 << 20
CHUNKS_UNDER_WAY = 4
"""of one prompt, so that a long one leaves rows to others"""
OF_STORES = ("loaded", "late", "failed")
"""How a prefetch ends that says something of the stores that it loaded from."""
PREFETCHES = 1024
"""under way at once; more get nothing"""
UNUSED_SECONDS = 60.0
"""After this time a promoted block that nobody used counts as any other cached block."""
ASKED = 256
"""Blocks that the pool is asked for at once."""


@dataclass(frozen=True, eq=False)
class Prefetch:
    """What became of ``Keeper.prefetch``. Thread-safe. The keeper changes it, and nobody else.

    ``prompt``: the BlockKeys. ``deadline``: in seconds on the keeper's clock. ``blocks``: blocks that have entered the
    host tier so far, in all groups of layers. ``ended``: why there is no more to come: "" while it goes on, "loaded",
    "cached" (the pool has all), "absent" (no store has more), "declined" (to compute is faster), "late", "full" (no
    room before the deadline, or no more than what has come), "failed", "cancelled", "forgotten", "reset" or "closed".
    ``done``: whether nothing more will come. ``cancelled``: whether ``cancel`` was called.
    """

    prompt: BlockKeys
    deadline: float
    blocks: int = field(default=0, init=False)
    ended: str = field(default="", init=False)
    done: bool = field(default=False, init=False)
    cancelled: bool = field(default=False, init=False)
    _process: Process = field(default_factory=Process, init=False)
    _bell: Bell = field(default_factory=Bell, init=False)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done, at most ``timeout`` seconds. Returns whether it is. Raises ForkedProcess in a child of
        ``os.fork()``."""
        self._process.check(self)
        return self._bell.wait_for(lambda: self.done, timeout)

    def cancel(self) -> None:
        """Bring no more. What has come stays."""
        self._note(cancelled=True)

    def came(self, blocks: int) -> None:
        """Called by the keeper: so many more blocks have entered the host tier."""
        self._note(blocks=self.blocks + blocks)

    def end(self, why: str) -> None:
        """Called by the keeper."""
        self._note(ended=self.ended or why, done=True)
        self._bell.ring()

    def _note(self, **changes: object) -> None:
        """Nobody else can set a field, as the class is frozen."""
        vars(self).update(changes)

    def __repr__(self) -> str:
        return f"Prefetch(blocks={self.blocks}, ended={self.ended!r})"


@dataclass(eq=False)
class _Fetch:
    """A prefetch under way. ``first``: the first place that the pool did not have. ``chains``: the blocks of the
    prompt, for each group of layers; ``source``: the store that has each, of those that one has."""

    handle: Prefetch
    generation: int
    first: int
    chains: list[list[Content]]
    source: dict[Content, int] = field(default_factory=dict)
    search: Search[Content] | None = None
    wanted: deque[Content] = field(default_factory=deque)
    loadings: deque[Loading[Content]] = field(default_factory=deque)
    attempts: dict[int, LoadAttempt] = field(default_factory=dict)


class Prefetches:
    """The prefetches of a keeper. The keeper's thread owns it.

    ``promotion_blocks``: the most blocks that wait on the host for their requests, or are on their way there. So
    prefetches displace no more than that of what the host has, however many requests wait. ``policies``: of each store,
    whether to load from it; None loads all that is there.
    """

    def __init__(
        self, pool: KVCacheManager, tier: PoolTier, bridge: Bridge[Content], policies: Sequence[LoadPolicy | None],
        promotion_blocks: int, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._pool, self._tier, self._bridge, self._clock = pool, tier, bridge, clock
        self._policies, self._most = policies, promotion_blocks
        self._fetches: list[_Fetch] = []
        # Blocks on their way. And since when a block has waited for its request.
        self._coming: set[Content] = set()
        self._promoted: dict[Content, float] = {}
        self.ended: Counter[str] = Counter()
        self.found_blocks = 0

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
        return self._most - len(self._coming) - len(self._promoted)

    def next_deadline(self) -> float | None:
        ends = [fetch.handle.deadline for fetch in self._fetches]
        ends += [attempt.until for fetch in self._fetches for attempt in fetch.attempts.values()]
        return min(ends, default=None)

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
        fetch = _Fetch(handle, self._generation(), first, self._tier.of_prompt(prompt, last))
        self._fetches.append(fetch)
        fetch.search = Search(handle.deadline, partial(self._found, fetch), partial(self._plan, fetch))
        self._bridge.search(fetch.search, self._absent([one for chain in fetch.chains for one in chain[first:]]))

    def _absent(self, contents: Sequence[Content]) -> list[Content]:
        """Those of the contents that the pool does not have."""
        return [one for one, here in zip(contents, self._tier.here(contents), strict=True) if not here]

    def _found(self, fetch: _Fetch, number: int, asked: Sequence[Content], job: Job) -> list[Content]:
        """A store has said which blocks it has. Returns what is left for the next one."""
        there = list(compress(asked, (job.codes == OK).tolist()))
        self.found_blocks += len(there)
        fetch.source.update(dict.fromkeys(there, number))
        if fetch not in self._fetches:
            return []
        return self._absent([one for one in asked if one not in fetch.source])

    def _plan(self, fetch: _Fetch, *_: object) -> None:
        """Choose what to load."""
        if fetch not in self._fetches:
            return
        prompt = fetch.handle.prompt
        there = np.zeros((len(fetch.chains), len(prompt) // self._pool.tokens_per_block), np.bool_)
        for one in fetch.source:
            there[one.group, one.place] = True
        wanted = self._wanted(fetch, there)
        if not wanted:
            # Others may have brought it meanwhile.
            more = self._pool.match_prefix(prompt).full_tokens > fetch.first * self._pool.tokens_per_block
            return self._stop(fetch, "cached" if more else "absent")
        refused = self._attempt(fetch, wanted)
        if refused is not None:
            # The engine computes from there on.
            for one in wanted:
                if one.place >= refused:
                    self._bridge.note(fetch.source[one], [one], ["not worth loading"])
            there[:, refused:] = False
            wanted = self._wanted(fetch, there)
        if not wanted:
            return self._stop(fetch, "declined")
        fetch.wanted.extend(wanted)

    def _wanted(self, fetch: _Fetch, there: Bools) -> list[Content]:
        """What to load of what is there, in the order of the prompt."""
        lacking = self._pool.lacking(fetch.handle.prompt, there)
        found = [fetch.chains[group][i] for group, places in enumerate(lacking.blocks) for i in places.tolist()]
        return sorted(found, key=lambda one: (one.place, one.group))

    def _attempt(self, fetch: _Fetch, wanted: list[Content]) -> int | None:
        """Choose for each store whether to load from it. Returns the first place that is not worth it, or None."""
        for number in dict.fromkeys(fetch.source[one] for one in wanted):
            policy, own = self._policies[number], [one for one in wanted if fetch.source[one] == number]
            if policy is None:
                continue
            ahead = sum(other.source[one] == number for other in self._fetches for one in other.wanted)
            ahead += sum(len(loading.blocks) for other in self._fetches for loading in other.loadings
                         if loading.number == number)  # fmt: skip
            places = len({one.place for one in own})
            ahead_bytes = ahead * self._bridge.clients[number].queue.block_bytes
            attempt = LoadAttempt.of(policy, places, ahead_bytes, self._clock(), len(own))
            if not attempt.load.blocks:
                return own[0].place
            fetch.attempts[number] = attempt
        return None

    # -- loading -------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Begin the loads for which there is room, and end what is over."""
        now = self._clock()
        self._note_used(now)
        for fetch in list(self._fetches):
            if fetch.handle.cancelled:
                self._stop(fetch, "cancelled")
            elif any(attempt.lost(now) for attempt in fetch.attempts.values()):
                self._stop(fetch, "late")
            elif now >= fetch.handle.deadline:
                self._stop(fetch, "full" if fetch.wanted and not fetch.loadings else "late")
            else:
                while fetch.wanted and len(fetch.loadings) < CHUNKS_UNDER_WAY and self._load(fetch):
                    pass
                if fetch.handle.blocks and not fetch.loadings and self._room < 1:
                    # It has its share. Others may be waiting for theirs.
                    self._stop(fetch, "full")

    def _load(self, fetch: _Fetch) -> bool:
        """Begin to load the next blocks. Returns False if there is no room now."""
        ahead = list(islice(fetch.wanted, ASKED))
        here = set(compress(ahead, self._tier.here(ahead)))
        while fetch.wanted and fetch.wanted[0] in here:
            # Another prompt has brought it, or a request has computed it.
            self._came(fetch, fetch.source[fetch.wanted.popleft()], 1, self._clock())
        if not fetch.wanted:
            if not fetch.loadings:
                self._stop(fetch, "loaded")
            return False
        number, deadline = fetch.source[fetch.wanted[0]], fetch.handle.deadline
        queue = self._bridge.clients[number].queue
        most = min(max(1, CHUNK_BYTES // queue.block_bytes), max(1, queue.slots // (2 * CHUNKS_UNDER_WAY)), self._room)
        # What is on its way for another prompt is not loaded twice.
        ours = takewhile(
            lambda one: fetch.source[one] == number and one not in self._coming and one not in here, fetch.wanted
        )
        chosen = list(islice(ours, max(0, most)))
        try:
            done = partial(self._loaded, fetch)
            loading = self._bridge.load(number, chosen, deadline, done, hold=True) if chosen else None
        except StoreBusy:
            return False
        if loading is None:
            return False
        for content in loading.blocks:
            fetch.wanted.popleft()
            self._coming.add(content)
        fetch.loadings.append(loading)
        return True

    def _loaded(self, fetch: _Fetch, loading: Loading[Content]) -> None:
        """A job is done. Blocks enter the pool in the order of the prompt."""
        while fetch in self._fetches and fetch.loadings and fetch.loadings[0].job.done:
            self._enter(fetch, fetch.loadings[0])

    def _enter(self, fetch: _Fetch, loading: Loading[Content]) -> None:
        """Publish the leading blocks of what a prompt waits for first."""
        if fetch.generation != self._generation():
            return self._stop(fetch, "reset")
        leading, before = loading.job.leading, self._tier.loaded_blocks
        client, here = self._bridge.clients[loading.number], list[bool]()
        try:
            here = self._tier.publish(client, loading.blocks[:leading], loading.rows[:leading])
        except DeviceError:
            leading = 0
        fetch.handle.came(self._tier.loaded_blocks - before)
        self._coming.difference_update(loading.blocks)
        came = [content for content, there in zip(loading.blocks, here, strict=False) if there]
        self._promoted.update(dict.fromkeys(came, self._clock()))
        self._note_used(self._clock(), came)
        if not all(here):
            # The host is full of what must stay, such as the blocks before these.
            return self._stop(fetch, "full")
        self._came(fetch, loading.number, leading, loading.job.began)
        if leading < len(loading.blocks):
            return self._stop(fetch, "late" if loading.job.codes[leading] == LATE else "failed")
        client.release(fetch.loadings.popleft().job)
        if not fetch.wanted and not fetch.loadings:
            self._stop(fetch, "loaded")

    def _note_used(self, now: float, contents: Sequence[Content] | None = None) -> None:
        """Blocks that are on the device, or gone, do not wait for a request any more. ``contents``: which are looked
        at; by default those that were looked at least recently."""
        asked = list(islice(self._promoted, ASKED)) if contents is None else contents
        there = zip(asked, self._tier.here(asked, "host"), self._tier.here(asked, "device"), strict=True)
        for one, host, device in there:
            since = self._promoted.pop(one)
            if host and not device and since > now - UNUSED_SECONDS:
                self._promoted[one] = since

    def _came(self, fetch: _Fetch, number: int, items: int, began: float) -> None:
        """So many blocks of an attempt are in the pool, by a job that began then."""
        if number in fetch.attempts:
            fetch.attempts[number].note(items, began, self._clock())

    # -- ending --------------------------------------------------------------------------------------

    def stop_all(self, why: str, concerns: Callable[[Content], bool] = lambda _: True) -> None:
        """End the prefetches that may bring these contents."""
        for fetch in list(self._fetches):
            if any(concerns(content) for chain in fetch.chains for content in chain):
                self._stop(fetch, why)

    def _stop(self, fetch: _Fetch, why: str) -> None:
        if fetch not in self._fetches:
            return
        self._fetches.remove(fetch)
        under_way = [one for loading in fetch.loadings for one in loading.blocks]
        for one in [*under_way, *fetch.wanted] if why in ("late", "full") else ():
            self._bridge.note(fetch.source[one], [one], [why])
        for loading in fetch.loadings:
            loading.job.cancel()
            self._bridge.clients[loading.number].release(loading.job)
            self._coming.difference_update(loading.blocks)
        if fetch.search is not None and fetch.search.job is not None:
            fetch.search.job.cancel()
        for attempt in fetch.attempts.values():
            attempt.end(self._clock(), told=why in OF_STORES)
        self._end(fetch.handle, why)

    def _end(self, handle: Prefetch, why: str) -> None:
        self.ended[why] += 1
        handle.end(why)

    def _generation(self) -> int:
        return int(self._pool.core.states.heads[0, H.generation])
