"""Prefetches: what stores have of the prompts of waiting requests is brought to a pool's host tier, in bounded
amounts."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, islice, takewhile

import numpy as np

from kvpool.common.arrays import Bools
from kvpool.common.process import stays_here
from kvpool.common.threads import Bell
from kvpool.errors import DeviceError, StoreBusy
from kvpool.pool.keys import BlockKeys
from kvpool.pool.manager import KVCacheManager
from kvpool.state.records import H
from kvpool.storage.choice import LoadAttempt
from kvpool.storage.pool_adapter import Content, PoolAdapter
from kvpool.storage.store import LATE, OK
from kvpool.storage.store_requests import StoreRequest
from kvpool.storage.tier_storage import READ_AT_ONCE, Loading, Search, TierStorage

CHUNK_BYTES = 4 << 20
CHUNKS_UNDER_WAY = 4
"""of one prompt, so that a long one leaves rows to others"""
OF_STORES = ("loaded", "late", "failed")
"""How a prefetch ends that says something of the stores that it loaded from."""
PREFETCHES = 1024
"""under way at once; more get nothing"""
UNUSED_SECONDS = 60.0
"""After this time a promoted block that nobody used counts as any other cached block, even though its prefetch was not
cancelled."""


@dataclass(eq=False, repr=False)
class Prefetch:
    """The state of the loads of one prompt. ``StorageManager.prefetch`` returns it.

    Attributes
    ----------
    prompt : BlockKeys
        The prompt.
    deadline : float
        When it ends, in seconds on the storage manager's clock.
    engine_free : float
        Until when the request waits for the engine, in seconds on the same clock.
    blocks : int
        Blocks that have entered the host tier so far, in all groups of layers.
    ended : str
        Why nothing more is loaded: "" while it goes on, "loaded", "cached" (the pool has all), "absent" (no store has
        more), "declined" (computing is faster), "late", "full" (no room before the deadline, or no more than what has
        arrived), "failed", "cancelled", "forgotten", "cleared" or "closed".
    done : bool
        Whether it has ended.
    cancelled : bool
        Whether ``cancel`` was called.

    Notes
    -----
    Any thread may use it. Only the storage manager changes it.
    """

    prompt: BlockKeys
    deadline: float
    engine_free: float = -math.inf
    blocks: int = field(default=0, init=False)
    ended: str = field(default="", init=False)
    done: bool = field(default=False, init=False)
    cancelled: bool = field(default=False, init=False)
    _bell: Bell = field(default_factory=Bell, init=False)

    def __post_init__(self) -> None:
        stays_here(self)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait. By default as long as it takes.

        Returns
        -------
        bool
            Whether it is done.
        """
        return self._bell.wait_for(lambda: self.done, timeout)

    def cancel(self) -> None:
        """Load no more. Call it when the request has ended or was aborted, even if the prefetch is done.

        What has arrived stays cached, and stops counting against ``promotion_blocks``.
        """
        self.cancelled = True

    def end(self, why: str) -> None:
        """End it. Only the storage manager calls this.

        Parameters
        ----------
        why : str
            The value of ``ended``.
        """
        self.ended, self.done = self.ended or why, True
        self._bell.ring()

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
    """The prefetches of a storage manager. The storage manager's thread owns it."""

    def __init__(
        self,
        pool: KVCacheManager,
        adapter: PoolAdapter,
        storage: TierStorage[Content],
    ) -> None:
        self._pool, self._adapter, self._storage, self._clock = pool, adapter, storage, storage.clock
        self._fetches: list[_Fetch] = []
        self.ended: Counter[str] = Counter()
        self.found_blocks = 0

    @property
    def in_flight(self) -> int:
        """Prefetches that have not ended."""
        return len(self._fetches)

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
        chains = self._adapter.of_prompt(prompt, last) if first < last or self._storage.unread else []
        for chain in chains if prompt.reuse else []:
            self._storage.add_user_of_unread(chain, handle)
        if first >= last:
            return self._end(handle, "cached")
        fetch = _Fetch(handle, self._generation(), first, chains)
        self._fetches.append(fetch)
        fetch.search = Search(handle.deadline, partial(self._found, fetch), partial(self._plan, fetch))
        self._storage.search(fetch.search, self._absent([block for chain in fetch.chains for block in chain[first:]]))

    def _absent(self, contents: Sequence[Content]) -> list[Content]:
        """Those of the contents that the pool does not have."""
        return [
            content for content, is_cached in zip(contents, self._adapter.here(contents), strict=True) if not is_cached
        ]

    def _found(self, fetch: _Fetch, number: int, asked: Sequence[Content], request: StoreRequest) -> list[Content]:
        """A store has said which blocks it has. Returns what is left for the next one."""
        stored = list(compress(asked, (request.codes == OK).tolist()))
        self.found_blocks += len(stored)
        fetch.source.update(dict.fromkeys(stored, number))
        if fetch not in self._fetches:
            return []
        return self._absent([content for content in asked if content not in fetch.source])

    def _plan(self, fetch: _Fetch, *_: object) -> None:
        """Choose what to load."""
        if fetch not in self._fetches:
            return
        prompt = fetch.handle.prompt
        stored = np.zeros((len(fetch.chains), len(prompt) // self._pool.tokens_per_block), np.bool_)
        for content in fetch.source:
            stored[content.group, content.place] = True
        wanted = self._wanted(fetch, stored)
        if not wanted:
            # Others may have brought it meanwhile.
            more = self._pool.match_prefix(prompt).full_tokens > fetch.first * self._pool.tokens_per_block
            return self._stop(fetch, "cached" if more else "absent")
        refused = self._attempt(fetch, wanted)
        if refused is not None:
            # The engine computes from there on.
            for content in wanted:
                if content.place >= refused:
                    self._storage.note(fetch.source[content], [content], ["declined"])
            stored[:, refused:] = False
            wanted = self._wanted(fetch, stored)
        if not wanted:
            return self._stop(fetch, "declined")
        fetch.wanted.extend(wanted)

    def _wanted(self, fetch: _Fetch, stored: Bools) -> list[Content]:
        """What to load of what is there, in the order of the prompt."""
        lacking = self._pool.content.missing_blocks(fetch.handle.prompt, stored)
        chosen = [fetch.chains[group][i] for group, places in enumerate(lacking.blocks) for i in places.tolist()]
        return sorted(chosen, key=lambda content: (content.place, content.group))

    def _attempt(self, fetch: _Fetch, wanted: list[Content]) -> int | None:
        """Choose for each store whether to load from it. Returns the first place that is not worth it, or None."""
        for number in dict.fromkeys(fetch.source[content] for content in wanted):
            of_store = [content for content in wanted if fetch.source[content] == number]
            before = sum(other.source[content] == number for other in self._fetches for content in other.wanted)
            spare = max(0.0, fetch.handle.engine_free - self._clock())
            attempt = self._storage.attempt(
                number, len({content.place for content in of_store}), len(of_store), before, spare
            )
            if attempt is not None and not attempt.load.blocks:
                return of_store[0].place
            if attempt is not None:
                fetch.attempts[number] = attempt
        return None

    # -- loading -------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Begin the loads for which there is room, and end what is over."""
        now_s = self._clock()
        self._look(list(islice(self._storage.unread, READ_AT_ONCE)))
        # Before others load: they have the room of those that were cancelled.
        for fetch in [fetch for fetch in self._fetches if fetch.handle.cancelled]:
            self._stop(fetch, "cancelled")
        for user in self._storage.users:
            if isinstance(user, Prefetch) and user.cancelled:
                self._storage.leave(user)
        for fetch in list(self._fetches):
            if any(attempt.lost(now_s) for attempt in fetch.attempts.values()):
                self._stop(fetch, "late")
            elif now_s >= fetch.handle.deadline:
                self._stop(fetch, "full" if fetch.wanted and not fetch.loadings else "late")
            else:
                while fetch.wanted and len(fetch.loadings) < CHUNKS_UNDER_WAY and self._load(fetch):
                    pass
                if fetch.handle.blocks and not fetch.loadings and not self._storage.free:
                    # It has its share. Others may be waiting for theirs.
                    self._stop(fetch, "full")

    def _load(self, fetch: _Fetch) -> bool:
        """Begin to load the next blocks. Returns False if there is no room now."""
        ahead = list(islice(fetch.wanted, READ_AT_ONCE))
        cached = set(compress(ahead, self._adapter.here(ahead)))
        while fetch.wanted and fetch.wanted[0] in cached:
            # Another prompt has brought it, or a request has computed it.
            content = fetch.wanted.popleft()
            self._storage.add_user_of_unread((content,), fetch.handle)
            attempt, now_s = fetch.attempts.get(fetch.source[content]), self._clock()
            if attempt is not None:
                attempt.note(1, now_s, now_s)
        if not fetch.wanted:
            if not fetch.loadings:
                self._stop(fetch, "loaded")
            return False
        number, deadline = fetch.source[fetch.wanted[0]], fetch.handle.deadline
        worker = self._storage.workers[number]
        share = worker.slots // (2 * CHUNKS_UNDER_WAY)
        most = min(max(1, CHUNK_BYTES // worker.block_bytes), max(1, share), self._storage.free)
        # What is on its way for another prompt is not loaded twice.
        ours = takewhile(
            lambda block: fetch.source[block] == number and block not in self._storage.coming and block not in cached,
            fetch.wanted,
        )
        chosen, attempt, done = list(islice(ours, most)), fetch.attempts.get(number), partial(self._loaded, fetch)
        try:
            loading = self._storage.load(number, chosen, deadline, attempt, done) if chosen else None
        except StoreBusy:
            return False
        if loading is None:
            return False
        for _ in loading.blocks:
            self._storage.add_user(fetch.wanted.popleft(), fetch.handle)
        fetch.loadings.append(loading)
        return True

    def _loaded(self, fetch: _Fetch, loading: Loading[Content]) -> None:
        """A store request is done. Blocks enter the pool in the order of the prompt."""
        while fetch in self._fetches and fetch.loadings and fetch.loadings[0].request.done:
            self._enter(fetch, fetch.loadings[0])

    def _enter(self, fetch: _Fetch, loading: Loading[Content]) -> None:
        """Publish the leading blocks of what a prompt waits for first."""
        if fetch.generation != self._generation():
            return self._stop(fetch, "cleared")
        leading, before = loading.request.leading, self._adapter.loaded_blocks
        try:
            entered = self._storage.enter(loading, np.arange(len(loading.blocks)) < leading)
        except DeviceError:
            leading, entered = 0, []
        fetch.handle.blocks += self._adapter.loaded_blocks - before
        self._look(entered)
        if len(entered) < leading:
            # The host is full of what must stay, such as the blocks before these.
            return self._stop(fetch, "full")
        if leading < len(loading.blocks):
            return self._stop(fetch, "late" if loading.request.codes[leading] == LATE else "failed")
        self._storage.end(fetch.loadings.popleft())
        if not fetch.wanted and not fetch.loadings:
            self._stop(fetch, "loaded")

    def _look(self, brought: Sequence[Content]) -> None:
        """Blocks that are on the device, or gone, do not wait for a request any more. Others are looked at again when
        the rest was."""
        tiers = zip(brought, self._adapter.here(brought, "host"), self._adapter.here(brought, "device"), strict=True)
        for content, host, device in tiers:
            arrival = self._storage.unread.get(content)
            if arrival is None:
                continue
            if host and not device and arrival.until > self._clock():
                self._storage.unread.move_to_end(content)
            else:
                self._storage.drop(content)

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
        in_flight = [block for loading in fetch.loadings for block in loading.blocks]
        for block in [*in_flight, *fetch.wanted] if why in ("late", "full") else ():
            self._storage.note(fetch.source[block], [block], [why])
        for loading in fetch.loadings:
            self._storage.end(loading)
        if fetch.search is not None and fetch.search.request is not None:
            fetch.search.request.cancel()
        for attempt in fetch.attempts.values():
            attempt.end(self._clock(), measured=why in OF_STORES)
        self._end(fetch.handle, why)

    def _end(self, handle: Prefetch, why: str) -> None:
        self.ended[why] += 1
        handle.end(why)

    def _generation(self) -> int:
        return int(self._pool.core.states.groups[0, H.generation])
