"""The planner's figures of a store are those of an LRU store below LRU tiers, written down in plain Python."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from kvpool.__main__ import main
from kvpool.common.arrays.layout import BlockLayout
from kvpool.tools.planner import CapacityPlan, Machine, StorePlan, StoreTier, survey_of
from kvpool.tools.replay.content import Request
from kvpool.tools.replay.traces import synthetic
from tests.planner.test_plan_survey import by_ids, chains, native

Lru = OrderedDict[int, None]


def touch(cache: Lru, blocks: list[int]) -> None:
    for block in reversed(blocks):
        cache[block] = None
        cache.move_to_end(block)


def simulated(requests: list[Request], size: int, tiers: int, capacity: int, save: str) -> tuple[list[int], int]:
    """What each request finds in the store and not in the tiers, and how many blocks are saved."""
    pool: Lru = OrderedDict()
    store: Lru = OrderedDict()
    hits_of_requests, saved = [], 0
    for request in requests:
        blocks = chains(request, size)
        hits = 0
        while hits < (request.input_length - 1) // size and (blocks[hits] in pool or blocks[hits] in store):
            hits += 1
        hits_of_requests.append(sum(block not in pool for block in blocks[:hits]))
        if save == "commit":
            saved += sum(block not in store for block in blocks)
            touch(store, blocks)
        touch(pool, blocks)
        if save == "evict":
            for block in blocks:
                store.pop(block, None)
        while len(pool) > tiers:
            block, _ = pool.popitem(last=False)
            if save == "evict":
                saved += 1
                store[block] = None
        while len(store) > capacity:
            store.popitem(last=False)
    return hits_of_requests, saved


def plan_of(requests: list[Request], size: int, tiers: int, save: str, **store: Any) -> StorePlan:
    layout = BlockLayout.for_model("llama-3-8b", tokens_per_block=size)
    machine = Machine(layout, device_blocks=tiers, store=StoreTier(save=save, **store), prefill_tokens_per_second=None)
    plan = CapacityPlan(survey_of(requests, tokens_per_block=size), machine).store()
    assert plan is not None
    return plan


@pytest.mark.parametrize("save", ["commit", "evict"])
@pytest.mark.parametrize(
    ("requests", "size"),
    [(native(1), 1), (native(2), 3), (by_ids(4, 8), 4), (by_ids(5, 6), 4)],
    ids=["tokens", "tokens of 3", "ids", "ids across blocks"],
)
def test_a_store_finds_and_writes_what_an_lru_store_does(requests: list[Request], size: int, save: str) -> None:
    every = {chain for request in requests for chain in chains(request, size)}
    for tiers in (0, 1, 7, 20, len(every) // 2, len(every) + 1):
        plan = plan_of(requests, size, tiers, save)
        for capacity in (0, 1, 2, 5, 13, 40, len(every) // 2, len(every), len(every) + 9):
            hits_of_requests, saved = simulated(requests, size, tiers, capacity, save)
            row = plan.row(capacity)
            where = f"tiers={tiers}, capacity={capacity}"
            assert row.hit_tokens == sum(hits_of_requests) * size, where
            assert row.loads == sum(hits > 0 for hits in hits_of_requests), where
            assert row.read_bytes == sum(hits_of_requests) * plan.layout.block_bytes, where
            assert row.written_bytes == saved * plan.layout.block_bytes, where


@pytest.mark.parametrize("save", ["commit", "evict"])
def test_time_saved_is_that_of_requests_for_which_a_load_is_faster(save: str) -> None:
    requests, size, tiers, capacity = synthetic(150, seed=3).requests, 16, 300, 2_500
    store = StoreTier(save=save, bandwidth=2.0, latency=20_000.0)
    layout = BlockLayout.for_model("llama-3-8b", tokens_per_block=size)
    plan = StorePlan(survey_of(requests, tokens_per_block=size), layout, store, tiers, 9_000.0)
    hits_of_requests, _ = simulated(requests, size, tiers, capacity, save)
    gains = [blocks * (size / 9_000 - layout.block_bytes / 2e9) - 0.02 for blocks in hits_of_requests]
    row = plan.row(capacity)
    assert row.saved_seconds_per_request == pytest.approx(sum(gain for gain in gains if gain > 0) / 150)
    assert 0 < row.loads == sum(gain > 0 for gain in gains) < sum(blocks > 0 for blocks in hits_of_requests)
    assert row.hit_tokens == sum(hits_of_requests) * size > row.read_bytes // layout.token_bytes


def test_a_sample_estimates_the_same_figures() -> None:
    requests = synthetic(2_000, seed=5).requests
    layout = BlockLayout.for_model("llama-3-8b", tokens_per_block=16)
    rows = []
    for sample in (1.0, 0.2):
        survey = survey_of(requests, tokens_per_block=16, sample=sample)
        plan = StorePlan(survey, layout, StoreTier(bandwidth=8.0), survey.longest_blocks, 10_000.0)
        rows.append(plan.row(20 * survey.longest_blocks)._asdict())
    for name in ("hit_tokens", "read_bytes", "written_bytes", "saved_seconds_per_request"):
        assert rows[0][name] > 0 and rows[1][name] == pytest.approx(rows[0][name], rel=0.15), name


def test_text_says_what_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "plan --limit 150 --device-blocks 1000 --host-blocks 500 --store-capacity 10GiB --store-save evict "
        "--store-bandwidth 3.5 --store-latency 200 --prefill-tokens-per-second 9000"
    ).split()
    assert main([*arguments, "--json"]) == 0
    store = json.loads(capsys.readouterr().out)["store"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert (store["save"], store["gb_per_second"], store["latency_us"]) == ("evict", 3.5, 200)
    assert store["tier_blocks"] == 1500 and store["asked"]["blocks"] == 10 * 512
    assert "3.5 GB/s, 200 µs, save=evict\n" in text
    for row in [*store["table"], store["asked"]]:
        assert re.search(rf" {row['blocks']:,} +{row['token_rate']:.2%} +{row['loads']:,} ", text)
    assert text.count("<- asked") == 1
    hits = [row["hit_tokens"] for row in store["table"]]
    assert hits == sorted(hits) and hits[-1] > 0


def test_no_time_no_rate_and_no_store_is_made_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"tokens": [1, 2, 3, 4]}\n' * 2)
    arguments = ["plan", str(path), "--tokens-per-block", "1", "--device-blocks", "0", "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["store"] is None
    assert main([*arguments, "--store"]) == 0
    store = json.loads(capsys.readouterr().out)["store"]
    assert (store["save"], store["gb_per_second"], store["latency_us"]) == ("commit", 1, 1000), "as --help says"
    row = store["table"][-1]
    assert row["hit_tokens"] == 3 and row["written_bytes"] == 4 * 128 * 1024
    assert row["read_bytes_per_second"] is row["written_bytes_per_second"] is row["saved_seconds_per_request"] is None
