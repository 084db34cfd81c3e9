"""Handlers that raise before any instruction of a call: a queue and a HostStorageManager lose nothing, hold nothing
that nobody has, and go on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool import HostCache, HostTier
from kvpool.storage import OK, MemoryStore, StoreWorker
from kvpool.storage.host_storage_manager import HostStorageManager
from tests.exact import At
from tests.hostcache.conftest import IDENTITY, keys
from tests.stores.lab import done, memory, saved

pytestmark = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other instructions look for signals there")
KEYS = keys("a", "b", "c")


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
    scene.manager.poll()
    scene.until_done()


def come(scene: Scene) -> None:
    load(scene)
    scene.manager.poll()
    scene.until_done()


def save(scene: Scene) -> None:
    scene.manager.publish(scene.cache.reserve(keys("new", "newer")).keys)


def keep(scene: Scene) -> None:
    save(scene)
    scene.manager.poll()
    scene.until_done()


# Every third place: a storage manager is made for each.
@pytest.mark.parametrize("before", [search, load, come, save, keep], ids=lambda before: before.__name__)
def test_a_handler_that_raises_in_poll_leaves_no_key_pending_and_no_lease(before: Callable[[Scene], None]) -> None:
    k, reached = int(np.random.default_rng().integers(3)), True
    print("first place", k)
    while reached:
        k += 3
        scene = Scene()
        before(scene)
        at = At(k)
        at.run(scene.manager.poll)
        reached = at.reached
        scene.check(at.where)
        scene.close()
    assert k > 20


def test_a_handler_that_raises_in_pin_leaves_no_lease() -> None:
    scene, k, reached = Scene(), 0, True
    come(scene)
    assert scene.manager.drain(600)
    while reached:
        k += 1
        at = At(k)
        raised = at.run(lambda: scene.manager.pin(KEYS, owner="me"))
        reached = at.reached
        assert len(scene.cache.leases) == (at.ended or raised is None), at.where
        scene.cache.revoke("me")
    scene.check("")
    scene.close()


def test_a_handler_that_raises_in_a_call_of_a_queue_keeps_no_thread_waiting() -> None:
    calls: dict[str, Callable[[StoreWorker, Any], Any]] = {
        "find": lambda queue, keys: queue.find(keys),
        "load": lambda queue, keys: queue.load(keys, np.arange(10, 12)).wait(600),
        "stats": lambda queue, keys: queue.stats(),
        "drain": lambda queue, keys: queue.drain(600),
    }
    for call in calls.values():
        with StoreWorker(MemoryStore(1 << 20), memory(), IDENTITY) as queue:
            keys, k, reached = saved(queue, 2), 0, True
            while reached:
                k += 1
                at = At(k)
                at.run(lambda queue=queue, keys=keys, call=call: call(queue, keys))
                reached = at.reached
                assert queue.drain(600), at.where
            assert (done(queue.load(keys, np.arange(2))).codes == OK).all()


def test_jobs_that_a_handler_has_kept_from_the_caller_are_reported_again() -> None:
    with StoreWorker(MemoryStore(1 << 20), memory(), IDENTITY) as queue:
        keys, k, reached = saved(queue, 1), 0, True
        while reached:
            k, reported = k + 1, list[Any]()
            job = done(queue.find(keys, reported.append))
            at = At(k)
            at.run(queue.poll)
            reached = at.reached
            queue.poll()
            assert reported == [job] and not queue.in_flight, at.where
            assert not queue.wait(0), at.where
