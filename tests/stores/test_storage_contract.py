"""The contract of storage managers, of a pool and of a HostCache, over stores: what is saved comes back, and whatever a
store does, nothing wrong comes in, nobody waits for it, and what is given up is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.storage import OK, REFUSED, BreakerStats, LoadOrCompute, MemoryStore
from kvpool.storage.backends.disk import DiskStore
from tests.stores import host_lab, pool_lab
from tests.stores.lab import BLOCK_BYTES, IDENTITY, OTHER, Clock, Wrong, fail, names
from tests.waiting import until

BLOCKS = 8
"""of a document"""
SECONDS = 5.0
"""Time to bring a document."""


class PoolHost:
    """Documents are prompts, and the host is the host tier of a pool."""

    def __init__(
        self, *stores: Any, blocks: int = 256, quota: int | None = None, speed: float | None = None, **options: Any
    ) -> None:
        self.of, self.clock = pool_lab.make_engine(P=BLOCKS + 4, S=blocks), Clock()
        quotas = None if quota is None else {(None, None): quota}
        self.manager = pool_lab.make_manager(
            self.of, list(stores), quotas=quotas, prefill_tokens_per_s=speed, clock=self.clock, **options
        )
        self.fetches: dict[int, Any] = {}

    def document(self, number: int) -> list[int]:
        return pool_lab.tokens(BLOCKS * pool_lab.T + 1, 1000 * number)

    def compute(self, number: int) -> None:
        self.of.seed(self.document(number))

    def use(self, number: int) -> None:
        self.compute(number)
        assert self.manager.drain(600)

    write = use

    def drop(self, number: int) -> None:
        self.of.cache.content.forget(self.of.prompt(self.document(number)))

    def ask(self, number: int) -> None:
        self.fetches[number] = self.manager.prefetch(self.of.prompt(self.document(number)), SECONDS)

    def ended(self, number: int) -> bool:
        return bool(self.fetches[number].done)

    def cached(self, number: int) -> int:
        return self.of.reusable(self.document(number)) // pool_lab.T

    def here(self, number: int) -> int:
        sequence = self.of.add(self.document(number))
        self.of.release(sequence, store=False)
        return sequence.cached // pool_lab.T

    def clear(self) -> None:
        assert self.manager.clear(force=True).wait(600)

    @property
    def saved(self) -> int:
        return self.manager.stats().saved_blocks

    @property
    def declined(self) -> int:
        return BLOCKS * self.manager.stats().prefetches.get("declined", 0)

    def close(self) -> None:
        if not self.of.cache.closed:
            assert self.manager.close(600)
            self.of.cache.close()


class CacheHost:
    """Documents are keys, and the host is a HostCache."""

    def __init__(
        self, *stores: Any, blocks: int = 256, quota: int | None = None, speed: float | None = None, **options: Any
    ) -> None:
        policies = None if speed is None else [LoadOrCompute(speed, BLOCK_BYTES, pool_lab.T) for _ in stores]
        self.of = host_lab.Engine(
            *stores,
            blocks=blocks,
            quota=quota,
            policies=policies,
            load_seconds=SECONDS,
            retry_seconds=0.0,
            save_share=1.0,
            **options,
        )
        self.manager = self.of.manager

    def compute(self, number: int) -> None:
        self.of.write(BLOCKS, BLOCKS * number)
        self.manager.poll()

    def write(self, number: int) -> None:
        self.compute(number)
        assert self.manager.drain(600)

    def use(self, number: int) -> None:
        self.of.read(BLOCKS, BLOCKS * number)
        assert self.manager.drain(600)

    def drop(self, number: int) -> None:
        self.of.cache.forget(names(BLOCKS, BLOCKS * number))

    def ask(self, number: int) -> None:
        self.manager.lookup(names(BLOCKS, BLOCKS * number))
        self.manager.poll()

    def ended(self, number: int) -> bool:
        self.manager.poll()
        return not self.manager.stats().searching

    def cached(self, number: int) -> int:
        return int((self.of.cache.lookup(names(BLOCKS, BLOCKS * number)) == host_lab.HERE).sum())

    def here(self, number: int) -> int:
        said = [*self.manager.lookup(names(BLOCKS, BLOCKS * number)).tolist(), host_lab.ABSENT]
        count = next(place for place, answer in enumerate(said) if answer != host_lab.HERE)
        self.of.read(count, BLOCKS * number)
        return count

    def clear(self) -> None:
        self.manager.clear()
        self.of.until(lambda: not any(counters.unconfirmed_drops for counters in self.manager.stats().stores))

    @property
    def saved(self) -> int:
        return self.manager.stats().saved_blocks

    @property
    def declined(self) -> int:
        return self.manager.stats().missed.get("declined", 0)

    def close(self) -> None:
        if not self.of.cache.closed:
            self.of.close()


Host = PoolHost | CacheHost


def later(host: Host, seconds: float) -> None:
    if isinstance(host, PoolHost):
        host.clock.pass_(seconds)
    else:
        host.of.now += seconds


def bring(host: Host, number: int) -> int:
    """How many blocks of a document are there when its stores were asked, the first ones. Their bytes are right."""
    host.ask(number)
    until(lambda: host.ended(number))
    return host.here(number)


def health(host: Host) -> BreakerStats:
    return host.manager.stats().health["wrong"]


@pytest.fixture(params=[PoolHost, CacheHost], ids=["pool", "cache"])
def made(request: pytest.FixtureRequest) -> Iterator[Callable[..., Host]]:
    """Make hosts with storage managers over some stores, and close them."""
    hosts: list[Host] = []

    def make(*stores: Any, **options: Any) -> Host:
        hosts.append(request.param(*stores, **{"identity": IDENTITY} | options))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


def saved_documents(made: Callable[..., Host], store: Wrong, count: int) -> None:
    """Another process has saved documents in this store."""
    first = made(store)
    for number in range(count):
        first.write(number)
    assert first.saved == count * BLOCKS
    first.close()


@pytest.fixture(params=["memory", "disk"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """Open a store again and again, as one process after the other does."""
    in_memory = MemoryStore(256 * BLOCK_BYTES)
    return lambda: Wrong(in_memory if request.param == "memory" else DiskStore(tmp_path / "store", 256 * BLOCK_BYTES))


def test_what_one_has_saved_the_next_one_finds(made: Callable[..., Host], kept: Callable[[], Wrong]) -> None:
    saved_documents(made, kept(), 2)
    host = made(kept())
    assert host.here(0) == 0
    assert bring(host, 0) == bring(host, 1) == BLOCKS and bring(host, 2) == 0
    assert host.manager.drain(600) and host.saved == 0, "what came from a store is not saved to it again"
    host.close()
    other = made(kept(), identity=OTHER)
    assert bring(other, 0) == other.saved == 0


@pytest.mark.parametrize("save", ["evict", "reuse"])
def test_what_was_not_evicted_or_used_again_is_not_saved(made: Callable[..., Host], store: Wrong, save: str) -> None:
    host = made(store, save=save)
    for number in range(2):
        host.write(number)
    assert host.saved == 0
    for _ in range(2):
        host.use(0)
        assert host.saved == (BLOCKS if save == "reuse" else 0)
    for number in range(2):
        host.drop(number)
    assert [bring(host, number) for number in range(2)] == [host.saved, 0]


def test_what_the_host_evicts_was_saved_before(made: Callable[..., Host], store: Wrong) -> None:
    host = made(store, blocks=2 * BLOCKS, save="evict")
    for number in range(12):
        host.write(number)
    assert 9 * BLOCKS <= host.saved < 12 * BLOCKS and not host.manager.stats().dropped
    assert host.here(0) == 0 and bring(host, 0) == BLOCKS


def test_what_is_saved_before_it_goes_goes_in_its_order(made: Callable[..., Host], store: Wrong) -> None:
    """A quarter of a host, or half of a small one, is saved before it goes: more than one document. Where blocks are
    saved that are used again, none is saved here."""
    left = []
    for save in ("evict", "reuse"):
        host = made(Wrong(MemoryStore(256 * BLOCK_BYTES)), blocks=8 * BLOCKS, save=save)
        for number in range(20):
            host.write(number)
        assert host.saved >= 12 * BLOCKS if save == "evict" else not host.saved
        left.append([host.cached(number) for number in range(20)])
    assert left[0] == left[1] and 0 in left[0]


def test_nothing_from_before_a_clear_is_found(made: Callable[..., Host], kept: Callable[[], Wrong]) -> None:
    host = made(kept())
    for number in range(2):
        host.write(number)
    host.clear()
    assert bring(host, 0) == bring(host, 1) == 0
    host.write(0)
    host.drop(0)
    assert bring(host, 0) == BLOCKS and bring(host, 1) == 0
    host.close()
    later_process = made(kept())
    assert bring(later_process, 0) == BLOCKS and bring(later_process, 1) == 0


def test_what_closing_gives_up_is_counted(made: Callable[..., Host], store: Wrong) -> None:
    host, gate = made(store), store.hold("save")
    for number in range(12):
        host.compute(number)
    until(lambda: gate.reached.is_set() and host.manager.stats().waiting_blocks > BLOCKS)
    assert not host.manager.close(0.05)
    gate.open()
    assert host.manager.close(600)
    stats = host.manager.stats()
    assert stats.waiting_blocks == 0 and stats.saved_blocks + sum(stats.dropped.values()) == 12 * BLOCKS
    assert stats.dropped["wrong", "cancelled"] == 12 * BLOCKS - stats.saved_blocks > BLOCKS


# -- stores that lie, fail, hang -------------------------------------------------------------------------


def test_a_changed_byte_never_comes_in(made: Callable[..., Host], store: Wrong) -> None:
    saved_documents(made, store, 1)

    def damage(answer: Any) -> Any:
        store.memory[:, :8] = 0xEE
        return answer

    host, store.after["load"] = made(store), damage
    assert bring(host, 0) == 0
    host.manager.drain(600)
    assert store.stats()["blocks"] == 0, "the store has dropped what was damaged"


def test_a_store_that_says_it_has_everything_harms_nothing(made: Callable[..., Host], store: Wrong) -> None:
    store.after["find"] = lambda answer: np.full(len(answer), OK, np.uint8)
    host = made(store)
    host.ask(0)
    until(lambda: host.ended(0))
    assert host.here(0) == 0


def test_a_load_that_hangs_costs_no_more_than_its_deadline(made: Callable[..., Host], store: Wrong) -> None:
    saved_documents(made, store, 1)
    host, gate = made(store), store.hold("load")
    host.ask(0)
    until(lambda: host.ended(0) or gate.reached.is_set())
    assert not host.ended(0)
    later(host, SECONDS + 1)
    host.ask(2)  # The threads that watch deadlines look at the clock when a job begins.
    until(lambda: host.ended(0))
    assert host.here(0) == 0
    if isinstance(host, PoolHost):
        host.of.seed(host.document(1))
    else:
        host.of.write(BLOCKS, BLOCKS)
    gate.open()
    assert host.manager.drain(600)
    assert host.here(0) == 0 and host.here(1) == BLOCKS, "late bytes get nowhere"


def test_a_store_that_fails_is_left_alone_and_used_again(made: Callable[..., Host], store: Wrong) -> None:
    saved_documents(made, store, 1)
    host = made(store)
    store.before["find"] = store.before["save"] = fail
    calls = len(store.calls)
    for number in range(1, 7):
        assert bring(host, 0) == 0
        host.write(number)
    assert health(host).reads_suspended and health(host).writes_suspended
    assert [store.calls[calls:].count(kind) for kind in ("find", "save", "load")] == [3, 3, 0]
    assert host.manager.stats().dropped == {("wrong", "failed"): 3 * BLOCKS, ("wrong", "suspended"): 3 * BLOCKS}
    if isinstance(host, CacheHost):
        assert host.manager.stats().missed == {"failed": 3 * BLOCKS, "suspended": 3 * BLOCKS}
        assert host.of.cache.stats().pinned == 0
    store.before.clear()
    assert bring(host, 0) == 0, "it is suspended"
    later(host, 6)
    assert bring(host, 0) == BLOCKS
    host.write(7)
    assert host.saved == BLOCKS and not (health(host).reads_suspended or health(host).writes_suspended)


def test_after_a_dead_store_the_next_one_serves(made: Callable[..., Host], store: Wrong) -> None:
    saved_documents(made, store, 1)
    dead = Wrong(MemoryStore(64 * BLOCK_BYTES))
    dead.name = "dead"
    dead.before.update(dict.fromkeys(("find", "save", "load", "forget"), fail))
    assert bring(made(dead, store), 0) == BLOCKS


def test_a_full_store_refuses_and_that_is_counted(made: Callable[..., Host], store: Wrong) -> None:
    host, store.after["save"] = made(store), lambda answer: np.full(len(answer), REFUSED, np.uint8)
    host.write(0)
    assert host.saved == 0 and host.manager.stats().dropped == {("wrong", "refused"): BLOCKS}
    assert not health(host).writes_suspended


def test_a_store_gets_no_more_than_the_quota(made: Callable[..., Host], store: Wrong) -> None:
    host = made(store, quota=4 * BLOCK_BYTES)
    for number in range(3):
        host.write(number)
    dropped = host.manager.stats().dropped
    assert store.stats()["blocks"] == 4 and {*dropped} <= {("wrong", "quota")}
    assert host.saved + sum(dropped.values()) == 3 * BLOCKS
    nothing = made(Wrong(MemoryStore(64 * BLOCK_BYTES)), quota=1)
    nothing.write(0)
    assert nothing.manager.stats().dropped == {("wrong", "quota"): BLOCKS}


@pytest.mark.parametrize("seconds", [0.001, 4.0])
def test_a_store_that_loses_to_the_engine_is_left_alone_and_one_that_wins_is_not(
    made: Callable[..., Host], store: Wrong, seconds: float
) -> None:
    """To compute a document takes 0.32 s."""
    saved_documents(made, store, 30)
    host = made(store, speed=100.0)
    store.before["load"] = lambda: later(host, seconds)
    came = [bring(host, number) for number in range(30)]
    assert host.declined >= 20 * BLOCKS if seconds > 1 else came == [BLOCKS] * 30


def test_a_load_that_hangs_ends_when_the_engine_would_have_computed_it(made: Callable[..., Host], store: Wrong) -> None:
    """Long before its deadline."""
    saved_documents(made, store, 10)
    host = made(store, speed=100.0)
    store.before["load"] = lambda: later(host, 0.001)
    assert [bring(host, number) for number in range(9)] == [BLOCKS] * 9
    gate = store.hold("load")
    host.ask(9)
    until(lambda: host.ended(9) or gate.reached.is_set())
    assert not host.ended(9)
    later(host, 2.0)
    host.ask(20)
    until(lambda: host.ended(9))
    assert host.here(9) == 0
    gate.open()
    assert host.manager.drain(600)


def test_a_store_that_does_not_open_closes_the_others(made: Callable[..., Host], store: Wrong) -> None:
    broken = Wrong(MemoryStore(1 << 20))
    broken.name, broken.before["open"] = "broken", fail
    with pytest.raises(OSError, match="I/O error"):
        made(store, broken)
    assert store.calls == ["open", "close"]
