"""A host cache: one writer a key, nothing is found before it is written, nothing is lost in silence."""

from __future__ import annotations

import pickle
import threading
from functools import partial
from random import Random

import numpy as np
import pytest

from engine import Clock
from kvpool import HostCache, HostTier, ModelIdentity, OutOfBlocks, PoolClosed
from kvpool.errors import BlockNotFound, LeaseExpired, PoolBusy
from kvpool.hostcache import HostSlots
from kvpool.pool import Missed
from kvpool.state.hashing import block_key
from tests import debug
from tests.hostcache.conftest import ABSENT, HERE, IDENTITY, Make, calls, keys, look, store
from tests.waiting import at_once


@pytest.mark.parametrize(
    ("history", "name", "expected"),
    [
        (5, "never", Missed(0, 16, "never_seen")),
        (2, "b", Missed(0, 16, "forgotten", 5)),
        (2, "c", Missed(0, 16, "forgotten", 0)),
        (2, "a", Missed(0, 16, "unknown")),  # two have gone after it
        (3, "a", Missed(0, 16, "evicted", 15)),
        (0, "never", Missed(0, 16, "unknown")),
    ],
)
def test_why_a_key_is_not_here_is_known_of_as_many_as_are_to_be_remembered(
    make: Make, history: int, name: str, expected: Missed
) -> None:
    clock = Clock()
    cache = make(2, history=history, clock=clock)
    for key in "abc":
        store(cache, key)
    for key, now in (("b", 10), ("c", 15)):
        clock.now = now
        cache.forget(keys(key, "never"))
    assert cache.explain(name.encode(), 16) == expected
    cache.clear()
    assert cache.explain(b"x").reason == "unknown"


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_a_prompt_is_that_of_its_reservation(make: Make, seed: int) -> None:
    """An engine may end its stores as a set. If 5 of 20 chunks are evicted, the first 15 are left."""
    cache, chunks = make(20), keys(*(f"chunk {number}" for number in range(20)))
    cache.reserve(chunks[:12]), cache.reserve(chunks[12:])
    mixed = list(chunks)
    Random(seed).shuffle(mixed)
    assert cache.publish(mixed) == 20
    assert cache.reserve(keys("a", "b", "c", "d", "e")).evicted == chunks[:-6:-1]
    assert (cache.lookup(chunks) == HERE).tolist() == [True] * 15 + [False] * 5


def test_what_gets_a_higher_priority_stays_until_its_time_is_over(make: Make) -> None:
    clock = Clock()
    cache = make(2, clock=clock, event_capacity=16)
    store(cache, "a"), store(cache, "b")
    cache.reserve(keys("p"))  # a goes, and p is pending
    assert cache.set_priority(keys("a", "b", "p"), 60, ttl_ms=10) == 1
    with pytest.raises(OutOfBlocks):
        cache.reserve(keys("c"))
    for wrong in ({"priority": 101}, {"priority": 5, "ttl_ms": -1}):
        with pytest.raises(ValueError, match=r"priority|ttl_ms"):
            cache.set_priority(keys("b"), **wrong)
    clock.now = 10
    assert cache.reserve(keys("c")).evicted == [b"b"]
    assert [event.priority for event in cache.events() if event.kind == "updated"] == [60, 35]


def test_an_owner_that_is_gone_loses_its_leases(make: Make) -> None:
    cache = make()
    store(cache, "a", "b")
    gone, other = cache.pin(keys("a"), owner="gone"), cache.pin(keys("a", "b"), owner="other")
    assert cache.revoke("gone") == 1 and gone.closed and cache.leases == [other]
    other.close()


def test_a_lease_closed_as_unused_leaves_the_blocks_of_other_leases_where_they_are(make: Make) -> None:
    cache = make(3)
    store(cache, "a", "b", "c")
    other, lease = cache.pin(keys("a")), cache.pin(keys("a", "b", "c"))
    lease.close(used=False)
    cache.verify()
    other.close()
    assert cache.reserve(keys("d", "e")).evicted == [b"b", b"c"]
    cache.verify()


def test_who_reads_under_a_lease_learns_that_it_was_revoked_meanwhile(make: Make) -> None:
    cache = make()
    store(cache, "a")
    with pytest.raises(LeaseExpired, match="reader"), cache.pin(keys("a"), owner="reader"):
        cache.revoke("reader")
    with pytest.raises(KeyError, match="its own"), cache.pin(keys("a"), owner="reader"):
        cache.revoke("reader")
        raise KeyError("its own")


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


