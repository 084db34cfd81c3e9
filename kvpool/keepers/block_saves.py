"""Saving: which contents of a pool are saved, and when; and their way from the host tier to the stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from typing import Protocol

import numpy as np

from kvpool.errors import StoreBusy
from kvpool.keepers.bridge_events import BridgeEvents
from kvpool.keepers.known_content import ON_HOST, Content, KnownContent, Namespace
from kvpool.keepers.staged_store import PoolCopies, StagedStore, uses
from kvpool.pool.manager import KVCacheManager
from kvpool.state.ring import STORED
from kvpool.stores.jobs import SAVE, Job
from kvpool.stores.queue import NO_LIMIT
from kvpool.stores.seals import BlockNames
from kvpool.stores.store import CODES, OK, REFUSED, Rows

CHUNK_BYTES = 4 << 20


@dataclass
class SaveOptions:
    """``quotas``: bytes by namespace. ``victims``: whether what is saved is what the host evicts next.
    ``queued_blocks``: bound for what waits, for each store. ``deadline``: seconds for each job."""

    quotas: Mapping[Namespace, int]
    victims: bool
    queued_blocks: int
    deadline: float


class Saver:
    """The saves of a keeper. Contents wait in a line for each store. The keeper's thread owns it."""

    def __init__(
        self, pool: KVCacheManager, stores: Sequence[StagedStore], known: KnownContent, told: BridgeEvents,
        options: SaveOptions, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._pool, self._known, self._told, self._options, self._clock = pool, known, told, options, clock
        self._copies = PoolCopies(pool, options.victims)
        self._lines: dict[StagedStore, dict[Content, None]] = {store: {} for store in stores}
        self.saved_blocks = self.saved_bytes = 0

    @property
    def waiting(self) -> int:
        """Blocks that wait to be saved, in all stores."""
        return sum(map(len, self._lines.values()))

    def want(self, content: Content) -> None:
        """Save a content in every store that is not known to have it."""
        for store, line in self._lines.items():
            bit = 1 << store.index
            if (content.saved | content.saving) & bit:
                continue
            if self._options.quotas.get(content.whose, 1) < 1:
                store.dropped["quota"] += 1
            elif len(line) >= self._options.queued_blocks:
                store.dropped["queue_full"] += 1
            else:
                content.saving |= bit
                line[content] = None

    def missed(self, content: Content) -> None:
        """A content is gone that should have been saved, and was not asked for in time."""
        for store in self._lines:
            if not (content.saved | content.saving) & 1 << store.index:
                store.dropped["evicted"] += 1

    def gone(self, content: Content) -> None:
        """The pool does not have a content any more. What waits to be copied is given up."""
        for store, line in self._lines.items():
            if content in line:
                self._give_up(store, [content], "evicted")

    def give_up(self, reason: str, concerns: Callable[[Content], bool] = lambda _: True) -> None:
        """Give up what waits of these contents."""
        for store, line in self._lines.items():
            self._give_up(store, [content for content in line if concerns(content)], reason)

    def turn(self, blocks: int) -> bool:
        """Copy and save what waits, for each store at most about ``blocks``. Returns whether there is more that could
        be saved now."""
        for store, line in self._lines.items():
            left = blocks
            while line and store.client.free(SAVE) and left > 0:
                left -= self._save(store, line)
        return any(line and store.client.free(SAVE) for store, line in self._lines.items())

    def _save(self, store: StagedStore, line: dict[Content, None]) -> int:
        """Save the first contents of a line that are alike: of one namespace and one group of layers. Returns how many
        left it."""
        if not store.client.usable(SAVE):
            count = len(line)
            self._give_up(store, list(line), "suspended")
            return count
        first = next(iter(line))
        alike = takewhile(lambda one: (one.namespace, one.group) == (first.namespace, first.group), line)
        rows = store.client.take(SAVE, max(1, CHUNK_BYTES // store.client.queue.block_bytes))
        chosen = list(islice(alike, len(rows)))
        for content in chosen:
            del line[content]
        there = np.zeros(len(rows), np.bool_)
        there[: len(chosen)] = self._copies.copy(chosen, store.client.memory, rows.tolist())
        store.client.give_back(rows[~there])
        self._give_up(store, [one for one, came in zip(chosen, there, strict=False) if not came], "evicted")
        good = [one for one, came in zip(chosen, there, strict=False) if came]
        if good:
            self._begin(store, good, rows[there])
        return len(chosen)

    def _begin(self, store: StagedStore, contents: list[Content], rows: Rows) -> None:
        whose = contents[0].whose
        nbytes = self._options.quotas.get(whose)
        limit = NO_LIMIT if nbytes is None else nbytes // store.client.queue.block_bytes
        names = BlockNames(map(self._known.name, contents), contexts=[content.context for content in contents])
        deadline = self._clock() + self._options.deadline
        done = partial(self._saved, store, contents)
        try:
            store.client.save(names, rows, done, tag=store.tag(whose), limit=limit, deadline=deadline)
        except StoreBusy:
            store.client.give_back(rows)
            self._give_up(store, contents, "queue_full")

    def _saved(self, store: StagedStore, contents: list[Content], job: Job) -> None:
        kept = (job.codes == OK).tolist()
        for content, code in zip(contents, job.codes.tolist(), strict=True):
            content.saving &= ~(1 << store.index)
            if code == OK:
                self.saved_blocks += 1
                self.saved_bytes += self._pool.groups[content.group].block_bytes
            else:
                limited = code == REFUSED and content.whose in self._options.quotas
                store.dropped["quota" if limited else CODES[code]] += 1
        news = [one for one, ok in zip(contents, kept, strict=True) if ok and self._known.note(one, store.index, True)]
        self._told.tell(STORED, store.index, news)

    def _give_up(self, store: StagedStore, contents: Sequence[Content], reason: str) -> None:
        for content in contents:
            content.saving &= ~(1 << store.index)
            self._lines[store].pop(content, None)
        if contents:
            store.dropped[reason] += len(contents)


class Rule(Protocol):
    """Decides which contents are saved, and when."""

    def changed(self, content: Content, before: int, valued: int) -> None:
        """A content is on other tiers than ``before``, or its priority was ``valued``."""

    def turn(self) -> None:
        """Ask the saver for what is due now."""


class OnCommit:
    """Saves each content as soon as the pool has it."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver

    def changed(self, content: Content, before: int, valued: int) -> None:
        if not before and content.on:
            self._saver.want(content)

    def turn(self) -> None:
        """Nothing is due later."""


class OnEviction:
    """Saves each content before the host evicts it.

    The events tell what is only on the host, and in which order it came there: this is the order in which the host
    evicts, the lowest priority first. What is among the next victims of a full host is saved: the next quarter of its
    blocks, or the next ``least``, at most half. Where content is evicted earlier, since others hold host blocks, the
    host counts as full that early.
    """

    def __init__(self, saver: Saver, host_blocks: Sequence[int], least: int) -> None:
        self._saver = saver
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
                self._saver.missed(content)
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
                self._save_next(g)

    def _save_next(self, g: int) -> None:
        excess = self._count[g] - (self._room[g] - self._margins[g])
        for order in self._order[g]:
            for content in order:
                if excess <= 0:
                    return
                excess -= 1
                self._saver.want(content)


class OnReuse:
    """Saves each content when it has been used twice.

    The pool counts uses. It is asked about so many contents in a turn, one after the other, so that nobody waits long
    for its lock.
    """

    ASKED = 256

    def __init__(self, pool: KVCacheManager, saver: Saver) -> None:
        self._pool, self._saver = pool, saver
        self._watched: list[dict[Content, None]] = [{} for _ in pool.groups]

    def changed(self, content: Content, before: int, valued: int) -> None:
        if content.on:
            self._watched[content.group].setdefault(content)
        else:
            self._watched[content.group].pop(content, None)

    def turn(self) -> None:
        for group, watched in enumerate(self._watched):
            asked = list(islice(watched, self.ASKED))
            for content, count in zip(asked, uses(self._pool, group, asked) if asked else (), strict=True):
                # What was not used again is asked about last.
                del watched[content]
                if count > 1:
                    self._saver.want(content)
                elif content.on:
                    watched[content] = None
