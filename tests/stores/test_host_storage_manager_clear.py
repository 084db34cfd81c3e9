"""After a clear nothing is found that was saved before: by this process, by a later one, while blocks come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpool.storage.backends.disk import DiskStore
from kvpool.storage.mac import Secret
from tests.stores.disk_lab import crash
from tests.stores.host_lab import ABSENT, HERE, PENDING, Engine, Make
from tests.stores.lab import BLOCK_BYTES, Gate, Wrong, names
from tests.waiting import until


@pytest.mark.parametrize("clears", [True, False], ids=["dropped later", "never dropped"])
def test_after_clear_nothing_is_found_that_was_saved_before(make: Make, store: Wrong, clears: bool) -> None:
    """As with weights that were replaced while the engine runs. Not every store can drop what a model has saved."""
    gate = store.hold("clear")
    store.clears_prefix *= clears
    engine = make(retry_seconds=0.0)
    engine.saved(4)
    engine.write(2, first=10)
    engine.manager.lookup(names(4))
    engine.manager.clear()
    assert engine.cache.stats().evictable == 0
    assert engine.ask(4) == [ABSENT] * 4
    gate.open()
    engine.until(lambda: not engine.stats.stores[0].unconfirmed_drops)
    assert engine.ask(4) == [ABSENT] * 4 and store.calls.count("clear") == clears
    engine.saved(4)
    assert engine.ask(4) == [HERE] * 4
    engine.read(4)


@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
def test_what_is_saved_after_a_clear_is_found_by_a_later_process(make: Make, tmp_path: Path, killed: bool) -> None:
    folder = tmp_path / "store"
    for first in (0, 20):  # And so it is after the second one.
        engine = make(DiskStore(folder, 64 * BLOCK_BYTES))
        engine.saved(4, first)
        engine.manager.clear()
        engine.until(lambda engine=engine: not engine.stats.stores[0].unconfirmed_drops)  # type: ignore[misc]
        engine.saved(4, first + 10)
        if killed:
            folder = crash(folder, tmp_path / f"left {first}")
        engine.close()
    engine = make(DiskStore(folder))
    assert engine.ask(40) == [ABSENT] * 30 + [HERE] * 4 + [ABSENT] * 6
    engine.read(4, 30)


def test_a_process_that_ends_in_a_clear_leaves_what_was_before_to_nobody(make: Make, tmp_path: Path) -> None:
    """The store has noted the epoch, and has not dropped the blocks yet."""
    store, gate = Wrong(DiskStore(tmp_path / "store", 64 * BLOCK_BYTES)), Gate()
    engine = make(store)
    engine.saved(4)
    store.before["clear"] = gate
    engine.manager.clear()
    gate.wait()
    left = crash(tmp_path / "store", tmp_path / "left")
    gate.open()
    engine.close()
    assert make(DiskStore(left)).ask(4) == [ABSENT] * 4


def test_a_key_that_is_forgotten_while_its_load_hangs_is_a_miss_and_not_pending_for_ever(
    make: Make, store: Wrong
) -> None:
    """The store has it still, but its block belongs to the call that hangs."""
    engine, gate = make(retry_seconds=0.5), Gate()
    engine.saved(3)
    store.before["load"] = gate
    engine.held(gate, 3)
    engine.later(3)
    engine.until(lambda: engine.stats.hung == 3)
    engine.manager.forget(names(3))
    engine.now += 1
    assert engine.ask(3) == [ABSENT] * 3
    gate.open()
    engine.until(lambda: not engine.stats.hung)
    engine.now += 1
    assert engine.ask(3) == [HERE] * 3
    engine.read(3)


@pytest.mark.parametrize("kind", ["find", "load"])
def test_a_key_that_is_forgotten_while_it_comes_is_absent_at_once_and_does_not_come(
    make: Make, store: Wrong, kind: str
) -> None:
    engine, gate = make(retry_seconds=5.0, load_seconds=60.0), Gate()
    engine.saved(3)
    store.before[kind] = gate
    assert engine.look(3) == [PENDING] * 3
    engine.until(gate.reached.is_set)
    engine.manager.forget(names(3))
    said = [engine.look(3)]
    gate.open()
    engine.drain()
    said.append(engine.look(3))
    assert said == [[ABSENT] * 3] * 2
    stats = engine.stats
    assert (stats.loaded_blocks, stats.missed["cancelled"], stats.loading) == (0, 3, 0)


def kept(engine: Engine, known: set[bytes]) -> set[bytes]:
    """What a listener knows of the store after all changes."""
    for change in engine.manager.changes():
        known = known | {*change.keys} if change.stored else known - {*change.keys}
    return known


def test_after_clear_a_listener_knows_of_nothing_in_stores(make: Make, store: Wrong) -> None:
    """Even of saves that had ended and that the storage manager notes within the call."""
    engine = make()
    assert kept(engine, set()) == set()
    engine.saved(4)
    known = kept(engine, set())
    assert known == {*names(4)}
    engine.write(2, 20)
    engine.manager.poll()
    until(lambda: engine.stats.stores[0].blocks.get(("save", "ok")) == 6)
    engine.manager.clear()
    assert kept(engine, known) == set()
    engine.until(lambda: not engine.stats.stores[0].unconfirmed_drops)
    engine.saved(2, 30)
    assert kept(engine, set()) == {*names(2, 30)}


# -- while keys are hashed -------------------------------------------------------------------------------


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Holds the threads that hash keys."""
    gate, opaque = Gate(), Secret.derive_keys

    def held(secret: Secret, names: Any) -> Any:
        gate()
        return opaque(secret, names)

    monkeypatch.setattr(Secret, "derive_keys", held)
    return gate


