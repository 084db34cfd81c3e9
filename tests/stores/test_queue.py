"""A queue answers in time and verifies every answer, whatever its store does."""

from __future__ import annotations

import os
import resource
import select
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

from kvpool import PoolClosed
from kvpool.storage import (
    CANCELLED,
    DAMAGED,
    FAILED,
    LATE,
    OK,
    BlockNames,
    MemoryStore,
    StoreRequest,
    StoreWorker,
    staging_rows,
)
from kvpool.storage.circuit_breaker import CircuitBreaker
from tests.stores.lab import (
    BLOCK_BYTES,
    IDENTITY,
    SLOTS,
    Clock,
    Gate,
    Wrong,
    begin_load,
    begin_save,
    codes_of,
    content,
    done,
    fail,
    fill,
    keys_of,
    memory,
    names,
    open_queue,
    raising,
    returned,
    saved,
)
from tests.waiting import at_once

# -- a store that lies ---------------------------------------------------------------------------------


def jobs_of(queue: StoreWorker, keys: Any) -> dict[str, Callable[[], StoreRequest]]:
    """Begin a job of each kind that asks for blocks."""
    rows = np.arange(10, 10 + len(keys))
    return {
        "find": lambda: queue.find(keys),
        "save": lambda: queue.save(keys, rows),
        "load": lambda: queue.load(keys, rows),
    }


@pytest.mark.parametrize("kind", ["find", "save", "load"])
@pytest.mark.parametrize(
    "answer",
    [
        np.array([257, 257]),
        np.array([1.0, 1.0]),
        [True, True],
        [1, 1, 1],
        [[1, 1]],
        [1, 1 << 70],
        None,
        "11",
        [1, 7],
    ],
    ids=str,
)
def test_codes_that_are_none_are_failures(store: Wrong, queue: StoreWorker, answer: Any, kind: str) -> None:
    keys = saved(queue, 2)
    store.after[kind] = lambda loaded: (answer, loaded[1]) if kind == "load" else answer
    job = jobs_of(queue, keys)[kind]()
    assert codes_of(job) == [FAILED] * 2 and job.error


@pytest.mark.parametrize(
    "macs",
    [None, np.zeros((2, 15), np.uint8), np.zeros((2, 16), np.uint8), "x" * 32],
    ids=str,
)
def test_missing_or_wrong_macs_make_no_block_valid(store: Wrong, queue: StoreWorker, macs: Any) -> None:
    keys = saved(queue, 2)
    store.after["load"] = lambda loaded: (loaded[0], macs)
    assert returned(queue.load(keys, [10, 11])).ok == 0


# -- blocks that an engine names itself ----------------------------------------------------------------


def test_a_store_that_is_not_there_at_first_is_asked_for_its_epoch_later(store: Wrong) -> None:
    """What is in the epoch before is not taken for it meanwhile."""
    with open_queue(store.inner) as queue:
        done(queue.reset())
        keys = saved(queue, 2)
    store.before["epoch"] = raising(ConnectionError("not there yet"))
    with open_queue(store) as queue:
        for job in (queue.find(keys), begin_load(queue, keys), queue.save(keys, np.arange(2))):
            assert codes_of(job) == [FAILED] * 2 and "not there" in job.error
        del store.before["epoch"]
        assert returned(begin_load(queue, keys)).ok == 2


def test_a_reset_that_the_store_does_not_note_keeps_everything_back_until_it_does(store: Wrong) -> None:
    with open_queue(store) as queue:
        keys = saved(queue, 2)
        store.before["epoch"] = raising(OSError("no room"))
        job = queue.reset()
        until(queue, lambda: bool(job.error))
        assert codes_of(queue.find(keys)) == [CANCELLED] * 2 and not job.done
        del store.before["epoch"]
        assert job.wait(600) and job.ok and job.dropped == 2


def test_an_epoch_that_no_store_draws_is_not_taken(store: Wrong) -> None:
    with open_queue(store) as queue:
        for answer in (b"short", "text", 7):
            store.after["epoch"] = lambda _, answer=answer: answer
            job = done(queue.find(BlockNames(names(1))))
            assert job.codes.tolist() == [FAILED] and "16 bytes or none" in job.error


