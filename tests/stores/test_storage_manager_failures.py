"""Whatever a store does, a storage manager serves no wrong byte, never blocks, and counts what it gives up."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from kvpool import PoolClosed
from kvpool.storage import MemoryStore, StorageManager
from kvpool.storage.backends.disk import DiskStore
from kvpool.storage.mac import BlockNames
from kvpool.storage.pool_adapter import Content, PoolAdapter, StoredContent
from kvpool.storage.prefetches import Prefetches
from kvpool.storage.store import Bytes, Rows, Stop
from tests.engine import Engine
from tests.seeds import some_of
from tests.stores.lab import Gate, Wrong, fail, raising
from tests.stores.pool_lab import (
    IDENTITY,
    fetch,
    make_engine,
    make_manager,
    prefetched,
    room,
    seed,
    stocked,
    store,
    tokens,
)
from tests.waiting import until

PROMPT = tokens(41)


# -- bounds --------------------------------------------------------------------------------------------


def test_a_block_that_is_evicted_before_it_was_copied_is_counted(engine: Engine) -> None:
    gate, slow = Gate(), Wrong(store())
    slow.before["save"] = gate
    with make_manager(engine, slow, staging_blocks=2) as manager:
        engine.seed(PROMPT, 41)
        gate.wait()
        engine.cache.clear()
        gate.open()
        assert manager.drain(600)
        stats = manager.stats()
        assert stats.dropped["wrong", "evicted"] > 0
        assert stats.saved_blocks + stats.dropped["wrong", "evicted"] == 10


def contents_of(engine: Engine, count: int) -> list[Content]:
    return tier_of(engine).of_prompt(engine.prompt(PROMPT), count)[0]


def tier_of(engine: Engine) -> PoolAdapter:
    return PoolAdapter(engine.cache, StoredContent(engine.cache, [], 100), {}, True)


def test_a_row_has_nothing_of_what_was_there_before(engine: Engine) -> None:
    """A block is shorter than its row, and the row is saved whole."""
    with engine.cache as pool:
        engine.seed(PROMPT, 40)
        rows = np.full((4, 4096), 0xFF, np.uint8)
        assert tier_of(engine).copy(contents_of(engine, 3), rows, [2, 0, 1]).all()
        size = pool.groups[0].block_bytes
        assert not rows[:3, size:].any() and (rows[:3, :size] != 0xFF).any(axis=1).all()


def test_nothing_is_saved_that_was_copied_under_a_revoked_lease(engine: Engine) -> None:
    """The blocks may have had other content before the copy was over."""
    with engine.cache as pool:
        engine.seed(PROMPT, 40)

        class Rows(list[int]):
            def __getitem__(self, place: Any) -> Any:
                pool.revoke("kvpool storage manager")
                return super().__getitem__(place)

        assert not tier_of(engine).copy(contents_of(engine, 3), np.zeros((4, 4096), np.uint8), Rows([2, 0, 1])).any()


def test_a_mac_covers_what_the_pool_has_under_the_key_now(engine: Engine) -> None:
    """Another prompt may have got the key since the event. One of another namespace is not saved for it."""
    with engine.cache:
        engine.seed(PROMPT, 40)
        contents = contents_of(engine, 3)
        right = [content.context for content in contents]
        contents[1].fields = contents_of(engine, 2)[0].fields
        assert tier_of(engine).copy(contents, np.zeros((4, 4096), np.uint8), [2, 0, 1]).all()
        assert [content.context for content in contents] == right
        for content in contents:
            content.namespace += 1
        assert not tier_of(engine).copy(contents, np.zeros((4, 4096), np.uint8), [2, 0, 1]).any()


@pytest.mark.parametrize("differs", ["tokens", "salt", "extra_ids", "parent"])
def test_the_second_of_two_prompts_with_one_key_gets_a_miss(differs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds a collision of 16 bytes still gets nobody's KV. The name under which the first block was saved is
    forced upon the block of another prompt."""
    made, other = make_engine(), make_engine()
    names: dict[str, Any] = {"tokens": {}, "salt": {"salt": "b"}, "extra_ids": {"extra_ids": [9] * 9}, "parent": {}}
    first, second = tokens(9), {"tokens": tokens(9, 500)}.get(differs, tokens(9))
    if differs == "parent":
        # The second blocks agree, those before them do not.
        second = [*tokens(4, 500), *first[4:]]
    memory = stocked(first)
    with made.cache:
        forced = dict(zip(other.keys(second, **names[differs]), made.keys(first), strict=True))
    names_of = PoolAdapter.names

    def collide(self: PoolAdapter, blocks: Iterable[Content], *, with_contexts: bool) -> BlockNames:
        wanted = list(blocks)
        named = [Content(content.group, forced.get(content.key, content.key)) for content in wanted]
        contexts = names_of(self, wanted, with_contexts=with_contexts).contexts
        return BlockNames(names_of(self, named, with_contexts=False).names, contexts)

    with other.cache, make_manager(other, memory) as manager:
        monkeypatch.setattr(PoolAdapter, "names", collide)
        handle = prefetched(other, manager, second, **names[differs])
        assert handle.blocks == 0 and handle.ended == "failed"
        assert manager.stats().stores["memory"].blocks["load", "damaged"] >= 1
        other.release(other.add(second, **names[differs]))