def other_content(engine: Engine) -> None:
    """The engine writes other bytes under the same names, which are not to be saved."""
    taken = engine.cache.reserve(names(4))
    engine.tier.blocks[taken.blocks] = 7
    engine.cache.publish(taken.keys)


def test_what_is_published_after_clear_is_not_saved_for_what_was_before(
    make: Make, store: Wrong, hashing: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine would find the KV of other weights. The store is one that cannot drop all, and that never looks
    whether to stop."""
    save, store.clears_prefix = store.inner.save, 0
    monkeypatch.setattr(store.inner, "save", lambda *call: save(*call[:-1], lambda: False))
    engine = make(store)
    engine.write(4)
    engine.until(hashing.reached.is_set)
    engine.manager.clear()
    other_content(engine)
    hashing.open()
    engine.drain()
    assert (engine.stats.unsaved, store.stats()["blocks"]) == ({"cancelled": 4}, 0)
    engine.close()
    again = make(store)
    assert again.ask(4) == [ABSENT] * 4


@pytest.mark.parametrize("here", [0, 2])
def test_a_block_that_has_gone_while_its_key_is_hashed_is_not_saved(
    make: Make, store: Wrong, hashing: Gate, here: int
) -> None:
    """Its bytes, which somebody writes anew, are no longer those of the key."""
    engine = make()
    engine.write(4)
    engine.until(hashing.reached.is_set)
    engine.cache.forget(names(4 - here, here))
    taken = engine.cache.reserve(names(4 - here, here))
    engine.tier.blocks[taken.blocks] = 7
    hashing.open()
    engine.drain()
    stats = engine.stats
    assert (stats.saved_blocks, stats.unsaved) == (here, {"evicted": 4 - here})
    assert store.stats()["blocks"] == here and engine.cache.stats().pinned == 0
    engine.cache.abort(taken.keys)
    engine.cache.forget(names(here))
    assert engine.ask(4) == [HERE] * here + [ABSENT] * (4 - here)
    engine.read(here)


def test_a_block_that_is_written_anew_while_its_key_is_hashed_is_saved_as_it_is_now(make: Make, hashing: Gate) -> None:
    engine = make()
    engine.write(4)
    engine.until(hashing.reached.is_set)
    engine.cache.forget(names(4))
    other_content(engine)
    hashing.open()
    engine.drain()
    assert engine.stats.saved_blocks == 4
    engine.cache.forget(names(4))
    assert engine.ask(4) == [HERE] * 4
    with engine.manager.pin(names(4)) as lease:
        assert (engine.tier.blocks[lease.blocks] == 7).all()