def test_a_reset_beside_a_clear_begins_an_epoch(store: Wrong) -> None:
    """And a second one waits with the first."""
    with open_queue(store) as queue:
        gate = store.hold("clear")
        jobs = [queue.clear(), queue.clear(), queue.reset(), queue.reset(), queue.clear()]
        assert jobs[0] is jobs[1] is jobs[4] and jobs[2] is jobs[3] and jobs[0] is not jobs[2]
        gate.open()
        assert all(job.wait(600) and job.ok for job in jobs)
        assert store.calls.count("clear") == 2 and store.inner.epoch(queue.secret.model, False)


class Lender:
    """Lends the rows of some names, to one call of the store at a time."""

    def __init__(self, rows: dict[bytes, int]) -> None:
        self.rows, self.lent, self.given_back = rows, list[tuple[bytes, ...]](), 0

    @contextmanager
    def __call__(self, asked: BlockNames) -> Iterator[Any]:
        self.lent.append(asked.names)
        yield np.array([self.rows.get(name, -1) for name in asked.names])
        self.given_back += 1


def test_rows_are_lent_for_each_call_and_what_has_gone_is_absent(store: Wrong, queue: StoreWorker) -> None:
    fill(queue.memory, 10)
    lender = Lender({name: row for row, name in enumerate(names(10)) if row % 3})
    job = returned(queue.save(BlockNames(names(10)), lender))
    assert job.counts == {"absent": 4, "ok": 6}
    assert sorted(map(len, lender.lent)) == [2, 4, 4] and lender.given_back == 3
    assert done(queue.load(BlockNames(names(10)), np.arange(20, 30))).codes.tolist() == job.codes.tolist()
    assert np.array_equal(queue.memory[28], content(8))


def test_bytes_after_a_row_belong_to_the_store_and_not_to_the_block() -> None:
    store, whole = Wrong(MemoryStore(8 * BLOCK_BYTES)), memory(4, BLOCK_BYTES + 24)
    with pytest.raises(ValueError, match=f"row_padding: .*{whole.shape[1]}"):
        StoreWorker(store, whole, IDENTITY, row_padding=whole.shape[1])
    with StoreWorker(store, whole, IDENTITY, row_padding=24) as queue:
        assert queue.block_bytes == BLOCK_BYTES and queue.memory.shape == (4, BLOCK_BYTES)
        fill(queue.memory, 2)
        keys = keys_of(queue, 2)
        for kind in ("save", "load"):
            store.before[kind] = lambda: whole[:, BLOCK_BYTES:].fill(7)
        assert queue.save(keys, [0, 1]).wait(600)
        job = queue.load(keys, [2, 3])
        assert returned(job).ok == 2
        assert np.array_equal(queue.memory[2:], queue.memory[:2])


# -- a store that is late, hangs or is dead ------------------------------------------------------------


def test_loads_go_before_saves_that_came_earlier(store: Wrong) -> None:
    store.threads = 1
    with open_queue(store) as queue:
        keys, gate = saved(queue, 4), store.hold("find")
        held = queue.find(keys)
        gate.wait()
        jobs = [queue.save(keys, np.arange(4)), begin_load(queue, keys, 10)]
        store.calls.clear()
        gate.open()
        assert held.wait(600) and all(job.wait(600) for job in jobs)
        assert store.calls == ["load", "save"]


# -- bounds, closing, forking --------------------------------------------------------------------------


def test_a_deadline_that_has_passed_reaches_no_store(store: Wrong, queue: StoreWorker) -> None:
    assert codes_of(queue.find(keys_of(queue, 4), deadline=queue.now() - 1)) == [LATE] * 4
    assert "find" not in store.calls


def test_closing_cancels_waits_and_closes_the_store_once(store: Wrong) -> None:
    queue, gate = open_queue(store), store.hold("save")
    job = begin_save(queue, 4)
    gate.wait()
    assert not queue.close(0.05) and job.codes.tolist() == [CANCELLED] * 4 and not job.returned
    assert "close" not in store.calls
    gate.open()
    assert queue.close(600) and queue.close(600) and store.calls.count("close") == 1
    with pytest.raises(PoolClosed, match="wrong"):
        queue.find(keys_of(queue, 1))


