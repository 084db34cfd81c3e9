"""Handlers that raise before any instruction of a call: a worker and a storage manager leave no lock held, serve no
wrong bytes, and go on."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvpool import HostCache, HostTier
from kvpool.integrations.options import EngineOptions
from kvpool.integrations.staged import StagedBlocks
from kvpool.storage import OK, MemoryStore, StoreWorker
from kvpool.storage.host_storage_manager import HostStorageManager
from kvpool.storage.store_requests import StoreRequest
from tests.exact import At
from tests.hostcache.conftest import IDENTITY, keys
from tests.stores.lab import BLOCK_BYTES, Wrong, begin_load, done, memory, saved
from tests.stores.pool_lab import make_engine, make_manager, store, tokens

pytestmark = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other instructions look for signals there")
KEYS, NEW = keys("a", "b", "c"), keys("new", "newer")


def places(stride: int = 1, least: int = 5) -> Iterator[At]:
    """Handlers that raise before one instruction of a call after the other, as long as the call has so many."""
    first = int(np.random.default_rng().integers(stride))
    print("first place", first)
    for k in itertools.count(first + stride, stride):
        at = At(k)
        yield at
        if not at.reached:
            assert k > least
            return


STRIDES = pytest.mark.parametrize("stride", [48, pytest.param(3, marks=pytest.mark.exhaustive)])
"""A storage manager is made for each place."""


class Scene:
    """A storage manager whose store has KEYS, which the cache does not have."""

    def __init__(self) -> None:
        self.cache = HostCache(8, 4096, identity=IDENTITY)
        self.tier = HostTier.of(self.cache)
        self.manager = HostStorageManager(
            self.cache, self.tier, [MemoryStore(1 << 20)], retry_seconds=0.0, load_seconds=600.0
        )
        self.manager.publish(self.cache.reserve(KEYS).keys)
        assert self.manager.drain(600)
        self.cache.forget(KEYS)

    def until_done(self) -> None:
        """Let the threads of the store do what was asked of them."""
        end = time.monotonic() + 600
        while any(stats.queued_blocks or stats.running_calls for stats in self.manager.stats().stores):
            assert time.monotonic() < end
            time.sleep(0.0002)

    def check(self, where: str) -> None:
        assert self.manager.drain(600), f"something is under way for ever {where}"
        stats = self.cache.stats()
        assert (stats.pending, stats.leases) == (0, 0), f"held by nobody {where}"
        self.cache.verify()
        for _ in range(3):  # the first answer may be that they have not come
            self.manager.lookup(KEYS)
            assert self.manager.drain(600)
        assert self.manager.lookup(KEYS).tolist() == [self.cache.HERE] * 3, where

    def close(self) -> None:
        assert self.manager.close(600)
        self.cache.close()
        self.tier.close()


def search(scene: Scene) -> None:
    scene.manager.lookup(KEYS)


def load(scene: Scene) -> None:
    search(scene)
    poll(scene)
    scene.until_done()


def come(scene: Scene) -> None:
    load(scene)
    poll(scene)
    scene.until_done()


def save(scene: Scene) -> None:
    scene.manager.publish(scene.cache.reserve(NEW).keys)


def keep(scene: Scene) -> None:
    save(scene)
    poll(scene)
    scene.until_done()


def written(scene: Scene) -> None:
    scene.cache.reserve(NEW)


def poll(scene: Scene) -> None:
    scene.manager.poll()


def look(scene: Scene) -> None:
    scene.manager.lookup(KEYS, "me")


def forget(scene: Scene) -> None:
    scene.manager.forget(KEYS)


def publish(scene: Scene) -> None:
    scene.manager.publish(NEW)


def close(scene: Scene) -> None:
    scene.manager.close(600)


@pytest.mark.parametrize(
    ("before", "call"),
    [
        *((before, poll) for before in (search, load, come, save, keep)),
        (come, look),
        (load, forget),
        (written, publish),
        (load, close),
    ],
    ids=lambda function: function.__name__,
)
@STRIDES
def test_a_handler_that_raises_leaves_no_key_pending_and_no_lease(
    before: Callable[[Scene], None], call: Callable[[Scene], None], stride: int
) -> None:
    for at in places(stride):
        scene = Scene()
        before(scene)
        at.run(lambda scene=scene: call(scene))
        if call is publish and scene.cache.stats().pending:
            publish(scene)
        if call is not close:
            scene.check(at.where)
        scene.close()


@STRIDES
def test_a_second_exception_while_a_call_gives_up_what_the_first_has_left_changes_nothing(stride: int) -> None:
    for place, at in enumerate(places(stride)):
        scene = Scene()
        load(scene)
        At(40 + stride * place).run(scene.manager.poll)
        at.run(scene.manager.poll)
        scene.check(at.where)
        scene.close()


@pytest.mark.parametrize("before", [save, keep])
@STRIDES
def test_a_handler_that_raises_leaves_no_save_that_is_not_noted(before: Callable[[Scene], None], stride: int) -> None:
    for at in places(stride):
        scene = Scene()
        scene.manager.changes()
        before(scene)
        at.run(scene.manager.poll)
        assert scene.manager.drain(600)
        changes = scene.manager.changes()
        stored = {key for change in changes if change.stored for key in change.keys}
        assert before is save or stored == {*NEW}, at.where
        assert not any(scene.manager._adapter._runs), at.where
        scene.close()


def test_a_handler_that_raises_in_pin_leaves_no_lease_that_the_cache_does_not_list() -> None:
    scene = Scene()
    come(scene)
    assert scene.manager.drain(600)
    for at in places():
        at.run(lambda: scene.manager.pin(KEYS, owner="me"))
        assert len(scene.cache.leases) <= 1, at.where
        scene.cache.revoke("me")
    scene.check("")
    scene.close()


CALLS: dict[str, Callable[[StoreWorker, Any], Any]] = {
    "find": lambda queue, keys: queue.find(keys),
    "find_now": lambda queue, keys: queue.find_now(keys),
    "load": lambda queue, keys: begin_load(queue, keys, 10).wait(600),
    "save": lambda queue, keys: queue.save(keys, np.arange(2)),
    "forget": lambda queue, keys: queue.forget(queue.secret.derive_keys([b"not there"])),
    "cancel": lambda queue, keys: queue.find(keys, deadline=queue.now() + 600).cancel(),
    "release": lambda queue, keys: [queue.release(job) for job in queue.requests],
    "stats": lambda queue, keys: queue.stats(),
    "drain": lambda queue, keys: queue.drain(600),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_handler_that_raises_in_a_call_of_a_worker_leaves_nothing_that_waits(name: str) -> None:
    rows = np.arange(2, 4)
    with StoreWorker(MemoryStore(1 << 20), memory(), IDENTITY) as queue:
        keys = saved(queue, 2)
        for at in places():
            if name == "release":
                done(queue.load(keys, rows, hold=True))
            at.run(lambda: CALLS[name](queue, keys))
            assert queue.drain(600), at.where
            for job in queue.requests:
                assert job.held or job.wait(600), at.where
                queue.release(job)
            assert queue.stats().queued_blocks == queue.in_flight == 0, at.where
        assert (done(queue.load(keys, rows)).codes == OK).all()


@pytest.mark.parametrize("name", ["cancel", "save"])
def test_a_handler_that_raises_takes_no_callback_away_and_counts_no_block_that_waits(name: str) -> None:
    for at in places(3):
        store, called = Wrong(MemoryStore(1 << 20)), list[StoreRequest]()
        store.threads = 1
        with StoreWorker(store, memory(), IDENTITY) as queue:
            keys, gate = saved(queue, 2), store.hold("find")
            queue.find(keys)
            gate.wait()
            if name == "cancel":
                job = queue.find(keys, called.append)
                at.run(job.cancel)
                job.cancel()
            else:
                at.run(lambda queue=queue, keys=keys, called=called: queue.save(keys, np.arange(2), called.append))
            gate.open()
            assert queue.drain(600), at.where
            queue.poll()
            assert len(called) == 1 or name == "save" and not called, at.where
            assert not queue.stats().queued_blocks, at.where


@pytest.mark.parametrize("name", ["prefetch", "forget"])
def test_a_handler_that_raises_leaves_no_lock_for_which_the_thread_of_a_pools_storage_manager_waits(name: str) -> None:
    engine = make_engine()
    with engine.cache, make_manager(engine, store()) as manager:
        prompt = engine.cache.block_keys(tokens(9))
        for at in places(3):
            at.run(lambda: getattr(manager, name)(prompt))
            assert manager.drain(600), at.where


@pytest.mark.parametrize("kind", ["save", "load"])
def test_staged_blocks_have_their_own_bytes_after_a_handler_has_raised(kind: str) -> None:
    seconds = dict.fromkeys(("find_seconds", "load_seconds", "save_seconds"), 600.0)
    options, names = EngineOptions(staging_bytes=8 * BLOCK_BYTES, **seconds), [b"a", b"b"]

    def fill(place: int, row: Any) -> None:
        row[:] = 1 + place

    def check(place: int, row: Any) -> None:
        assert (row == 1 + place).all()

    for at in places(9):
        blocks = StagedBlocks(MemoryStore(1 << 20), BLOCK_BYTES, IDENTITY, options)
        call = blocks.save if kind == "save" else blocks.load
        assert all(blocks.save(names, fill))
        at.run(lambda call=call: call(names, fill if kind == "save" else check))
        assert blocks.save([b"c", b"d"], fill) and blocks.load(names, check) == [True, True], at.where
        rows = blocks.worker.take("load", 9).tolist()
        assert len({*rows}) == len(rows) >= 6, at.where
        blocks.close()
