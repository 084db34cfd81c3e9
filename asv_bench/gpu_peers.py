"""Copies of other projects on a GPU, in turn with those of kvpool, where their wheels are installed: a part of
``asv_bench.gpu_table``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from asv_bench.benchmarks.gpu import LOAD, REPEATS, SAVE, Scenes
from kvpool.device.cuda.calibration import PATHS

SIZES = (4 << 10, 16 << 10, 64 << 10)
Copy = Callable[[np.ndarray], None]


def _vllm(way: int) -> Iterator[tuple[str, Copy]]:
    """vLLM's batched copy, and the Triton kernel that it takes for small loads. Both take addresses and sizes."""
    import torch
    from vllm import _custom_ops
    from vllm.v1.kv_offload.cpu import swap_blocks_triton

    def columns(rows: np.ndarray) -> list[Any]:
        return [torch.from_numpy(np.ascontiguousarray(column)) for column in rows.T]

    def batched(rows: np.ndarray) -> None:
        _custom_ops.swap_blocks_batch(*columns(rows))
        torch.cuda.synchronize()

    def triton(rows: np.ndarray) -> None:
        swap_blocks_triton.swap_blocks_batch(*columns(rows), bytes_per_chunk=int(rows[0, 2]))
        torch.cuda.synchronize()

    yield "vLLM, batched", batched
    if way == LOAD:
        yield "vLLM, Triton", triton


def peer_rows() -> Iterator[str]:
    """A line for each way and size: the medians of alternating runs of kvpool's paths and of a peer, in GB/s."""
    for way, size in ((way, size) for way in (LOAD, SAVE) for size in SIZES):
        try:
            peers = dict(_vllm(way))
        except Exception as error:  # A wheel that is not there, or does not fit this machine.
            yield f"vLLM is not measured: {type(error).__name__}: {error}"
            return
        scene = ("engine, load", "engine, save")[way]
        for name, copy in peers.items():
            for path in PATHS:
                yield f"{scene}, {size:,} bytes: {_alternating(scene, path, size, name, copy)}"


def _alternating(scene: str, path: str, size: int, name: str, copy: Copy) -> str:
    made = Scenes()
    try:
        made.setup(scene, path, size)
    except NotImplementedError as error:
        return str(error)
    try:
        (way,) = made.ways
        times: dict[str, list[float]] = {path: [], name: []}
        for _ in range(REPEATS + 1):
            times[path].append(made._batch()[0])
            begin = perf_counter()
            copy(made.work[way].rows)
            times[name].append(perf_counter() - begin)
        speeds = {who: made.copied_bytes / median(some[1:]) / 1e9 for who, some in times.items()}
        return ", ".join(f"{who} {speed:.1f} GB/s" for who, speed in speeds.items())
    finally:
        made.teardown()
