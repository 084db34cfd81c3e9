"""Another process loads KV into a pool that it has attached, while this one reads the prefix that both use."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import BlockLayout, KVCacheManager, PagedKV, gather_kv, scatter_kv
from kvpool.device.cpu import CpuDevice
from tests.gpu import loader
from tests.gpu.conftest import GPU, real_cupy

T, BLOCKS = 4, 32
LAYOUT = BlockLayout(3, 2, 16, T, dtype="float16")
PREFIX, PROMPT = 10, 50
"""Tokens that the pool has, two full blocks and a part of one, and tokens of the prompt to be loaded."""


class SharedDevice(CpuDevice):
    """Main memory, of which the device tier is a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def allocate(self, nbytes: int, tier: str) -> Any:
        return np.asarray(np.memmap(self.path, np.uint8, "w+", shape=(nbytes,))) if tier == "device" else super().allocate(nbytes, tier)


def content(seed: int, tokens: int) -> np.ndarray:
    """[planes, layers, tokens, heads * head_dim]"""
    shape = (LAYOUT.planes, LAYOUT.layers, tokens, LAYOUT.kv_heads * LAYOUT.head_dim)
    return np.random.default_rng(seed).integers(1, 2**15, shape).astype(np.uint16)


def slots_of(blocks: np.ndarray, tokens: int) -> np.ndarray:
    return (blocks.astype(np.int64)[:, None] * T + np.arange(T)).reshape(-1)[:tokens]


def put(cache: KVCacheManager, slots: np.ndarray, kv: np.ndarray) -> None:
    scatter_kv(PagedKV.of_pool(LAYOUT, cache.device_pool), slots, loader.on_device(kv, cache.device_pool))
    cache._device.synchronize()


def seen(cache: KVCacheManager, slots: np.ndarray) -> np.ndarray:
    out = loader.on_device(np.zeros_like(content(0, len(slots))), cache.device_pool)
    gather_kv(PagedKV.of_pool(LAYOUT, cache.device_pool), slots, out)
    cache._device.synchronize()
    return out if isinstance(out, np.ndarray) else out.get()


@pytest.mark.parametrize("where", ["main memory", GPU])
def test_a_loader_in_another_process_fills_a_reservation_beside_a_reader(where: str, tmp_path: Path) -> None:
    device = "cuda" if where == "gpu" else SharedDevice(tmp_path / "tier")
    cupy = real_cupy() if where == "gpu" else None
    tokens, wanted = list(range(PROMPT)), content(1, PROMPT)
    context = multiprocessing.get_context("spawn")
    with KVCacheManager(LAYOUT, device_blocks=BLOCKS, device=device) as cache:
        first = cache.add_sequence([*tokens[:PREFIX], 99])
        put(cache, slots_of(cache.block_table(first).dense()[0], PREFIX), wanted[:, :, :PREFIX].copy())
        cache.commit(first, [PREFIX])
        cache.release(first)
        reader = cache.add_sequence(tokens[: PREFIX - 1])
        shared = slots_of(cache.block_table(reader).dense()[0], PREFIX - PREFIX % T)
        with cache.reserve(tokens, owner="another process") as reservation:
            assert reservation.skip_prefix_n_tokens == PREFIX
            attach: loader.Attach = loader.MappedFile(str(tmp_path / "tier"))
            if cupy is not None:
                attach = loader.CudaHandle(cupy, cache.device_pool)
            brought = wanted.copy()
            brought[:, :, :PREFIX] = 0xFFFF  # what must not arrive
            slots = slots_of(reservation.blocks, PROMPT)
            process = context.Process(target=loader.load, args=(attach, LAYOUT, BLOCKS, slots, brought, PREFIX), daemon=True)
            process.start()
            reads = 0
            while process.is_alive() or reads == 0:
                np.testing.assert_array_equal(seen(cache, shared), wanted[:, :, : len(shared)])
                assert cache.match_prefix([*tokens, 7]).tokens == PREFIX, "nobody finds what is not committed"
                reads += 1
                process.join(0.01)
            assert process.exitcode == 0
            reservation.commit()
        second = cache.add_sequence([*tokens, 7])
        assert cache.cached_tokens(second) == PROMPT
        np.testing.assert_array_equal(seen(cache, slots_of(cache.block_table(second).dense()[0], PROMPT)), wanted)
        cache.verify()
        cache.release([reader, second])
