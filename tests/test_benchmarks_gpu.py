"""The benchmarks of a GPU and the script that writes their table do on a stand-in for CuPy what they are to do on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from asv_bench import gpu_table
from asv_bench.benchmarks import gpu
from kvpool.device.calibration import DIRECTIONS, KERNEL, PATHS, PLAIN
from tests.device.conftest import fake_cuda as fake_cuda
from tests.device.fake_cupy import FakeCupy

NBYTES, COUNT = 4096, 8
MILLISECONDS = 2.0


@pytest.fixture
def cupy(fake_cuda: Callable[..., FakeCupy], monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    """A stand-in with timing events, all two milliseconds apart, and benchmarks of a size for it."""
    made: Any = fake_cuda()
    runtime = made.runtime

    def elapsed(begin: int, end: int) -> float:
        assert runtime.events[begin].done and runtime.events[end].done and runtime.events[begin].stream == runtime.events[end].stream
        return MILLISECONDS

    def create() -> int:
        handle = runtime.eventCreateWithFlags(runtime.eventDisableTiming)
        runtime.timing.add(handle)
        return int(handle)

    runtime.timing, runtime.eventCreate = set(), create
    runtime.eventElapsedTime = elapsed
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setattr(gpu.BlockCopies, "tier_bytes", 64 * NBYTES)
    monkeypatch.setattr(gpu.KvCopies, "shape", {"layers": 2, "kv_heads": 2, "head_dim": 16})
    monkeypatch.setattr(gpu.KvCopies, "blocks", 8)
    monkeypatch.setattr(gpu.KvCopies, "tokens", 50)
    monkeypatch.setattr(gpu.StagedTables, "busy_bytes", 4096)
    monkeypatch.setattr(gpu.StagedTables, "params", [2, 8])
    monkeypatch.setattr(gpu, "SEQUENCES", 4)
    monkeypatch.setattr(gpu, "COLUMNS", 8)
    return made


def run_tracks(benchmark: type[Any], parameters: tuple[Any, ...]) -> dict[str, float]:
    found = gpu_table.measured(benchmark, parameters)
    assert found is not None
    return found


@pytest.mark.parametrize("parameters", list(product(DIRECTIONS, PATHS, ["apart", "neighbours"])), ids=str)
def test_blocks_are_copied_by_the_path_that_is_measured(cupy: FakeCupy, parameters: tuple[str, str, str]) -> None:
    direction, path, placement = parameters
    found = run_tracks(gpu.BlockCopies, (direction, path, NBYTES, COUNT, placement))
    assert found["speed"] == pytest.approx(NBYTES * COUNT / MILLISECONDS / 1e6)
    assert found["share_of_peak"] == pytest.approx(100 * COUNT / 32)
    assert bool(cupy.batched) == (path == "batched") and bool(cupy.launched) == (path == KERNEL)
    if path == PLAIN:
        # Two rounds of batches, where neighbours are one copy, and one of large copies.
        copies = 2 * (gpu.REPEATS + 1) * (COUNT if placement == "apart" else 1) + gpu.REPEATS + 1
        assert cupy.runtime.calls.count("memcpyAsync") == copies
    assert_nothing_is_left(cupy)


@pytest.mark.parametrize("parameters", list(product(*gpu.KvCopies.params, gpu_table.ORDERS)), ids=str)
def test_tokens_are_copied_by_kernels(cupy: FakeCupy, parameters: tuple[str, ...]) -> None:
    found = run_tracks(gpu.KvCopies, parameters)
    assert found["share_of_plain_copy"] == 100 and len(cupy.launched) == 2 * (gpu.REPEATS + 1)
    assert_nothing_is_left(cupy)


def test_tables_are_staged_by_kernels(cupy: FakeCupy) -> None:
    found = run_tracks(gpu.StagedTables, (2,))
    assert set(found) == {"cpu_time", "cpu_time_of_memcpy", "gpu_time", "gpu_time_of_memcpy_async"}
    assert found["gpu_time"] == 1e3 * MILLISECONDS and len(cupy.launched) == 2 * (gpu.REPEATS + 1)
    assert_nothing_is_left(cupy)


def test_the_table_names_the_machine_and_every_case(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_table, "FRAGMENT_BYTES", (NBYTES, 8 * NBYTES))
    monkeypatch.setattr(gpu_table, "FRAGMENTS", (2, COUNT))
    place = tmp_path / "RESULTS.md"
    gpu_table.main(["--output", str(place)])
    text = place.read_text(encoding="utf-8")
    assert "Fake GPU, CUDA 13.0, commit" in text and "`python -m asv_bench.gpu_table --output" in text
    for direction, placement in product(DIRECTIONS, ("apart", "neighbours")):
        assert f"### {direction}, {placement}" in text
    rows = [line for line in text.splitlines() if line.startswith(tuple(f"| {path} |" for path in PATHS))]
    # The largest case does not fit into the tiers, and stays empty.
    assert len(rows) == 6 * len(PATHS) * 2 and all(row.count(" %)") == (2 if "| 2 |" in row else 1) for row in rows)
    assert text.count("| gather |") == text.count("| scatter |") == 4
    assert_nothing_is_left(cupy)


def test_without_a_gpu_the_script_says_so_and_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(SystemExit, match="nothing was measured.*CuPy"):
        gpu_table.main(["--output", str(tmp_path / "RESULTS.md")])
    assert not list(tmp_path.iterdir())


def assert_nothing_is_left(cupy: FakeCupy) -> None:
    runtime: Any = cupy.runtime
    assert not runtime.registered and list(runtime.streams) == [0]
    assert runtime.timing and not runtime.timing & set(runtime.events)
