"""Whatever a store does, a keeper serves no wrong byte, waits for nobody, and counts what it gives up."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from kvpool import PoolClosed
from kvpool.storage import FAILED, MemoryStore, Prefetch, StorageManager
from kvpool.storage.backends.disk import DiskStore
from kvpool.storage.pool_tier import Content, PoolTier, StoredContent
from kvpool.storage.store import Bytes, Rows, Stop
from tests.engine import Engine
from tests.stores.keeping import IDENTITY, engine, fetch, grouped, keeper, room, seed, store, tokens
from tests.stores.lab import Gate, Wrong, fail
from tests.waiting import until

PROMPT = tokens(41)


# -- stores that lie, fail, hang -----------------------------------------------------------------------


def test_what_came_before_a_failure_is_used(one: Engine, wrong: Wrong) -> None:
    wrong.after["load"] = lambda answer: (np.where(np.arange(len(answer[0])) < 3, answer[0], FAILED), answer[1])
    with keeper(one, wrong) as kept:
        assert fetch(one, kept, PROMPT) == 3
        sequence = one.add(PROMPT)
        assert sequence.cached == 12
        one.release(sequence)


# -- bounds --------------------------------------------------------------------------------------------


def test_saves_that_find_no_place_are_dropped_and_counted(one: Engine) -> None:
    gate, slow = Gate(), Wrong(store())
    slow.before["save"] = gate
    with keeper(one, slow, staging_blocks=4, queued_blocks=8) as kept:
        sequence = one.add(tokens(129))
        one.finish(sequence)
        assert gate.reached.wait(600)
        until(lambda: ("wrong", "queue_full") in kept.stats().dropped)
        gate.open()
        assert kept.drain(600)
        stats = kept.stats()
        assert stats.saved_blocks + sum(stats.dropped.values()) == 32


def test_a_block_that_is_evicted_before_it_was_copied_is_counted(one: Engine) -> None:
    gate, slow = Gate(), Wrong(store())
    slow.before["save"] = gate
    with keeper(one, slow, staging_blocks=2) as kept:
        one.seed(PROMPT, 41)
        assert gate.reached.wait(600)
        one.cache.reset()
        gate.open()
        assert kept.drain(600)
        stats = kept.stats()
        assert stats.dropped["wrong", "evicted"] > 0
        assert stats.saved_blocks + stats.dropped["wrong", "evicted"] == 10


def contents_of(one: Engine, count: int) -> list[Content]:
    return tier_of(one).of_prompt(one.prompt(PROMPT), count)[0]


def tier_of(one: Engine) -> PoolTier:
    return PoolTier(one.cache, StoredContent(one.cache, [], 100), {}, True)


def test_a_row_has_nothing_of_what_was_there_before(one: Engine) -> None:
    """A block is shorter than its row, and the row is saved whole."""
    with one.cache as pool:
        one.seed(PROMPT, 40)
        rows = np.full((4, 4096), 0xFF, np.uint8)
        assert tier_of(one).copy(contents_of(one, 3), rows, [2, 0, 1]).all()
        size = pool.groups[0].block_bytes
        assert not rows[:3, size:].any() and (rows[:3, :size] != 0xFF).any(axis=1).all()


def test_nothing_is_saved_that_was_copied_under_a_revoked_lease(one: Engine) -> None:
    """The blocks may have had other content before the copy was over."""
    with one.cache as pool:
        one.seed(PROMPT, 40)

        class Rows(list[int]):
            def __getitem__(self, place: Any) -> Any:
                pool.revoke("kvpool keeper")
                return super().__getitem__(place)

        assert not tier_of(one).copy(contents_of(one, 3), np.zeros((4, 4096), np.uint8), Rows([2, 0, 1])).any()


def test_a_block_is_sealed_with_what_the_pool_has_under_its_key_now(one: Engine) -> None:
    """Another prompt may have got the key since the event. One of another namespace is not saved for it."""
    with one.cache:
        one.seed(PROMPT, 40)
        own = contents_of(one, 3)
        right = [content.context for content in own]
        own[1].said = contents_of(one, 2)[0].said
        assert tier_of(one).copy(own, np.zeros((4, 4096), np.uint8), [2, 0, 1]).all()
        assert [content.context for content in own] == right
        for content in own:
            content.namespace += 1
        assert not tier_of(one).copy(own, np.zeros((4, 4096), np.uint8), [2, 0, 1]).any()


@pytest.mark.parametrize("differs", ["tokens", "salt", "extra_ids", "parent"])
def test_of_two_prompts_with_one_key_the_second_gets_a_miss(differs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds a collision of 16 bytes still gets nobody's KV. The name under which the first block was saved is
    forced upon the block of another prompt."""
    made, memory, other = engine(), store(), engine()
    names: dict[str, Any] = {"tokens": {}, "salt": {"salt": "b"}, "extra_ids": {"extra_ids": [9] * 9}, "parent": {}}
    first, second = tokens(9), {"tokens": tokens(9, 500)}.get(differs, tokens(9))
    if differs == "parent":
        # The second blocks agree, those before them do not.
        second = [*tokens(4, 500), *first[4:]]
    with made.cache, keeper(made, memory) as kept:
        seed(made, kept, [first])
        keys = made.keys(first)
    forced = dict(zip(other.keys(second, **names[differs]), keys, strict=True))
    own = PoolTier.name

    def collide(self: PoolTier, content: Content) -> bytes:
        found = Content(content.group, forced.get(content.key, content.key))
        return own(self, found)

    with other.cache, keeper(other, memory) as kept:
        monkeypatch.setattr(PoolTier, "name", collide)
        handle = kept.prefetch(other.prompt(second, **names[differs]), 60.0)
        assert handle.wait(600) and handle.blocks == 0 and handle.ended == "failed"
        assert kept.stats().stores["memory"].blocks["load", "damaged"] >= 1
        other.release(other.add(second, **names[differs]))


