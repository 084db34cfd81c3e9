"""What ``forget`` drops comes back from no store: not by work that was in flight, not while the store is
down, and not after a restart once it is confirmed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvpool import PoolClosed
from kvpool.errors import PoolBusy, StoreBusy
from kvpool.storage import Forgotten, StorageManager
from tests.engine import Engine
from tests.stores.lab import Gate, Wrong
from tests.stores.pool_lab import (
    IDENTITY,
    T,
    fetch,
    grouped,
    make_engine,
    make_manager,
    read_all,
    seed,
    seeded,
    stocked,
    store,
    tokens,
    write_all,
)
from tests.stores.test_drops import Down
from tests.waiting import until

PROMPT, OTHER = tokens(41), tokens(41, 1000)
BLOCKS = 10
"""full blocks of each"""
Drop = Callable[[Engine, StorageManager], Forgotten]
DROPS: dict[str, Drop] = {
    "prompt": lambda engine, manager: manager.forget(PROMPT),
    "keys": lambda engine, manager: manager.forget(engine.prompt(PROMPT).keys[:BLOCKS]),
    "namespace": lambda engine, manager: manager.forget(namespace=(None, None)),
    "clear": lambda engine, manager: manager.clear(),
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
    other = make_engine(P=64, S=64)
    with other.cache, make_manager(other, memory) as manager:
        return fetch(other, manager, prompt, **names)


# -- what is dropped -----------------------------------------------------------------------------------


def test_what_is_forgotten_leaves_the_pool_and_the_store(engine: Engine, drop: Drop) -> None:
    memory = store()
    with seeded(engine, PROMPT, memory) as manager:
        forgotten = drop(engine, manager)
        assert forgotten.wait(600) and forgotten.done and not forgotten.errors
        assert forgotten.stores == {"memory": BLOCKS}
        # A prompt has a tail besides, which no store has.
        assert forgotten.blocks == (None if drop is DROPS["clear"] else BLOCKS + (drop is not DROPS["keys"]))
        assert engine.reusable(PROMPT) == 0 and fetch(engine, manager, PROMPT) == 0
        assert manager.match_prefix(engine.prompt(PROMPT)).store_tokens == 0
        assert not memory._blocks
        seed(engine, manager, [PROMPT])
    assert restarted(memory) == BLOCKS, "it may be saved anew"
    with pytest.raises(PoolClosed):
        drop(engine, manager)


@pytest.mark.parametrize("name", ["prompt", "keys"])
def test_the_blocks_of_other_prompts_stay(engine: Engine, name: str) -> None:
    """Even those that begin with the same tokens, unless they need what is forgotten."""
    memory, longer = store(), [*PROMPT[:20], *tokens(20, 500)]
    with make_manager(engine, memory) as manager:
        seed(engine, manager, [PROMPT, OTHER, longer])
        assert DROPS[name](engine, manager).wait(600)
        assert engine.reusable(OTHER) > 0 and engine.reusable(longer) == 0
    assert restarted(memory) == restarted(memory, longer) == 0 and restarted(memory, OTHER) == BLOCKS


def test_a_tenant_that_leaves_takes_its_content_along(engine: Engine) -> None:
    memory = store()
    names = [{}, {"salt": "leaves"}, {"salt": b"leaves"}, {"salt": "leaves", "adapter_id": 3}, {"adapter_id": 3}]
    with make_manager(engine, memory) as manager:
        for namespace in names:
            seed(engine, manager, [PROMPT], **namespace)
        forgotten = manager.forget(namespace=("leaves", None))
        assert forgotten.wait(600) and forgotten.stores == {"memory": BLOCKS}
        assert engine.reusable(PROMPT, salt="leaves") == 0 and engine.reusable(PROMPT, salt=b"leaves") > 0
    assert [restarted(memory, **namespace) for namespace in names] == [BLOCKS, 0, BLOCKS, BLOCKS, BLOCKS]


def test_what_another_process_has_saved_is_forgotten_too(engine: Engine, drop: Drop) -> None:
    memory = stocked(PROMPT)
    with make_manager(engine, memory) as manager:
        assert drop(engine, manager).wait(600) and not memory._blocks


@pytest.mark.parametrize("clears", [False, True])
def test_all_groups_of_layers_are_dropped(clears: bool) -> None:
    memory, prompt = store(), tokens(33)
    with grouped() as cache, StorageManager(cache, [memory], identity=IDENTITY, load_seconds=60.0) as manager:
        sequence = cache.add_sequence(prompt)
        write_all(cache, sequence, 1)
        cache.commit(sequence)
        cache.release(sequence)
        assert manager.drain(600) and memory._blocks
        assert (manager.clear() if clears else manager.forget(prompt)).wait(600)
        assert not memory._blocks and not read_all(cache, cache.block_keys(prompt))
        handle = manager.prefetch(prompt)
        assert handle.wait(600) and handle.blocks == 0


# -- work under way ------------------------------------------------------------------------------------


def test_a_prefetch_of_which_a_part_has_come_brings_no_more(engine: Engine, drop: Drop) -> None:
    """One of its first loads hangs. Others are done, and wait for it to enter the pool."""
    wrong, gate, count = Wrong(stocked(PROMPT)), Gate(), iter(range(100))
    wrong.threads = 4
    wrong.after["load"] = lambda answer: answer if next(count) else (gate(), answer)[1]
    with make_manager(engine, wrong, staging_blocks=8) as manager:
        handle = manager.prefetch(engine.prompt(PROMPT), 60.0)
        gate.wait()
        until(lambda: manager.stats().stores["wrong"].blocks["load", "ok"] >= 3)
        forgotten = drop(engine, manager)
        assert handle.wait(600) and handle.ended in ("forgotten", "cleared")
        came = handle.blocks
        gate.open()
        assert forgotten.wait(600) and manager.drain(600)
        assert engine.reusable(PROMPT) == 0 and handle.blocks == manager.stats().loaded_blocks == came < 4


def test_a_save_that_is_over_and_not_noted_is_taken_back(engine: Engine, wrong: Wrong, drop: Drop) -> None:
    """The storage manager's thread waits for its clock while the save ends. Then ``forget`` is called."""
    clock, gate = HeldClock(), wrong.hold("save")
    with make_manager(engine, wrong, clock=clock) as manager:
        engine.seed(PROMPT, len(PROMPT))
        gate.wait()
        with clock.held():
            gate.open()
            until(lambda: manager.stats().stores["wrong"].blocks["save", "ok"] == BLOCKS)
            reports: list[Forgotten] = []
            caller = threading.Thread(target=lambda: reports.append(drop(engine, manager)))
            caller.start()
            until(lambda: len(manager._orders) == 1)
        caller.join(600)
        assert reports[0].wait(600) and reports[0].stores == {"wrong": BLOCKS} and manager.drain(600)
        assert manager.match_prefix(engine.prompt(PROMPT)).store_tokens == 0 and not wrong.inner._blocks


