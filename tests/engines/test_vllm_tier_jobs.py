"""kvpool's secondary tier, called as vLLM calls it: jobs over rows of a memoryview, with stores that do wrong."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

tiers = pytest.importorskip(
    "kvpool.integrations.vllm.secondary_tier",
    reason="needs vLLM: python -m tests.engines build, then python -m tests.engines test",
    exc_type=ImportError,
)

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key  # noqa: E402
from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: E402

from kvpool.storage import MemoryStore, urls  # noqa: E402
from tests.engines.test_vllm_spec import config  # noqa: E402
from tests.stores.lab import Gate, Wrong, content, fail  # noqa: E402
from tests.waiting import until  # noqa: E402

BYTES = 4096
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


class Tier:
    """The tier over a store that does what a test says, and what vLLM does with it."""

    def __init__(self, store: Wrong, **options: Any) -> None:
        self.rows = np.zeros((16, BYTES), np.int8)
        self.view = memoryview(self.rows)
        spec = SimpleNamespace(config=config({}))
        self.real = tiers.KVPoolSecondaryTier(spec, self.view, "kvpool", stores="memory:?capacity=1MiB", **options)
        self.jobs = 0

    def submit(self, load: bool, numbers: list[int], rows: list[int]) -> int:
        self.jobs += 1
        job = TransferJob(self.jobs, keys(*numbers), np.array(rows, np.int32), load, ReqContext(req_id="r"))
        (self.real.submit_load if load else self.real.submit_store)(job)
        return self.jobs

    def save(self, *numbers: int) -> None:
        for row, number in enumerate(numbers):
            self.rows[row] = content(number).view(np.int8)
        job = self.submit(False, list(numbers), list(range(len(numbers))))
        (result,) = self.results(1)
        assert (result.job_id, result.success) == (job, True)

    def results(self, count: int) -> list[Any]:
        results: list[Any] = []
        until(lambda: len(results.extend(self.real.get_finished_jobs()) or results) >= count)
        return results

    def lookup(self, *numbers: int) -> list[Any]:
        """One step of the scheduler."""
        states = [self.real.lookup(key, ReqContext(req_id="r")) for key in keys(*numbers)]
        self.real.on_schedule_end(ScheduleEndContext((), ()))
        return states

    def await_states(self, *numbers: int) -> list[Any]:
        def resolved() -> bool:
            assert not list(self.real.get_finished_jobs())
            return RETRY not in self.lookup(*numbers)

        until(resolved)
        assert not self.real.has_pending_work()
        return self.lookup(*numbers)


def keys(*numbers: int) -> list[Any]:
    return [make_offload_key(b"%032d" % number, 0) for number in numbers]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Wrong:
    wrong = Wrong(MemoryStore(1 << 20))
    monkeypatch.setattr(urls, "open_store", lambda text, **names: wrong)
    return wrong


@pytest.fixture
def tier(store: Wrong) -> Iterator[Tier]:
    tier = Tier(store, remember_seconds=1000.0)
    yield tier
    tier.real.shutdown()
    tier.view.release()


def test_what_was_stored_is_found_and_loaded_byte_for_byte(tier: Tier) -> None:
    tier.save(1, 2, 3)
    assert tier.lookup(1, 2, 3, 4) == [RETRY] * 4
    assert tier.real.has_pending_work()
    assert tier.await_states(1, 2, 3, 4) == [HIT, HIT, HIT, MISS]
    job = tier.submit(True, [3, 1], [9, 11])
    (result,) = tier.results(1)
    assert (result.job_id, result.success, result.transfer_bytes) == (job, True, 2 * BYTES)
    assert np.array_equal(tier.rows[9].view(np.uint8), content(3))
    assert np.array_equal(tier.rows[11].view(np.uint8), content(1))


def test_a_load_that_comes_in_part_names_what_has_come(tier: Tier) -> None:
    tier.save(1, 2)
    tier.submit(True, [1, 7, 2], [9, 10, 11])
    (result,) = tier.results(1)
    assert not result.success and list(result.successful_keys) == keys(1, 2)
    assert tier.lookup(7) == [MISS], "it is not tried again at once"


def test_a_changed_byte_is_a_failed_load(tier: Tier, store: Wrong) -> None:
    tier.save(1)

    def flip(answer: Any) -> Any:
        store.memory[9, 77] ^= 1
        return answer

    store.after["load"] = flip
    tier.submit(True, [1], [9])
    (result,) = tier.results(1)
    assert not result.success and not result.successful_keys


def test_a_load_that_hangs_is_reported_when_its_rows_are_free(store: Wrong) -> None:
    tier, gate = Tier(store, load_seconds=2.0), Gate()
    tier.save(1)
    store.before["load"] = gate
    tier.submit(True, [1], [9])
    assert gate.reached.wait(600)
    until(lambda: tier.real._worker.stats().blocks["load", "late"] == 1)
    assert list(tier.real.get_finished_jobs()) == []
    gate.open()
    (result,) = tier.results(1)
    assert not result.success
    tier.real.shutdown()


def test_a_dead_store_fails_jobs_and_is_left_alone(tier: Tier, store: Wrong) -> None:
    store.before.update({"save": fail, "find": fail})
    for number in range(6):
        tier.submit(False, [number], [0])
        assert [result.success for result in tier.results(1)] == [False]
        assert tier.await_states(number) == [MISS]
    assert store.calls.count("save") == store.calls.count("find") == 3


def test_draining_waits_for_calls_and_what_was_saved_before_is_not_found(tier: Tier, store: Wrong) -> None:
    tier.save(1)
    assert tier.await_states(1) == [HIT]
    tier.submit(False, [2], [3])
    tier.real.drain_jobs()
    assert [result.success for result in tier.real.get_finished_jobs()] == [True]
    assert tier.await_states(1, 2) == [MISS, MISS]
    tier.save(1)
    assert tier.await_states(1) == [HIT]


def test_shutting_down_while_a_call_hangs_keeps_the_memory(store: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, gate = Tier(store), store.hold("save")
    tier.submit(False, [1], [0])
    assert gate.reached.wait(600)
    queue = tier.real._worker
    monkeypatch.setattr(queue, "drain", lambda timeout: False)
    monkeypatch.setattr(type(queue), "close", lambda self, timeout=600: False)
    with pytest.raises(TimeoutError, match="may still write"):
        tier.real.shutdown()
    monkeypatch.undo()
    gate.open()
    tier.real.shutdown()


def test_a_lasting_store_needs_the_name_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    spec = SimpleNamespace(config=config({}))
    with pytest.raises(ValueError, match="name the model's weights"):
        tiers.KVPoolSecondaryTier(spec, memoryview(np.zeros((4, BYTES), np.int8)), "kvpool", stores="disk:/a")
