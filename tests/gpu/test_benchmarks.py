"""The benchmarks of a GPU and the script that writes their table, at a small size: they do what they are to measure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asv_bench import gpu_peers, gpu_table
from asv_bench.benchmarks import gpu
from asv_bench.gpu_peers import PEERS, fragments, sglang
from kvpool.device.cuda import calibration, describe_gpus
from kvpool.device.cuda.calibration import DIRECTIONS, KERNELS, PATHS, Calibration

pytestmark = pytest.mark.gpu
NBYTES, COUNT = 4096, 8
SECONDS = 0.002
PACKAGES = {"vLLM": "vllm", "sgl-kernel": "sgl_kernel", "LMCache": "lmcache"}
SIZES: dict[Any, dict[str, Any]] = {
    gpu.BlockCopies: {"tier_bytes": 64 * NBYTES},
    gpu.Tiers: {"runs": 4, "run_sizes": (256, 1024)},
    gpu.Scenes: {
        "tier_bytes": 64 * NBYTES,
        "batch_bytes": 4 * NBYTES,
        "repeats": 3,
        "products": 1,
        "matrix": 16,
        "element": "float32",
    },
    gpu.KvCopies: {"shape": {"layers": 2, "kv_heads": 2, "head_dim": 16}, "blocks": 8, "tokens": 50},
    gpu.StagedTables: {"busy_bytes": 4096, "params": [2, 8]},
    gpu: {"SEQUENCES": 4, "COLUMNS": 8, "REPEATS": 2},
    gpu_table: {"FRAGMENT_BYTES": (NBYTES, 8 * NBYTES), "FRAGMENTS": (2, COUNT)},
}


@pytest.fixture(autouse=True)
def small(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Benchmarks of a small size, and a clock by which every call takes two milliseconds once it is done."""
    for owner, sizes in SIZES.items():
        for name, value in sizes.items():
            monkeypatch.setattr(owner, name, value)
    measured = cupy.cuda.runtime.eventElapsedTime

    def elapsed(begin: int, end: int) -> float:
        assert measured(begin, end) >= 0
        return 1e3 * SECONDS

    monkeypatch.setattr(cupy.cuda.runtime, "eventElapsedTime", elapsed)
    yield
    gpu.close_tiers()


def run_tracks(benchmark: type[Any], parameters: tuple[Any, ...]) -> dict[str, float]:
    found = gpu_table.measured(benchmark, parameters)
    assert found is not None
    return found


@pytest.mark.parametrize("parameters", list(product(DIRECTIONS, PATHS, ["apart", "neighbours"])), ids=str)
def test_blocks_are_copied_by_the_path_that_is_measured(
    parameters: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    direction, path, placement = parameters
    paths = list[str]()
    chosen = Calibration.choose
    monkeypatch.setattr(Calibration, "choose", lambda *given: (paths.append(found := chosen(*given)), found)[1])
    found = run_tracks(gpu.BlockCopies, (direction, path, NBYTES, COUNT, placement))
    assert found["speed"] == pytest.approx(NBYTES * COUNT / SECONDS / 1e9)
    assert found["share_of_peak"] == pytest.approx(100 * COUNT / 32)
    assert found["call"] > 0
    assert paths == [path] * (gpu.REPEATS + 1)


@pytest.mark.parametrize("parameters", list(product(*gpu.KvCopies.params, gpu_table.ORDERS)), ids=str)
def test_tokens_are_copied(parameters: tuple[str, ...]) -> None:
    found = run_tracks(gpu.KvCopies, parameters)
    assert found["share_of_plain_copy"] == pytest.approx(100)
    assert found["call"] > 0


@pytest.mark.parametrize("parameters", list(product(*gpu.Scenes.params)), ids=str)
def test_every_byte_of_a_scene_is_copied_by_its_path(cupy: Any, parameters: tuple[str, str]) -> None:
    scene, path = parameters
    made = gpu.Scenes()
    made.setup(scene, path, 256)
    tiers, random = made.tiers, np.random.default_rng(0)
    assert tiers is not None
    values = [random.integers(0, 256, tiers.nbytes, dtype=np.uint8) for _ in tiers.memory]
    tiers.memory[0].set(values[0])
    tiers.memory[1][:] = values[1]
    cupy.cuda.Device().synchronize()
    made._batch()
    found = tiers.memory[0].get(), tiers.memory[1]
    changed = [int((one != other).sum()) for one, other in zip(found, values, strict=True)]
    made.teardown()
    for way, tier in ((gpu.LOAD, 0), (gpu.SAVE, 1)):
        wanted = made.batch_bytes if way in made.ways else 0
        assert 0.97 * wanted <= changed[tier] <= wanted, "but for bytes that were equal before"
    tracked = run_tracks(gpu.Scenes, (scene, path, 256))
    assert set(tracked) == {"speed", "p99", "call", "slowdown_of_matmul"}
    assert min(tracked[name] for name in ("speed", "p99", "call")) > 0


class Tensor:
    """What is used of PyTorch's, over an array of either tier."""

    def __init__(self, array: Any, device: str = "") -> None:
        self.array = array

    def view(self, *shape: int) -> Tensor:
        return Tensor(self.array.reshape(shape))

    def cuda(self) -> Tensor:
        return self


@pytest.mark.parametrize("way", [gpu.LOAD, gpu.SAVE])
def test_a_kernel_that_takes_numbers_of_items_copies_what_the_path_beside_it_copies(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, way: int
) -> None:
    def copy(src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, item_size: int) -> None:
        assert src.array.shape[1] == item_size
        rows = cupy.asnumpy(src.array)[src_indices.array]
        dst.array[dst_indices.array] = rows if isinstance(dst.array, np.ndarray) else cupy.asarray(rows)

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(from_numpy=Tensor, as_tensor=Tensor))
    monkeypatch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
    monkeypatch.setitem(sys.modules, "sgl_kernel.kvcacheio", SimpleNamespace(transfer_kv_per_layer_mla=copy))
    made = gpu.Scenes()
    made.setup(("engine, load", "engine, save")[way], "plain", NBYTES)
    assert made.tiers is not None
    source, target = made.tiers.memory[:: 1 if way == gpu.SAVE else -1]
    of = np if isinstance(source, np.ndarray) else cupy
    source[:] = of.arange(source.size) % 251
    ((_, kernel),) = sglang(made, way)
    found = []
    for call in (kernel, made._batch):
        target[:] = 0
        cupy.cuda.Device().synchronize()
        call()
        cupy.cuda.Device().synchronize()
        found.append(cupy.asnumpy(target).tobytes())
    made.teardown()
    assert found[0] == found[1] and any(found[0])


