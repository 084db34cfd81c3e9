"""kvpool as an adapter of the peer benchmark finds what the benchmark's oracle finds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ADAPTER = ROOT / "asv_bench" / "peerbench_kvpool.py"
HARNESS = ROOT.parent / "shared" / "peerbench"
TRACE = ROOT.parent / "shared" / "traces" / "conversation_trace.jsonl"


def results(command: list[str], folder: Path) -> list[dict[str, Any]]:
    if not (HARNESS.exists() and TRACE.exists()):
        pytest.skip(f"no {HARNESS} or no {TRACE}")
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def options(capacity: int, *more: str) -> list[str]:
    return ["--trace", str(TRACE), "--capacity", str(capacity), "--limit", "60", "--reps", "1", *more]


def test_adapter_runs_from_here_and_agrees_with_the_oracle(tmp_path: Path) -> None:
    for capacity in (9_000, 50_000):
        (oracle,) = results([str(HARNESS / "replay.py"), "--adapter", "oracle", *options(capacity)], tmp_path)
        (ours,) = results([str(ADAPTER), "--harness", str(HARNESS), *options(capacity)], tmp_path)
        assert ours["adapter"] == "kvpool"
        for figure in ("hit_tokens", "prompt_tokens", "evicted_blocks", "cached_blocks", "requests", "peak_active"):
            assert ours[figure] == oracle[figure], figure


def test_adapter_runs_when_dropped_into_a_copy_of_the_harness(tmp_path: Path) -> None:
    if HARNESS.exists():
        (tmp_path / "adapters").mkdir()
        shutil.copy(HARNESS / "replay.py", tmp_path)
        shutil.copy(ADAPTER, tmp_path / "adapters" / "kvpool.py")
        (tmp_path / "adapters" / "__init__.py").touch()
    start = (
        f"import sys, runpy; sys.path[0:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; runpy.run_path('replay.py', "
        "run_name='__main__')"
    )
    command = ["-c", start, "--adapter", "kvpool:host=9000,partial", *options(9_000, "--limit", "30")]
    (ours,) = results(command, tmp_path)
    assert ours["requests"] == 30 and ours["hit_tokens"] > 0


def test_usage_is_told_without_a_harness() -> None:
    done = subprocess.run([sys.executable, str(ADAPTER)], capture_output=True, text=True)
    assert done.returncode != 0 and "--harness PATH" in done.stderr
    done = subprocess.run(
        [sys.executable, str(ADAPTER), "--harness", str(ROOT / "kvpool")], capture_output=True, text=True
    )
    assert done.returncode != 0 and "holds no replay.py" in done.stderr