class HeldClock:
    """Seconds that pass as usual, but the storage manager's thread waits for them while the clock is held."""

    def __init__(self) -> None:
        self._free, self._waits = threading.Event(), threading.Event()
        self._free.set()

    def __call__(self) -> float:
        if threading.current_thread().name == "kvpool-storage" and not self._free.is_set():
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


def test_what_waits_to_be_saved_is_given_up_and_counted(engine: Engine, wrong: Wrong, drop: Drop) -> None:
    """All staging rows are taken by a save that hangs."""
    gate = wrong.hold("save")
    with make_manager(engine, wrong, staging_blocks=2) as manager:
        engine.seed(PROMPT, len(PROMPT))
        gate.wait()
        until(lambda: manager.stats().waiting_blocks == BLOCKS - 1)
        forgotten = drop(engine, manager)
        assert manager.stats().dropped["wrong", "forgotten"] == BLOCKS - 1
        gate.open()
        assert forgotten.wait(600) and manager.drain(600)
    assert restarted(wrong.inner) == 0


# -- stores that do not do it --------------------------------------------------------------------------


def test_one_of_two_stores_confirms_while_the_other_is_down(engine: Engine, wrong: Wrong, drop: Drop) -> None:
    near = store()
    with seeded(engine, PROMPT, [near, wrong]) as manager:
        down = Down(wrong)
        forgotten = drop(engine, manager)
        until(lambda: forgotten.stores == {"memory": BLOCKS, "wrong": None} and "wrong" in forgotten.errors)
        assert "I/O error" in forgotten.errors["wrong"] and not forgotten.wait(0.0)
        assert manager.stats().stores["wrong"].unconfirmed_drops == 1
        assert fetch(engine, manager, PROMPT) == 0, "the far store does not bring it"
        # It is computed again meanwhile: the far store does not get it yet.
        seed(engine, manager, [PROMPT])
        assert engine.reusable(PROMPT) > 0 and manager.stats().dropped["wrong", "cancelled"] == BLOCKS
        down.up()
        assert forgotten.wait(600) and forgotten.stores == {"memory": BLOCKS, "wrong": BLOCKS}


