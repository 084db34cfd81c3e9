"""What a keeper was told to forget comes back from no store: not by work that was under way, not while the store is
down, and not after a restart once it is confirmed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvpool import PoolBusy, PoolClosed, StoreBusy
from kvpool.storage import Forgotten, MemoryStore, StorageManager
from tests.engine import Engine
from tests.stores.keeping import (
    IDENTITY,
    T,
    engine,
    fetch,
    grouped,
    keeper,
    read_all,
    seed,
    store,
    tokens,
    write_all,
)
from tests.stores.lab import Gate, Wrong, fail
from tests.stores.test_drops import Down
from tests.waiting import until

PROMPT, OTHER = tokens(41), tokens(41, 1000)
BLOCKS = 10
"""full blocks of each"""
Drop = Callable[[Engine, StorageManager], Forgotten]
DROPS: dict[str, Drop] = {
    "prompt": lambda one, kept: kept.forget(PROMPT),
    "keys": lambda one, kept: kept.forget(one.prompt(PROMPT).keys[:BLOCKS]),
    "namespace": lambda one, kept: kept.forget(namespace=(None, None)),
    "clear": lambda one, kept: kept.clear(),
}


@pytest.fixture
def wrong() -> Wrong:
    """An empty store of four threads."""
    made = Wrong(store())
    made.threads = 4
    return made


@pytest.fixture(params=DROPS.values(), ids=DROPS)
def drop(request: pytest.FixtureRequest) -> Drop:
    return request.param


def restarted(memory: Any, prompt: list[int] = PROMPT, **names: Any) -> int:
    """How many blocks of a prompt another process finds."""
    other = engine(P=64, S=64)
    with other.cache, keeper(other, memory) as kept:
        return fetch(other, kept, prompt, **names)


# -- what is dropped -----------------------------------------------------------------------------------


def test_what_is_forgotten_leaves_the_pool_and_the_store(one: Engine, drop: Drop) -> None:
    memory = store()
    with keeper(one, memory) as kept:
        seed(one, kept, [PROMPT])
        forgotten = drop(one, kept)
        assert forgotten.wait(600) and forgotten.done and not forgotten.errors
        assert forgotten.stores == {"memory": BLOCKS}
        # A prompt has a tail besides, which no store has.
        assert forgotten.blocks == (None if drop is DROPS["clear"] else BLOCKS + (drop is not DROPS["keys"]))
        assert one.reusable(PROMPT) == 0 and fetch(one, kept, PROMPT) == 0
        assert kept.match_prefix(one.prompt(PROMPT)).store_tokens == 0
    assert not memory._blocks and restarted(memory) == 0


@pytest.mark.parametrize("name", ["prompt", "keys"])
def test_the_blocks_of_other_prompts_stay(one: Engine, name: str) -> None:
    """Also those that begin with the same tokens, unless they need what is forgotten."""
    memory, longer = store(), [*PROMPT[:20], *tokens(20, 500)]
    with keeper(one, memory) as kept:
        seed(one, kept, [PROMPT, OTHER, longer])
        assert DROPS[name](one, kept).wait(600)
        assert one.reusable(OTHER) > 0 and one.reusable(longer) == 0
    assert restarted(memory) == restarted(memory, longer) == 0 and restarted(memory, OTHER) == BLOCKS


def test_a_tenant_that_leaves_takes_its_content_along(one: Engine) -> None:
    memory = store()
    names = [{}, {"salt": "leaves"}, {"salt": b"leaves"}, {"salt": "leaves", "adapter_id": 3}, {"adapter_id": 3}]
    with keeper(one, memory) as kept:
        for own in names:
            seed(one, kept, [PROMPT], **own)
        # Half of it is not in this pool, but another process had saved it.
        seed_elsewhere(memory, OTHER, salt="leaves")
        forgotten = kept.forget(namespace=("leaves", None))
        assert forgotten.wait(600) and forgotten.stores == {"memory": 2 * BLOCKS}
        assert one.reusable(PROMPT, salt="leaves") == 0 and one.reusable(PROMPT, salt=b"leaves") > 0
    assert [restarted(memory, **own) for own in names] == [BLOCKS, 0, BLOCKS, BLOCKS, BLOCKS]
    assert restarted(memory, OTHER, salt="leaves") == 0


def seed_elsewhere(memory: MemoryStore, prompt: list[int], **names: Any) -> None:
    """Another pool has computed and saved a prompt."""
    other = engine(P=64, S=64)
    opened = memory._memory
    with other.cache, keeper(other, memory) as kept:
        seed(other, kept, [prompt], **names)
    memory._memory = opened


def seed_first(memory: Any) -> None:
    other = engine(P=64, S=64)
    with other.cache, keeper(other, memory) as kept:
        seed(other, kept, [PROMPT])


@pytest.mark.parametrize("clears", [False, True])
def test_all_groups_of_layers_are_dropped(clears: bool) -> None:
    memory, prompt = store(), tokens(33)
    with grouped() as cache, StorageManager(cache, [memory], identity=IDENTITY, deadline_ms=60_000) as kept:
        sequence = cache.add_sequence(prompt)
        write_all(cache, sequence, 1)
        cache.commit(sequence)
        cache.release(sequence)
        assert kept.drain(600) and memory._blocks
        assert (kept.clear() if clears else kept.forget(prompt)).wait(600)
        assert not memory._blocks and not read_all(cache, cache.block_keys(prompt))
        handle = kept.prefetch(prompt)
        assert handle.wait(600) and handle.blocks == 0


def test_what_is_computed_again_is_saved_and_found_again(one: Engine, drop: Drop) -> None:
    memory = store()
    with keeper(one, memory) as kept:
        seed(one, kept, [PROMPT])
        assert drop(one, kept).wait(600)
        seed(one, kept, [PROMPT])
    assert restarted(memory) == BLOCKS


def test_readers_of_events_learn_what_the_store_has_lost(one: Engine, drop: Drop) -> None:
    with keeper(one, store()) as kept:
        seed(one, kept, [PROMPT])
        kept.events()
        drop(one, kept)
        told = [event for event in kept.events() if event.tier == "memory"]
        assert {event.kind for event in told} == {"removed"}
        assert sum(len(event.keys) for event in told) == BLOCKS


# -- work under way ------------------------------------------------------------------------------------


def test_a_prefetch_of_which_a_part_has_come_brings_no_more(one: Engine, wrong: Wrong, drop: Drop) -> None:
    """One of its first loads hangs. Others are done, and wait for it to enter the pool."""
    seed_first(wrong.inner)
    gate, count = Gate(), iter(range(100))
    wrong.after["load"] = lambda answer: answer if next(count) else (gate(), answer)[1]
    with keeper(one, wrong, staging_blocks=8) as kept:
        handle = kept.prefetch(one.prompt(PROMPT), 60.0)
        assert gate.reached.wait(600)
        until(lambda: kept.stats().stores["wrong"].blocks["load", "ok"] >= 3)
        forgotten = drop(one, kept)
        assert handle.wait(600) and handle.ended in ("forgotten", "reset")
        came = handle.blocks
        gate.open()
        assert forgotten.wait(600) and kept.drain(600)
        assert one.reusable(PROMPT) == 0 and handle.blocks == kept.stats().loaded_blocks == came < 4


def test_a_save_that_is_over_and_not_noted_is_taken_back(one: Engine, wrong: Wrong, drop: Drop) -> None:
    """The keeper's thread waits for its clock while the save ends. Then it is told to forget."""
    clock, gate = HeldClock(), wrong.hold("save")
    with keeper(one, wrong, clock=clock) as kept:
        one.seed(PROMPT, len(PROMPT))
        assert gate.reached.wait(600)
        with clock.held():
            gate.open()
            until(lambda: kept.stats().stores["wrong"].blocks["save", "ok"] == BLOCKS)
            found: list[Forgotten] = []
            caller = threading.Thread(target=lambda: found.append(drop(one, kept)))
            caller.start()
            until(lambda: len(kept._orders) == 1)
        caller.join(600)
        assert found[0].wait(600) and found[0].stores == {"wrong": BLOCKS} and kept.drain(600)
        assert kept.match_prefix(one.prompt(PROMPT)).store_tokens == 0 and not wrong.inner._blocks


