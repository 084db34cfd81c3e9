"""A client reports each job once, and reuses no row before its job has returned, whatever the store does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvpool.storage import CANCELLED, DAMAGED, LATE, OK, BlockNames, StoreClient, StoreRequest, staging_rows
from kvpool.storage.store_client import CircuitBreaker
from tests.stores.lab import BLOCK_BYTES, IDENTITY, Clock, Gate, Wrong, content, names
from tests.waiting import at_once

ROWS = 8


class Calls:
    """The calls that a client has made, in order."""

    def __init__(self) -> None:
        self.made: list[tuple[str, bool]] = []

    def done(self, job: StoreRequest) -> None:
        self.made.append(("done", job.returned))

    def returned(self, job: StoreRequest) -> None:
        self.made.append(("returned", job.returned))


@pytest.fixture
def client(store: Wrong, clock: Clock) -> Iterator[StoreClient]:
    options = {"health": CircuitBreaker(1, 3600.0), "staging": True, "patience": 0.0, "clock": clock}
    made = StoreClient(store, staging_rows(ROWS, BLOCK_BYTES), IDENTITY, **options)
    yield made
    assert made.close()
    assert not made.in_flight and made.free("load") == ROWS


def until(client: StoreClient, condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        client.poll()
        if condition():
            return
        client.queue.wait(0.1)
    raise AssertionError("it has not come in ten minutes")


def save(client: StoreClient, count: int, **options: Any) -> BlockNames:
    keys = BlockNames(names(count))
    rows = client.take("save", count)
    for place, row in enumerate(rows):
        client.memory[row] = content(place)
    job = client.save(keys, rows, **options)
    assert client.wait(job, 600) and job.ok == count
    until(client, lambda: not client.in_flight)
    return keys


def test_a_job_is_reported_once_when_it_is_done_and_once_when_it_has_returned(client: StoreClient) -> None:
    keys, calls = save(client, 3), Calls()
    job = client.load(keys, client.take("load", 3), calls.done, calls.returned)
    until(client, lambda: not client.in_flight)
    client.poll()
    assert [kind for kind, _ in calls.made] == ["done", "returned"] and job.ok == 3


def test_the_rows_of_a_load_that_hangs_come_back_when_it_has_returned(
    store: Wrong, client: StoreClient, clock: Clock
) -> None:
    keys, calls, gate = save(client, 3), Calls(), store.hold("load")
    job = client.load(keys, client.take("load", 3), calls.done, calls.returned, deadline=clock.soon())
    assert gate.reached.wait(600)
    clock.pass_(1.0)
    until(client, lambda: bool(calls.made))
    assert calls.made == [("done", False)] and (job.codes == LATE).all()
    assert client.free("load") == ROWS - 3 and client.in_flight == 1
    gate.open()
    until(client, lambda: not client.in_flight)
    assert calls.made == [("done", False), ("returned", True)] and client.free("load") == ROWS


def test_rows_that_are_held_come_back_when_they_are_released(client: StoreClient) -> None:
    keys, calls = save(client, 2), Calls()
    job = client.load(keys, client.take("load", 2), calls.done, calls.returned, hold=True)
    until(client, lambda: len(calls.made) == 2)
    assert client.free("load") == ROWS - 2 and np.array_equal(client.memory[job.rows[1]], content(1))
    client.release(job)
    client.release(job)
    assert client.free("load") == ROWS and not client.in_flight


def test_rows_that_are_released_early_come_back_when_the_call_has(store: Wrong, client: StoreClient) -> None:
    keys, calls, gate = save(client, 2), Calls(), store.hold("load")
    job = client.load(keys, client.take("load", 2), returned=calls.returned, hold=True)
    client.release(job)
    assert client.free("load") == ROWS - 2
    gate.open()
    until(client, lambda: not client.in_flight)
    assert calls.made == [("returned", True)]


def test_saves_leave_half_of_the_rows_to_loads(client: StoreClient) -> None:
    rows = client.take("save", ROWS)
    assert len(rows) == ROWS - ROWS // 2 and not len(client.take("save", 1))
    more = client.take("load", ROWS)
    assert len({*rows.tolist(), *more.tolist()}) == ROWS
    client.give_back(rows)
    client.give_back(more)


def test_who_waits_for_a_row_gets_that_of_a_job_that_returns(store: Wrong, client: StoreClient) -> None:
    keys, gate = save(client, 1), store.hold("load")
    rows = client.take("load", ROWS)
    client.load(keys, rows[:1])
    threading.Timer(0.05, gate.open).start()
    assert client.take("load", 4, 600.0).tolist() == rows[:1].tolist()
    client.give_back(rows)


def test_nobody_waits_for_rows_that_hang(store: Wrong, client: StoreClient, clock: Clock) -> None:
    keys, gate = save(client, 4), store.hold("load")
    gone = client.take("load", ROWS - 4)
    hung = [client.load(BlockNames(names(4)), gone, deadline=clock.soon())]
    hung.append(client.load(keys, client.take("load", 4), deadline=clock.soon()))
    until(client, lambda: store.calls.count("load") == 2)
    clock.pass_(1.0)
    assert all(client.wait(job, 600) for job in hung)
    assert not len(client.take("load", 1, 600.0))
    gate.open()


def test_a_store_that_fails_lies_or_is_late_is_suspended_until_a_probe(store: Wrong, client: StoreClient) -> None:
    keys = save(client, 1)
    store.after["load"] = lambda answer: (answer[0], np.zeros_like(answer[1]))
    job = client.load(keys, client.take("load", 1))
    assert client.wait(job, 600) and job.codes.tolist() == [DAMAGED]
    assert client.suspended and not client.usable("find") and not client.usable("load")
    assert client.usable("save") and client.usable("forget") and client.usable("clear")
    client.health.resume()
    assert client.usable("load") and not client.suspended


def test_a_job_that_had_no_time_says_nothing_of_its_store(store: Wrong) -> None:
    for patience, suspended in ((3600.0, False), (0.0, True)):
        gate, clock = Gate(), Clock()
        store.before["find"], options = gate, {"health": CircuitBreaker(1), "patience": patience, "clock": clock}
        client = StoreClient(store, staging_rows(2, BLOCK_BYTES), IDENTITY, **options)
        job = client.find(BlockNames(names(1)), deadline=clock.soon())
        assert gate.reached.wait(600)
        clock.pass_(1.0)
        assert client.wait(job, 600) and job.codes.tolist() == [LATE] and client.suspended == suspended
        gate.open()
        assert client.close()


def test_drops_are_reported_and_do_not_change_health(store: Wrong, client: StoreClient) -> None:
    """Two clears of the same namespace are one job, which is reported to both."""
    keys, names_done, gate = save(client, 2), list[str](), store.hold("clear")
    jobs = [client.clear(done=lambda job, name=name: names_done.append(name)) for name in ("one", "other")]
    assert jobs[0] is jobs[1]
    gate.open()
    until(client, lambda: len(names_done) == 2)
    dropped = client.forget(keys)
    assert client.wait(dropped, 600) and dropped.ok == 2 and names_done == ["one", "other"] and not client.suspended


def test_a_call_that_raises_keeps_no_other_from_being_made(client: StoreClient) -> None:
    calls = Calls()

    def fails(job: StoreRequest) -> None:
        raise RuntimeError("mine")

    jobs = [client.find(BlockNames(names(1)), fails), client.find(BlockNames(names(1)), calls.done)]
    assert all(job.wait(600) for job in jobs)
    with pytest.raises(RuntimeError, match="mine"):
        client.poll()
    until(client, lambda: not client.in_flight)
    assert len(calls.made) == 1


def test_a_job_that_is_refused_leaves_its_rows_to_the_caller(store: Wrong, client: StoreClient) -> None:
    rows = client.take("save", 2)
    with pytest.raises(ValueError, match="one for each of the 1 keys"):
        client.save(BlockNames(names(1)), rows)
    assert not client.in_flight and client.free("load") == ROWS - 2
    client.give_back(rows)


def test_closing_reports_that_jobs_were_cancelled(store: Wrong, client: StoreClient) -> None:
    keys, codes, gate = save(client, 1), list[int](), store.hold("find")
    for _ in range(3):
        client.find(keys, lambda job: codes.append(int(job.codes[0])))
    assert gate.reached.wait(600) and not client.close(0.05)
    assert codes.count(CANCELLED) == 3
    gate.open()


def test_threads_that_wait_share_rows_and_get_their_own_bytes(client: StoreClient) -> None:
    def work(first: int) -> None:
        for turn in range(20):
            keys = BlockNames(names(2, first + 2 * turn))
            for kind in ("save", "load"):
                rows = client.take(kind, 2, 600.0)
                if kind == "save":
                    client.memory[rows] = first + turn
                begin = client.save if kind == "save" else client.load
                options = {} if kind == "save" else {"hold": True}
                job = begin(keys[: len(rows)], rows, **options)
                assert client.wait(job, 600) and (job.codes == OK).all(), job
                assert kind == "save" or (client.memory[rows] == first + turn).all()
                client.release(job)

    at_once(work, (0, 100))
    until(client, lambda: not client.in_flight)
