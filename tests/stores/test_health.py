"""A store that fails is left alone, and tried again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpool.storage import ABSENT, DAMAGED, FAILED, LATE, OK, REFUSED
from kvpool.storage.circuit_breaker import CircuitBreaker
from kvpool.storage.store_requests import StoreRequest
from tests.stores.lab import Clock


def job(*codes: int, kind: str = "load") -> Any:
    """A job that is done, with these codes."""

    made = object.__new__(StoreRequest)
    made.kind, made._codes, made._counted, made._settled = kind, np.array(codes, np.uint8), None, True
    return made


@pytest.fixture
def health(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(3, 5.0, probe_seconds_max=15.0, clock=clock)


def fail(health: CircuitBreaker, count: int = 3, kind: str = "load") -> None:
    for _ in range(count):
        health.note(job(FAILED, kind=kind))


@pytest.mark.parametrize("code", [OK, ABSENT, REFUSED])
def test_an_answer_between_failures_counts_them_anew(health: CircuitBreaker, code: int) -> None:
    fail(health, 2)
    health.note(job(code, FAILED))
    fail(health, 2)
    assert health.usable()


def test_a_save_of_what_is_gone_does_not_change_health_and_is_not_a_probe(health: CircuitBreaker, clock: Clock) -> None:
    fail(health, kind="save")
    clock.now += 5
    assert health.usable(writes=True) and not health.usable(writes=True)
    health.note(job(ABSENT, ABSENT, kind="save"))
    assert health.suspended(writes=True) and health.usable(writes=True)
    health.note(job(ABSENT, OK, kind="save"))
    assert not health.suspended(writes=True)


@pytest.mark.parametrize("code", [FAILED, LATE, DAMAGED])
def test_what_counts_as_a_failure(health: CircuitBreaker, code: int) -> None:
    for _ in range(3):
        health.note(job(code, code))
    assert not health.usable() and health.stats().failed_requests == 3


def test_one_job_probes_it_after_a_while(health: CircuitBreaker, clock: Clock) -> None:
    fail(health)
    clock.now += 4.9
    assert not health.usable()
    clock.now += 0.1
    assert health.usable() and not health.usable()
    health.note(job(OK))
    assert health.usable() and health.usable() and not health.suspended()
    assert health.stats().probes == 1


def test_a_probe_that_fails_doubles_the_wait_up_to_a_bound(health: CircuitBreaker, clock: Clock) -> None:
    fail(health)
    for wait in (5, 10, 15, 15):
        clock.now += wait - 0.5
        assert not health.usable()
        clock.now += 0.5
        assert health.usable()
        health.note(job(LATE))
    health.note(job(OK))
    fail(health)
    clock.now += 5
    assert health.usable()


@pytest.mark.parametrize("begun", ["nothing", "a find", "older loads"])
def test_a_probe_that_never_ends_is_replaced_after_the_same_wait(
    health: CircuitBreaker, clock: Clock, begun: str
) -> None:
    fail(health, 10 if begun == "older loads" else 3)
    clock.now += 5
    assert health.usable()
    if begun == "a find":
        health.note(job(OK, kind="find"))
    assert not health.usable()
    clock.now += 5
    assert health.usable()


def test_loads_leave_the_probe_of_finds_to_a_find(health: CircuitBreaker, clock: Clock) -> None:
    fail(health, kind="find")
    assert not health.usable(found=True)
    clock.now += 5
    assert health.usable(found=True) and health.usable() and not health.usable()


def test_writes_that_fail_suspend_no_reads(health: CircuitBreaker) -> None:
    fail(health, kind="save")
    assert health.usable() and not health.usable(writes=True)
    assert health.stats().writes_suspended and not health.stats().reads_suspended
    health.note(job(OK, kind="find"))
    assert not health.usable(writes=True)
    health.note(job(OK, kind="save"))
    assert health.usable(writes=True)


@pytest.mark.parametrize(("good", "bad"), [("find", "load"), ("load", "find")])
def test_answers_of_one_kind_excuse_no_failures_of_another(health: CircuitBreaker, good: str, bad: str) -> None:
    for _ in range(3):
        health.note(job(OK, kind=good))
        health.note(job(FAILED, kind=bad))
    assert health.suspended() and not health.usable() and not health.usable(found=True)
    assert health.usable(writes=True)


def probing_find(health: CircuitBreaker, clock: Clock, code: int) -> None:
    """Loads have failed. After the wait a find is the probe, and gets this answer."""
    fail(health)
    clock.now += 5
    assert health.usable()
    health.note(job(code, kind="find"))


def test_a_find_that_probes_lets_the_load_begin_that_ends_the_suspension(health: CircuitBreaker, clock: Clock) -> None:
    probing_find(health, clock, OK)
    assert not health.usable() and health.usable(found=True)
    health.note(job(OK, kind="load"))
    assert health.usable() and not health.suspended()


def test_a_load_of_a_probe_that_fails_doubles_the_wait(health: CircuitBreaker, clock: Clock) -> None:
    probing_find(health, clock, OK)
    health.note(job(FAILED, kind="load"))
    assert not health.usable(found=True)
    clock.now += 9.5
    assert not health.usable() and not health.usable(found=True)
    clock.now += 0.5
    assert health.usable()


def test_a_probe_that_finds_nothing_gives_its_place_to_the_next(health: CircuitBreaker, clock: Clock) -> None:
    """No load follows it, so it says nothing of loads. Finds are answered, and need not be spared."""
    probing_find(health, clock, ABSENT)
    for _ in range(5):
        assert health.suspended() and health.usable() and not health.usable()
        health.note(job(ABSENT, kind="find"))
    assert health.usable()
    health.note(job(ABSENT, OK, kind="find"))
    health.note(job(ABSENT, kind="find"))
    assert not health.usable(), "a load is under way"
    health.note(job(OK, kind="load"))
    assert health.usable() and not health.suspended()
