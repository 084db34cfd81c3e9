"""Copies on a GPU: blocks by size, number, direction and path; tokens; block tables; beside plain copies and peers.

Each class measures all of its parameters once, in one process, as its ``setup_cache``. Its benchmarks look figures up:
what ``asv run --bench gpu`` keeps is what ``asv_bench.gpu_table`` renders. Without a GPU they are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpool.device.cuda.calibration import DIRECTIONS, PATHS

from . import gpu_cases, gpu_peers
from .gpu_cases import SIZES, measure_all


def figure(name: str, unit: str) -> Callable[..., float]:
    """Make a benchmark that looks up one figure."""

    def track(self: Any, measured: dict[tuple[Any, ...], Any], *parameters: Any) -> float:
        return float(measured[parameters][name])

    track.unit = unit  # type: ignore[attr-defined]
    return track


class OnGpu:
    """Base: skips what cannot run on this machine, and fails where measuring has failed."""

    timeout = 3600
    version = "1"
    """Raise this when a measurement changes: asv compares figures of one version only."""

    def setup(self, measured: dict[tuple[Any, ...], Any], *parameters: Any) -> None:
        if isinstance(measured[parameters], Exception):
            raise measured[parameters]


class Conditions(OnGpu):
    params: list[list[Any]] = []

    def setup_cache(self) -> Any:
        return measure_all(gpu_cases.Conditions, self.params)

    track_emulated = figure("emulated", "1: no figure here is of a GPU")
    track_quick = figure("quick", "1: too small to measure anything")
    track_changed_files = figure("changed_files", "files that differ from the commit")


class BlockCopies(OnGpu):
    params: list[list[Any]] = [
        list(DIRECTIONS),
        ["apart", "neighbours"],
        list(PATHS),
        list(SIZES.fragments),
        list(SIZES.fragment_bytes),
    ]
    param_names = ["direction", "placement", "path", "fragments", "fragment_bytes"]

    def setup_cache(self) -> Any:
        return measure_all(gpu_cases.BlockCopies, self.params)

    track_time_per_byte = figure("time_per_byte", "ps/B")
    track_gpu_time_per_byte = figure("gpu_time_per_byte", "ps/B")
    track_call = figure("call", "us")
    track_times_large_copy = figure("times_large_copy", "times the time per byte of one large copy")


class Scenes(OnGpu):
    params: list[list[Any]] = [
        ["layers, load", "layers, save", "engine, load", "engine, save", "engine, both ways"],
        list(SIZES.run_bytes),
        list(PATHS),
    ]
    param_names = ["scene", "run_bytes", "path"]

    def setup_cache(self) -> Any:
        return measure_all(gpu_cases.Scenes, self.params)

    track_time_per_byte = figure("time_per_byte", "ps/B")
    track_p99 = figure("p99", "ms")
    track_call = figure("call", "us")
    track_matmul_time = figure("matmul_time", "times the time of a matrix product alone")


class KvCopies(OnGpu):
    params: list[list[Any]] = [["gather", "scatter"], ["device", "host"], ["layer_first", "block_first"]]
    param_names = ["direction", "staging", "order"]

    def setup_cache(self) -> Any:
        return measure_all(gpu_cases.KvCopies, self.params)

    track_time_per_byte = figure("time_per_byte", "ps/B")
    track_gpu_time_per_byte = figure("gpu_time_per_byte", "ps/B")
    track_call = figure("call", "us")
    track_times_plain_copy = figure("times_plain_copy", "times the time of a plain copy")


class StagedTables(OnGpu):
    params: list[list[Any]] = [list(SIZES.columns)]
    param_names = ["used_columns"]

    def setup_cache(self) -> Any:
        return measure_all(gpu_cases.StagedTables, self.params)

    track_cpu_time = figure("cpu_time", "us")
    track_cpu_time_of_memcpy = figure("cpu_time_of_memcpy", "us")
    track_gpu_time = figure("gpu_time", "us")
    track_gpu_time_of_memcpy_async = figure("gpu_time_of_memcpy_async", "us")


class PeerCopies(OnGpu):
    params: list[list[Any]] = [list(gpu_peers.PEERS), ["load", "save"], list(SIZES.peer_bytes), list(PATHS)]
    param_names = ["peer", "way", "fragment_bytes", "path"]

    def setup_cache(self) -> Any:
        return measure_all(gpu_peers.PeerCopies, self.params)

    track_time_per_byte = figure("time_per_byte", "ps/B")
    track_time_per_byte_of_peer = figure("time_per_byte_of_peer", "ps/B")


class PeerTokens(OnGpu):
    params: list[list[Any]] = [["gather", "scatter"], ["device", "host"]]
    param_names = ["direction", "staging"]

    def setup_cache(self) -> Any:
        return measure_all(gpu_peers.PeerTokens, self.params)

    track_time_per_byte = figure("time_per_byte", "ps/B")
    track_time_per_byte_of_peer = figure("time_per_byte_of_peer", "ps/B")
