"""Forgetting: content that a caller names leaves the pool and every store, and no work under way brings it back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvpool.keepers.block_saves import Saver
from kvpool.keepers.bridge_events import BridgeEvents
from kvpool.keepers.known_content import Content, KnownContent, Namespace
from kvpool.keepers.loading import Loader
from kvpool.keepers.staged_store import StagedStore
from kvpool.pool.keys import BlockKeys, key_rows
from kvpool.pool.manager import KVCacheManager
from kvpool.state.ring import REMOVED
from kvpool.stores.jobs import Job
from kvpool.stores.seals import BlockNames
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
        self, pool: KVCacheManager, stores: Sequence[StagedStore], known: KnownContent, told: BridgeEvents,
        loader: Loader, saver: Saver,
    ) -> None:  # fmt: skip
        self._pool, self._stores, self._known, self._told = pool, stores, known, told
        self._loader, self._saver = loader, saver

    def blocks(self, prompt: BlockKeys | npt.NDArray[np.int64]) -> Forgotten:
        """Forget the full blocks of a prompt, and its stored tail; or contents by keys of the pool, int64[n, 2]."""
        contents = self._known.of_keys(key_rows(prompt) if isinstance(prompt, BlockKeys) else prompt)
        for store in self._stores:
            store.client.queue.check_forget(len(contents))
        named, names = set(contents), BlockNames(map(self._known.name, contents))
        count = self._pool.forget(prompt if isinstance(prompt, BlockKeys) else prompt.view(np.uint64))
        return self._drop(count, named.__contains__, lambda store: store.client.queue.forget(names))

    def namespace(self, namespace: Namespace) -> Forgotten:
        """Forget all content of a namespace. Raises ValueError for a store that cannot."""
        self._check(TAG_BYTES, "drop a namespace")
        count = self._pool.forget(namespace=namespace)
        return self._drop(
            count,
            lambda content: content.whose == namespace,
            lambda store: store.client.queue.clear(store.tag(namespace)),
        )

    def everything(self, force: bool) -> Forgotten:
        """Reset the pool, and forget all that stores have of this model. Raises ValueError for a store that cannot, and
        PoolBusy."""
        self._check(MODEL_BYTES, "be cleared")
        self._pool.reset(force)
        self._loader.stop_all("reset")
        return self._drop(None, lambda content: True, lambda store: store.client.queue.clear())

    def _check(self, size: int, what: str) -> None:
        """Raise unless all stores can drop blocks by so many bytes of their tags, now."""
        for store in self._stores:
            if store.client.queue.clears < size:
                raise ValueError(
                    f"the store {store.name!r} cannot {what}: accepted are stores that can, see Store.clears"
                )
            store.client.queue.check_forget(1)

    def _drop(
        self, blocks: int | None, concerns: Callable[[Content], bool], begin: Callable[[StagedStore], Job]
    ) -> Forgotten:
        """What is left to do when the pool has forgotten these contents."""
        self._loader.stop_all("forgotten", concerns)
        # From here on the queues give none of it to anybody, and save none of it.
        jobs = {store.name: begin(store) for store in self._stores}
        for store in self._stores:
            # What had ended before: it is noted now, and then taken back.
            store.client.poll()
        self._saver.give_up("forgotten", concerns)
        known = [content for content in self._known.all() if content.saved and concerns(content)]
        for store in self._stores:
            gone = [content for content in known if self._known.note(content, store.index, False)]
            self._told.tell(REMOVED, store.index, gone)
        return Forgotten(blocks, jobs)


def _is_confirmed(job: Job) -> bool:
    return bool((job.codes == OK).all())