@pytest.mark.parametrize("save", ["commit", "evict", "reuse"])
def test_a_pool_whose_keys_end_with_it_is_refused_at_once(tmp_path: Path, save: str) -> None:
    """A store that outlives the process would have nothing for the next one."""
    made, disk = engine(secret=None), DiskStore(tmp_path / "store", room(8))
    with made.cache:
        with pytest.raises(ValueError, match=r"pool: expected .*secret=store\.secret"):
            keeper(made, [store(), disk], save=save)
        assert keeper(made, store()).close(600)
    kept_secret = engine(secret=disk.secret)
    with kept_secret.cache, keeper(kept_secret, disk) as kept:
        seed(kept_secret, kept, [PROMPT])
    again = DiskStore(tmp_path / "store", room(8))
    after = engine(secret=again.secret)
    with after.cache, keeper(after, again) as kept:
        assert fetch(after, kept, PROMPT) > 0


def test_a_namespace_has_no_more_than_its_quota(one: Engine) -> None:
    memory = store()
    quotas = {("tenant", None): room(4), ("nothing", 3): 0, ("less than a block", None): 1}
    with keeper(one, memory, quotas=quotas) as kept:
        seed(one, kept, [PROMPT], salt="tenant")
        seed(one, kept, [PROMPT], salt="nothing", adapter_id=3)
        assert memory.stats()["blocks"] <= 4
        assert kept.stats().dropped["memory", "quota"] >= 10
        refused = kept.stats().dropped["memory", "quota"]
        seed(one, kept, [PROMPT], salt="less than a block")
        assert kept.stats().dropped == {("memory", "quota"): refused + 10}
        seed(one, kept, [PROMPT], adapter_id=3)
        assert memory.stats()["blocks"] <= 14 and memory.stats()["blocks"] >= 10


def test_a_namespace_has_its_own_quota_and_not_that_of_its_neighbour(one: Engine) -> None:
    """Blocks of both wait for a keeper that comes later."""
    memory = store()
    for salt in ("tenant", "other"):
        one.seed(PROMPT, 40, salt=salt)
    with keeper(one, memory, quotas={("tenant", None): room(2)}) as kept:
        assert kept.drain(600) and memory.stats()["blocks"] == 2 + 10


def test_promotions_never_displace_more_than_their_room(one: Engine) -> None:
    """However many requests wait, most of what the host has stays."""
    memory, waiting = store(1024), [tokens(41, 1000 * i) for i in range(1, 20)]
    with keeper(one, memory) as kept:
        seed(one, kept, waiting)
    two = engine(P=40, S=40)
    with two.cache, keeper(two, memory, promotion_blocks=10) as kept:
        for i in range(8):
            two.seed(tokens(41, 100_000 + 1000 * i), 41)
        assert kept.drain(600)
        before = set(two.cached("host"))
        handles = [kept.prefetch(two.prompt(prompt), 0.3) for prompt in waiting]
        assert all(handle.wait(600) for handle in handles)
        assert sum(handle.blocks for handle in handles) <= 10
        assert len(before - set(two.cached("host"))) <= 10 and kept.stats().promoted_blocks <= 10


