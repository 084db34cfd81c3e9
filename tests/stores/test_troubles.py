"""Failures of a store are logged once for each kind, and then as a count at intervals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvpool.integrations.metrics import PoolMetrics
from kvpool.storage import REFUSED
from kvpool.storage.circuit_breaker import REPEAT_SECONDS
from tests.stores.host_lab import Engine
from tests.stores.lab import BLOCK_BYTES, Wrong
from tests.stores.pool_lab import fetch, make_engine, make_manager, seed, tokens


@pytest.fixture
def engine(store: Wrong) -> Iterator[Engine]:
    made = Engine(store, retry_seconds=0.0)
    yield made
    made.close()


def logged_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings since the last call."""
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    caplog.clear()
    return warnings


def fail(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_one_warning_for_each_kind_of_trouble_and_then_a_count(
    engine: Engine, store: Wrong, caplog: pytest.LogCaptureFixture
) -> None:
    engine.saved(4)
    assert engine.ask(1, first=90) and not logged_warnings(caplog)
    store.before["save"] = fail
    for first in (10, 20):
        engine.write(2, first)
        engine.drain()
    [first_line] = logged_warnings(caplog)
    assert "wrong" in first_line and "save of 2 blocks: failed" in first_line and "No space left" in first_line
    store.after["load"] = lambda answer: (answer[0], np.roll(answer[1], 1, 1))
    engine.ask(2)
    [damaged] = logged_warnings(caplog)
    assert "load of 2 blocks: damaged" in damaged
    engine.now += REPEAT_SECONDS
    engine.write(3, 30)
    engine.drain()
    lines = logged_warnings(caplog)
    assert len(lines) == 2 and "save of 5 blocks more: failed" in lines[0] and "suspended" in lines[1]


def test_a_full_store_is_logged_and_an_empty_one_is_not(store: Wrong, caplog: pytest.LogCaptureFixture) -> None:
    made = make_engine(P=64, S=64)
    with made.cache, make_manager(made, store) as manager:
        assert fetch(made, manager, tokens(41)) == 0 and not logged_warnings(caplog)
        store.after["save"] = lambda answer: np.full(len(answer), REFUSED, np.uint8)
        seed(made, manager, [tokens(41), tokens(41, 1000)])
    [line] = logged_warnings(caplog)
    assert ": refused" in line and "save of" in line


def test_what_is_given_up_on_purpose_is_not_trouble(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.write(4)
    engine.manager.poll()
    engine.manager.clear()
    engine.drain()
    assert not logged_warnings(caplog)


def test_metrics_of_a_host_storage_manager_count_why_blocks_did_not_come_or_go(engine: Engine, store: Wrong) -> None:
    engine.saved(4)
    assert len(engine.ask(6)) == 6
    store.before["save"] = fail
    engine.write(2, 50)
    engine.drain()
    registry = CollectorRegistry()
    with PoolMetrics(registry) as metrics:
        metrics.add("a", engine.manager)
        lines = generate_latest(registry).decode().splitlines()
    for sample in (
        'host_storage_missed_total{pool="a",reason="absent"} 2.0',
        'host_storage_blocks_total{kind="loaded",pool="a"} 4.0',
        'host_storage_blocks_total{kind="asked",pool="a"} 6.0',
        'store_dropped_saves_total{pool="a",reason="failed",store="wrong"} 2.0',
        f'store_bytes_total{{kind="load",pool="a",store="wrong"}} {4 * BLOCK_BYTES}.0',
    ):
        assert f"kvpool_{sample}" in lines
