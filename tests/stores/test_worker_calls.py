"""A worker reports each job once, and reuses no row before its job has returned, whatever the store does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvpool.storage import DAMAGED, LATE, OK, BlockNames, StoreRequest, StoreWorker, staging_rows
from kvpool.storage.circuit_breaker import CircuitBreaker
from tests.stores.lab import BLOCK_BYTES, IDENTITY, Clock, Wrong, content, names
from tests.waiting import at_once

ROWS = 8


class Calls:
    """The calls that a worker has made, in order."""

    def __init__(self) -> None:
        self.made: list[tuple[str, bool]] = []

    def done(self, job: StoreRequest) -> None:
        self.made.append(("done", job.returned))

    def returned(self, job: StoreRequest) -> None:
        self.made.append(("returned", job.returned))


@pytest.fixture
def worker(store: Wrong, clock: Clock) -> Iterator[StoreWorker]:
    options = {"health": CircuitBreaker(1, 3600.0), "staging": True, "patience": 0.0, "clock": clock}
    made = StoreWorker(store, staging_rows(ROWS, BLOCK_BYTES), IDENTITY, **options)
    yield made
    assert made.close()
    assert not made.in_flight and made.free("load") == ROWS


def until(worker: StoreWorker, condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        worker.poll()
        if condition():
            return
        worker.wait(0.1)
    raise AssertionError("it has not come in ten minutes")


def save(worker: StoreWorker, count: int, **options: Any) -> BlockNames:
    keys = BlockNames(names(count))
    rows = worker.take("save", count)
    for place, row in enumerate(rows):
        worker.memory[row] = content(place)
    job = worker.save(keys, rows, **options)
    assert job.wait(600) and job.ok == count
    until(worker, lambda: not worker.in_flight)
    return keys


def test_the_rows_of_a_load_that_hangs_come_back_when_it_has_returned(
    store: Wrong, worker: StoreWorker, clock: Clock
) -> None:
    keys, calls, gate = save(worker, 3), Calls(), store.hold("load")
    job = worker.load(keys, worker.take("load", 3), calls.done, calls.returned, deadline=clock.soon())
    gate.wait()
    clock.pass_(1.0)
    until(worker, lambda: bool(calls.made))
    assert calls.made == [("done", False)] and (job.codes == LATE).all()
    assert not worker.poll() and not worker.wait(0)
    assert worker.free("load") == ROWS - 3 and worker.in_flight == 1
    gate.open()
    until(worker, lambda: not worker.in_flight)
    assert calls.made == [("done", False), ("returned", True)] and worker.free("load") == ROWS
    assert (job.codes == LATE).all() and not worker.wait(0)


def test_rows_that_are_held_come_back_when_they_are_released(worker: StoreWorker) -> None:
    keys, calls = save(worker, 2), Calls()
    job = worker.load(keys, worker.take("load", 2), calls.done, calls.returned, hold=True)
    until(worker, lambda: len(calls.made) == 2)
    assert worker.free("load") == ROWS - 2 and np.array_equal(worker.memory[job.rows[1]], content(1))
    worker.release(job)
    worker.release(job)
    assert worker.free("load") == ROWS and not worker.in_flight


def test_nobody_waits_for_rows_that_hang(store: Wrong, worker: StoreWorker, clock: Clock) -> None:
    keys, gate = save(worker, 4), store.hold("load")
    gone = worker.take("load", ROWS - 4)
    hung = [worker.load(BlockNames(names(4)), gone, deadline=clock.soon())]
    hung.append(worker.load(keys, worker.take("load", 4), deadline=clock.soon()))
    until(worker, lambda: store.calls.count("load") == 2)
    clock.pass_(1.0)
    assert all(job.wait(600) for job in hung)
    assert not len(worker.take("load", 1, 600.0))
    gate.open()


def test_a_store_that_fails_lies_or_is_late_is_suspended_until_a_probe(store: Wrong, worker: StoreWorker) -> None:
    keys = save(worker, 1)
    store.after["load"] = lambda answer: (answer[0], np.zeros_like(answer[1]))
    job = worker.load(keys, worker.take("load", 1))
    assert job.wait(600) and job.codes.tolist() == [DAMAGED]
    assert worker.suspended and not worker.usable("find") and not worker.usable("load")
    assert worker.usable("save") and worker.usable("forget") and worker.usable("clear")
    worker.health.resume()
    assert worker.usable("load") and not worker.suspended


def test_a_call_that_raises_keeps_no_other_from_being_made(worker: StoreWorker) -> None:
    calls = Calls()

    def fails(job: StoreRequest) -> None:
        raise RuntimeError("mine")

    jobs = [worker.find(BlockNames(names(1)), fails), worker.find(BlockNames(names(1)), calls.done)]
    assert all(job.wait(600) for job in jobs)
    with pytest.raises(RuntimeError, match="mine"):
        worker.poll()
    until(worker, lambda: not worker.in_flight)
    assert len(calls.made) == 1


def test_threads_that_wait_share_rows_and_get_their_own_bytes(worker: StoreWorker) -> None:
    def work(first: int) -> None:
        for turn in range(20):
            keys = BlockNames(names(2, first + 2 * turn))
            for kind in ("save", "load"):
                rows = worker.take(kind, 2, 600.0)
                if kind == "save":
                    worker.memory[rows] = first + turn
                begin = worker.save if kind == "save" else worker.load
                options = {} if kind == "save" else {"hold": True}
                job = begin(keys[: len(rows)], rows, **options)
                assert job.wait(600) and (job.codes == OK).all(), job
                assert kind == "save" or (worker.memory[rows] == first + turn).all()
                worker.release(job)

    at_once(work, (0, 100))
    until(worker, lambda: not worker.in_flight)
