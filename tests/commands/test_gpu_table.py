"""Results of the GPU benchmarks: every figure is in the tables, and only what a GPU measured becomes a baseline."""

from __future__ import annotations

import json
import re
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest

from asv_bench import gpu_bench, gpu_table
from asv_bench.gpu_table import Result, render
from tests.commands.test_benchmarks import BENCHMARKS

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"machine": "nvidia-test", "gpu": "NVIDIA Test, CUDA 13.0"}
FIT: dict[str, tuple[Any, Any]] = {f"gpu.Conditions.track_{name}": ([0.0], []) for name in gpu_table.CONDITIONS}
TABLES = {"gpu.StagedTables.track_cpu_time": ([12.5], [["64"]]), "gpu.StagedTables.track_gpu_time": ([3.25], [["64"]])}


def write(path: Path, results: dict[str, tuple[Any, Any]], commit: str = "a" * 40, date: int = 1) -> Path:
    """A file as asv writes it."""
    head = {"commit_hash": commit, "env_name": "existing-py", "date": date, "params": MACHINE, "python": "3.11"}
    columns = {"requirements": {}, "env_vars": {}, "result_columns": ["result", "params", "version"], "durations": {}}
    rows = {"results": {name: [*row, "1"] for name, row in results.items()}, "version": 2}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head | columns | rows))
    path.with_name("machine.json").write_text(json.dumps(MACHINE | {"version": 1}))
    return path


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of baselines and a table that are not the repository's."""
    monkeypatch.setattr(gpu_bench, "BASELINE", tmp_path / "baseline")
    monkeypatch.setattr(gpu_bench, "RESULTS", tmp_path / "RESULTS.md")


def test_every_benchmark_of_a_gpu_is_in_the_tables(tmp_path: Path) -> None:
    """Each figure is another one, and is found again in the form in which its column shows it."""
    numbers = count(101)
    shown: dict[str, list[float]] = {}
    results: dict[str, tuple[Any, Any]] = {}
    for benchmark in (each for each in BENCHMARKS if each.module == "gpu" and each.owner.__name__ != "Conditions"):
        params = benchmark.params
        values = [float(next(numbers)) for _ in product(*params)]
        shown[str(benchmark)] = values
        # The tables show the inverse of times per byte and ratios, and what is more than 1 of products.
        inverse = {"time_per_byte": 1000, "times_": 100}
        scale = next((scale for part, scale in inverse.items() if part in benchmark.name), None)
        tracked = [scale / value if scale else value for value in values]
        if benchmark.name == "track_matmul_time":
            tracked = [1 + value / 100 for value in values]
        results[str(benchmark)] = tracked, [[repr(value) for value in each] for each in params]
    text = render(Result.load(write(tmp_path / "result.json", FIT | results)))
    written = set(re.findall(r"\d+", text))
    assert len(shown) > 15
    missing = {name: values for name, values in shown.items() if not {f"{value:.0f}" for value in values} <= written}
    assert not missing


UNFIT = {
    "emulated": ({"gpu.Conditions.track_emulated": ([1.0], [])}, "the driver is emulated"),
    "quick": ({"gpu.Conditions.track_quick": ([1.0], [])}, "quick"),
    "changed": ({"gpu.Conditions.track_changed_files": ([2.0], [])}, "files differ"),
    "not known": ({"gpu.Conditions.track_emulated": ([float("nan")], [])}, "the driver is emulated"),
    "failed": ({"gpu.StagedTables.track_cpu_time": ([None], [["64"]])}, "1 benchmarks failed"),
}


@pytest.mark.parametrize(("changed", "reason"), UNFIT.values(), ids=UNFIT)
def test_what_is_unfit_is_refused_as_a_baseline_and_marked(
    tmp_path: Path, changed: dict[str, tuple[Any, Any]], reason: str
) -> None:
    path = write(tmp_path / "out" / "result.json", FIT | TABLES | changed)
    with pytest.raises(SystemExit, match=reason):
        gpu_bench.main(["--record", str(path)])
    assert not gpu_bench.BASELINE.exists() and not gpu_bench.RESULTS.exists()
    text = render(Result.load(path))
    assert reason in text.splitlines()[2]
    headings = [line for line in text.splitlines() if line.startswith(("# ", "## "))]
    assert all(("not a GPU" in line) == ("emulated" in reason) for line in headings)


def test_a_baseline_is_kept_without_places_and_rendered(tmp_path: Path) -> None:
    path = write(tmp_path / "out" / "aaaaaaaa-existing-py_home.json", FIT | TABLES)
    assert gpu_bench.last_baseline("nvidia-test") is None
    assert "There is no baseline for nvidia-test" in gpu_bench.compare(tmp_path, path)
    gpu_bench.main(["--record", str(path)])
    kept = gpu_bench.last_baseline("nvidia-test")
    assert kept == tmp_path / "baseline" / "nvidia-test" / "aaaaaaaa-existing.json"
    assert gpu_bench.RESULTS.read_text() == render(Result.load(kept)) == render(Result.load(path))
    assert "py_home" not in kept.read_text()


def test_the_repository_keeps_no_baseline_that_is_unfit() -> None:
    folder, text = ROOT / "asv_bench" / "baseline", (ROOT / "asv_bench" / "RESULTS.md").read_text(encoding="utf-8")
    baselines = list(folder.glob("*/*-*.json"))
    assert not [path for path in baselines if Result.load(path).faults()]
    if baselines:
        assert text in [render(Result.load(path)) for path in baselines]
    else:
        assert "Measured by an earlier command" in text