def test_events_have_keys_and_a_gap_counts_what_was_lost(make: Make) -> None:
    cache = make(2, event_capacity=3)
    store(cache, "a", "bb")
    first = cache.events()
    assert [(event.kind, event.keys) for event in first] == [("created", ()), ("stored", (b"a", b"bb"))]
    store(cache, "c", priority=40)
    cache.forget(keys("a"))
    second = cache.events()
    assert [(e.kind, e.keys, e.priority) for e in second] == [
        ("removed", (b"bb",), 35),
        ("stored", (b"c",), 40),
        ("removed", (b"a",), 35),
    ]
    assert first[-1].next == second[0].number
    store(cache, "d"), store(cache, "e"), store(cache, "f")
    assert cache.events()[0].number > second[-1].next and cache.stats().events_dropped > 0


def test_times_are_those_of_the_content_and_not_of_its_block(make: Make) -> None:
    clock = Clock(1000)
    cache = make(1, clock=clock)
    for name, now in (("a", 1000), ("b", 3000)):
        clock.now = now
        store(cache, name)
    clock.now = 3400
    cache.pin(keys("b")).close()
    clock.now = 3500
    store(cache, "c")
    stats = cache.stats()
    assert (stats.lifetime_ms.count, stats.lifetime_ms.total_ms) == (2, 2000 + 500)
    assert (stats.idle_ms.total_ms, stats.reuse_gap_ms.total_ms) == (2000 + 100, 400)


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
    state, make_key = cache._states[0], block_key
    words = np.zeros(17, np.int32)
    words[0], words[1] = 1, ord("b")
    root = cache._root
    key = make_key(
        words, np.empty(0, np.int64), state.header.secret0, state.header.secret1, root[1], root[2], state.header.guards
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
    again, slots = pickle.loads(pickle.dumps((taken, taken.slots)))
    assert (again.keys, again.blocks.tolist(), slots) == (taken.keys, taken.blocks.tolist(), taken.slots)
    assert (
        len(slots) == 2
        and slots == HostSlots((0, 1), cache.fingerprint)
        and slots[1:] == HostSlots((1,), cache.fingerprint)
    )
    cache.publish(taken.keys)
    with cache.pin(keys("a")) as lease:
        assert lease.slots.blocks == (0,)


def test_a_closed_cache_refuses_all_but_stats_and_close(make: Make) -> None:
    cache = make()
    store(cache, "a")
    lease = cache.pin(keys("a"))
    cache.close()
    cache.close()
    assert cache.stats().published_blocks == 1 and lease.closed
    for call in (*calls(cache), cache.clear, cache.refresh, cache.verify):
        with pytest.raises(PoolClosed):
            call()


# ----------------------------------------
# Threads that use one cache at the same time: one writer a key, one content a block.


FEW_NAMES = [f"key {i}".encode() for i in range(40)]


def test_a_block_is_written_by_one_and_read_with_its_content(make: Make) -> None:
    """Six threads reserve, write, publish, pin and read; a byte of another key, or one that changes, is a failure."""
    cache = make(16, 64)
    tier = HostTier(16, 64, identity=IDENTITY)
    seen = [0, 0]

    def content(key: bytes) -> int:
        return 1 + FEW_NAMES.index(key)

    def store(random: np.random.Generator) -> None:
        taken = cache.reserve([FEW_NAMES[i] for i in random.integers(0, len(FEW_NAMES), 3)])
        for key, block in zip(taken.keys, taken.blocks.tolist(), strict=True):
            tier.blocks[block] = content(key)
        if random.random() < 0.2:
            cache.abort(taken.keys)
        else:
            seen[0] += cache.publish(taken.keys)

    def load(random: np.random.Generator) -> None:
        here = [key for key in FEW_NAMES if cache.find(key) == cache.HERE][:4]
        with cache.pin(here) as lease:
            for key, block in zip(lease.keys, lease.blocks.tolist(), strict=True):
                assert (tier.blocks[block] == content(key)).all(), key
                seen[1] += 1

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(150):
            try:
                (store if random.random() < 0.5 else load)(random)
            except (OutOfBlocks, BlockNotFound):
                pass  # Others hold too much, or have evicted it since.
            if random.random() < 0.05:
                cache.forget([FEW_NAMES[int(random.integers(len(FEW_NAMES)))]])

    at_once(work, range(6))
    assert cache.stats().used == 0 and seen[0] and seen[1]


def test_nobody_reserves_a_key_before_its_old_order_is_forgotten(make: Make) -> None:
    """Else the order of the new reservation would be lost, and the beginning of a prompt evicted before its end."""
    cache, seen = make(4, 64), list[bool]()

    class Order(dict[bytes, int]):
        def pop(self, key: bytes, *default: object) -> object:
            other = threading.Thread(target=lambda: seen.append(cache._lock.acquire(blocking=False)))
            other.start()
            other.join()
            return super().pop(key, *default)

    cache.reserve(FEW_NAMES[:2])
    cache._order = Order(cache._order)
    cache.abort(FEW_NAMES[:2])
    assert seen == [False, False] and not cache._order


# ----------------------------------------
# Policies that look at conversations.


def keys_of(name: str, count: int) -> list[bytes]:
    return [f"{name} {place}".encode() for place in range(count)]


class Talks:
    """Conversations of 10 keys in a cache of 24: "soon" comes back every ten seconds, "late" every two hundred."""

    def __init__(self, make: Make, policy: str) -> None:
        self.now = 0
        self.cache = make(24, clock=lambda: self.now, policy=policy)
        for at in range(0, 3_000, 10):
            self.turn("soon", 10, at)
            if at % 200 == 0:
                self.turn("late", 10, at)
        self.turn("soon", 10, 3_000)
        self.turn("late", 10, 3_001)

    def turn(self, name: str, count: int, at: float) -> list[bytes]:
        """Run a request with that many keys. Return what was evicted for it."""
        self.now = int(at * 1000)
        keys = keys_of(name, count)
        taken = self.cache.reserve(keys)
        self.cache.publish(taken.keys)
        self.cache.touch(keys, turn=True)
        return taken.evicted

    @property
    def here(self) -> tuple[int, int]:
        """How much there is of "soon" and of "late"."""
        self.cache.verify()
        soon, late = (self.cache.lookup(keys_of(name, 10)) == self.cache.HERE for name in ("soon", "late"))
        return int(soon.sum()), int(late.sum())


def test_what_readers_have_held_since_its_turn_is_still_of_its_conversation_and_teaches_no_pause(make: Make) -> None:
    talks = Talks(make, "agent")
    book = talks.cache._states[0].policy_state
    assert book is not None
    before = book.rates.copy()
    for name in ("soon", "late"):
        talks.now += 100
        with talks.cache.pin(keys_of(name, 10)):
            pass
        assert talks.cache.touch(keys_of(name, 10)) == 10 and talks.here == (10, 10)
    assert np.array_equal(book.rates, before)
    gone = talks.turn("other", 12, 3_002)
    assert talks.here == (10, 2) and gone == keys_of("late", 10)[:1:-1]


@pytest.mark.parametrize("policy", ["agent", "adaptive"])
def test_what_is_refused_changes_no_byte_of_what_a_policy_knows(make: Make, policy: str) -> None:
    talks = Talks(make, policy)
    cache, late, state = talks.cache, keys_of("late", 10), talks.cache._states[0]
    lease, more = cache.pin(keys_of("soon", 10)), keys_of("more", 15)
    before = [debug.dump(state), *debug.book(state)]
    for call, error in (
        (lambda: cache.reserve(more), OutOfBlocks),
        (lambda: cache.pin([*late, b"no"]), BlockNotFound),
        (lambda: cache.publish([*late, b"no"]), BlockNotFound),
        (lambda: cache.touch([*late, 7], turn=True), TypeError),
        (lambda: cache.clear(), PoolBusy),
    ):
        with pytest.raises(error):
            call()
    now, talks.now = talks.now, -1  # a clock that fails
    for verb in (cache.reserve, cache.pin, partial(cache.touch, turn=True)):
        with pytest.raises(ValueError, match="clock"):
            verb(late)
    talks.now = now
    assert [debug.dump(state), *debug.book(state)] == before
    lease.close()


@pytest.mark.parametrize("policy", ["lru", "agent"])
def test_what_is_named_as_the_next_victims_goes_in_this_order(make: Make, policy: str) -> None:
    talks = Talks(make, policy)
    talks.cache.set_priority(keys_of("soon", 2), 10)
    cursor = talks.cache.open_dirty_cursor(pending=True)
    before, candidates, after = (talks.cache.eviction_candidates(c, 4 + 8, 20) for c in (None, cursor, None))
    assert before == candidates == after, "without a cursor, nothing is read and nothing is left out"
    assert len(candidates) == 8 and candidates[:2] == keys_of("soon", 2) and talks.here == (10, 10)
    assert talks.turn("other", 12, 3_002) == candidates and talks.cache.unsaved_blocks == 0
