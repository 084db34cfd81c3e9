"""The benchmarks of a GPU at quick sizes: they do what they are to measure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from asv_bench.benchmarks import gpu, gpu_cases
from asv_bench.benchmarks.gpu_cases import LOAD, QUICK, SAVE, measure
from kvpool.device.cuda.calibration import DIRECTIONS, PATHS, Calibration

pytestmark = pytest.mark.gpu
NBYTES, COUNT, RUN_BYTES = QUICK.fragment_bytes[0], QUICK.fragments[0], QUICK.run_bytes[0]
SECONDS = 0.002


@pytest.fixture(autouse=True)
def quick(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Quick sizes, and a clock by which every call takes two milliseconds once it is done."""
    monkeypatch.setattr(gpu_cases, "SIZES", QUICK)
    measured = cupy.cuda.runtime.eventElapsedTime

    def elapsed(begin: int, end: int) -> float:
        assert measured(begin, end) >= 0
        return 1e3 * SECONDS

    monkeypatch.setattr(cupy.cuda.runtime, "eventElapsedTime", elapsed)
    yield
    gpu_cases.close_tiers()


@pytest.mark.parametrize("parameters", list(product(DIRECTIONS, ["apart", "neighbours"], PATHS)), ids=str)
def test_blocks_are_copied_by_the_path_that_is_measured(
    parameters: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = list[str]()
    chosen = Calibration.choose
    monkeypatch.setattr(Calibration, "choose", lambda *arguments: (paths.append(path := chosen(*arguments)), path)[1])
    busy, copy, rounds = list[int](), gpu_cases.BlockCopies.copy, QUICK.rounds + 1
    half = QUICK.tier_bytes // 2

    def watched(case: Any, target: int, source: int, nbytes: int) -> None:
        if source == case.tiers.bases[0] and target == source + half:
            busy.append(nbytes)
        copy(case, target, source, nbytes)

    monkeypatch.setattr(gpu_cases.BlockCopies, "copy", watched)
    figures = measure(gpu_cases.BlockCopies, (*parameters, COUNT, NBYTES))
    assert figures["time_per_byte"] == pytest.approx(1e12 * SECONDS / (NBYTES * COUNT))
    assert figures["gpu_time_per_byte"] == figures["time_per_byte"]
    # The one large copy is the same one inside the GPU.
    assert len(busy) == rounds * (gpu_cases.BUSY_COPIES + (parameters[0] == "within"))
    assert figures["times_large_copy"] == pytest.approx(QUICK.tier_bytes / 2 / (NBYTES * COUNT))
    assert figures["call"] > 0
    assert paths == [parameters[-1]] * 2 * rounds


@pytest.mark.parametrize("scene", gpu.Scenes.params[0])
@pytest.mark.parametrize("path", PATHS)
def test_every_byte_of_a_scene_is_copied_by_its_path(cupy: Any, scene: str, path: str) -> None:
    made = gpu_cases.Scenes()
    with made.closing:
        made.setup(scene, RUN_BYTES, path)
        tiers, random = made.tiers, np.random.default_rng(0)
        values = [random.integers(0, 256, tiers.nbytes, dtype=np.uint8) for _ in tiers.memory]
        tiers.memory[0].set(values[0])
        tiers.memory[1][:] = values[1]
        cupy.cuda.Device().synchronize()
        made.batch()
        copied = tiers.memory[0].get(), tiers.memory[1]
        changed = [int((copy != other).sum()) for copy, other in zip(copied, values, strict=True)]
    for way, tier in ((LOAD, 0), (SAVE, 1)):
        wanted = QUICK.batch_bytes if way in made.ways else 0
        assert 0.97 * wanted <= changed[tier] <= wanted, "but for bytes that were equal before"
    figures = measure(gpu_cases.Scenes, (scene, RUN_BYTES, path))
    assert figures["matmul_time"] == 1
    assert min(figures[name] for name in ("time_per_byte", "p99", "call")) > 0
