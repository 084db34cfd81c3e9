"""Forgetting: content that a caller names leaves the pool and every store, and no work under way brings it back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvpool.keepers.block_saves import Saver
from kvpool.keepers.feed import Feed
from kvpool.keepers.lanes import Lane, Namespace
from kvpool.keepers.ledger import Content, Ledger, Link
from kvpool.keepers.loading import Loader
from kvpool.pool.keys import BlockKeys
from kvpool.pool.manager import KVCacheManager
from kvpool.state.ring import REMOVED
from kvpool.stores.jobs import Job
from kvpool.stores.store import MODEL_BYTES, OK, TAG_BYTES


class Forgotten:
    """What became of ``Keeper.forget`` or ``Keeper.clear``. Thread-safe.

    ``blocks``: how many contents the pool has forgotten; None after ``clear``.

    A store that is down is told again until it has confirmed, as long as the keeper lives. Meanwhile the keeper finds,
    loads and saves nothing of it there. Nothing of this outlives the keeper: if it ends before a store has confirmed,
    the store may have the content, and so the next keeper must forget it again.
    """

    def __init__(self, blocks: int | None, jobs: Mapping[str, Job]) -> None:
        self.blocks, self._jobs = blocks, dict(jobs)

    @property
    def stores(self) -> dict[str, int | None]:
        """For each store how many blocks it has dropped, or None while it has not confirmed that all are gone."""
        return {name: job.dropped if _is_confirmed(job) else None for name, job in self._jobs.items()}

    @property
    def errors(self) -> dict[str, str]:
        """The last error of each store that has not confirmed and gave one."""
        return {name: job.error for name, job in self._jobs.items() if job.error and not _is_confirmed(job)}

    @property
    def done(self) -> bool:
        """Whether all stores have confirmed. What a disk has confirmed does not come back after a crash either."""
        return all(map(_is_confirmed, self._jobs.values()))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all stores have confirmed, at most ``timeout`` seconds, or until the keeper is closed. Returns
        whether they have."""
        end = None if timeout is None else time.monotonic() + timeout
        for job in self._jobs.values():
            job.wait(None if end is None else max(0.0, end - time.monotonic()))
        return self.done

    def __repr__(self) -> str:
        return f"Forgotten(blocks={self.blocks}, stores={self.stores})"


class Forgetter:
    """Drops content from a pool and its stores. The keeper's thread owns it, so no import, copy or find of the keeper's
    is half done meanwhile."""

    def __init__(
        self, pool: KVCacheManager, lanes: Sequence[Lane], ledger: Ledger, feed: Feed, loader: Loader, saver: Saver
    ) -> None:
        self._pool, self._lanes, self._ledger = pool, lanes, ledger
        self._feed, self._loader, self._saver = feed, loader, saver

    def prompt(self, prompt: BlockKeys) -> Forgotten:
        """Forget the full blocks of a prompt, and its stored tail."""
        links = self._ledger.links(prompt, len(prompt) // self._pool.tokens_per_block)
        return self._links(links, lambda: self._pool.forget(prompt))

    def keys(self, rows: npt.NDArray[np.int64]) -> Forgotten:
        """Forget contents by keys of the pool, int64[n, 2]. Raises ValueError for those that nobody knows."""
        names = [row.tobytes() for row in rows]
        links = self._ledger.named(names)
        unknown = [name.hex() for name, link in zip(names, links, strict=True) if link is None]
        if unknown:
            raise ValueError(
                f"prompt: the keeper does not know {len(unknown)} of {len(names)} keys, such as {unknown[0]}, so nor "
                "what the stores call them: accepted are keys of blocks that the pool has or had lately, or the prompt"
            )
        keys = rows.view(np.uint64).reshape(-1, 2)
        return self._links([link for link in links if link is not None], lambda: self._pool.forget(keys))

    def namespace(self, namespace: Namespace) -> Forgotten:
        """Forget all content of a namespace. Raises ValueError for a store that cannot."""
        self._check(TAG_BYTES, "drop a namespace")
        count = self._pool.forget(namespace=namespace)
        return self._drop(
            count,
            lambda content: content.link.name[:2] == namespace,
            lambda lane: lane.queue.clear(lane.tag(namespace)),
        )

    def everything(self, force: bool) -> Forgotten:
        """Reset the pool, and forget all that stores have of this model. Raises ValueError for a store that cannot, and
        PoolBusy."""
        self._check(MODEL_BYTES, "be cleared")
        self._pool.reset(force)
        self._loader.stop_all("reset")
        return self._drop(None, lambda content: True, lambda lane: lane.queue.clear())

    def _links(self, links: Sequence[Link], forget: Callable[[], int]) -> Forgotten:
        contents = [
            content
            for group in self._pool.groups
            if group.kind != "cross"
            for content in self._ledger.contents(links, group.index)
        ]
        for lane in self._lanes:
            lane.queue.check_forget(len(contents))
        named = {link.key for link in links}
        return self._drop(
            forget(),
            lambda content: content.key in named,
            lambda lane: lane.queue.forget(self._ledger.store_keys(contents, lane.index)),
        )

    def _check(self, size: int, what: str) -> None:
        """Raise unless all stores can drop blocks by so many bytes of their tags, now."""
        for lane in self._lanes:
            if lane.queue.clears < size:
                raise ValueError(
                    f"the store {lane.name!r} cannot {what}: accepted are stores that can, see Store.clears"
                )
            lane.queue.check_forget(1)

    def _drop(self, blocks: int | None, concerns: Callable[[Content], bool], begin: Callable[[Lane], Job]) -> Forgotten:
        """What is left to do when the pool has forgotten these contents."""
        self._loader.forget(concerns)
        # From here on the queues give none of it to anybody, and save none of it.
        jobs = {lane.name: begin(lane) for lane in self._lanes}
        for lane in self._lanes:
            # What had ended before: it is noted now, and then taken back.
            lane.settle()
        self._saver.forget(concerns)
        known = [content for content in self._ledger.all() if content.saved and concerns(content)]
        for lane in self._lanes:
            gone = [content for content in known if self._ledger.note(content, lane.index, False)]
            self._feed.tell(REMOVED, lane.index, gone)
        return Forgotten(blocks, jobs)


def _is_confirmed(job: Job) -> bool:
    return bool((job.codes == OK).all())
