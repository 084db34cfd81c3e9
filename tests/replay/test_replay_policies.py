"""The table of policies of a replay: its hits are those of a replay with bytes, and no copy is made for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpool import BlockLayout
from kvpool.__main__ import main
from kvpool.tools.planner import replayed
from kvpool.tools.planner.policies import LRU, MIN
from kvpool.tools.planner.replayed import BlocksFound, compare_replayed
from kvpool.tools.replay import Replay, ReplayConfig, Request, Trace, read_trace, synthetic
from tests.data import CHATS, recorded_or_skip

AGENTS = {
    "block": 16,
    "requests": [
        [10 * n, 16 * (n + 3), 30, "tool_use", 1, 5, 0, n - 1, n + 2 if n else 0, [[n + 2, 1]] if n else [[0, 3]]]
        for n in range(8)
    ],
}


def config(size: int, device_blocks: int, host_blocks: int, active: int = 8) -> ReplayConfig:
    layout = BlockLayout.of_block_bytes(size, size)
    return ReplayConfig(layout, device_blocks, host_blocks, active=active, partial=False, device="cpu")


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    path = tmp_path / "agents.jsonl"
    path.write_text("".join(json.dumps({"session": str(n), **AGENTS}) + "\n" for n in range(12)))
    return path


def requests_of(kind: str, sessions: Path) -> list[Request]:
    if kind == "synthetic":
        return synthetic(150).requests
    return read_trace(str(sessions if kind == "agents" else CHATS), limit=150).requests


@pytest.mark.parametrize("kind", ["synthetic", "agents", "chats"])
@pytest.mark.parametrize(
    ("size", "device_blocks", "host_blocks", "active"),
    [(16, 700, 0, 1), (16, 400, 600, 8), (7, 900, 500, 3), (64, 150, 100, 64)],
)
def test_the_hits_are_those_of_a_replay_with_bytes(
    kind: str, size: int, device_blocks: int, host_blocks: int, active: int, sessions: Path
) -> None:
    requests, shape = requests_of(kind, sessions), config(size, device_blocks, host_blocks, active)
    table, interrupted = compare_replayed(requests, shape, [])
    with Replay(Trace(kind, kind, requests), shape) as replay:
        summary = replay.run()
    hits = summary.hits
    assert table.hits == {LRU: BlocksFound(hits.device_tokens // size, hits.host_tokens // size)}
    assert (table.requests, table.prompt_tokens) == (summary.requests, summary.prompt_tokens)
    assert table.rate(sum(table.hits[LRU])) == hits.rate <= table.rate(table.optimum)
    assert hits.tokens and not interrupted


def test_the_recorded_agents_hit_what_a_replay_with_bytes_has_found() -> None:
    trace = read_trace(str(recorded_or_skip("agents.jsonl.xz")), users=32, pause_max=60, limit=2000)
    table, _ = compare_replayed(trace.requests, config(64, 25_000, 0, 64), ["adaptive"])
    assert table.prompt_tokens == 204_212_304 and 64 * table.hits[LRU].device == 46_664_384
    assert table.hits[LRU].device < table.hits["adaptive"].device < table.optimum


def test_the_command_prints_each_policy_beside_lru_and_the_optimum(
    sessions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ["--tokens-per-block", "16", "--device-blocks", "40", "--host-blocks", "10", "--users", "6"]
    command = ["replay", str(sessions), *shape, "--active", "2", "--policies", "agent"]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["hit_rates"]) == [LRU, "agent", MIN] and report["requests"] == 96
    rates = [*report["hit_rates"].values()]
    assert 0 < min(rates) and max(rates) == rates[-1] < 1
    assert main(command) == 0
    text = capsys.readouterr().out
    assert all(f"{rate:.2%}" in text for rate in rates) and "40 device, 10 host, of 16 tokens" in text
    assert main([*command[:-1], "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["hits"]) == [LRU, "reuse", "agent", "adaptive"]


def test_an_interrupted_comparison_has_the_policies_that_came_to_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    once = replayed.replay_hits

    def interrupted(requests: Any, uses: Any, config: ReplayConfig, policy: str, *args: Any) -> BlocksFound:
        if policy == "agent":
            raise KeyboardInterrupt
        return once(requests, uses, config, policy, *args)

    monkeypatch.setattr(replayed, "replay_hits", interrupted)
    assert main(["replay", "--limit", "20", "--json", "--policies", "reuse", "agent", "adaptive"]) == 130
    report = json.loads(capsys.readouterr().out)
    assert report["interrupted"] and list(report["hits"]) == [LRU, "reuse"]