def test_what_several_requests_wait_for_is_loaded_once(one: Engine, wrong: Wrong) -> None:
    gate = wrong.hold("find")
    with keeper(one, wrong) as kept:
        handles = [kept.prefetch(one.prompt([*PROMPT[:37], *tokens(4, first)]), 60.0) for first in range(5)]
        until(lambda: kept.stats().prefetching == 5)
        gate.open()
        assert all(handle.wait(600) and handle.ended in ("loaded", "cached") for handle in handles), handles
        assert sum(handle.blocks for handle in handles) == 9
        assert kept.stats().stores["wrong"].blocks["load", "ok"] == 9


def test_a_prefetch_that_waits_for_a_block_of_another_loads_it_if_that_fails(one: Engine, wrong: Wrong) -> None:
    gate = Gate()
    wrong.before["load"], wrong.threads = gate, 4
    with keeper(one, wrong, deadline_ms=60_000) as kept:
        first = kept.prefetch(one.prompt(PROMPT), 60.0)
        assert gate.reached.wait(600)
        second = kept.prefetch(one.prompt(PROMPT), 60.0)
        until(lambda: kept.stats().found_blocks == 20)
        first.cancel()
        assert first.wait(600) and first.blocks == 0
        gate.open()
        assert second.wait(600) and second.blocks == 10 and second.ended == "loaded"


def test_a_cancelled_prefetch_brings_nothing_more(one: Engine, wrong: Wrong) -> None:
    gate = wrong.hold("find")
    with keeper(one, wrong) as kept:
        handle = kept.prefetch(one.prompt(PROMPT), 60.0)
        assert gate.reached.wait(600)
        handle.cancel()
        assert handle.wait(600) and handle.ended == "cancelled"
        gate.open()
        assert kept.drain(600) and one.reusable(PROMPT) == 0


# -- the pool under it ---------------------------------------------------------------------------------


def test_nothing_that_was_asked_before_a_reset_enters_after_it(one: Engine, wrong: Wrong) -> None:
    gate = wrong.hold("load")
    with keeper(one, wrong) as kept:
        handle = kept.prefetch(one.prompt(PROMPT), 60.0)
        assert gate.reached.wait(600)
        one.cache.reset()
        gate.open()
        assert handle.wait(600) and handle.ended == "reset" and one.reusable(PROMPT) == 0
        del wrong.before["load"]
        assert fetch(one, kept, PROMPT) == 10


def test_a_keeper_ends_with_its_pool() -> None:
    made, gate, slow = engine(), Gate(), Wrong(store())
    slow.before["find"] = gate
    kept = keeper(made, slow)
    handle = kept.prefetch(made.prompt(PROMPT), 60.0)
    assert gate.reached.wait(600)
    made.cache.close()
    until(lambda: kept.closed)
    assert handle.wait(600) and handle.ended == "closed" and not kept.drain(0.01)
    with pytest.raises(PoolClosed):
        kept.prefetch(PROMPT)
    gate.open()
    assert kept.close(600) and kept.stats().saved_blocks == 0


def test_closing_counts_what_it_gives_up(one: Engine, wrong: Wrong) -> None:
    gate = wrong.hold("save")
    kept = keeper(one, wrong, staging_blocks=8)
    one.seed(tokens(81), 80)
    assert gate.reached.wait(600)
    until(lambda: kept.stats().waiting_blocks == 16)
    assert not kept.close(0.05)
    gate.open()
    assert kept.close(600)
    stats = kept.stats()
    assert stats.waiting_blocks == 0 and stats.saved_blocks + sum(stats.dropped.values()) == 20
    assert stats.dropped["wrong", "cancelled"] == 20 - stats.saved_blocks >= 16


def test_a_long_prompt_leaves_rows_to_others(wrong: Wrong) -> None:
    long, short, engines = tokens(401, 1000), tokens(41), [engine(P=256, S=256) for _ in range(2)]
    with engines[0].cache, keeper(engines[0], wrong, staging_blocks=64) as kept:
        seed(engines[0], kept, [long, short])
    gate, held = Gate(), [False] * 64 + [True]
    wrong.before["load"] = lambda: gate() if held.pop() else None
    wrong.threads = 4
    with engines[1].cache, keeper(engines[1], wrong, staging_blocks=64) as kept:
        first = kept.prefetch(engines[1].prompt(long), deadline=600.0)
        assert gate.reached.wait(600)
        assert fetch(engines[1], kept, short) == 10 and not first.done
        gate.open()
        assert first.wait(600) and first.blocks == 100


