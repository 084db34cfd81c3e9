"""A host cache: one writer a key, nothing is found before it is written, nothing is lost in silence."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from random import Random

import numpy as np
import pytest

from kvpool import (
    BlockNotFound,
    HostCache,
    HostSlots,
    LeaseExpired,
    ModelIdentity,
    OutOfBlocks,
    PoolBusy,
    PoolClosed,
)
from kvpool.state.hashing import block_key
from tests.hostcache.conftest import IDENTITY, keys, store

ABSENT, HERE, PENDING = HostCache.ABSENT, HostCache.HERE, HostCache.PENDING
Make = Callable[..., HostCache]


def look(cache: HostCache, *names: str) -> list[int]:
    """The answers of both ways to ask, which agree."""
    found = cache.lookup(keys(*names)).tolist()
    assert found == [cache.find(key) for key in keys(*names)]
    return found


def test_a_key_is_pending_until_its_bytes_are_published(make: Make) -> None:
    cache = make()
    taken = cache.reserve(keys("a", "b"))
    assert taken.keys == (b"a", b"b") and sorted(taken.blocks.tolist()) == [0, 1] and taken.evicted == []
    assert look(cache, "a", "b", "c") == [PENDING, PENDING, ABSENT]
    assert cache.publish([b"b"]) == 1
    assert look(cache, "a", "b") == [PENDING, HERE]
    assert cache.publish([b"a"]) == 1 and look(cache, "a") == [HERE]


def test_a_key_has_one_writer(make: Make) -> None:
    cache = make()
    assert cache.reserve(keys("a", "a")).keys == (b"a",)
    assert cache.reserve(keys("a", "b")).keys == (b"b",), "a is another's"
    cache.publish(keys("a", "b"))
    assert cache.reserve(keys("a", "b")).keys == (), "both are here"


def test_the_least_recently_used_goes_and_the_call_says_which(make: Make) -> None:
    cache = make(3)
    store(cache, "a"), store(cache, "b"), store(cache, "c")
    cache.touch(keys("a"))
    taken = cache.reserve(keys("d", "e"))
    assert taken.evicted == [b"b", b"c"] and look(cache, "a", "b", "c") == [HERE, ABSENT, ABSENT]


def test_the_end_of_a_prompt_goes_before_its_beginning(make: Make) -> None:
    cache = make(3)
    store(cache, "1", "2", "3")
    assert cache.reserve(keys("x")).evicted == [b"3"]
    cache.abort(keys("x"))
    cache.touch(keys("1", "2"))
    assert cache.reserve(keys("x", "y")).evicted == [b"2"]
    cache.abort(keys("x", "y"))
    with cache.pin(keys("1")):
        assert cache.stats().pinned == 1
    store(cache, "4", "5")
    cache.pin(keys("1", "4", "5")).close()
    assert cache.reserve(keys("x")).evicted == [b"5"]


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_a_prompt_is_that_of_its_reservation(make: Make, seed: int) -> None:
    """An engine may end its stores as a set. Of 20 chunks with 5 evicted, the first 15 are left."""
    cache, chunks = make(20), keys(*(f"chunk {number}" for number in range(20)))
    cache.reserve(chunks[:12]), cache.reserve(chunks[12:])
    mixed = list(chunks)
    Random(seed).shuffle(mixed)
    assert cache.publish(mixed) == 20
    assert cache.reserve(keys("a", "b", "c", "d", "e")).evicted == chunks[:-6:-1]
    assert (cache.lookup(chunks) == HERE).tolist() == [True] * 15 + [False] * 5


def test_what_is_offered_is_not_evicted_by_the_same_call(make: Make) -> None:
    cache = make(3)
    store(cache, "a"), store(cache, "b"), store(cache, "c")
    assert cache.reserve(keys("a", "b", "d")).evicted == [b"c"]
    cache.publish(keys("d"))
    with pytest.raises(OutOfBlocks) as refused:
        cache.reserve(keys("a", "b", "d", "e"))
    assert (refused.value.tier, refused.value.needed, refused.value.free) == ("host", 1, 0)
    assert look(cache, "a", "b", "d", "e") == [HERE, HERE, HERE, ABSENT]


def test_a_refused_reservation_takes_nothing(make: Make) -> None:
    cache = make(3)
    store(cache, "a", "b")
    before = cache.stats()
    lease = cache.pin(keys("a"))
    with pytest.raises(OutOfBlocks):
        cache.reserve(keys("x", "y", "z"))
    assert look(cache, "a", "b", "x", "y", "z") == [HERE, HERE, ABSENT, ABSENT, ABSENT]
    assert cache.stats().reserved_blocks == before.reserved_blocks and cache.stats().free == 2
    lease.close()


def test_a_key_that_is_named_twice_takes_one_block(make: Make) -> None:
    cache = make(2)
    store(cache, "a")
    assert cache.reserve(keys("b", "a", "b", "a", "b")).keys == (b"b",)
    assert cache.publish(keys("b", "b")) == 1


def test_content_of_a_higher_priority_stays(make: Make) -> None:
    cache = make(2)
    store(cache, "a", priority=80), store(cache, "b", priority=50)
    assert cache.reserve(keys("c"), priority=60).evicted == [b"b"]
    cache.publish(keys("c"))
    with pytest.raises(OutOfBlocks):
        cache.reserve(keys("d"), priority=40)
    assert look(cache, "a", "c") == [HERE, HERE]


def test_what_gets_a_higher_priority_stays_until_its_time_is_over(make: Make) -> None:
    clock = [0]
    cache = make(2, clock=lambda: clock[0], event_capacity=16)
    store(cache, "a"), store(cache, "b")
    cache.reserve(keys("p"))  # a goes, and p is pending
    assert cache.set_priority(keys("a", "b", "p"), 60, ttl_ms=10) == 1
    with pytest.raises(OutOfBlocks):
        cache.reserve(keys("c"))
    for wrong in ({"priority": 101}, {"priority": 5, "ttl_ms": -1}):
        with pytest.raises(ValueError, match=r"priority|ttl_ms"):
            cache.set_priority(keys("b"), **wrong)
    clock[0] = 10
    assert cache.reserve(keys("c")).evicted == [b"b"]
    assert [event.priority for event in cache.events() if event.kind == "updated"] == [60, 35]


def test_a_priority_falls_when_its_time_is_over(make: Make) -> None:
    clock = [0]
    cache = make(2, clock=lambda: clock[0], event_capacity=16)
    store(cache, "a", priority=80, ttl_ms=10), store(cache, "b")
    clock[0] = 9
    assert cache.refresh() == 0
    cache.touch(keys("a"))  # from now on again
    clock[0] = 18
    assert cache.refresh() == 0
    clock[0] = 19
    assert cache.refresh() == 1
    assert [event.kind for event in cache.events()] == ["created", "stored", "stored", "updated"]
    assert cache.reserve(keys("c")).evicted == [b"b"] and cache.stats().expired_blocks == 1


def test_what_is_pinned_stays_until_the_lease_is_closed(make: Make) -> None:
    cache = make(2)
    blocks = store(cache, "a", "b")
    lease = cache.pin(keys("b", "a"), owner="reader")
    assert lease.blocks.tolist() == blocks[::-1] and lease.keys == (b"b", b"a") and not lease.closed
    with pytest.raises(OutOfBlocks):
        cache.reserve(keys("c"))
    second = cache.pin(keys("a"))
    lease.close()
    assert cache.reserve(keys("c")).evicted == [b"b"] and lease.closed
    with pytest.raises(LeaseExpired, match="reader"):
        lease.close()
    second.close()


def test_what_is_not_here_cannot_be_pinned(make: Make) -> None:
    cache = make()
    store(cache, "a")
    cache.reserve(keys("b"))
    for name in ("b", "c"):
        with pytest.raises(BlockNotFound, match=name.encode().hex()):
            cache.pin(keys("a", name))
    assert cache.stats().pinned == 0 and cache.leases == []
    cache.abort(keys("b"))


def test_an_owner_that_is_gone_loses_its_leases(make: Make) -> None:
    cache = make()
    store(cache, "a", "b")
    gone, other = cache.pin(keys("a"), owner="gone"), cache.pin(keys("a", "b"), owner="other")
    assert cache.revoke("gone") == 1 and gone.closed and cache.leases == [other]
    other.close()


def test_who_reads_under_a_lease_learns_that_it_was_revoked_meanwhile(make: Make) -> None:
    cache = make()
    store(cache, "a")
    with pytest.raises(LeaseExpired, match="reader"), cache.pin(keys("a"), owner="reader"):
        cache.revoke("reader")
    with pytest.raises(KeyError, match="its own"), cache.pin(keys("a"), owner="reader"):
        cache.revoke("reader")
        raise KeyError("its own")


def test_what_is_aborted_is_absent_and_its_block_is_free(make: Make) -> None:
    cache = make(1)
    cache.reserve(keys("a"))
    assert cache.abort(keys("a")) == 1 and look(cache, "a") == [ABSENT]
    assert cache.reserve(keys("b")).evicted == [] and cache.stats().aborted_blocks == 1
    cache.abort(keys("b"))


@pytest.mark.parametrize("verb", ["publish", "abort"])
def test_only_pending_keys_come_to_an_end_and_all_or_none(make: Make, verb: str) -> None:
    cache = make()
    store(cache, "a")
    cache.reserve(keys("b"))
    for name in ("a", "c"):
        with pytest.raises(BlockNotFound, match=name.encode().hex()):
            getattr(cache, verb)(keys("b", name))
    assert look(cache, "a", "b") == [HERE, PENDING]
    cache.abort(keys("b"))


def test_what_is_forgotten_is_not_found_and_a_reader_keeps_the_bytes(make: Make) -> None:
    cache = make(2)
    store(cache, "a", "b")
    lease = cache.pin(keys("a"))
    assert cache.forget(keys("a", "b", "c", "a")) == 2 and look(cache, "a", "b") == [ABSENT, ABSENT]
    first = cache.reserve(keys("a"))
    assert first.blocks.tolist() != lease.blocks.tolist(), "another block: somebody reads the old one"
    with pytest.raises(OutOfBlocks):
        cache.reserve(keys("x"))
    lease.close()
    cache.reserve(keys("x"))
    cache.abort(keys("a", "x"))


@pytest.mark.parametrize("verb", ["forget", "clear"])
def test_a_writer_that_ends_after_its_key_was_forgotten_publishes_nothing(make: Make, verb: str) -> None:
    cache = make(2)
    cache.reserve(keys("a", "b"))
    if verb == "forget":
        assert cache.forget(keys("a", "b", "a")) == 2
    else:
        cache.clear(force=True)
    assert look(cache, "a", "b") == [ABSENT, ABSENT], "nobody is to wait for it"
    assert cache.reserve(keys("a")).keys == (), "the first writer may still be writing"
    assert cache.publish(keys("a")) == 0 and cache.abort(keys("b")) == 1
    assert cache.reserve(keys("a", "b")).keys == (b"a", b"b")
    assert cache.publish(keys("a", "b")) == 2


def test_clear_drops_everything_and_waits_for_nobody(make: Make) -> None:
    cache = make(event_capacity=8)
    store(cache, "a")
    lease = cache.pin(keys("a"))
    with pytest.raises(PoolBusy, match="1 leases are open and 0 keys pending"):
        cache.clear()
    cache.clear(force=True)
    cache.verify()
    assert look(cache, "a") == [ABSENT] and cache.events()[-1].kind == "cleared"
    lease.close()
    store(cache, "a")
    cache.clear()
    assert cache.stats().empty == 4


def test_events_tell_keys_and_a_gap_tells_what_was_lost(make: Make) -> None:
    cache = make(2, event_capacity=3)
    store(cache, "a", "bb")
    first = cache.events()
    assert [(event.kind, event.keys) for event in first] == [("created", ()), ("stored", (b"a", b"bb"))]
    store(cache, "c", priority=40)
    cache.forget(keys("a"))
    second = cache.events()
    assert [(e.kind, e.keys, e.priority) for e in second] == [
        ("removed", (b"bb",), 35), ("stored", (b"c",), 40), ("removed", (b"a",), 35),
    ]  # fmt: skip
    assert first[-1].next == second[0].number
    store(cache, "d"), store(cache, "e"), store(cache, "f")
    assert cache.events()[0].number > second[-1].next and cache.stats().events_dropped > 0


def test_figures_add_up(make: Make) -> None:
    cache = make(3)
    store(cache, "a", "b", "c")
    cache.reserve(keys("d"))
    cache.abort(keys("d"))
    lease = cache.pin(keys("a", "b"))
    cache.reserve(keys("e"))
    found = cache.stats()
    assert (found.capacity, found.free, found.used, found.evictable, found.empty) == (3, 0, 3, 0, 0)
    assert (found.pinned, found.pending, found.leases) == (2, 1, 1)
    assert (found.reserved_blocks, found.published_blocks, found.aborted_blocks) == (5, 3, 1)
    assert (found.reused_blocks, found.evicted_blocks, found.forgotten_blocks) == (2, 1, 1)
    assert found.lifetime_ms.count == 1 and found.reuse_gap_ms.count == 2
    cache.abort(keys("e"))
    lease.close()


def test_times_are_those_of_the_content_and_not_of_its_block(make: Make) -> None:
    clock = [1000]
    cache = make(1, clock=lambda: clock[0])
    for name, now in (("a", 1000), ("b", 3000)):
        clock[0] = now
        store(cache, name)
    clock[0] = 3400
    cache.pin(keys("b")).close()
    clock[0] = 3500
    store(cache, "c")
    found = cache.stats()
    assert (found.lifetime_ms.count, found.lifetime_ms.total_ms) == (2, 2000 + 500)
    assert (found.idle_ms.total_ms, found.reuse_gap_ms.total_ms) == (2000 + 100, 400)


def test_keys_of_another_model_are_never_found() -> None:
    """Two caches with one secret: their hashes of one key differ, as the identity is a part of it."""
    hashes = []
    others = [IDENTITY, *(ModelIdentity(**{**vars_of(IDENTITY), name: "other"}) for name in vars_of(IDENTITY))]
    for identity in others:
        with HostCache(1, 64, identity=identity, secret=b"s" * 16, event_capacity=8) as cache:
            store(cache, "a")
            hashes.append((cache.fingerprint, identity.fingerprint, block_hash(cache)))
    for column in zip(*hashes, strict=True):
        assert len(set(column)) == len(others)


def block_hash(cache: HostCache) -> bytes:
    block = cache._states[0].blocks[0]
    return block["key0"].tobytes() + block["key1"].tobytes()


def vars_of(identity: ModelIdentity) -> dict[str, str]:
    return {
        name: getattr(identity, name)
        for name in ("model", "revision", "kv_dtype", "layout", "hash_version", "kv_scales")
    }


def test_a_hash_alone_is_never_a_hit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two keys that hash alike: the second is not found under the first."""
    cache = make(4)
    store(cache, "a")
    state, found = cache._states[0], block_key
    words = np.zeros(17, np.int32)
    words[0], words[1] = 1, ord("b")
    root = cache._root
    key = found(
        words, np.empty(0, np.int64), state.head.secret0, state.head.secret1, root[1], root[2], state.head.guards
    )
    blocks = state.blocks
    old = int(np.flatnonzero(state.index == 0)[0])
    bucket = ((int(np.int64(key[0]).view(np.uint64)) >> 32) * len(state.index)) >> 32
    state.index[old] = -1
    blocks["key0"][0], blocks["key1"][0] = key
    state.index[bucket] = 0
    try:
        assert cache.find(b"b") == ABSENT, "the block has the hash of b, and the words of a"
    finally:
        cache.close()