@pytest.mark.parametrize("save", ["commit", "evict", "reuse"])
def test_a_pool_whose_keys_end_with_it_is_refused_at_once(tmp_path: Path, save: str) -> None:
    """A store that outlives the process would have nothing for the next one."""
    made, disk = make_engine(secret=None), DiskStore(tmp_path / "store", room(8))
    with made.cache:
        with pytest.raises(ValueError, match=r"pool: expected .*secret=store\.secret"):
            make_manager(made, [store(), disk], save=save)
        assert make_manager(made, store()).close(600)
    kept_secret = make_engine(secret=disk.secret)
    with kept_secret.cache, make_manager(kept_secret, disk) as manager:
        seed(kept_secret, manager, [PROMPT])
    again = DiskStore(tmp_path / "store", room(8))
    after = make_engine(secret=again.secret)
    with after.cache, make_manager(after, again) as manager:
        assert fetch(after, manager, PROMPT) > 0


def test_a_namespace_has_its_own_quota_and_not_that_of_its_neighbour(engine: Engine) -> None:
    """Blocks of both wait for a storage manager that is made later."""
    memory = store()
    for salt in ("tenant", "other"):
        engine.seed(PROMPT, 40, salt=salt)
    with make_manager(engine, memory, quotas={("tenant", None): room(2)}) as manager:
        assert manager.drain(600) and memory.stats()["blocks"] == 2 + 10


def test_promotions_never_displace_more_than_their_room() -> None:
    """However many requests wait, most of what the host has stays."""
    waiting, two = [tokens(41, 1000 * i) for i in range(1, 20)], make_engine(P=40, S=40)
    with two.cache, make_manager(two, stocked(*waiting), promotion_blocks=10) as manager:
        for i in range(8):
            two.seed(tokens(41, 100_000 + 1000 * i), 41)
        assert manager.drain(600)
        before = set(two.cached("host"))
        handles = [manager.prefetch(two.prompt(prompt), 0.3) for prompt in waiting]
        assert all(handle.wait(600) for handle in handles)
        assert sum(handle.blocks for handle in handles) <= 10
        assert len(before - set(two.cached("host"))) <= 10 and manager.stats().promoted_blocks <= 10


def test_what_several_requests_wait_for_is_loaded_once(engine: Engine, wrong: Wrong) -> None:
    gate = wrong.hold("find")
    with make_manager(engine, wrong) as manager:
        handles = [manager.prefetch(engine.prompt([*PROMPT[:37], *tokens(4, first)]), 60.0) for first in range(5)]
        until(lambda: manager.stats().prefetching == 5)
        gate.open()
        assert all(handle.wait(600) and handle.ended in ("loaded", "cached") for handle in handles), handles
        assert sum(handle.blocks for handle in handles) == 9
        assert manager.stats().stores["wrong"].blocks["load", "ok"] == 9


def test_a_prefetch_that_waits_for_a_block_of_another_loads_it_if_that_fails(engine: Engine, wrong: Wrong) -> None:
    gate = Gate()
    wrong.before["load"], wrong.threads = gate, 4
    with make_manager(engine, wrong, load_seconds=60.0) as manager:
        first = manager.prefetch(engine.prompt(PROMPT), 60.0)
        gate.wait()
        second = manager.prefetch(engine.prompt(PROMPT), 60.0)
        until(lambda: manager.stats().found_blocks == 20)
        first.cancel()
        assert first.wait(600) and first.blocks == 0
        gate.open()
        assert second.wait(600) and second.blocks == 10 and second.ended == "loaded"


