"""What a reader rebuilds from a storage manager's events equals ``match_prefix``, tier by tier, across resets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from kvpool.pool.events import Events
from kvpool.storage import MemoryStore, StorageManager
from kvpool.storage.pool_adapter import Content
from tests.engine import Engine, EventReplay
from tests.seeds import some_of
from tests.stores.pool_lab import (
    T,
    fetch,
    make_engine,
    make_manager,
    room,
    seed,
    seeded,
    store,
    tokens,
)

PROMPT = tokens(33)
TIERS = ("device", "host", "near", "far")
STEPS = 60


class Mirror(EventReplay):
    """A listener that has seen all events since the start, or since a snapshot."""

    def __init__(self, tiers: Sequence[str] = TIERS) -> None:
        super().__init__({tier: set() for tier in tiers})

    @property
    def blocks(self) -> dict[str, int]:
        return {tier: len(keys) for tier, keys in self.cached.items() if keys}


class Named(MemoryStore):
    """A store with a name of its own, and how to lose blocks without a word."""

    def __init__(self, name: str, blocks: int) -> None:
        super().__init__(room(blocks))
        self.name = name

    def lose(self, count: int, random: Random) -> None:
        there = sorted(self._blocks)
        for key in random.sample(there, min(count, len(there))):
            self.forget(np.frombuffer(key, np.uint8).reshape(1, -1))


def predicted(known: Mapping[str, set[Any]], chain: Sequence[Any], prompt: Sequence[int]) -> tuple[int, int, int]:
    """The device, host and store tokens that a listener expects of a prompt with these keys."""
    usable = (len(prompt) - 1) // T
    stores = set[Any]().union(*(keys for tier, keys in known.items() if tier not in ("device", "host")))

    def prefix(keys: set[Any]) -> list[Any]:
        missing = next((place for place in range(usable) if chain[place] not in keys), usable)
        return list(chain[:missing])

    full = prefix(known["device"] | known["host"])
    host = sum(key not in known["device"] for key in full)
    beyond = len(prefix(known["device"] | known["host"] | stores)) - len(full)
    return (len(full) - host) * T, host * T, beyond * T


def check(mirror: Mirror, engine: Engine, manager: StorageManager, prompts: Sequence[Sequence[int]]) -> None:
    """Compare a mirror with the pool, with every prompt's match, and with what is known of each store."""
    for tier in ("device", "host"):
        assert mirror.cached[tier] == set(engine.cached(tier)), tier
    for prompt in prompts:
        keys = engine.prompt(prompt)
        match = manager.match_prefix(keys)
        chain = [key.tobytes() for key in keys.keys]
        reported = match.device_tokens, match.host_tokens, match.store_tokens
        assert reported == predicted(mirror.cached, chain, prompt), prompt
    for number, tier in enumerate(TIERS[2:] if len(mirror.cached) == 4 else ("memory",)):
        known = {content.key for content in manager._stored.all() if manager._stored.has(content, number)}
        assert mirror.cached[tier] == known, tier


# -- the example ---------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = make_engine()
    with made.cache:
        yield made


def after_snapshot(events: Events) -> Mirror:
    mirror = Mirror(("device", "host", "memory"))
    mirror.feed(events[events.before_snapshot :])
    return mirror


def test_what_stores_hold_is_reported_again_after_a_reset(engine: Engine) -> None:
    with make_manager(engine, store()) as manager:
        early = Mirror(("device", "host", "memory"))
        seed(engine, manager, [PROMPT])
        early.feed(manager.events())
        assert early.blocks == {"device": 8, "host": 8, "memory": 8}
        engine.cache.clear()
        events = manager.events()
        early.feed(events)
        assert early.blocks == {"memory": 8}
        assert manager.match_prefix(PROMPT)[:] == (0, 0, 0, 32)
        assert [event.kind for event in events] == ["cleared", "stored"], "one chain is one event"
        assert events[1].tier == "memory" and events[1].parent is None
        assert np.array_equal(np.asarray(events[1].tokens).ravel(), PROMPT[:32])
        assert not manager.events(), "it is reported once"
        assert fetch(engine, manager, PROMPT) == 8 and manager.drain(600)
        events = manager.events(snapshot=True)
        early.feed(events)
        assert early.blocks == after_snapshot(events).blocks == {"host": 8, "memory": 8}


def test_a_reset_that_nobody_has_read_is_in_no_snapshot(engine: Engine) -> None:
    """Its reader gets what is cached now, and those from the start what stores have, before the snapshot begins."""
    with seeded(engine, PROMPT, store()) as manager:
        engine.cache.clear()
        seed(engine, manager, [tokens(9, 500)], salt="tenant")
        events = manager.events(snapshot=True)
        early = Mirror(("device", "host", "memory"))
        early.feed(events[: events.before_snapshot])
        assert early.blocks == after_snapshot(events).blocks == {"device": 2, "host": 2, "memory": 10}
        assert early.cached == after_snapshot(events).cached
        stored = [event for event in events if event.kind == "stored" and event.tier == "memory"]
        assert {event.salt for event in stored} == {None, "tenant"}