def test_a_peer_is_measured_in_turn_with_each_path(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    monkeypatch.setattr(gpu.Scenes, "enqueue_all", lambda made: turns.append("kvpool"))
    lines = list(fragments(lambda made, way: iter([("a peer", lambda: turns.append("peer"))])))
    assert len(lines) == 2 * 3 * len(PATHS)
    measured = [line for line in lines if "a peer" in line]
    assert measured and turns == ["kvpool", "peer"] * (len(measured) * (gpu_peers.REPEATS + 1))
    assert lines[0].startswith("engine, load, 4,096 bytes: plain ")


def test_tables_are_staged() -> None:
    found = run_tracks(gpu.StagedTables, (2,))
    assert set(found) == {"cpu_time", "cpu_time_of_memcpy", "gpu_time", "gpu_time_of_memcpy_async"}
    assert found["gpu_time"] == pytest.approx(1e6 * SECONDS)


def test_kernels_are_proven_without_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place, records = tmp_path / "RESULTS.md", tmp_path / "proven.json"
    records.write_text("[]")
    monkeypatch.setattr(gpu_table, "prove", partial(calibration.prove, file=records))
    gpu_table.main(["--prove", "--output", str(place)])
    capability = describe_gpus()[0].capability
    assert calibration.proven(capability, records) == set(KERNELS)
    assert f"kernel: proven for compute capability {capability}" in capsys.readouterr().out
    assert not place.exists()


def test_the_table_names_the_machine_and_every_case(cupy: Any, tmp_path: Path) -> None:
    place = tmp_path / "RESULTS.md"
    gpu_table.main(["--output", str(place)])
    text, name = place.read_text(encoding="utf-8"), cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    assert f"{name}, CUDA 1" in text and ", commit" in text and "`python -m asv_bench.gpu_table --output" in text
    for direction, placement in product(DIRECTIONS, ("apart", "neighbours")):
        assert f"### {direction}, {placement}" in text
    for scene in gpu.Scenes.params[0]:
        assert text.count(f"| {scene} |") == len(gpu.Tiers.run_sizes) * len(PATHS)
    there = {peer for peer, package in PACKAGES.items() if find_spec(package)}
    missing = {peer for peer in PEERS if f"{peer} is not measured: ModuleNotFoundError: " in text}
    assert "## Peers" in text and missing == set(PEERS) - there
    rows = [line for line in text.splitlines() if line.startswith(tuple(f"| {path} |" for path in PATHS))]
    # The largest case does not fit into the tiers, and stays empty.
    assert len(rows) == 6 * len(PATHS) * 2 and all(row.count(" %)") == (2 if "| 2 |" in row else 1) for row in rows)
    assert all(row.rpartition(" %), ")[2].split(" |")[0].isdigit() for row in rows), "the call of each batch"
    assert text.count("| gather |") == text.count("| scatter |") == 4
