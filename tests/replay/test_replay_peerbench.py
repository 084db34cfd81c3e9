"""kvpool as an adapter of the peer benchmark finds what the benchmark's oracle finds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asv_bench import peerbench_kvpool
from kvpool import BlockLayout
from kvpool.tools.replay import Replay, ReplayConfig, read_trace
from kvpool.tools.replay.engine import Admit, Append, Finish, schedule
from tests.data import CHATS, harness_or_skip

ROOT = Path(__file__).resolve().parents[2]
ADAPTER = ROOT / "asv_bench" / "peerbench_kvpool.py"


def results(command: list[str], folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def options(capacity: int, *more: str) -> list[str]:
    return ["--trace", str(CHATS), "--capacity", str(capacity), "--limit", "60", "--reps", "1", *more]


@pytest.mark.parametrize(("capacity", "variant"), [(4_000, ""), (15_000, ""), (4_000, "host=4000")])
def test_adapter_has_the_hits_of_a_replay(capacity: int, variant: str) -> None:
    """The adapter is driven as the harness drives it."""
    trace, adapter, hits = read_trace(str(CHATS), limit=60), peerbench_kvpool.make(variant), 0
    adapter.start(capacity, 16, 16)
    driven: dict[int, SimpleNamespace] = {}
    for step in schedule(trace.requests, device_blocks=capacity, active=16, tokens_per_block=16):
        if isinstance(step, Admit):
            request = SimpleNamespace(tokens=step.request.prompt(), out_tokens=step.request.output())
            driven[step.request.index] = request
            adapter.prepare(request)
            adapter.ingest(request)
            hits += adapter.admit(request)
        elif isinstance(step, Append):
            adapter.append_batch([(driven[request.index], start, count) for request, start, count in step.items])
        elif isinstance(step, Finish):
            adapter.finish(driven.pop(step.request.index))
    adapter.check()
    stats = adapter.stats()
    adapter.stop()
    config = ReplayConfig(
        BlockLayout.of_block_bytes(16, 16), capacity, adapter.host_blocks, active=16, partial=False, device="cpu"
    )
    with Replay(trace, config) as replay:
        summary = replay.run()
    assert not driven and hits == summary.hits.tokens > 0
    assert stats["offloaded_blocks"] == summary.blocks.offloaded and bool(variant) == bool(summary.blocks.offloaded)


def test_adapter_runs_from_here_and_agrees_with_the_oracle(tmp_path: Path) -> None:
    harness = harness_or_skip()
    for capacity in (9_000, 50_000):
        (oracle,) = results([str(harness / "replay.py"), "--adapter", "oracle", *options(capacity)], tmp_path)
        (ours,) = results([str(ADAPTER), "--harness", str(harness), *options(capacity)], tmp_path)
        assert ours["adapter"] == "kvpool"
        for figure in ("hit_tokens", "prompt_tokens", "evicted_blocks", "cached_blocks", "requests", "peak_active"):
            assert ours[figure] == oracle[figure], figure


def test_adapter_runs_when_dropped_into_a_copy_of_the_harness(tmp_path: Path) -> None:
    shutil.copy(harness_or_skip() / "replay.py", tmp_path)
    (tmp_path / "adapters").mkdir()
    shutil.copy(ADAPTER, tmp_path / "adapters" / "kvpool.py")
    (tmp_path / "adapters" / "__init__.py").touch()
    start = (
        f"import sys, runpy; sys.path[0:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; runpy.run_path('replay.py', "
        "run_name='__main__')"
    )
    command = ["-c", start, "--adapter", "kvpool:host=9000,partial", *options(9_000, "--limit", "30")]
    (ours,) = results(command, tmp_path)
    assert ours["requests"] == 30 and ours["hit_tokens"] > 0


def test_usage_is_shown_without_a_harness() -> None:
    done = subprocess.run([sys.executable, str(ADAPTER)], capture_output=True, text=True)
    assert done.returncode != 0 and "--harness PATH" in done.stderr
    done = subprocess.run(
        [sys.executable, str(ADAPTER), "--harness", str(ROOT / "kvpool")], capture_output=True, text=True
    )
    assert done.returncode != 0 and "holds no replay.py" in done.stderr