# -- the pool under it ---------------------------------------------------------------------------------


def test_nothing_that_was_asked_before_a_reset_enters_after_it(engine: Engine, wrong: Wrong) -> None:
    gate = wrong.hold("load")
    with make_manager(engine, wrong) as manager:
        handle = manager.prefetch(engine.prompt(PROMPT), 60.0)
        gate.wait()
        engine.cache.clear()
        gate.open()
        assert handle.wait(600) and handle.ended == "cleared" and engine.reusable(PROMPT) == 0
        del wrong.before["load"]
        assert fetch(engine, manager, PROMPT) == 10


def test_a_storage_manager_ends_with_its_pool() -> None:
    made, gate, slow = make_engine(), Gate(), Wrong(store())
    slow.before["find"] = gate
    manager = make_manager(made, slow)
    handle = manager.prefetch(made.prompt(PROMPT), 60.0)
    gate.wait()
    made.cache.close()
    until(lambda: manager.closed)
    assert handle.wait(600) and handle.ended == "closed" and not manager.drain(0.01)
    with pytest.raises(PoolClosed):
        manager.prefetch(PROMPT)
    gate.open()
    assert manager.close(600) and manager.stats().saved_blocks == 0


def test_a_prefetch_that_cannot_begin_ends_and_no_other(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_manager(engine, stocked(PROMPT)) as manager:
        for error, why in ((RuntimeError("mine"), "failed"), (PoolClosed("mine"), "closed")):
            with monkeypatch.context() as patched:
                patched.setattr(Prefetches, "begin", raising(error))
                assert prefetched(engine, manager, PROMPT).ended == why
        assert fetch(engine, manager, PROMPT) == 10


def test_what_was_asked_of_a_thread_that_ends_ends_with_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()

    def fails(_: Prefetches) -> None:
        gate()
        raise RuntimeError("mine")

    monkeypatch.setattr(Prefetches, "turn", fails)
    with make_manager(engine, store()) as manager, ThreadPoolExecutor(1) as other:
        gate.wait()
        handle, forgotten = manager.prefetch(engine.prompt(PROMPT)), other.submit(manager.forget, PROMPT)
        until(lambda: len(manager._orders) == 2)
        gate.open()
        assert handle.wait(600) and handle.ended == "closed"
        with pytest.raises(PoolClosed, match="has ended"):
            forgotten.result(600)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save": "always"}, "save: expected"),
        ({"identity": "tiny"}, "identity: expected"),
        ({"staging_blocks": 1}, "staging_blocks: expected"),
        ({"load_seconds": 0}, "load_seconds: expected a finite number of 0.001 or more"),
        ({"promotion_blocks": 0}, "promotion_blocks: expected"),
        ({"prefill_tokens_per_s": 5e-324}, "prefill_tokens_per_s: expected a finite number of 1e-06 or more"),
        ({"quotas": {"tenant": 4}}, "pair"),
        ({"quotas": {("tenant", None): -1}}, "quotas"),
        ({"probe_seconds": -1}, "probe_seconds: expected"),
    ],
)
def test_bad_arguments_are_named(engine: Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        StorageManager(engine.cache, **({"stores": [store()], "identity": IDENTITY} | options))
    with make_manager(engine, store()) as manager, pytest.raises(ValueError, match="timeout: .*"):
        manager.prefetch([1], -1.0)


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
@pytest.mark.parametrize("number", some_of(1, range(2)))
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
    made = make_engine(P=20, S=12)
    with made.cache, make_manager(made, memory, save=save, staging_blocks=16, probe_seconds=0.001) as manager:
        for _ in range(60):
            family = random.randrange(5)
            prompt = [*tokens(random.choice((8, 16, 24)), 1000 * family), *tokens(random.randrange(1, 12), 50)]
            salt = random.choice((None, "a"))
            handle = manager.prefetch(made.prompt(prompt, salt=salt), 60.0)
            if random.random() < 0.7:
                assert handle.wait(600)
            made.seed(prompt, len(prompt), salt=salt)
            assert handle.wait(600)
        assert manager.drain(600) and not manager.closed
        made.cache.verify()
        assert {"find", "load", "save"} <= set(memory.calls)
