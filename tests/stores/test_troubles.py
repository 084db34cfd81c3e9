"""What goes wrong with a store is told once for each kind of trouble, and then as a count at intervals."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvpool.integrations.metrics import PoolMetrics
from kvpool.storage import REFUSED
from kvpool.storage.store_client import REPEAT_SECONDS, TroubleLog
from tests.stores.hostkeeping import Engine
from tests.stores.keeping import engine, fetch, keeper, seed, tokens
from tests.stores.lab import BLOCK_BYTES, Wrong


@pytest.fixture
def behind(store: Wrong) -> Iterator[Engine]:
    made = Engine(store, retry_seconds=0.0)
    yield made
    made.close()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings since the last call."""
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    caplog.clear()
    return found


def fail(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_one_warning_for_each_kind_of_trouble_and_then_a_count(
    behind: Engine, store: Wrong, caplog: pytest.LogCaptureFixture
) -> None:
    behind.saved(4)
    assert behind.ask(1, first=90) and not told(caplog)
    store.before["save"] = fail
    for first in (10, 20):
        behind.write(2, first)
        assert behind.keeper.drain(600)
    [first_line] = told(caplog)
    assert "wrong" in first_line and "save of 2 blocks: failed" in first_line and "No space left" in first_line
    store.after["load"] = lambda answer: (answer[0], np.roll(answer[1], 1, 1))
    behind.ask(2)
    [damaged] = told(caplog)
    assert "load of 2 blocks: damaged" in damaged
    behind.now += REPEAT_SECONDS
    behind.write(3, 30)
    assert behind.keeper.drain(600)
    lines = told(caplog)
    assert len(lines) == 2 and "save of 5 blocks more: failed" in lines[0] and "suspended" in lines[1]


def test_a_store_that_is_full_is_told_and_one_that_has_nothing_is_not(
    store: Wrong, caplog: pytest.LogCaptureFixture
) -> None:
    made = engine(P=64, S=64)
    with made.cache, keeper(made, store) as kept:
        assert fetch(made, kept, tokens(41)) == 0 and not told(caplog)
        store.after["save"] = lambda answer: np.full(len(answer), REFUSED, np.uint8)
        seed(made, kept, [tokens(41), tokens(41, 1000)])
    [line] = told(caplog)
    assert ": refused" in line and "save of" in line


def test_what_is_given_up_on_purpose_is_no_trouble(
    behind: Engine, store: Wrong, caplog: pytest.LogCaptureFixture
) -> None:
    behind.write(4)
    behind.keeper.poll()
    behind.keeper.clear()
    assert behind.keeper.drain(600) and not told(caplog)


def test_metrics_of_a_host_keeper_say_why_blocks_did_not_come_or_go(behind: Engine, store: Wrong) -> None:
    behind.saved(4)
    assert len(behind.ask(6)) == 6
    store.before["save"] = fail
    behind.write(2, 50)
    assert behind.keeper.drain(600)
    registry = CollectorRegistry()
    with PoolMetrics(registry) as metrics:
        metrics.add("a", behind.cache)
        metrics.add("a", behind.keeper)
        lines = generate_latest(registry).decode().splitlines()
    found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if 'pool="a"' in line}
    expected = {
        'kvpool_host_storage_missed_total{pool="a",reason="absent"}': 2,
        'kvpool_host_storage_blocks_total{kind="loaded",pool="a"}': 4,
        'kvpool_host_storage_blocks_total{kind="asked",pool="a"}': 6,
        'kvpool_host_storage_waiting{kind="searching",pool="a"}': 0,
        'kvpool_store_dropped_saves_total{pool="a",reason="failed",store="wrong"}': 2,
        'kvpool_store_bytes_total{kind="load",pool="a",store="wrong"}': 4 * BLOCK_BYTES,
        'kvpool_store_bytes_total{kind="save",pool="a",store="wrong"}': 4 * BLOCK_BYTES,
        'kvpool_store_suspended{kind="write",pool="a",store="wrong"}': 0,
        'kvpool_store_figure{figure="capacity",pool="a",store="wrong"}': 256,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert found['kvpool_store_seconds_total{kind="load",pool="a",store="wrong"}'] > 0


# ----------------------------------------
# What is told of stores that fail: the first of each kind at once, then numbers, and no flood.


LOG = logging.getLogger("kvpool.storage.test")


class Told:
    """What was logged since the last look, under a clock of the test's."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now, self._caplog = 0.0, caplog
        self.troubles = TroubleLog("the disk", lambda: self.now, LOG)
        self._seen = 0

    def lines(self) -> list[str]:
        found = [record.getMessage() for record in self._caplog.records[self._seen :]]
        self._seen = len(self._caplog.records)
        return found


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Told:
    caplog.set_level(logging.INFO, LOG.name)
    return Told(caplog)


def test_the_first_trouble_of_each_kind_is_a_warning_with_its_meaning(said: Told) -> None:
    said.troubles.note("load", "damaged", 3)
    said.troubles.note("save", "failed", 2, "No space left on device")
    damaged, failed = said.lines()
    assert "store the disk: load of 3 blocks: damaged (the bytes were not those that were saved)" in damaged
    assert "save of 2 blocks: failed No space left on device" in failed


def test_trouble_that_goes_on_is_counted_and_told_once_a_minute(said: Told) -> None:
    said.troubles.note("load", "late", 1)
    assert len(said.lines()) == 1
    for second in range(1, 60):
        said.now = float(second)
        said.troubles.note("load", "late", 2)
    assert said.lines() == []
    said.now = 60.0
    said.troubles.note("load", "late", 2)
    (line,) = said.lines()
    assert "load of 120 blocks more: late" in line
    assert said.troubles.counts["load", "late"] == 121


def test_what_follows_from_trouble_that_was_told_is_counted_only(said: Told) -> None:
    note: Callable[..., None] = said.troubles.note
    note("load", "suspended", 5, quiet=True)
    assert said.lines() == [] and said.troubles.counts["load", "suspended"] == 5
