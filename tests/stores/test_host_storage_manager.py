"""A storage manager loads blocks from stores into a host cache, and saves them: in time, within its bounds, none wrong,
whatever the stores do."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from kvpool import HostCache, HostTier, OutOfBlocks, PoolClosed
from kvpool.pool import Missed
from kvpool.storage import MemoryStore
from kvpool.storage.host_storage_manager import HostStorageManager
from tests.stores.host_lab import ABSENT, HERE, PENDING, Engine, Make
from tests.stores.lab import BLOCK_BYTES, IDENTITY, OTHER, Gate, Wrong, content, fail, names

# -- what it is for --------------------------------------------------------------------------------------


def test_the_identity_of_the_stores_can_outlive_the_caches(make: Make, store: Wrong) -> None:
    """The cache's may name the engine that runs."""
    make().saved(4)
    cache = HostCache(8, BLOCK_BYTES, identity=OTHER)
    with HostTier.of(cache) as tier, HostStorageManager(cache, tier, [store], identity=IDENTITY) as manager:
        assert manager.find(b"block 0") == PENDING and manager.drain(600)
        assert manager.find(b"block 0") == HERE


def test_why_stores_have_not_brought_a_key_is_said(make: Make, store: Wrong) -> None:
    engine = make(blocks=8)
    engine.saved(2)
    engine.write(8, first=100)
    engine.drain()
    assert engine.ask(3) == [HERE, HERE, ABSENT]
    assert engine.manager.explain(b"block 2", 16) == Missed(0, 16, "unknown", trouble=(("stores", "absent"),))
    engine.manager.forget(names(1))
    assert engine.manager.explain(b"block 0", 16).trouble == (("stores", "forgotten"),)
    store.before["load"] = fail
    engine.cache.forget(names(2))
    engine.now += 100
    assert engine.ask(2) == [ABSENT, ABSENT]
    assert engine.manager.explain(b"block 1", 16).trouble == (("stores", "failed"),)


def test_a_block_that_the_engine_writes_itself_is_not_loaded_over(make: Make, store: Wrong) -> None:
    engine, gate = make(), Gate()
    engine.saved(1)
    store.before["find"] = gate
    assert engine.manager.find(b"block 0") == PENDING
    engine.until(gate.reached.is_set)
    taken = engine.cache.reserve([b"block 0"])
    gate.open()
    engine.drain()
    assert engine.stats.missed == {"taken": 1} and "load" not in store.calls
    engine.tier.blocks[taken.blocks[0]] = content(0)
    engine.manager.publish(taken.keys)
    engine.read(1)


# -- stores that are late, dead, lying or full -----------------------------------------------------------


def test_what_has_come_before_the_deadline_is_used(make: Make) -> None:
    """A load of two calls, of which one hangs."""
    store, gate, count = Wrong(MemoryStore(2000 * BLOCK_BYTES)), Gate(), 1100
    engine, hangs = make(store, blocks=4096), iter([gate])
    engine.saved(count)
    store.before["load"] = lambda: next(hangs, lambda: None)()
    engine.manager.lookup(names(count))
    engine.until(lambda: store.calls.count("load") == 2)
    engine.until(lambda: engine.stats.stores[0].running_calls == 1)
    engine.later(3)
    engine.until(lambda: PENDING not in engine.manager.lookup(names(count)))
    here = (engine.manager.lookup(names(count)) == HERE).tolist()
    assert sorted([here[0], here[-1]]) == [False, True] and sum(here) in (1024, count - 1024)
    assert engine.stats.hung == count - sum(here)
    gate.open()
    engine.drain()
    assert engine.cache.stats().pending == 0
    engine.read(sum(here), first=0 if here[0] else 1024)


def test_a_store_whose_find_hangs_leaves_time_to_those_after_it(make: Make, store: Wrong) -> None:
    near = Wrong(MemoryStore(256 * BLOCK_BYTES))
    engine = make(near, store, load_seconds=2.0)
    engine.saved(1)
    gate = near.hold("find")
    engine.held(gate, 1)
    engine.later(1.1)
    engine.until(lambda: engine.look(1) == [HERE])
    engine.read(1)
    gate.open()


