"""What callers do to cached content by its name: forget it, value it; and requests that reuse or publish nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from engine import Engine, Make
from group_engine import GroupsEngine, Open
from tests.race.lab import Lab

A, B = list(range(13)), list(range(100, 113))
"""Three full blocks, and a token."""
KINDS: dict[str, list[dict[str, Any]]] = {
    "full": [{}],
    "window": [{"window": 6, "sinks": 1}],
    "states": [{"kind": "recurrent", "snapshot_tokens": 4}],
    "several": [{}, {"window": 6}, {"kind": "recurrent", "snapshot_tokens": 4}, {"kind": "cross"}],
}


def encoder(engine: GroupsEngine) -> dict[str, int]:
    return {"encoder_tokens": 3} if any(side.kind == "cross" for side in engine.sides) else {}


def fill(engine: Engine, tokens: Sequence[int], tier: str, **names: Any) -> None:
    """Have a prompt cached on the device, on both tiers, or on the host alone."""
    options = encoder(engine) if isinstance(engine, GroupsEngine) else {}
    engine.seed(tokens, **names, **options)
    keys = engine.prompt(tokens, **names)
    if tier != "device":
        engine.cache.content.offload(keys)
    if tier == "host":
        held = [engine.cache.add_sequence([7], **options)]
        while True:
            try:
                engine.cache.append_tokens(held[0], [7])
            except Exception:
                break
        engine.cache.release(held, store=False)


# -- forget ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("tier", ["device", "both", "host"])
@pytest.mark.parametrize("how", ["prompt", "keys", "namespace"])
def test_what_is_forgotten_is_found_by_nobody_and_its_blocks_are_empty(
    open_: Open, kinds: list[dict[str, Any]], tier: str, how: str
) -> None:
    engine = open_(*({"host_blocks": 12} | kind for kind in kinds), max_sequence_tokens=4 * 40)
    cache, content = engine.cache, engine.cache.content
    fill(engine, A, tier, salt="leaves")
    engine.seed(B, salt="stays", **encoder(engine))
    keys, other = engine.prompt(A, salt="leaves"), engine.prompt(B, salt="stays")
    promised, before, cached = cache.match_prefix(other), cache.stats(), int(content.cached_blocks(keys).sum())
    assert cache.match_prefix(keys).tokens == 12
    calls = {"prompt": {"prompt": keys}, "keys": {"prompt": keys.keys}, "namespace": {"namespace": ("leaves", None)}}
    assert content.forget(**calls[how]) == cached > 0  # type: ignore[arg-type]
    after, copies = cache.stats(), 2 * cached if tier == "both" else cached
    assert after.forgotten_by_call_blocks == cached
    assert not content.cached_blocks(keys).any() and cache.match_prefix(keys).tokens == 0
    assert cache.find_and_pin_host(keys.keys[0]) is None and cache.match_prefix(other) == promised
    assert after.device.empty + after.host.empty == before.device.empty + before.host.empty + copies
    assert after.device.evictable + after.host.evictable == before.device.evictable + before.host.evictable - copies
    assert content.forget(keys) == content.forget(namespace=("leaves", None)) == 0


def test_other_namespaces_and_other_prompts_stay(make: Make) -> None:
    engine = make(T=4, P=32)
    names: list[dict[str, Any]] = [{}, {"salt": "A"}, {"salt": "A", "adapter_id": 1}, {"salt": b"A"}, {"adapter_id": 1}]
    for namespace in names:
        engine.seed(A, **namespace)
    assert engine.cache.content.forget(namespace=("A", 1)) == 3
    assert [engine.reusable(A, **namespace) for namespace in names] == [12, 12, 0, 12, 12]
    assert engine.cache.content.forget(namespace=(None, None)) == 3
    assert [engine.reusable(A, **namespace) for namespace in names] == [0, 12, 0, 12, 12]
    assert engine.cache.content.forget(engine.prompt(A)) == 0
    assert engine.cache.content.forget(engine.prompt(A[:4], salt="A")) == 1
    assert engine.reusable(A, salt="A") == 0, "the second block is not found without the first"
    engine.seed(A[:5], salt="A")
    assert engine.reusable(A, salt="A") == 12, "and is when that comes back"


def test_the_stored_tail_of_a_prompt_goes_with_it(make: Make) -> None:
    engine = make(T=4, P=16)
    engine.seed(A[:8])  # one full block, and a tail of three tokens
    engine.seed([*A[:4], 77, 78, 79])
    assert engine.reusable(A) == 7
    assert engine.cache.content.forget(engine.prompt([*A[:4], 77])) == 1, (
        "the block; the tail has more tokens than the prompt"
    )
    engine.seed(A[:5])
    assert engine.reusable(A) == 7 and engine.cache.content.forget(engine.prompt(A[:7])) == 2
    engine.seed(A[:5])
    assert engine.reusable(A) == 4


@pytest.mark.parametrize("how", ["prompt", "namespace"])
def test_what_running_sequences_hold_is_unfindable_and_goes_when_they_end(make: Make, how: str) -> None:
    engine = make(T=4, P=16)
    cache, prompt = engine.cache, engine.prompt(A, salt="A")
    first = engine.commit(engine.add(A, salt="A"))
    twin = engine.add(A, salt="A")
    again = engine.admitted(cache.add_sequence(cache.block_keys(A, salt="A", reuse=False)), A, salt="A")
    engine.commit(again)  # it has computed the same content: its blocks wait to be published
    cache.content.forget(**({"prompt": prompt} if how == "prompt" else {"namespace": ("A", None)}))  # type: ignore[arg-type]
    assert engine.reusable(A, salt="A") == 0 and not engine.cached()
    engine.append(first, [1, 2, 3, 4, 5, 6, 7])
    for sequence in (first, twin, again):
        engine.commit(sequence)
        assert not engine.cached(), "nothing comes back"
        engine.release(sequence)
        assert not engine.cached()
    assert engine.free() == 16 == cache.stats().device.empty
    assert engine.seed(A, salt="A") == 0, "a new request begins anew"
    assert engine.reusable(A, salt="A") == 12


def test_a_fork_of_a_withdrawn_sequence_publishes_nothing_either(make: Make) -> None:
    engine = make(T=4, P=16)
    first = engine.add(A, salt="A")
    engine.cache.content.forget(namespace=("A", None))
    (two,) = engine.fork(first)
    engine.append(two, [5, 5, 5, 5])
    engine.reorder([first, two], [1, 1])
    engine.finish(two)
    engine.finish(first)
    assert not engine.cached() and engine.reusable(A, salt="A") == 0


def test_a_reservation_of_the_namespace_publishes_nothing(make: Make) -> None:
    engine = make(T=4, P=16)
    with engine.cache.imports.reserve(engine.prompt(A, salt="A")) as reservation:
        assert engine.cache.content.forget(namespace=("A", None)) == 0
        reservation.commit()
    assert not engine.cached() and engine.free() == 16


def test_forgetting_is_reported(make: Make) -> None:
    engine = make(T=4, P=8, S=8, event_capacity=100)
    fill(engine, A, "both")
    engine.cache.events()
    assert engine.cache.content.forget(engine.prompt(A)) == 3
    removed = [(event.kind, event.tier, len(event.keys)) for event in engine.cache.events() if event.kind == "removed"]
    assert sorted(removed) == [("removed", "device", 1)] * 3 + [("removed", "host", 1)] * 3


@pytest.mark.parametrize("without", [None, "copy_writes_after_engine", "engine_writes_after_engine"])
def test_an_emptied_block_is_not_written_before_its_last_reader_has_run(without: str | None) -> None:
    """On the sim device, with the first stream stalled; without the rule, the device sees the race."""
    lab = Lab(2, 0, guard=without)
    first = lab.add([1, 2, 3, 4])
    lab.commit(first)
    lab.release(first)
    assert lab.cache.content.forget(lab.prompt([1, 2, 3, 4])) == 2
    with lab.on(lab.b):
        second = lab.add([5, 6, 7, 8])
    lab.release(second)
    findings = lab.findings()
    assert bool(findings) == (without == "engine_writes_after_engine"), findings


# -- priorities --------------------------------------------------------------------------------------------------------


def test_the_time_of_a_priority_begins_now_or_at_release(make: Make) -> None:
    engine = make(T=4, P=8)
    engine.seed(A)
    running = engine.add(B)
    engine.commit(running)
    engine.clock.now = 100
    assert engine.cache.content.set_priority(engine.prompt(A), 80, ttl_ms=50) == 3
    assert engine.cache.content.set_priority(engine.prompt(B), 90, ttl_ms=50) == 3
    engine.clock.now = 149
    assert engine.cache.content.refresh() == 0
    engine.release(running)
    engine.clock.now = 150
    assert engine.cache.content.refresh() == 3
    engine.clock.now = 199
    assert engine.cache.content.refresh() == 3
    assert engine.cache.content.set_priority(engine.prompt(A), 80, ttl_ms=50) == 3
    assert engine.cache.content.set_priority(engine.prompt(A), 80) == 3, "for ever"
    engine.clock.now = 1000
    assert engine.cache.content.refresh() == 0


# -- requests that reuse or publish nothing ----------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_a_request_that_reuses_nothing_computes_all_and_leaves_it_to_others(
    open_: Open, kinds: list[dict[str, Any]]
) -> None:
    engine = open_(*({"host_blocks": 6} | kind for kind in kinds))
    cache, options = engine.cache, encoder(engine)
    engine.seed(A, **options)
    engine.cache.content.offload(engine.prompt(A))
    before, fresh = cache.stats(), cache.block_keys(A, reuse=False)
    assert (
        cache.match_prefix(fresh).tokens == 0
        and cache.content.prefetch(fresh) == 0
        and not fresh.reuse
        and fresh.publish
    )
    if not options:
        needs = [cache.blocks_needed(fresh, **engine.named(side.index)) for side in engine.sides]
        assert needs == [cache.blocks_needed(list(range(500, 513)), **engine.named(s.index)) for s in engine.sides]
    request = engine.admitted(cache.add_sequence(fresh, **options), A, **options)
    assert request.cached == 0
    engine.finish(request)
    after = cache.stats()
    assert after.bypassed_tokens - before.bypassed_tokens == 13
    for name in ("prompt_tokens", "missed_blocks", "reused_device_tokens", "reused_host_tokens", "partial_tokens"):
        assert getattr(after, name) == getattr(before, name), name
    engine.cache.content.forget(engine.prompt(A))
    engine.finish(engine.admitted(cache.add_sequence(fresh, **options), A, **options))
    assert engine.reusable(A) == 12, "what it computed is cached"


def test_a_request_that_publishes_nothing_leaves_no_tail_either(make: Make) -> None:
    engine = make(T=4, P=8)
    engine.seed(A[:5])
    engine.finish(engine.admitted(engine.cache.add_sequence(engine.cache.block_keys(A[:8], publish=False)), A[:8]))
    assert engine.reusable(A) == 4


# -- what is cached, and what could be brought -------------------------------------------------------------------------


def test_a_loader_learns_what_each_group_lacks(open_: Open) -> None:
    engine = open_({}, {"window": 6}, {"kind": "recurrent"})
    prompt, missing_blocks = list(range(25)), engine.cache.content.missing_blocks
    engine.seed(prompt[:9])
    there = np.ones((3, 6), np.bool_)
    for tokens, missing in ((24, [[2, 3, 4, 5], [4, 5], [5]]), (20, [[2, 3, 4], [3, 4], [4]])):
        found = missing_blocks(prompt, there)
        assert found.tokens == tokens and [blocks.tolist() for blocks in found.blocks] == missing
        there[2, 5] = False
    nothing = missing_blocks(prompt, np.zeros((3, 6), np.bool_))
    assert nothing.tokens == 8 and not any(len(blocks) for blocks in nothing.blocks)
    for wrong in (there[:2], there.astype(np.int8), [[True]], "x"):
        with pytest.raises((TypeError, ValueError), match="available"):
            missing_blocks(prompt, wrong)
