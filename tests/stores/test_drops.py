"""What a queue drops is found, loaded and saved by nobody, whatever its store does, until the store has
confirmed that it is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool.errors import StoreBusy
from kvpool.storage import ABSENT, CANCELLED, FAILED, OK, MemoryStore, StoreRequest, StoreWorker
from kvpool.storage.circuit_breaker import CircuitBreaker
from kvpool.storage.store import TAG_BYTES
from tests.stores.lab import (
    BLOCK_BYTES,
    Gate,
    Wrong,
    begin_load,
    begin_save,
    codes_of,
    fail,
    fill,
    keys_of,
    open_queue,
    saved,
)

Drop = Callable[[StoreWorker, Any], StoreRequest]
DROPS: dict[str, Drop] = {
    "forget": lambda queue, keys: queue.forget(keys),
    "clear": lambda queue, keys: queue.clear(),
    "clear of a namespace": lambda queue, keys: queue.clear(queue.secret.tag(b"")),
}


@pytest.fixture
def store() -> Wrong:
    made = Wrong(MemoryStore(64 * BLOCK_BYTES))
    made.threads = 4
    return made


@pytest.fixture(params=DROPS.values(), ids=DROPS)
def drop(request: pytest.FixtureRequest) -> Drop:
    return request.param


class Down:
    """A store that refuses drops until it is up again. ``refused`` is released at each that it refuses."""

    def __init__(self, store: Wrong) -> None:
        self._store, self.refused = store, threading.Semaphore(0)
        store.before.update(forget=self._refuse, clear=self._refuse)

    def _refuse(self) -> None:
        self.refused.release()
        raise OSError(5, "I/O error")

    def up(self) -> None:
        del self._store.before["forget"], self._store.before["clear"]


def codes(job: StoreRequest) -> list[int]:
    assert job.wait(600)
    return job.codes.tolist()


# -- calls under way -----------------------------------------------------------------------------------


def test_a_drop_waits_for_the_saves_under_way_that_it_concerns(store: Wrong, queue: StoreWorker, drop: Drop) -> None:
    gate, store.deaf = Gate(), True
    store.before["save"] = gate
    keys = keys_of(queue, 4)
    saving = queue.save(keys, np.arange(4))
    gate.wait()
    dropped = drop(queue, keys)
    assert codes(saving) == [CANCELLED] * 4 and not saving.returned and not dropped.done
    assert codes(queue.find(keys)) == [CANCELLED] * 4
    assert store.calls[1:] == ["save"], "the store was asked nothing else"
    gate.open()
    assert codes(dropped) == [OK] * len(dropped.codes) and dropped.dropped == 4
    assert codes(queue.find(keys)) == [ABSENT] * 4


def test_a_forget_waits_for_no_other_save(store: Wrong, queue: StoreWorker) -> None:
    keys, gate = saved(queue, 4), store.hold("save")
    saving = queue.save(keys_of(queue, 2, 10), np.arange(10, 12))
    gate.wait()
    assert codes(queue.forget(keys)) == [OK] * 4 and not saving.done
    gate.open()
    assert codes(saving) == [OK] * 2


def test_a_queued_save_leaves_out_what_is_dropped(store: Wrong, queue: StoreWorker) -> None:
    gate = store.hold("save")
    blockers = [queue.save(keys_of(queue, 1, 40 + i), np.array([40 + i])) for i in range(3)]
    gate.wait()
    fill(queue.memory, 12)
    keys = keys_of(queue, 12)
    saving = queue.save(keys, np.arange(12))  # in three calls
    dropped = queue.forget(keys[2:9])
    assert saving.codes.tolist()[2:9] == [CANCELLED] * 7 and not saving.done
    gate.open()
    wanted = [OK] * 2 + [CANCELLED] * 7 + [OK] * 3
    assert codes(saving) == wanted and all(codes(job) == [OK] for job in (*blockers, dropped)[:3])
    assert codes(dropped) == [OK] * 7
    assert codes(queue.find(keys)) == [OK] * 2 + [ABSENT] * 7 + [OK] * 3
    assert queue.stats().queued_blocks == 0


@pytest.mark.parametrize("kind", ["find", "load"])
def test_what_a_store_answers_after_a_drop_counts_no_more(
    store: Wrong, queue: StoreWorker, drop: Drop, kind: str
) -> None:
    """The call had found the blocks before."""
    keys, gate = saved(queue, 4), Gate()

    def held(answer: Any) -> Any:
        gate()
        return answer

    store.after[kind] = held
    asked = queue.find(keys) if kind == "find" else begin_load(queue, keys, 10)
    gate.wait()
    dropped = drop(queue, keys)
    assert codes(asked) == [CANCELLED] * 4, "it is decided at once"
    assert asked.returned is False, "its rows may still be written"
    gate.open()
    assert codes_of(asked) == [CANCELLED] * 4
    assert codes(dropped) == [OK] * len(dropped.codes)


# -- a store that does not do it -----------------------------------------------------------------------


def test_until_a_store_that_is_down_confirms_nothing_is_found_loaded_or_saved(
    store: Wrong, queue: StoreWorker, drop: Drop
) -> None:
    keys, down = saved(queue, 4), Down(store)
    dropped = drop(queue, keys)
    assert down.refused.acquire(timeout=600)
    assert codes(queue.find(keys)) == [CANCELLED] * 4
    assert codes(begin_load(queue, keys)) == [CANCELLED] * 4
    assert codes(queue.save(keys, np.arange(4))) == [CANCELLED] * 4
    assert down.refused.acquire(timeout=600), "the drop is sent again"
    assert not dropped.done and "I/O error" in dropped.error and queue.stats().unconfirmed_drops == 1
    assert len(store.inner._blocks) == 4 and not {"find", "load"} & set(store.calls[2:])
    down.up()
    assert codes(dropped) == [OK] * len(dropped.codes) and dropped.dropped == 4
    assert queue.stats().unconfirmed_drops == 0 and not store.inner._blocks
    assert np.array_equal(saved(queue, 4), keys) and codes(queue.find(keys)) == [OK] * 4, "it may be saved anew"


def test_what_is_to_be_dropped_says_nothing_of_the_health_of_a_store(store: Wrong, queue: StoreWorker) -> None:
    """A store that is down would count as one that answers."""
    keys, down, health = saved(queue, 4), Down(store), CircuitBreaker(1, 3600.0)
    asked, store.before["find"] = queue.find(keys), fail
    queue.forget(keys[:2])
    failed, cancelled = queue.find(keys), queue.find(keys[:2])
    assert asked.wait(600) and codes(failed) == [CANCELLED] * 2 + [FAILED] * 2 and codes(cancelled) == [CANCELLED] * 2
    for job in (failed, cancelled):
        health.note(job)
    assert health.suspended()
    down.up()


def test_others_are_served_while_a_drop_is_not_confirmed(store: Wrong, queue: StoreWorker) -> None:
    tags = [queue.secret.tag(name) for name in (b"one", b"other")]
    first, second = saved(queue, 2, tag=tags[0]), saved(queue, 2, first=2, tag=tags[1])
    down = Down(store)
    dropped = [queue.clear(tags[0]), queue.forget(second[:1])]
    assert codes(queue.find(first, tag=tags[0])) == [CANCELLED] * 2
    assert codes(queue.find(second, tag=tags[1])) == [CANCELLED, OK]
    assert saved(queue, 2, first=10, tag=tags[1]).shape == (2, 32)
    assert codes(begin_save(queue, 1, 20, tag=tags[0])) == [CANCELLED]
    down.up()
    assert [codes(job) for job in dropped] == [[OK], [OK]]


def test_a_drop_that_hangs_keeps_no_load_waiting(store: Wrong, queue: StoreWorker, drop: Drop) -> None:
    tags = [queue.secret.tag(name) for name in (b"", b"other")]
    keys, others = saved(queue, 4, tag=tags[0]), saved(queue, 4, first=10, tag=tags[1])
    gate = store.before["forget"] = store.before["clear"] = Gate()
    hanging = [queue.forget(keys_of(queue, 1, 100 + i)) for i in range(8)] + [drop(queue, keys)]
    gate.wait()
    concerned = hanging[-1].kind == "clear" and hanging[-1].tag == queue.secret.model
    found = queue.load(others, np.arange(4), tag=tags[1])
    assert codes(found) == [CANCELLED if concerned else OK] * 4
    assert queue.drain(600), "drops that hang are not waited for"
    gate.open()
    assert all(codes(job) == [OK] * len(job.codes) for job in hanging)


def test_a_queue_that_is_closed_says_what_was_not_confirmed(store: Wrong, drop: Drop) -> None:
    with open_queue(store) as queue:
        keys, down = saved(queue, 4), Down(store)
        dropped = drop(queue, keys)
        assert down.refused.acquire(timeout=600)
    assert dropped.done and not dropped.ok and len(store.inner._blocks) == 4
    assert codes(dropped) == [CANCELLED] * len(dropped.codes)


# -- what is accepted ----------------------------------------------------------------------------------


def test_a_queue_full_of_saves_takes_a_drop_and_too_many_drops_are_refused(store: Wrong) -> None:
    store.threads = 2  # One of them saves and drops.
    with open_queue(store, queued_blocks=4) as queue:
        gate = store.hold("save")
        down = Down(store)
        begin_save(queue, 1)
        gate.wait()
        begin_save(queue, 4, 50)
        with pytest.raises(StoreBusy):
            begin_save(queue, 4, 60)
        queue.forget(keys_of(queue, 3))
        queue.check_forget(1)
        with pytest.raises(StoreBusy):
            queue.check_forget(2)
        with pytest.raises(StoreBusy):
            queue.forget(keys_of(queue, 2, 80))
        down.up()
        gate.open()


def test_a_drop_cannot_be_cancelled(store: Wrong, queue: StoreWorker, drop: Drop) -> None:
    keys, down = saved(queue, 2), Down(store)
    dropped = drop(queue, keys)
    with pytest.raises(ValueError, match="cannot be cancelled"):
        dropped.cancel()
    down.up()
    assert codes(dropped) == [OK] * len(dropped.codes)


@pytest.mark.parametrize("tag", [bytes(TAG_BYTES), b"short", "text"])
def test_only_tags_of_the_secret_are_accepted(queue: StoreWorker, tag: Any) -> None:
    """A clear of the model would not drop what has another tag."""
    keys = keys_of(queue, 1)
    calls: list[Callable[[], StoreRequest]] = [
        lambda: queue.save(keys, np.arange(1), tag=tag),
        lambda: queue.load(keys, np.arange(1), tag=tag),
        lambda: queue.find(keys, tag=tag),
        lambda: queue.clear(tag),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="tag: .*"):
            call()


def test_a_store_without_clear_refuses_it_and_changes_nothing(store: Wrong) -> None:
    store.clears_prefix = 0
    with open_queue(store) as queue:
        keys = saved(queue, 2)
        for tag in (None, queue.secret.tag(b"")):
            with pytest.raises(ValueError, match="expected one that can drop"):
                queue.clear(tag)
        assert codes(queue.find(keys)) == [OK] * 2
