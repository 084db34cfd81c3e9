"""How many steps of an engine a request loses to stores. A step looks keys up, and then polls."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.storage import MemoryStore
from kvpool.storage.backends.disk import DiskStore
from tests.stores.host_lab import ABSENT, HERE, PENDING, Engine, Make, engines
from tests.stores.lab import BLOCK_BYTES, Wrong, fail, keys_of, names, open_queue

STORES: dict[str, Callable[[Path], Any]] = {
    "memory": lambda folder: MemoryStore(256 * BLOCK_BYTES),
    "disk": lambda folder: DiskStore(folder / "store", 256 * BLOCK_BYTES),
    "remote": lambda folder: Wrong(MemoryStore(256 * BLOCK_BYTES)),
}
"""A store that does not declare an index in memory counts as a remote one."""


@pytest.fixture
def make() -> Iterator[Make]:
    yield from engines(Wrong(MemoryStore(1)))


def steps(engine: Engine, count: int, first: int = 0) -> list[int]:
    """What the first lookups of steps say of a request, until nothing is pending. Between steps, all that was begun
    ends, as in a step that lasts long."""
    said = [int(engine.manager.lookup(names(count, first))[0])]
    while said[-1] == PENDING:
        engine.manager.poll()
        for queue in engine.manager._workers:
            assert queue.drain(600)
        engine.now += 1.2
        said.append(int(engine.manager.lookup(names(count, first))[0]))
    engine.manager.poll()
    return said


@pytest.mark.parametrize(
    ("kind", "cold", "warm"),
    [
        ("memory", [ABSENT], [PENDING, HERE]),
        ("disk", [ABSENT], [PENDING, HERE]),
        ("remote", [PENDING, ABSENT], [PENDING, PENDING, HERE]),
    ],
)
def test_a_cold_request_loses_no_step_and_one_to_a_remote_store(
    make: Make, tmp_path: Path, kind: str, cold: list[int], warm: list[int]
) -> None:
    engine = make(STORES[kind](tmp_path))
    engine.saved(4)
    assert steps(engine, 4, first=50) == cold
    assert steps(engine, 4) == warm
    engine.read(4)


def test_what_was_found_in_a_step_is_not_evicted_in_it(make: Make) -> None:
    """A load that was found may begin only before the first answer of a step, or at its end."""
    store = Wrong(MemoryStore(256 * BLOCK_BYTES))
    engine = make(store, blocks=8, load_share=1.0)
    engine.saved(8)
    engine.write(8, first=50)
    engine.manager.poll()
    engine.drain()
    assert engine.manager.find(names(1, 50)[0]) == HERE
    gate = store.hold("find")
    engine.manager.lookup(names(4))
    engine.manager.poll()
    gate.wait()
    assert engine.manager.find(names(1, 50)[0]) == HERE
    gate.open()
    assert engine.manager._workers[0].drain(600)
    assert engine.look(4) == [PENDING] * 4
    engine.read(8, first=50)


def test_an_answer_on_the_thread_of_the_scheduler_is_of_no_store_that_is_suspended_or_is_to_drop_something(
    make: Make,
) -> None:
    threads = set[int]()
    store = Wrong(MemoryStore(256 * BLOCK_BYTES))
    store.indexed = True
    store.before["find"] = lambda: threads.add(threading.get_ident())
    engine = make(store, retry_seconds=0.0)
    engine.saved(2)
    here = threading.get_ident()
    assert engine.ask(1, first=9) == [ABSENT] and threads == {here}
    threads.clear()
    gate = store.hold("clear")
    engine.manager.clear()
    assert engine.ask(2) == [ABSENT] * 2 and here not in threads
    gate.open()
    engine.until(lambda: not engine.stats.stores[0].unconfirmed_drops)
    engine.saved(2)
    store.before["load"] = fail
    for _ in range(3):
        assert engine.ask(2) == [ABSENT] * 2
    threads.clear()
    assert engine.stats.suspended and engine.ask(2) == [ABSENT] * 2 and not threads


def test_a_find_that_fails_at_once_is_asked_by_a_job(make: Make) -> None:
    store = Wrong(MemoryStore(256 * BLOCK_BYTES))
    store.indexed = True
    engine = make(store, retry_seconds=0.0)
    store.after["find"] = lambda codes: np.full(len(codes) + 1, 1, np.uint8)
    for _ in range(3):
        assert engine.ask(1) == [ABSENT]
    assert engine.stats.missed == {"failed": 3} and engine.stats.suspended == ("wrong",)


def test_a_store_whose_find_ends_the_callers_thread_can_be_closed() -> None:
    store = Wrong(MemoryStore(256 * BLOCK_BYTES))
    store.indexed = True
    queue = open_queue(store)
    store.before["find"] = lambda: sys.exit(1)
    with pytest.raises(SystemExit):
        queue.find_now(keys_of(queue, 1))
    assert queue.close(5.0)


def test_a_prompt_is_saved_in_its_order_whatever_the_order_of_its_ends(make: Make) -> None:
    """What is evicted before it was saved is its end."""
    order = list[bytes]()
    store = Wrong(MemoryStore(256 * BLOCK_BYTES))
    engine = make(store, blocks=32, save_share=0.01)
    store.before["save"] = lambda: order.extend(lease.keys[0] for lease in engine.cache.leases)
    engine.cache.reserve(names(20))
    assert engine.manager.publish(set(names(20))) == 20
    engine.drain()
    assert order == names(20)