# -- what is accepted ----------------------------------------------------------------------------------


def test_bad_arguments_change_nothing(engine: Engine) -> None:
    memory = store()
    with seeded(engine, PROMPT, memory) as manager:
        calls: list[Callable[[], Any]] = [
            lambda: manager.forget(),
            lambda: manager.forget(PROMPT, namespace=(None, None)),
            lambda: manager.forget(namespace=(1.5, None)),
            lambda: manager.forget("prompt"),
            lambda: manager.clear(force="yes"),
        ]
        for call in calls:
            with pytest.raises(TypeError):
                call()
        assert manager.forget(PROMPT[: T - 1]).stores == {"memory": 0}, "no block is full"
        assert engine.reusable(PROMPT) > 0 and len(memory._blocks) == BLOCKS


def test_a_store_that_cannot_is_refused_before_anything_has_changed(engine: Engine, wrong: Wrong) -> None:
    near, wrong.clears_prefix = store(), 0
    with seeded(engine, PROMPT, [near, wrong]) as manager:
        for call in (lambda: manager.clear(), lambda: manager.forget(namespace=(None, None))):
            with pytest.raises(ValueError, match="store 'wrong'|got 'wrong'"):
                call()
        assert engine.reusable(PROMPT) > 0 and len(near._blocks) == len(wrong.inner._blocks) == BLOCKS
        assert manager.forget(PROMPT).wait(600), "blocks can be forgotten nevertheless"


def test_a_clear_while_sequences_live_changes_nothing_unless_it_is_forced(engine: Engine) -> None:
    memory = store()
    with seeded(engine, PROMPT, memory) as manager:
        engine.add(OTHER)
        with pytest.raises(PoolBusy):
            manager.clear()
        assert engine.reusable(PROMPT) > 0 and len(memory._blocks) == BLOCKS
        assert manager.clear(force=True).wait(600)
        assert engine.reusable(PROMPT) == 0 and not memory._blocks


def test_too_much_that_waits_to_be_dropped_is_refused_before_anything_has_changed(
    engine: Engine, wrong: Wrong, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = store()
    with seeded(engine, PROMPT, [near, wrong]) as manager:

        def full(blocks: int) -> None:
            raise StoreBusy("wrong", "forget", 1, 1)

        monkeypatch.setattr(manager._workers[1], "check_forget", full)
        for drop in DROPS.values():
            with pytest.raises(StoreBusy):
                drop(engine, manager)
        assert engine.reusable(PROMPT) > 0 and len(near._blocks) == BLOCKS
