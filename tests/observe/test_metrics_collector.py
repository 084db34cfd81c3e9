"""The collector: pools come and go, nothing runs between scrapes, what is scraped is valid, and the dashboard shows all
of it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import socket
import sys
import threading
from itertools import count
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition, parser

from engine import Make, small_layout
from kvpool import KVCacheManager, PoolClosed
from kvpool.__main__ import main
from kvpool.integrations.metric_definitions import (
    COUNTER,
    DEFINITIONS,
    GAUGE,
    HISTOGRAM,
    STORAGE_DEFINITIONS,
    STORE_DEFINITIONS,
)
from kvpool.integrations.metrics import DASHBOARD, PoolMetrics, served
from kvpool.pool.stats import GroupStats, Histogram, Stats, TierStats
from kvpool.tools.replay import Replay
from tests.waiting import at_once

SHOWN = (*DEFINITIONS, *STORE_DEFINITIONS, *STORAGE_DEFINITIONS)
"""What the dashboard shows."""
# Derived from others, or in other units.
LEFT_OUT = {"reused_device_blocks", "reused_host_blocks", "partial_blocks", "missed_blocks"}
LEFT_OUT |= {"offloaded_blocks", "onboarded_blocks", "copied_blocks"}


def scrape(registry: CollectorRegistry) -> list[Any]:
    """All samples, as a strict parser reads them."""
    text = exposition.generate_latest(registry).decode()
    return [sample for family in parser.text_string_to_metric_families(text) for sample in family.samples]


def pools(registry: CollectorRegistry) -> set[str]:
    return {sample.labels["pool"] for sample in scrape(registry)}


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def small_pool() -> KVCacheManager:
    return KVCacheManager(small_layout(4), device_blocks=2, host_blocks=2, device="cpu")


def test_pools_have_a_label_and_go_when_they_are_closed() -> None:
    registry = CollectorRegistry()
    with PoolMetrics(registry) as metrics, small_pool() as a:
        b = small_pool()
        metrics.add("a", a)
        metrics.add("b", b)
        assert pools(registry) == {"a", "b"}
        b.close()
        assert pools(registry) == {"a"}
        with small_pool() as again:
            metrics.add("b", again)
            assert pools(registry) == {"a", "b"}
            metrics.remove("a")
            assert pools(registry) == {"b"}


def test_a_collector_keeps_no_pool_alive() -> None:
    registry = CollectorRegistry()
    with PoolMetrics(registry) as metrics:
        metrics.add("a", small_pool())
        assert pools(registry) == set(), "it has gone without the garbage collector"


def test_wrong_pools_and_names_are_refused_and_change_nothing() -> None:
    registry, closed = CollectorRegistry(), small_pool()
    closed.close()
    with PoolMetrics(registry) as metrics, small_pool() as a, small_pool() as b:
        metrics.add("a", a)
        metrics.add("a", a)
        wrong: list[tuple[Any, Any, type[Exception], str]] = [
            ("a", b, ValueError, "pool: expected a name that no open pool has, got 'a'"),
            (1, b, TypeError, "pool: expected a string.*got 1"),
            ("b", None, TypeError, "cache: expected a KVCacheManager, a HostCache, .*got None"),
            ("b", closed, PoolClosed, "cache: expected an open one, got pool='b'"),
            ("\udc80", b, ValueError, r"pool: expected text that UTF-8 can encode.*got '\\udc80'"),
        ]
        for name, cache, error, message in wrong:
            with pytest.raises(error, match=message):
                metrics.add(name, cache)
        with pytest.raises(ValueError, match=r"pool: expected .*\['a'\].*got 'c'"):
            metrics.remove("c")
        assert pools(registry) == {"a"}
        metrics.close()
        with pytest.raises(ValueError, match="pool: expected an open collector.*'b'"):
            metrics.add("b", b)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_an_address_of_ipv6_is_one_that_clients_read() -> None:
    with served(0, "::1") as (metrics, address), small_pool() as cache:
        metrics.add("six", cache)
        assert address.startswith("http://[::1]:")
        assert b'pool="six"' in urlopen(address, timeout=600).read()


def test_closing_takes_the_collector_out_of_its_registry() -> None:
    registry = CollectorRegistry()
    metrics = PoolMetrics(registry)
    with pytest.raises(ValueError, match="kvpool_blocks"):
        PoolMetrics(registry)
    with small_pool() as cache:
        metrics.add("a", cache)
        metrics.close()
        metrics.close()
        assert generate_latest(registry) == b""
        PoolMetrics(registry).close()


def test_a_pool_is_read_once_for_each_scrape_and_at_no_other_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    stats = KVCacheManager.stats
    monkeypatch.setattr(KVCacheManager, "stats", lambda self: asked.append(self) or stats(self))
    registry = CollectorRegistry()
    with PoolMetrics(registry) as metrics, small_pool() as cache:
        metrics.add("a", cache)
        assert asked == []
        scrape(registry)
        assert asked == [cache]


def test_every_scrape_is_of_one_moment_while_the_pool_works(make: Make) -> None:
    engine, registry = make(P=6, S=3), CollectorRegistry()
    sums: list[list[float]] = []
    done = threading.Event()

    def watch() -> None:
        try:
            while not done.is_set():
                blocks = [s for s in scrape(registry) if s.name == "kvpool_blocks"]
                sums.append([sum(s.value for s in blocks if s.labels["tier"] == tier) for tier in ("device", "host")])
        finally:
            done.set()

    def work() -> None:
        try:
            for turn in count():
                engine.seed(range(9 * (turn % 4), 9 * (turn % 4) + 9), committed=9)
                if done.is_set() or turn >= 30 and len(sums) > 2:
                    break
        finally:
            done.set()

    with PoolMetrics(registry) as metrics:
        metrics.add("a", engine.cache)
        at_once(lambda call: call(), (watch, work))
    assert all(totals == [6, 3] for totals in sums)


def changed(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, TierStats):
        return dataclasses.replace(value, used=value.used + 1)
    if isinstance(value, Histogram):
        return Histogram(value.bins + np.eye(1, len(value.bins), 3, np.int64)[0], value.total_ms + 5)
    return 1 if value is None else value + 1


OF_GROUPS = {field.name for field in dataclasses.fields(GroupStats)}


def test_every_figure_of_stats_is_in_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = TierStats(9, 5, 4, 3, 1, 2, 1)
    plain = GroupStats(tier, tier)
    shown = same = Stats(tier, tier, prompt_tokens=9, groups=(plain, plain))
    monkeypatch.setattr(KVCacheManager, "stats", lambda self: shown)
    registry = CollectorRegistry()
    with PoolMetrics(registry) as metrics, small_pool() as cache:
        metrics.add("a", cache)
        before = scrape(registry)
        for field in sorted({field.name for field in dataclasses.fields(Stats)} - {"groups"}):
            if field in OF_GROUPS:
                group = dataclasses.replace(plain, **{field: changed(getattr(plain, field))})
                shown = dataclasses.replace(same, groups=(plain, group))
            else:
                shown = dataclasses.replace(same, **{field: changed(getattr(same, field))})
            new_samples = [sample for sample in scrape(registry) if sample not in before]
            assert bool(new_samples) == (field not in LEFT_OUT), field
            groups = {sample.labels.get("group") for sample in new_samples}
            assert groups <= ({"1"} if field in OF_GROUPS else {None}), field


# -- the dashboard -------------------------------------------------------------------------------


def exposed_names() -> dict[str, str]:
    """Names of series in queries, with the name of the metric."""
    suffixes = {COUNTER: "_total", GAUGE: "", HISTOGRAM: "_bucket"}
    return {definition.name + suffixes[definition.kind]: definition.name for definition in SHOWN}


def queries() -> list[str]:
    return [target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    shown = {name for query in queries() for name in re.findall(r"kvpool_\w+", query)}
    assert shown == set(exposed_names())


def test_queries_select_and_name_labels_that_the_metrics_have() -> None:
    labels = {definition.name: {"pool", *definition.labels} for definition in SHOWN}
    names = exposed_names()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            used = [names[name] for name in re.findall(r"kvpool_\w+", target["expr"])]
            known = set.intersection(*(labels[name] for name in used)) | {"le"}
            groups = ",".join(re.findall(r"by \(([^)]*)\)", target["expr"]))
            named = {label.strip() for label in groups.split(",") if label}
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert named <= known and shown <= known - {"le"}, target["expr"]
            assert "by (" not in target["expr"] or shown <= named, "a label that was summed away is shown"
            selectors = re.findall(r"kvpool_\w+{([^}]*)}", target["expr"])
            assert len(selectors) == len(used) and all('pool=~"$pool"' in selector for selector in selectors)
            for name, selector in zip(used, selectors, strict=True):
                assert ('group=~"$group"' in selector) == ("group" in labels[name])


# -- the command and the extra -------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path: Any) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"tokens": list(range(40)), "output_length": 3}) + "\n" for _ in range(4)))
    return str(path)


SMALL = ["--device-blocks", "40", "--host-blocks", "10", "--block-bytes", "64", "--device", "cpu"]


def test_replay_serves_its_pool_while_it_runs(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    finish = Replay._check_idle

    def look(self: Replay) -> None:
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+/metrics", capsys.readouterr().err)
        seen.extend([address, urlopen(address, timeout=600).read().decode()])
        finish(self)

    monkeypatch.setattr(Replay, "_check_idle", look)
    before = threading.active_count()
    assert main(["replay", trace, *SMALL, "--metrics-port", "0"]) == 0
    address, text = seen
    assert 'kvpool_query_tokens_total{pool="replay",tier="device"} 160.0' in text
    assert threading.active_count() <= before
    with pytest.raises(URLError):
        urlopen(address, timeout=600)


def test_a_port_that_is_taken_or_none_is_wrong_usage(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["replay", trace, *SMALL, "--metrics-port", port]) == 2
    assert f"error: metrics at 127.0.0.1, port {port}: " in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["replay", trace, *SMALL, "--metrics-port", "65536"])
    assert caught.value.code == 2 and "65536" in capsys.readouterr().err


def test_without_the_extra_the_error_names_it(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "kvpool.integrations.metrics")
    with pytest.raises(ImportError, match=r"\.\[metrics\]"):
        importlib.import_module("kvpool.integrations.metrics")
    assert main(["replay", trace, *SMALL, "--metrics-port", "0"]) == 2
    assert ".[metrics]" in capsys.readouterr().err
    assert main(["replay", trace, *SMALL]) == 0