class Mute(BaseException):
    """An error that raises when it is asked for its text."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["find", "save", "load"])
@pytest.mark.parametrize(
    "error", [SystemExit(1), KeyboardInterrupt(), MemoryError(), Mute()], ids=lambda e: type(e).__name__
)
def test_no_error_of_a_store_ends_a_thread(store: Wrong, queue: StoreWorker, error: BaseException, kind: str) -> None:
    keys = saved(queue, 2)

    def end() -> None:
        raise error

    store.before[kind] = end
    for _ in range(2 * store.threads):
        job = jobs_of(queue, keys)[kind]()
        assert codes_of(job) == [FAILED] * 2
        assert job.error.startswith(type(error).__name__)
    assert queue.stats().running_calls == 0


def test_a_store_with_a_wrong_secret_is_closed_again(store: Wrong) -> None:
    store.after["open"] = lambda secret: b"short"
    with pytest.raises(ValueError, match="secret: expected 32 bytes"):
        open_queue(store)
    assert store.calls == ["open", "close"]


def test_memory_stays_bounded_when_nobody_asks(store: Wrong) -> None:
    with open_queue(store) as queue:
        keys = keys_of(queue, 1)
        for _ in range(3000):
            done(queue.find(keys, deadline=queue.now() + 1000))
        assert not queue.has_results and not queue.wait(0) and not queue.requests


KEYS = np.zeros((2, 32), np.uint8)
BAD: list[tuple[Callable[[StoreWorker], Any], str]] = [
    (lambda queue: queue.find([b"key"]), "keys: expected"),
    (lambda queue: queue.find(KEYS[:, 1:]), "keys: expected"),
    (lambda queue: queue.find(KEYS, deadline=float("nan")), "deadline"),
    (lambda queue: queue.find(KEYS, deadline="5"), "deadline"),
    (lambda queue: queue.wait(-1.0), "timeout: expected a finite number of 0 or more, got -1.0"),
    (lambda queue: queue.load(KEYS, [0]), "rows: expected one for each of the 2 keys, got 1"),
    (lambda queue: queue.load(KEYS, [0, 0]), "rows that differ"),
    (lambda queue: queue.load(KEYS, [0, SLOTS]), "expected 0 to 63"),
    (lambda queue: queue.save(KEYS, [0, -1]), "expected 0 to 63"),
    (lambda queue: queue.save(KEYS, Lender({})), "keys: expected BlockNames"),
    (lambda queue: BlockNames([b"a", 1]), "expected bytes"),
    (lambda queue: StoreWorker(MemoryStore(1 << 20), KEYS[:, ::2], IDENTITY), "memory: expected"),
    (lambda queue: StoreWorker(object(), KEYS, IDENTITY), "store: expected a Store, got <"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_arguments_are_named(queue: StoreWorker, call: Callable[[StoreWorker], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(queue)
    assert queue.stats().queued_blocks == 0


@pytest.mark.parametrize("rows", [[0, SLOTS], [0, 1, 2], ["a", "b"], None])
def test_wrong_rows_of_a_lender_fail_its_blocks(queue: StoreWorker, rows: Any) -> None:
    job = returned(queue.save(BlockNames(names(2)), lambda _: nullcontext(rows)))
    assert job.counts == {"failed": 2} and job.error


# -- a store that writes to what it is given, or whose answers are none ------------------------------------


@pytest.mark.parametrize("writes", ["its row", "its key"])
def test_a_block_in_another_row_or_under_another_key_is_damaged(store: Wrong, queue: StoreWorker, writes: str) -> None:
    keys, load = saved(queue, 2), store.inner.load

    def other(given: Any, rows: Any, stop: Any) -> Any:
        if writes == "its row":
            rows[:] = 30
        else:
            given[:] = keys[1]
        return load(given, rows, stop)

    store.inner.load = other  # type: ignore[method-assign]
    job = returned(queue.load(keys[:1], [10]))
    assert job.codes.tolist() == [DAMAGED] and job.rows.tolist() == [10]
    assert (job.keys == keys[:1]).all(), "the job forgets its own key, and no other"


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("name", "a/b"), ("threads", 0), ("clears_prefix", 17), ("row_padding", -1), ("persistent", 1), ("indexed", "")],
)
def test_a_store_whose_attributes_are_wrong_is_refused_before_it_is_opened(
    store: Wrong, attribute: str, value: Any
) -> None:
    setattr(store, attribute, value)
    with pytest.raises((TypeError, ValueError), match=f"store.{attribute}: expected"):
        open_queue(store)
    assert not store.calls


@pytest.mark.parametrize("figures", [None, {"blocks": "x"}, [1]], ids=str)
def test_figures_of_a_store_that_are_none_are_left_out(store: Wrong, queue: StoreWorker, figures: Any) -> None:
    saved(queue, 1)
    store.stats = lambda: figures  # type: ignore[method-assign]
    assert queue.stats().store == {} and queue.stats().blocks["save", "ok"] == 1
    store.stats = fail  # type: ignore[method-assign]
    assert queue.stats().store == {}


# -- what a worker reports -------------------------------------------------------------------------------


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
    for gate in store.before.values():
        if isinstance(gate, Gate):  # a test that has failed has left it shut
            gate.open()
    assert made.close(600)
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
    assert worker.stats().blocks["load", "late"] == 3 and worker.health.stats().failed_requests == 1, "counted once"


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


def test_drops_are_reported_and_do_not_change_health(store: Wrong, worker: StoreWorker) -> None:
    """Two clears of the same namespace are one job, which is reported to both."""
    keys, names_done, gate = save(worker, 2), list[str](), store.hold("clear")
    jobs = [worker.clear(done=lambda job, name=name: names_done.append(name)) for name in ("one", "other")]
    assert jobs[0] is jobs[1]
    gate.open()
    until(worker, lambda: len(names_done) == 2)
    dropped = worker.forget(keys)
    assert dropped.wait(600) and dropped.ok == 2 and names_done == ["one", "other"] and not worker.suspended


def test_a_call_that_raises_keeps_no_other_from_being_made(worker: StoreWorker) -> None:
    calls = Calls()

    def fails(job: StoreRequest) -> None:
        raise RuntimeError("mine")

    jobs = [worker.find(BlockNames(names(1)), fails), worker.find(BlockNames(names(1)), calls.done)]
    assert all(job.wait(600) for job in jobs)
    with pytest.raises(RuntimeError, match="mine"):
        worker.poll()
    assert select.select([worker], [], [], 0)[0], "the descriptor stays readable for the other callback"
    until(worker, lambda: not worker.in_flight)
    assert len(calls.made) == 1


def test_a_worker_waits_in_a_process_with_more_than_1024_descriptors(store: Wrong) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as ends:
        ends.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
        while (descriptor := os.dup(0)) < 1024:
            ends.callback(os.close, descriptor)
        ends.callback(os.close, descriptor)
        with open_queue(store) as worker:
            assert worker.fileno() > 1024 and not worker.wait(0)
            worker.find(BlockNames(names(1)), (calls := Calls()).done)
            assert worker.wait(1e9) and worker.poll() and calls.made


def test_a_callback_that_polls_leaves_the_others_to_the_call_around_it(worker: StoreWorker) -> None:
    calls, polled = Calls(), list[bool]()
    jobs = [
        worker.find(BlockNames(names(1)), lambda job: polled.append(worker.poll())),
        worker.find(BlockNames(names(1)), calls.done),
    ]
    assert all(job.wait(600) for job in jobs)
    until(worker, lambda: not worker.in_flight)
    assert len(polled) == len(calls.made) == 1


def test_blocks_that_were_dropped_before_a_call_began_with_them_wait_no_more(store: Wrong) -> None:
    store.threads = 1
    with open_queue(store, piece_bytes=BLOCK_BYTES) as queue:
        keys, gate = saved(queue, 2), store.hold("find")
        found = queue.find(keys)
        gate.wait()
        dropped = queue.forget(keys[1:])
        gate.open()
        assert codes_of(found) == [OK, CANCELLED] and dropped.wait(600)
        assert not queue.stats().queued_blocks


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