def test_what_travels_can_be_pickled(make: Make) -> None:
    cache = make()
    taken = cache.reserve(keys("a", "b"))
    again = pickle.loads(pickle.dumps(taken))
    assert again.keys == taken.keys and again.blocks.tolist() == taken.blocks.tolist()
    slots = pickle.loads(pickle.dumps(taken.slots))
    assert slots == taken.slots == HostSlots((0, 1), cache.fingerprint) and len(slots) == 2
    assert slots[1:] == HostSlots((1,), cache.fingerprint)
    identity = pickle.loads(pickle.dumps(IDENTITY))
    assert identity == IDENTITY and identity.fingerprint == IDENTITY.fingerprint and hash(identity) == hash(IDENTITY)
    cache.publish(taken.keys)
    with cache.pin(keys("a")) as lease:
        assert lease.slots.blocks == (0,)


def test_usage_counts_each_block_once(make: Make) -> None:
    cache = make(6)
    cache.publish(cache.reserve(keys("a", "b", "c")).keys)
    assert cache.usage() == (3, 3, 0, 0)
    with cache.pin(keys("a", "b")), cache.pin(keys("b")):
        cache.reserve(keys("d", "e"))
        cache.forget(keys("a"))
        assert cache.usage() == (1, 1, 2, 2), "a forgotten block is held by its reader"
        stats = cache.stats()
        assert (stats.empty, stats.evictable, stats.pinned, stats.pending) == cache.usage()
    assert cache.usage() == (2, 2, 0, 2)


def test_a_closed_cache_refuses_all_but_stats_and_close(make: Make) -> None:
    cache = make()
    store(cache, "a")
    lease = cache.pin(keys("a"))
    cache.close()
    cache.close()
    assert cache.stats().published_blocks == 1 and lease.closed
    with_keys = [cache.lookup, cache.reserve, cache.pin, cache.touch, cache.publish, cache.abort, cache.forget]
    calls = [partial(call, given) for call in with_keys for given in (keys("a"), [])]
    without = [cache.clear, cache.refresh, cache.events, cache.verify]
    for call in (*calls, *without, lambda: cache.find(b"a"), lambda: cache.revoke("")):
        with pytest.raises(PoolClosed):
            call()


def test_no_keys_are_fine(make: Make) -> None:
    cache = make()
    assert cache.lookup([]).tolist() == [] and cache.reserve([]).keys == () and cache.touch([]) == 0
    assert cache.publish([]) == cache.abort([]) == cache.forget([]) == 0
    with cache.pin([]) as lease:
        assert len(lease.blocks) == 0