class HeldClock:
    """Seconds that pass as usual, but the keeper's thread waits for them while the clock is held."""

    def __init__(self) -> None:
        self._free, self._waits = threading.Event(), threading.Event()
        self._free.set()

    def __call__(self) -> float:
        if threading.current_thread().name == "kvpool-keeper" and not self._free.is_set():
            self._waits.set()
            assert self._free.wait(600)
        return time.monotonic()

    @contextmanager
    def held(self) -> Iterator[None]:
        self._free.clear()
        try:
            assert self._waits.wait(600)
            yield
        finally:
            self._free.set()


def test_what_waits_to_be_saved_is_given_up_and_counted(one: Engine, wrong: Wrong, drop: Drop) -> None:
    """All staging rows are taken by a save that hangs."""
    gate = wrong.hold("save")
    with keeper(one, wrong, staging_blocks=2) as kept:
        one.seed(PROMPT, len(PROMPT))
        assert gate.reached.wait(600)
        until(lambda: kept.stats().waiting_blocks == BLOCKS - 1)
        forgotten = drop(one, kept)
        assert kept.stats().dropped["wrong", "forgotten"] == BLOCKS - 1
        gate.open()
        assert forgotten.wait(600) and kept.drain(600)
    assert restarted(wrong.inner) == 0


