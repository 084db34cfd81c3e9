"""A storage manager saves the blocks of a pool, and loads them again, byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpool import KVCacheManager
from kvpool.device.cpu import CpuDevice
from kvpool.device.sim import SimDevice
from kvpool.storage import FAILED, OK, StorageManager, tier_storage
from tests.device.faults import FaultyDevice
from tests.engine import Engine, small_layout
from tests.stores.lab import OTHER, Clock, Wrong
from tests.stores.pool_lab import (
    IDENTITY,
    SECRET,
    T,
    fetch,
    grouped,
    make_engine,
    make_manager,
    prefetched,
    read_all,
    seed,
    seeded,
    stocked,
    store,
    tokens,
    write_all,
)


def test_a_prompt_gets_no_more_than_the_room_for_promotions() -> None:
    prompt, engine = tokens(41), make_engine()
    with engine.cache, make_manager(engine, stocked(prompt), promotion_blocks=4) as manager:
        handle = prefetched(engine, manager, prompt)
        assert handle.ended == "full" and handle.blocks == 4
        assert engine.reusable(prompt) == 16 and manager.stats().promoted_blocks == 4
        sequence = engine.add(prompt)
        assert sequence.cached == 16
        engine.finish(sequence)
        assert manager.drain(600) and manager.stats().promoted_blocks == 0
        assert fetch(engine, manager, prompt) == 0


def test_a_prefetch_ends_when_the_host_is_full_of_the_blocks_before() -> None:
    """The host keeps its copies of the beginning of the prompt, which is on the device by now."""
    prompt, engine = tokens(41), make_engine(S=4)
    with engine.cache, make_manager(engine, stocked(prompt), promotion_blocks=4) as manager:
        assert fetch(engine, manager, prompt) == 4 and engine.cache.content.prefetch(engine.prompt(prompt)) == 4
        assert manager.drain(600) and manager.stats().promoted_blocks == 0
        handle = prefetched(engine, manager, prompt)
        assert handle.ended == "full" and handle.blocks == 0
        assert manager.stats().promoted_blocks == 0, "what did not come waits for nobody"


def test_saving_changes_no_order_of_eviction() -> None:
    """The same requests, with and without a storage manager that saves before evictions."""
    hits_by_mode = []
    for save in ("evict", "commit", None):
        engine = make_engine(P=12, S=24)
        with engine.cache:
            manager = None if save is None else make_manager(engine, store(), save=save, staging_blocks=4)
            hits = []
            for i in range(40):
                hits.append(engine.seed(tokens(17, 1000 * (i * 7 % 11)), 17))
                assert manager is None or manager.drain(600)
            hits_by_mode.append(hits)
            assert manager is None or manager.close(600)
    assert hits_by_mode[0] == hits_by_mode[2]


# -- namespaces, groups, devices -----------------------------------------------------------------------


def test_nothing_crosses_namespaces_and_their_types() -> None:
    """Salts and adapters that print alike are different namespaces; so are prompts with other extra ids."""
    memory, prompt = store(), tokens(17)
    names: list[dict[str, Any]] = [
        {},
        {"salt": "1"},
        {"salt": b"1"},
        {"adapter_id": "1"},
        {"adapter_id": 1},
        {"salt": "1", "adapter_id": 1},
        {"extra_ids": [7] * 17},
        {"salt": ""},
        {"salt": "None"},
    ]
    for i, saved in enumerate(names):
        engine = make_engine()
        with engine.cache, make_manager(engine, memory) as manager:
            for other in names[i:]:
                assert fetch(engine, manager, prompt, **other) == 0
            for namespace in names[:i]:
                assert fetch(engine, manager, prompt, **namespace) == 4
                engine.release(engine.add(prompt, **namespace))
            engine.cache.clear()
            seed(engine, manager, [prompt], **saved)


def test_another_model_or_layout_finds_nothing() -> None:
    prompt = tokens(17)
    memory = stocked(prompt)
    for blocks, options, identity in (
        (0, {}, OTHER),
        (0, {"layout": {"kv_heads": 1}}, IDENTITY),
        (0, {"window": 8}, IDENTITY),
        (4, {}, IDENTITY),
    ):
        engine = make_engine(**options)
        with engine.cache, make_manager(engine, memory, identity=identity) as manager:
            assert fetch(engine, manager, prompt) == blocks


def test_prompts_that_publish_nothing_are_not_saved() -> None:
    engine = make_engine()
    with engine.cache, make_manager(engine, store()) as manager:
        sequence = engine.cache.add_sequence(engine.cache.block_keys(tokens(17), publish=False))
        engine.cache.commit(sequence)
        engine.cache.release(sequence)
        assert manager.drain(600) and manager.stats().saved_blocks == 0
        assert manager.prefetch(engine.cache.block_keys(tokens(17), reuse=False)).wait(600)
        assert manager.stats().prefetches == {"cached": 1}


def test_a_prefetch_says_why_there_is_no_more() -> None:
    engine = make_engine()
    with engine.cache, make_manager(engine, store()) as manager:
        seed(engine, manager, [tokens(17)])
        ends = []
        for prompt in (tokens(17, 500), tokens(17), tokens(17)):
            ends.append(prefetched(engine, manager, prompt).ended)
            if prompt[0]:
                engine.cache.clear()
        assert ends == ["absent", "loaded", "cached"]


@pytest.mark.parametrize("head_dim", [3, 600])
def test_several_groups_of_layers_come_back(head_dim: int) -> None:
    """Full attention in two parts, a window, and recurrent layers, in blocks of up to a page and of several."""
    memory, prompt = store(), tokens(21)
    contents: list[dict[tuple[int, bytes], bytes]] = []
    for turn in range(2):
        with (
            grouped(head_dim=head_dim) as cache,
            StorageManager(cache, [memory], identity=IDENTITY, load_seconds=60.0) as manager,
        ):
            keys = cache.block_keys(prompt)
            if turn:
                assert manager.prefetch(keys, 60.0).wait(600)
            sequence = cache.add_sequence(keys)
            assert cache.cached_tokens(sequence) == 20 * turn
            write_all(cache, sequence, seed=turn)
            cache.commit(sequence)
            assert manager.drain(600) and not manager.stats().dropped
            contents.append(read_all(cache, keys))
            cache.release(sequence)
    assert contents[0] and all(contents[0][place] == bytes_ for place, bytes_ in contents[1].items())


@pytest.mark.parametrize("seed_of_sim", range(3))
def test_on_a_device_that_finds_races_none_is_found(seed_of_sim: int) -> None:
    memory, prompt = store(), np.arange(33, dtype=np.int32)
    layout = small_layout(T)
    for turn in range(2):
        device = SimDevice(seed=seed_of_sim)
        with KVCacheManager(
            layout, device_blocks=12, host_blocks=8, device=device, event_capacity=256, secret=SECRET
        ) as cache:
            with StorageManager(cache, [memory], identity=IDENTITY, load_seconds=60.0) as manager:
                if turn:
                    assert manager.prefetch(prompt, 60.0).wait(600)
                sequence = cache.add_sequence(prompt)
                assert cache.cached_tokens(sequence) == (16 if turn else 0)
                cache.commit(sequence)
                cache.release(sequence)
                cache.release(cache.add_sequence(prompt + 100))
                assert manager.drain(600)
        device.close()


def test_a_copy_that_the_device_refuses_saves_nothing_wrong() -> None:
    """The copies to the host of some blocks fail: they are counted, and their rows are not saved. There is one row for
    saves, which the next blocks get."""
    memory, prompt = store(), tokens(41)
    device = FaultyDevice(CpuDevice(), lambda call, index, move: int(move[0]) in (2, 5))
    with KVCacheManager(small_layout(T), device_blocks=32, host_blocks=32, device=device, event_capacity=256) as cache:
        with StorageManager(cache, [memory], identity=IDENTITY, staging_blocks=2) as manager:
            sequence = cache.add_sequence(prompt)
            cache.commit(sequence)
            assert manager.drain(600)
            stats = manager.stats()
            assert stats.dropped == {("memory", "evicted"): 2} and stats.saved_blocks == 8
            cache.release(sequence)
            cache.verify()
    device.close()


def test_a_prefetch_may_take_as_long_as_its_request_waits_for_the_engine(engine: Engine) -> None:
    """The engine computes a prompt in 0.2 s, and a load takes 5 s."""
    clock, slow = Clock(), Wrong(store(1024))
    slow.before["load"] = lambda: clock.pass_(5.0)
    with make_manager(engine, slow, prefill_tokens_per_s=100.0, clock=clock, load_seconds=1_000.0) as manager:
        for first in range(0, 700, 100):
            seed(engine, manager, [prompt := tokens(17, first)])
            engine.cache.content.forget(prompt)
            handle = manager.prefetch(engine.prompt(prompt), 1e5, spare=60.0)
            assert handle.wait(600) and handle.ended == "loaded"


# -- why blocks were not found ---------------------------------------------------------------------------


PROMPT = tokens(17)


def test_what_a_store_has_and_the_pool_has_forgotten(engine: Engine) -> None:
    with seeded(engine, PROMPT, store()) as manager:
        assert manager.explain(PROMPT) == engine.cache.content.explain(PROMPT), "all of it is in the pool"
        engine.cache.content.forget(engine.keys(PROMPT)[2:])
        first, last = manager.explain(PROMPT).missed
        assert first[:3] == (8, 8, "forgotten") and first.stores == ("memory",) and not first.trouble
        assert last == (16, 1, "always_computed", None, (), ())
        with pytest.raises(TypeError, match="prompt"):
            manager.explain("text")


def test_damaged_or_failed_blocks_are_reported_until_they_are_right_again(engine: Engine, wrong: Wrong) -> None:
    wrong.after["load"] = lambda answer: (np.where(np.arange(len(answer[0])) < 3, answer[0], FAILED), answer[1])
    with make_manager(engine, wrong) as manager:
        assert fetch(engine, manager, PROMPT) == 3
        missed = manager.explain(PROMPT).missed
        assert [(each.first, each.tokens, each.trouble) for each in missed] == [
            (12, 4, (("wrong", "failed"),)),
            (16, 1, ()),
        ]
        wrong.after["load"] = lambda answer: (answer[0], answer[1] ^ 1)
        assert fetch(engine, manager, PROMPT) == 0
        assert manager.explain(PROMPT).missed[0].trouble == (("wrong", "damaged"),)
        del wrong.after["load"]
        seed(engine, manager, [PROMPT])
        engine.cache.content.forget(PROMPT)
        assert manager.explain(PROMPT).missed[0].trouble == ()


def test_why_blocks_were_not_saved_is_remembered_in_bounded_memory(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_storage, "NOTED", 2)
    refusing = Wrong(store())
    refusing.after["save"] = lambda codes: np.where(codes == OK, np.uint8(FAILED), codes)
    with seeded(engine, PROMPT, refusing, failures=1000) as manager:
        engine.cache.content.forget(PROMPT)
        missed = manager.explain(PROMPT).missed
    assert sum(each.tokens for each in missed if each.trouble == (("wrong", "failed"),)) == 8, "of two blocks"
