"""Saving: which contents of a pool are saved, and when; and their way from the host tier to the stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpool.errors import BlockNotFound, KVPoolError, PoolClosed, StoreBusy
from kvpool.keepers.feed import Feed
from kvpool.keepers.lanes import Lane, Namespace
from kvpool.keepers.ledger import ON_HOST, Content, Ledger
from kvpool.pool.events import Name
from kvpool.pool.leases import Lease
from kvpool.pool.manager import KVCacheManager
from kvpool.state import saving
from kvpool.state.ring import STORED
from kvpool.stores.jobs import Job
from kvpool.stores.queue import NO_LIMIT
from kvpool.stores.store import CODES, OK, REFUSED, Bytes

CHUNK_BYTES = 4 << 20
OWNER = "kvpool keeper"
"""of the leases under which blocks are copied"""


class Staging:
    """Copies blocks of the host tier into rows of a lane. The keeper's thread owns it.

    ``victims``: whether what is copied is what the host evicts next.
    """

    def __init__(self, pool: KVCacheManager, victims: bool) -> None:
        self._pool, self._victims = pool, victims
        # Views keep this memory alive, also if the pool is closed meanwhile.
        self._parts = [
            [rows.reshape(len(rows), -1).view(np.uint8) if len(rows) else None for rows in parts]
            for parts in pool.host_pools
        ]

    def copy(self, contents: Sequence[Content], memory: Bytes, rows: Sequence[int]) -> list[bool]:
        """Copy contents of one group of layers into rows. Returns which of them were there.

        What is only on the device is copied to the host first. There it is a redundant copy, the first to be evicted.
        """
        group = self._pool.groups[contents[0].group]
        keys = np.frombuffer(b"".join(one.key for one in contents), np.uint64).reshape(-1, 2)
        here = self._pool.cached_blocks(keys, tier="host")[group.index]
        if not here.all():
            self._pool.offload(keys[~here])
        copied = [False] * len(contents)
        for places, lease in self._leases(keys, group.index):
            try:
                for place, block in zip(places, (lease.blocks - group.first_host_block).tolist(), strict=True):
                    self._copy(group.index, block, memory[rows[place]])
                    copied[place] = True
            finally:
                if not _ended(lease):
                    # Somebody has revoked it: the rows may have other bytes.
                    for place in places:
                        copied[place] = False
        # A lease that ends makes its blocks the last victims. But to be copied for a store is no use of them.
        core, own = self._pool.core, keys.view(np.int64)
        core.decide(None, saving.evict_first, group.index, own, self._victims, core.now())
        return copied

    def _leases(self, keys: npt.NDArray[np.uint64], group: int) -> Iterator[tuple[Sequence[int], Lease]]:
        """Leases of host blocks, with the places of their keys."""
        try:
            yield range(len(keys)), self._pool.pin(keys, owner=OWNER, tier="host", group=group)
            return
        except BlockNotFound:
            pass
        for place, key in enumerate(keys):
            lease = self._pool.find_and_pin_host(key, owner=OWNER, group=group)
            if lease is not None:
                yield [place], lease

    def _copy(self, group: int, block: int, row: npt.NDArray[np.uint8]) -> None:
        at = 0
        for part in self._parts[group]:
            assert part is not None
            row[at : at + part.shape[1]] = part[block]
            at += part.shape[1]
        # What the row had before belongs to somebody else.
        row[at:] = 0


def _ended(lease: Lease) -> bool:
    """Close a lease. Returns whether it was open until now."""
    try:
        lease.close()
    except KVPoolError:
        return False
    return True


def uses(pool: KVCacheManager, group: int, contents: Sequence[Content]) -> list[int]:
    """How often contents of one group of layers were used, 0 for those that the pool does not have."""
    keys = np.frombuffer(b"".join(one.key for one in contents), np.int64).reshape(-1, 2)
    out = np.empty(len(keys), np.int64)
    with pool.core.lock:
        pool.core.check_open()
        saving.uses(pool.core.states.heads, group, keys, out)
    return out.tolist()


class Saver:
    """The saves of a keeper. Contents wait in a line for each store, up to ``queued_blocks``. The keeper's thread owns
    it.

    ``quotas``: bytes by namespace (salt, adapter_id). ``victims``: whether what is saved is what the host evicts next.
    ``deadline``: seconds for each job.
    """

    def __init__(
        self, pool: KVCacheManager, lanes: Sequence[Lane], ledger: Ledger, feed: Feed, quotas: Mapping[Namespace, int],
        victims: bool, queued_blocks: int, deadline: float, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._pool, self._lanes, self._ledger, self._feed, self._clock = pool, lanes, ledger, feed, clock
        self._quotas, self._most, self._deadline = quotas, queued_blocks, deadline
        self._staging = Staging(pool, victims)
        self._lines: list[dict[tuple[int, bytes], Content]] = [{} for _ in lanes]
        self.saved_blocks = self.saved_bytes = 0

    @property
    def waiting(self) -> int:
        """Blocks that wait to be saved, in all stores."""
        return sum(map(len, self._lines))

    def stop(self) -> None:
        """Give up what waits."""
        for lane, line in zip(self._lanes, self._lines, strict=True):
            self._give_up(lane, list(line.values()), "cancelled")
            line.clear()

    def want(self, content: Content) -> None:
        """Save a content in every store that is not known to have it."""
        for lane, line in zip(self._lanes, self._lines, strict=True):
            bit = 1 << lane.index
            if (content.saved | content.saving) & bit:
                continue
            if self._quotas.get(_namespace(content.link.name), 1) < 1:
                lane.drop("quota")
            elif len(line) >= self._most:
                lane.drop("queue_full")
            else:
                content.saving |= bit
                line[content.group, content.key] = content

    def gone(self, content: Content) -> None:
        """The pool does not have a content any more. What waits to be copied is given up."""
        for lane, line in zip(self._lanes, self._lines, strict=True):
            if line.pop((content.group, content.key), None) is not None:
                self._give_up(lane, [content], "evicted")

    def forget(self, concerns: Callable[[Content], bool]) -> None:
        """Give up what waits of these contents."""
        for lane, line in zip(self._lanes, self._lines, strict=True):
            gone = [content for content in line.values() if concerns(content)]
            for content in gone:
                del line[content.group, content.key]
            self._give_up(lane, gone, "forgotten")

    def missed(self, content: Content) -> None:
        """A content is gone that should have been saved, and was not asked for in time."""
        for lane in self._lanes:
            if not (content.saved | content.saving) & 1 << lane.index:
                lane.drop("evicted")

    def turn(self, blocks: int) -> bool:
        """Copy and save what waits, for each store at most about ``blocks``. Returns whether there is more that could
        be saved now."""
        more = False
        for lane, line in zip(self._lanes, self._lines, strict=True):
            left = blocks
            while line and lane.free_for_saves and left > 0:
                left -= self._save(lane, line)
            more = more or bool(line and lane.free_for_saves)
        return more

    def _save(self, lane: Lane, line: dict[tuple[int, bytes], Content]) -> int:
        """Save the first contents of a line that are alike. Returns how many left it."""
        if not lane.health.usable(writes=True):
            count = len(line)
            self._give_up(lane, list(line.values()), "suspended")
            line.clear()
            return count
        chosen = self._first(lane, line)
        rows = lane.take(len(chosen))
        try:
            copied = self._staging.copy(chosen, lane.memory, rows.tolist())
        except PoolClosed:
            raise
        except KVPoolError:
            # The device has failed, or somebody has revoked the lease.
            copied = [False] * len(chosen)
        there = np.array(copied, np.bool_)
        lane.give_back(rows[~there])
        self._give_up(lane, [one for one, came in zip(chosen, copied, strict=True) if not came], "evicted")
        good = [one for one, came in zip(chosen, copied, strict=True) if came]
        if good:
            self._begin(lane, good, rows[there])
        return len(chosen)

    def _first(self, lane: Lane, line: dict[tuple[int, bytes], Content]) -> list[Content]:
        """Take the first contents of a line, of one namespace and one group of layers."""
        most = max(1, min(lane.free_for_saves, CHUNK_BYTES // lane.queue.block_bytes))
        chosen: list[Content] = []
        for content in line.values():
            alike = not chosen or (content.link.namespace, content.group) == (chosen[0].link.namespace, chosen[0].group)
            if not alike or len(chosen) == most:
                break
            chosen.append(content)
        for content in chosen:
            del line[content.group, content.key]
        return chosen

    def _begin(self, lane: Lane, contents: list[Content], rows: npt.NDArray[np.int64]) -> None:
        keys, namespace = self._ledger.store_keys(contents, lane.index), _namespace(contents[0].link.name)
        nbytes = self._quotas.get(namespace)
        limit = NO_LIMIT if nbytes is None else nbytes // lane.queue.block_bytes
        try:
            job = lane.queue.save(keys, rows, tag=lane.tag(namespace), limit=limit,
                                  deadline=self._clock() + self._deadline)  # fmt: skip
        except StoreBusy:
            lane.give_back(rows)
            return self._give_up(lane, contents, "queue_full")
        lane.follow(job, partial(self._saved, lane, contents))

    def _saved(self, lane: Lane, contents: list[Content], job: Job) -> None:
        news: list[Content] = []
        for content, code in zip(contents, job.codes.tolist(), strict=True):
            content.saving &= ~(1 << lane.index)
            if code == OK:
                self.saved_blocks += 1
                self.saved_bytes += self._pool.groups[content.group].block_bytes
                if self._ledger.note(content, lane.index, True):
                    news.append(content)
            else:
                limited = code == REFUSED and _namespace(content.link.name) in self._quotas
                lane.drop("quota" if limited else CODES[code])
        self._feed.tell(STORED, lane.index, news)

    def _give_up(self, lane: Lane, contents: Sequence[Content], reason: str) -> None:
        for content in contents:
            content.saving &= ~(1 << lane.index)
        if contents:
            lane.drop(reason, len(contents))


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
        self._order: list[list[dict[bytes, Content]]] = [[{} for _ in range(101)] for _ in host_blocks]
        self._count = [0] * len(host_blocks)
        self._due = [False] * len(host_blocks)

    def changed(self, content: Content, before: int, valued: int) -> None:
        g, key = content.group, content.key
        if before == ON_HOST and self._order[g][valued].pop(key, None) is not None:
            if not content.on:
                self._saver.missed(content)
                self._room[g] = min(self._room[g], self._count[g])
            self._count[g] -= 1
        if content.on == ON_HOST:
            self._order[g][content.priority][key] = content
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
            for content in order.values():
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
        self._watched: list[dict[bytes, Content]] = [{} for _ in pool.groups]

    def changed(self, content: Content, before: int, valued: int) -> None:
        if content.on:
            self._watched[content.group].setdefault(content.key, content)
        else:
            self._watched[content.group].pop(content.key, None)

    def turn(self) -> None:
        for group, watched in enumerate(self._watched):
            asked = list(islice(watched.values(), self.ASKED))
            for content, count in zip(asked, uses(self._pool, group, asked) if asked else (), strict=True):
                # What was not used again is asked about last.
                del watched[content.key]
                if count > 1:
                    self._saver.want(content)
                elif content.on:
                    watched[content.key] = content


def _namespace(name: Name) -> Namespace:
    return name.salt, name.adapter_id