# -- stores that do not do it --------------------------------------------------------------------------


def test_a_store_that_is_down_blocks_nobody_and_brings_nothing_back(one: Engine, wrong: Wrong, drop: Drop) -> None:
    with keeper(one, wrong) as kept:
        seed(one, kept, [PROMPT])
        down = Down(wrong)
        forgotten = drop(one, kept)
        assert down.refused.acquire(timeout=600) and down.refused.acquire(timeout=600)
        assert not forgotten.wait(0.0) and forgotten.stores == {"wrong": None}
        assert "I/O error" in forgotten.errors["wrong"]
        assert kept.stats().stores["wrong"].unconfirmed_drops == 1
        assert fetch(one, kept, PROMPT) == 0
        # It is computed again meanwhile: the pool has it, and the store does not get it yet.
        seed(one, kept, [PROMPT])
        assert one.reusable(PROMPT) > 0 and kept.stats().dropped["wrong", "cancelled"] == BLOCKS
        down.up()
        assert forgotten.wait(600) and forgotten.stores == {"wrong": BLOCKS}
    assert restarted(wrong.inner) == 0


def test_a_suspended_store_is_told_too(one: Engine, wrong: Wrong, drop: Drop) -> None:
    with keeper(one, wrong, failures=1, probe_seconds=3600.0) as kept:
        seed(one, kept, [PROMPT])

        wrong.before["find"] = wrong.before["save"] = fail
        assert fetch(one, kept, OTHER) == 0
        seed(one, kept, [OTHER])
        health = kept.stats().health["wrong"]
        assert health.reads_suspended and health.writes_suspended
        assert drop(one, kept).wait(600)
    del wrong.before["find"], wrong.before["save"]
    assert restarted(wrong.inner) == 0


def test_of_two_stores_one_confirms_while_the_other_is_down(one: Engine, wrong: Wrong, drop: Drop) -> None:
    near = store()
    with keeper(one, [near, wrong]) as kept:
        seed(one, kept, [PROMPT])
        down = Down(wrong)
        forgotten = drop(one, kept)
        until(lambda: forgotten.stores == {"memory": BLOCKS, "wrong": None})
        assert fetch(one, kept, PROMPT) == 0, "the far store does not bring it"
        down.up()
        assert forgotten.wait(600) and forgotten.stores == {"memory": BLOCKS, "wrong": BLOCKS}


def test_a_keeper_that_ends_before_a_store_has_confirmed_says_so(one: Engine, wrong: Wrong, drop: Drop) -> None:
    with keeper(one, wrong) as kept:
        seed(one, kept, [PROMPT])
        down = Down(wrong)
        forgotten = drop(one, kept)
        assert down.refused.acquire(timeout=600)
    assert not forgotten.wait(600) and forgotten.stores == {"wrong": None}
    down.up()
    assert restarted(wrong.inner) == BLOCKS, "as is documented: it must be forgotten again"