@pytest.mark.parametrize("retry", [0.0, 1.0])
def test_a_reader_that_looks_late_learns_that_a_key_is_absent(make: Make, retry: float) -> None:
    """Steps of an engine may last for longer than an answer counts: it would ask for ever."""
    engine = make(retry_seconds=retry)
    assert engine.look(3) == [PENDING] * 3
    engine.until(lambda: not engine.stats.searching)
    engine.now += 3600.0
    assert engine.manager.find(names(1)[0]) == ABSENT
    engine.now += retry + 1.0
    assert engine.look(3) == [PENDING] * 3, "the answer was read, and is old"


def test_a_store_that_was_given_no_time_is_not_blamed(make: Make, store: Wrong) -> None:
    """Nobody has polled until shortly before the deadline."""
    engine, gate = make(load_seconds=2.0, retry_seconds=1000.0), store.hold("find")
    for key in names(4):
        engine.manager.find(key)
        engine.now += 1.95
        engine.manager.poll()
    engine.later(0.5)
    engine.until(lambda: engine.look(4) == [ABSENT] * 4)
    assert engine.stats.missed == {"late": 4} and engine.stats.suspended == ()
    gate.open()


def test_a_call_that_hangs_is_reported_for_either_store(make: Make, store: Wrong) -> None:
    engine, gate = make(store, MemoryStore(256 * BLOCK_BYTES)), store.hold("save")
    engine.write(2)
    engine.until(gate.reached.is_set)
    assert not engine.manager.close(0.05)
    gate.open()


# -- bounds ----------------------------------------------------------------------------------------------


def test_a_block_of_a_save_that_was_given_up_stays_until_the_call_returns(make: Make, store: Wrong) -> None:
    """Its bytes are still read."""
    engine, gate = make(blocks=4, save_share=1.0, save_seconds=0.1), store.hold("save")
    engine.write(3)
    engine.until(gate.reached.is_set)
    engine.later(61)
    engine.until(lambda: engine.stats.unsaved.get("late") == 3)
    assert engine.cache.stats().pinned == 3
    with pytest.raises(OutOfBlocks):
        engine.cache.reserve(names(2, 50))
    gate.open()
    engine.drain()
    assert engine.cache.stats().pinned == 0


def test_what_is_published_and_never_polled_is_bounded(make: Make) -> None:
    engine = make(blocks=16)
    for first in range(0, 40, 4):
        engine.write(4, first)
    stats = engine.stats
    assert stats.waiting_blocks == 16 and stats.unsaved == {"crowded": 24}


def test_small_caches_lend_stores_no_more_than_their_share(make: Make) -> None:
    stores = [Wrong(MemoryStore(256 * BLOCK_BYTES)) for _ in range(2)]
    gates = [Gate(), Gate()]
    for slow, gate in zip(stores, gates, strict=True):
        slow.before["save"] = gate
    engine = make(*stores, blocks=16, save_share=0.25)
    engine.write(16)
    engine.manager.poll()
    engine.until(lambda: all(gate.reached.is_set() for gate in gates))
    assert engine.stats.saving == 4
    for gate in gates:
        gate.open()
    engine.drain()
    assert engine.stats.saved_blocks == 32


