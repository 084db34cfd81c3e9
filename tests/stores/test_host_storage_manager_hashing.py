"""While the key of a block is hashed for a store, its name may be forgotten, written anew or cleared. No other bytes
are saved under that key."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool import HostCache
from kvpool.storage.mac import Secret
from tests.stores.host_lab import Engine, Make
from tests.stores.lab import Gate, Wrong, names

ABSENT, HERE = HostCache.ABSENT, HostCache.HERE


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Holds the threads that hash keys."""
    gate, opaque = Gate(), Secret.derive_keys

    def held(secret: Secret, names: Any) -> Any:
        gate()
        return opaque(secret, names)

    monkeypatch.setattr(Secret, "derive_keys", held)
    return gate


def other_content(engine: Engine, count: int) -> None:
    """The engine writes other bytes under the same names, which are not to be saved."""
    taken = engine.cache.reserve(names(count))
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
    other_content(engine, 4)
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
    other_content(engine, 4)
    hashing.open()
    engine.drain()
    assert engine.stats.saved_blocks == 4
    engine.cache.forget(names(4))
    assert engine.ask(4) == [HERE] * 4
    with engine.manager.pin(names(4)) as lease:
        assert (engine.tier.blocks[lease.blocks] == 7).all()