# -- what is accepted ----------------------------------------------------------------------------------


def test_bad_arguments_change_nothing(one: Engine) -> None:
    memory = store()
    with keeper(one, memory) as kept:
        seed(one, kept, [PROMPT])
        calls: list[tuple[type[Exception], Callable[[], Any]]] = [
            (TypeError, lambda: kept.forget()),
            (TypeError, lambda: kept.forget(PROMPT, namespace=(None, None))),
            (TypeError, lambda: kept.forget(namespace="tenant")),
            (TypeError, lambda: kept.forget(namespace=(1.5, None))),
            (TypeError, lambda: kept.forget("prompt")),
            (TypeError, lambda: kept.clear(force="yes")),
        ]
        for error, call in calls:
            with pytest.raises(error):
                call()
        assert one.reusable(PROMPT) > 0 and len(memory._blocks) == BLOCKS


def test_keys_that_nobody_knows_are_forgotten_too(one: Engine) -> None:
    """Another process may have saved them."""
    memory = store()
    seed_first(memory)
    with keeper(one, memory) as kept:
        keys = np.concatenate([one.prompt(PROMPT).keys, np.array([[1, 2]], np.uint64)])
        forgotten = kept.forget(keys)
        assert forgotten.wait(600) and forgotten.blocks == 0 and forgotten.stores == {"memory": BLOCKS}


def test_a_store_that_cannot_is_refused_before_anything_has_changed(one: Engine, wrong: Wrong) -> None:
    near, wrong.clears_prefix = store(), 0
    with keeper(one, [near, wrong]) as kept:
        seed(one, kept, [PROMPT])
        for call in (lambda: kept.clear(), lambda: kept.forget(namespace=(None, None))):
            with pytest.raises(ValueError, match="store 'wrong'|got 'wrong'"):
                call()
        assert one.reusable(PROMPT) > 0 and len(near._blocks) == len(wrong.inner._blocks) == BLOCKS
        assert kept.forget(PROMPT).wait(600), "blocks can be forgotten nevertheless"


def test_a_clear_while_sequences_live_changes_nothing_unless_it_is_forced(one: Engine) -> None:
    memory = store()
    with keeper(one, memory) as kept:
        seed(one, kept, [PROMPT])
        one.add(OTHER)
        with pytest.raises(PoolBusy):
            kept.clear()
        assert one.reusable(PROMPT) > 0 and len(memory._blocks) == BLOCKS
        assert kept.clear(force=True).wait(600)
        assert one.reusable(PROMPT) == 0 and not memory._blocks


def test_too_much_that_waits_to_be_dropped_is_refused_before_anything_has_changed(
    one: Engine, wrong: Wrong, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = store()
    with keeper(one, [near, wrong]) as kept:
        seed(one, kept, [PROMPT])

        def full(blocks: int) -> None:
            raise StoreBusy("wrong", "forget", 1, 1)

        monkeypatch.setattr(kept._clients[1].queue, "check_forget", full)
        for drop in DROPS.values():
            with pytest.raises(StoreBusy):
                drop(one, kept)
        assert one.reusable(PROMPT) > 0 and len(near._blocks) == BLOCKS


def test_a_keeper_that_was_closed_refuses(one: Engine, drop: Drop) -> None:
    kept = keeper(one, store())
    kept.close()
    with pytest.raises(PoolClosed):
        drop(one, kept)


def test_a_pool_that_was_closed_refuses(drop: Drop) -> None:
    made = engine(P=64, S=64)
    with keeper(made, store()) as kept:
        keys = made.prompt(PROMPT)
        made.cache.close()
        with pytest.raises(PoolClosed):
            kept.forget(keys) if drop is DROPS["prompt"] else drop(made, kept)


def test_a_short_prompt_has_nothing_to_forget(one: Engine) -> None:
    with keeper(one, store()) as kept:
        forgotten = kept.forget(PROMPT[: T - 1])
        assert forgotten.done and forgotten.blocks == 0 and forgotten.stores == {"memory": 0}