def test_sequences_and_leases_of_others_are_left_alone(one: Engine, wrong: Wrong) -> None:
    with keeper(one, wrong) as kept:
        sequence = one.add(tokens(17, 500))
        one.commit(sequence)
        assert kept.drain(600)
        assert not one.cache.leases and kept.stats().saved_blocks == 4
        one.cache.revoke("kvpool keeper")
        assert fetch(one, kept, PROMPT) == 10
        one.check_all()
        one.release(sequence)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save": "always"}, "save: expected"),
        ({"stores": []}, "stores: expected"),
        ({"stores": [MemoryStore(1), MemoryStore(1)]}, "different names"),
        ({"identity": "tiny"}, "identity: expected"),
        ({"staging_blocks": 1}, "staging_blocks: expected"),
        ({"deadline_ms": 0}, "deadline_ms: expected"),
        ({"promotion_blocks": 0}, "promotion_blocks: expected"),
        ({"prefill_tokens_per_s": 0}, "prefill_tokens_per_s: expected"),
        ({"prefill_tokens_per_s": 5e-324}, "prefill_tokens_per_s: expected finite numbers from 1e-06.*got 5e-324"),
        ({"prefill_tokens_per_s": "fast"}, "prefill_tokens_per_s: expected"),
        ({"quotas": {"tenant": 4}}, "pair"),
        ({"quotas": {("tenant", None): -1}}, "quotas"),
        ({"probe_seconds": -1}, "probe_seconds: expected"),
    ],
)
def test_bad_arguments_are_named(one: Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        StorageManager(one.cache, **({"stores": [store()], "identity": IDENTITY} | options))
    with keeper(one, store()) as kept, pytest.raises(ValueError, match="deadline: .*"):
        kept.prefetch([1], -1.0)


def test_keys_of_another_pool_are_refused(one: Engine) -> None:
    other = engine(secret=b"another secret of a pool")
    with other.cache, keeper(one, store()) as kept:
        for call in (kept.prefetch, kept.match_prefix):
            with pytest.raises(ValueError, match="another secret"):
                call(other.prompt(PROMPT))


def test_pools_without_events_or_a_host_tier_are_refused() -> None:
    for made in (engine(S=0), engine(event_capacity=0)):
        with made.cache, pytest.raises(ValueError, match="pool: expected .*, got "):
            keeper(made, store())
    with grouped(host_blocks=0) as cache, pytest.raises(ValueError, match="host tier for all groups"):
        StorageManager(cache, [store()], identity=IDENTITY)


class Liar(Wrong):
    """Gives another byte, or the bytes of another block, now and then."""

    def __init__(self, inner: MemoryStore, random: Random) -> None:
        super().__init__(inner)
        self.random = random

    def load(self, keys: Bytes, rows: Rows, stop: Stop) -> tuple[Bytes, Bytes]:
        answer = super().load(keys, rows, stop)
        kind = self.random.randrange(6)
        if kind == 0:
            self.memory[rows[self.random.randrange(len(rows))], self.random.randrange(192)] ^= 1
        elif kind == 1:
            self.memory[rows] = self.memory[rows[::-1]]
        return answer


@pytest.mark.parametrize("save", ["commit", "evict", "reuse"])
@pytest.mark.parametrize("number", range(2))
def test_no_request_ever_gets_a_wrong_byte(number: int, save: str) -> None:
    """Requests that share prefixes, over a store that fails, lies and loses blocks at random. The engine compares every
    byte that is reused."""
    random = Random(number)
    memory = Liar(MemoryStore(room(40)), random)
    print("seed", number)

    def sometimes() -> None:
        if random.random() < 0.1:
            fail()

    memory.before = dict.fromkeys(("find", "load", "save"), sometimes)
    made = engine(P=20, S=12)
    with made.cache, keeper(made, memory, save=save, staging_blocks=16, probe_seconds=0.001) as kept:
        for _ in range(60):
            family = random.randrange(5)
            prompt = [*tokens(random.choice((8, 16, 24)), 1000 * family), *tokens(random.randrange(1, 12), 50)]
            salt = random.choice((None, "a"))
            handle = kept.prefetch(made.prompt(prompt, salt=salt), 60.0)
            if random.random() < 0.7:
                assert handle.wait(600)
            made.seed(prompt, len(prompt), salt=salt)
            assert handle.wait(600)
        assert kept.drain(600) and not kept.closed
        made.cache.verify()
        assert {"find", "load", "save"} <= set(memory.calls)


@pytest.mark.parametrize("name", ["prompt", "deadline", "blocks", "ended"])
def test_a_prefetch_has_nothing_that_can_be_set(name: str) -> None:
    """The keeper's thread reads it until the last block has come: another prompt would get the KV of this one."""
    handle = Prefetch(None, 5.0)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        setattr(handle, name, 1)