# -- arguments, closing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save": "always"}, "save: expected"),
        ({"load_share": 0.0}, "load_share: expected"),
        ({"save_share": 1.5}, "save_share: expected"),
        ({"load_seconds": -1.0}, "load_seconds: expected"),
        ({"retry_seconds": float("nan")}, "retry_seconds: expected"),
        ({"spare": 0.5}, "spare: expected a function"),
        ({"quota": -1}, "quota: expected"),
        ({"policies": []}, "policies: expected one for each of 1 stores, got 0"),
    ],
)
def test_bad_options_are_named(store: Wrong, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Engine(store, **options)
    assert "open" not in store.calls


def test_the_memory_of_another_cache_is_refused(store: Wrong) -> None:
    with HostCache(4, BLOCK_BYTES, identity=IDENTITY) as cache, HostCache(4, BLOCK_BYTES, identity=OTHER) as other:
        with HostTier.of(other) as tier, pytest.raises(ValueError, match="tier: expected"):
            HostStorageManager(cache, tier, [store])
        with HostTier.of(cache) as tier, pytest.raises(ValueError, match="stores: .*"):
            HostStorageManager(cache, tier, [])


def test_closing_while_a_load_hangs_says_so_and_keeps_its_blocks(make: Make, store: Wrong) -> None:
    engine, gate = make(), Gate()
    engine.saved(3)
    store.before["load"] = gate
    engine.held(gate, 3)
    assert not engine.manager.close(0.05)
    assert engine.cache.stats().pending == 3
    with pytest.raises(PoolClosed):
        engine.manager.poll()
    gate.open()
    assert engine.manager.close(600)
    assert engine.cache.stats().pending == 0
    assert engine.manager.find(b"block 0") == ABSENT


# -- everything at once ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "save"), [(1, "commit"), (2, "reuse"), (3, "evict")])
def test_whatever_happens_no_wrong_byte_is_read(make: Make, store: Wrong, seed: int, save: str) -> None:
    random = np.random.default_rng(seed)
    print(f"seed {seed}")

    def maybe(answer: Any) -> Any:
        if random.integers(8) == 0:
            raise OSError(5, "I/O error")
        return answer

    def macs_of_others(answer: Any) -> Any:
        return answer[0], np.roll(answer[1], int(random.integers(4) == 0), 0)

    engine = make(blocks=12, save=save, load_seconds=0.02, retry_seconds=0.0, clock=time.monotonic)
    store.after.update({"find": maybe, "save": maybe, "load": macs_of_others})
    for _ in range(400):
        first, count = int(random.integers(40)), int(random.integers(1, 5))
        keys = names(count, first)
        verb = random.integers(6)
        if verb == 0:
            try:
                engine.write(count, first)
            except OutOfBlocks:
                pass
        elif verb == 1:
            engine.cache.forget(keys)
        elif verb == 2 and (engine.manager.lookup(keys) == HERE).all():
            engine.read(count, first)
        elif verb == 3 and random.integers(20) == 0:
            engine.manager.clear()
        else:
            engine.manager.lookup(keys)
        engine.manager.poll()
        if random.integers(3) == 0:
            time.sleep(0.001)
    engine.drain()
    engine.cache.verify()
    assert engine.cache.stats().pending == engine.cache.stats().pinned == 0


# -- keys that are refused, and leases that others close -----------------------------------------------------------


@pytest.mark.parametrize("verb", ["lookup", "publish", "forget", "pin"])
@pytest.mark.parametrize("given", [None, b"ab", [1], [b"x" * 65]], ids=str)
def test_keys_that_are_none_are_named(make: Make, verb: str, given: Any) -> None:
    engine = make()
    with pytest.raises((TypeError, ValueError), match="keys"):
        getattr(engine.manager, verb)(given)
    stats = engine.stats
    assert (stats.asked, stats.searching, stats.waiting_blocks) == (0, 0, 0)


def test_a_block_whose_lease_others_closed_is_not_kept(make: Make, store: Wrong) -> None:
    """Its bytes may have become those of another block while it was saved, and its MAC would be right for them."""
    engine, gate = make(), store.hold("save")
    engine.write(2)
    engine.manager.poll()
    gate.wait()
    assert engine.cache.revoke("kvpool stores") == 1
    gate.open()
    engine.drain()
    stats = engine.stats
    assert stats.saved_blocks == 0 and stats.unsaved == {"cancelled": 2}
    engine.until(lambda: not store.inner.stats()["blocks"])


def test_what_is_written_anew_while_it_waits_is_saved_once(make: Make, store: Wrong) -> None:
    engine, calls = make(blocks=64), list[int]()
    store.after["save"] = lambda codes: calls.append(len(codes)) or codes
    engine.write(6)
    for _ in range(100):  # more than wait for a store at all
        engine.cache.forget(names(3, 2))
        engine.write(3, 2)
    engine.write(2, 6)
    engine.drain()
    assert engine.stats.saved_blocks == sum(calls) == 8
    assert not any(engine.manager._adapter._runs)
