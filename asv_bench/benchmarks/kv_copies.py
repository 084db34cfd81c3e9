"""Tokens between paged caches of several engines' layouts and contiguous staging, on the CPU, beside NumPy's copy of
the same bytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.common.arrays.paged import LAYOUTS, PagedKV
from kvpool.device.memory.kv_copy import gather_kv, scatter_kv

from .pools import THREADS

LAYERS, PLANES, BLOCKS, TOKENS_PER_BLOCK, HEADS, HEAD_DIM = 4, 2, 1_024, 16, 8, 128
TOKENS = 4_096


def paged(layout: str) -> PagedKV:
    """A cache of float16 in this layout, 128 MiB that have their pages."""
    lists, _, axes = LAYOUTS[layout].partition("|")
    extents = {"L": LAYERS, "P": PLANES, "B": BLOCKS, "T": TOKENS_PER_BLOCK, "H": HEADS, "D": HEAD_DIM, "1": 1}
    if "T" not in axes:
        extents["B"] *= TOKENS_PER_BLOCK

    def arrays(names: list[str]) -> Any:
        if names:
            return [arrays(names[1:]) for _ in range(extents[names[0]])]
        return np.ones([extents[axis] for axis in axes.split()], np.float16)

    return PagedKV.of(arrays(lists.split()), layout)


class KvCopies:
    """4,096 tokens at random places, K and V of four layers: 64 MiB."""

    params = [
        "flashinfer",
        "flashinfer_hnd",
        "sglang",
        "tensorrt_llm",
        "vllm_flash_attention",
        "vllm_flash_attention_hnd",
    ]
    param_names = ["layout"]
    repeat = 3
    rounds = 1

    def setup(self, layout: str) -> None:
        self.cache = paged(layout)
        self.staging = np.ones((PLANES, self.cache.layers, TOKENS, HEADS * HEAD_DIM), np.float16)
        self.copy = np.ones_like(self.staging)
        random = np.random.default_rng(0)
        self.slots: npt.NDArray[np.int64] = random.permutation(self.cache.slots)[:TOKENS]
        self.parts = [slice(start, start + TOKENS // THREADS) for start in range(0, TOKENS, TOKENS // THREADS)]
        self.team = ThreadPoolExecutor(THREADS)
        self.time_gather_in_threads(layout)

    def teardown(self, layout: str) -> None:
        self.team.shutdown()

    def time_gather(self, layout: str) -> None:
        gather_kv(self.cache, self.slots, self.staging)

    def time_scatter(self, layout: str) -> None:
        scatter_kv(self.cache, self.slots, self.staging)

    def time_gather_in_threads(self, layout: str) -> None:
        list(self.team.map(lambda part: gather_kv(self.cache, self.slots[part], self.staging[:, :, part]), self.parts))

    def track_gather_share_of_memcpy(self, layout: str) -> float:
        """Speed of the gather, a plain copy of the same bytes = 1. The two alternate; the best of each counts."""
        gather, plain = [], []
        for _ in range(5):
            start = perf_counter()
            np.copyto(self.copy, self.staging)
            middle = perf_counter()
            gather_kv(self.cache, self.slots, self.staging)
            plain.append(middle - start)
            gather.append(perf_counter() - middle)
        return min(plain) / min(gather)

    track_gather_share_of_memcpy.unit = "x memcpy"  # type: ignore[attr-defined]