def test_content_that_is_known_no_more_is_known_to_no_mirror(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage manager's record of what stores have is bounded, and a store has more."""
    monkeypatch.setattr("kvpool.storage.storage_manager.KNOWN_BLOCKS", 6 - 64)
    with make_manager(engine, store()) as manager:
        early = Mirror(("device", "host", "memory"))
        for first in (0, 1000, 2000):
            seed(engine, manager, [tokens(17, first)])
            events = manager.events(snapshot=first == 2000)
            early.feed(events[: events.before_snapshot])
        assert manager.stats().stores["memory"].store["blocks"] == 12
        assert len(early.cached["memory"]) == 6 and early.cached == after_snapshot(events).cached
        engine.cache.clear()
        early.last = events.next
        early.feed(manager.events())
        assert manager.match_prefix(tokens(17, 2000)).store_tokens == 16
        assert early.cached["memory"] == {*engine.keys(tokens(17, 2000)), *engine.keys(tokens(17, 1000))[2:]}


def test_a_save_that_ends_before_a_snapshot_is_in_it(engine: Engine) -> None:
    """It is noted right before the snapshot is copied."""
    with seeded(engine, PROMPT, store()) as manager:
        manager.events()
        stored, events = manager._stored, engine.cache.events
        late = Content(0, bytes(range(16)))
        late.fields = bytes(16), np.zeros(T, np.int32).tobytes(), b""

        class Noted:
            """A lock before which something is noted, once."""

            def __init__(self, lock: Any) -> None:
                self.lock = lock

            def __enter__(self) -> None:
                stored._lock = self.lock
                stored.note(0, [late], True)
                self.lock.acquire()

            def __exit__(self, *_: object) -> None:
                self.lock.release()

        stored._lock = Noted(stored._lock)  # type: ignore[assignment]
        snapshot = manager.events(snapshot=True)
        assert engine.cache.events == events
        assert late.key in after_snapshot(snapshot).cached["memory"]


# -- any sequence of calls -----------------------------------------------------------------------------


class Lab:
    """A small pool with two small stores, its listeners, and random calls."""

    def __init__(self, number: int, capacity: int) -> None:
        print(f"seed {number}, {capacity} events")
        self.random = Random(number)
        self.engine = make_engine(14, 12, event_capacity=capacity)
        self.stores = Named("near", 12), Named("far", 40)
        save = self.random.choice(("commit", "evict", "reuse"))
        # Prefetched blocks that nobody has used leave room for others at once.
        self.manager = make_manager(self.engine, self.stores, save=save, interval_seconds=0.001, promotion_blocks=1000)
        documents = [[self.random.randrange(7) for _ in range(33)] for _ in range(3)]
        self.prompts = [document[:length] for document in documents for length in (9, 17, 33)]
        self.early, self.late = Mirror(), list[Mirror]()
        self.early.last = 0  # the number of the first event
        self.resets = self.losses = 0

    def step(self) -> None:
        verbs: dict[Callable[[], object], int] = {
            self.seed: 8,
            self.prefetch: 6,
            self.reset: 2,
            self.clear: 1,
            self.drop: 2,
            lambda: self.engine.cache.content.offload(self.prompt): 2,
            lambda: self.engine.cache.content.forget(self.engine.prompt(self.prompt)): 1,
            lambda: self.random.choice(self.stores).lose(self.random.randrange(1, 12), self.random): 2,
        }
        self.random.choices(list(verbs), list(verbs.values()))[0]()
        if self.random.random() < 0.4:
            assert self.manager.drain(600)
        if self.random.random() < 0.5:
            self.read(snapshot=self.random.random() < 0.2)

    @property
    def prompt(self) -> list[int]:
        return self.random.choice(self.prompts)

    def seed(self) -> None:
        self.engine.seed(self.prompt, None)

    def prefetch(self) -> None:
        fetch(self.engine, self.manager, self.prompt)

    def reset(self) -> None:
        self.engine.cache.clear()
        self.resets += 1

    def clear(self) -> None:
        self.manager.clear()

    def drop(self) -> None:
        self.manager.forget(self.engine.prompt(self.prompt))

    def read(self, snapshot: bool = False) -> None:
        """Give every listener what is new. Who sees a gap takes a snapshot; a late one begins with it."""
        events = self.manager.events(snapshot=snapshot)
        if events.number != self.early.last:
            self.losses += 1
            if not snapshot:
                events, snapshot = self.manager.events(snapshot=True), True
            for mirror in (self.early, *self.late):
                mirror.last = None
                mirror.feed(events[events.before_snapshot :])
        else:
            for mirror in (self.early, *self.late):
                mirror.feed(events[: events.before_snapshot])
                mirror.last = events.next
        if snapshot and len(self.late) < 3:
            self.late.append(Mirror())
            self.late[-1].feed(events[events.before_snapshot :])

    def check(self) -> None:
        """Nothing is under way, and everybody has read."""
        assert self.manager.drain(600)
        self.read(snapshot=self.random.random() < 0.2)
        for mirror in (self.early, *self.late):
            check(mirror, self.engine, self.manager, self.prompts)
        assert self.manager._stored._rows <= max(1, len(self.manager._stored.all()) * 2)

    def close(self) -> None:
        self.manager.close()
        self.engine.cache.close()


@pytest.mark.parametrize("capacity", [20, 4096])
@pytest.mark.parametrize("number", some_of(2, range(6)))
def test_every_mirror_is_what_match_prefix_says(number: int, capacity: int) -> None:
    lab = Lab(number, capacity)
    try:
        # What the promise is about happens at least once: a reset while a store has something.
        while not lab.manager._stored.all():
            lab.seed()
            assert lab.manager.drain(600)
        for call in (lab.read, lab.reset, lab.prefetch):
            call()
            lab.check()
        for _ in range(STEPS):
            lab.step()
            if lab.random.random() < 0.4:
                lab.check()
        lab.read(snapshot=True)
        lab.check()
        assert lab.resets and lab.late and (lab.losses == 0 or capacity == 20)
    finally:
        lab.close()
