"""Another process loads KV into a pool that it has attached, while this one serves: admits, evicts, commits, reads the
shared prefix."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool import BlockLayout, KVCacheManager, MemoryOptions, PagedKV, PoolClosed, attach, gather_kv, scatter_kv
from tests.gpu.conftest import GPU, real_cupy
from tests.share.processes import drop_while_capturing, fill_and_close, load, on_device
from tests.share.spawned import Spawn
from tests.share.spawned import spawn as spawn

T, BLOCKS = 4, 32
LAYOUT = BlockLayout(3, 2, 16, T, dtype="float16")
PREFIX, PROMPT, ROUNDS = 10, 50, 12
"""Tokens that the pool has, two full blocks and a part of one; tokens of the prompt to be loaded; requests during each
half of it."""


def content(seed: int, tokens: int) -> np.ndarray:
    """[planes, layers, tokens, heads * head_dim]"""
    shape = (LAYOUT.planes, LAYOUT.layers, tokens, LAYOUT.kv_heads * LAYOUT.head_dim)
    return np.random.default_rng(seed).integers(1, 2**15, shape).astype(np.uint16)


def slots_of(blocks: np.ndarray, tokens: int) -> np.ndarray:
    return (blocks.astype(np.int64)[:, None] * T + np.arange(T)).reshape(-1)[:tokens]


def put(cache: KVCacheManager, slots: np.ndarray, kv: np.ndarray) -> None:
    scatter_kv(PagedKV.of_pool(LAYOUT, cache.memory.device_pool), slots, on_device(kv, cache.memory.device_pool))
    cache.core.device.synchronize()


def seen(cache: KVCacheManager, slots: np.ndarray) -> np.ndarray:
    out = on_device(np.zeros_like(content(0, len(slots))), cache.memory.device_pool)
    gather_kv(PagedKV.of_pool(LAYOUT, cache.memory.device_pool), slots, out)
    cache.core.device.synchronize()
    return out if isinstance(out, np.ndarray) else out.get()


def serve(cache: KVCacheManager, seed: int) -> None:
    """A request of another prompt: what it reuses, and what it has written once all is offloaded and back, is its
    own."""
    tokens, kv = list(range(1000 * seed, 1000 * seed + 41)), content(seed, 41)
    for _ in range(2):
        sequence = cache.add_sequence(tokens)
        cached = int(cache.cached_tokens(sequence))
        slots = slots_of(cache.block_table(sequence).dense()[0], len(tokens))
        np.testing.assert_array_equal(seen(cache, slots[:cached].copy()), kv[:, :, :cached])
        put(cache, slots[cached:].copy(), kv[:, :, cached:].copy())
        cache.commit(sequence)
        cache.release(sequence)


@pytest.mark.parametrize("where", ["cpu", GPU])
def test_a_loader_in_another_process_fills_a_reservation_while_this_one_serves(where: str, spawn: Spawn) -> None:
    if where == "gpu":
        real_cupy()
    tokens, wanted = list(range(PROMPT)), content(1, PROMPT)
    device = {"gpu": "cuda"}.get(where, where)
    with KVCacheManager(
        LAYOUT, device_blocks=BLOCKS, host_blocks=BLOCKS, device=device, memory=MemoryOptions(shared=device == "cpu")
    ) as cache:
        first = cache.add_sequence([*tokens[:PREFIX], 99])
        put(cache, slots_of(cache.block_table(first).dense()[0], PREFIX), wanted[:, :, :PREFIX].copy())
        cache.commit(first, [PREFIX])
        cache.release(first)
        reader = cache.add_sequence(tokens[: PREFIX - 1])
        shared = slots_of(cache.block_table(reader).dense()[0], PREFIX - PREFIX % T)
        brought = wanted.copy()
        brought[:, :, :PREFIX] = 0xFFFF  # what must not arrive
        loader = spawn(load)
        with cache.imports.reserve(tokens, owner="another process") as reservation:
            assert reservation.skip_prefix_n_tokens == PREFIX
            loader.send((cache.memory.share(), slots_of(reservation.blocks, PROMPT), brought, PREFIX))
            assert loader.recv() == "attached"
            for _ in range(2):
                loader.send("go on")
                for number in range(ROUNDS):
                    serve(cache, seed=2 + number % 3)
                    np.testing.assert_array_equal(seen(cache, shared), wanted[:, :, : len(shared)])
                    assert cache.match_prefix([*tokens, 7]).tokens in (len(shared), PREFIX), (
                        "nobody finds what is not committed"
                    )
                assert loader.recv() == "written"
            reservation.commit()
        assert cache.stats().evicted_offloaded_blocks > 0 and cache.stats().onboarded_blocks > 0
        second = cache.add_sequence([*tokens, 7])
        assert cache.cached_tokens(second) == PROMPT
        np.testing.assert_array_equal(seen(cache, slots_of(cache.block_table(second).dense()[0], PROMPT)), wanted)
        cache.verify()
        cache.release([reader, second])


@pytest.mark.gpu
def test_a_gpu_that_another_process_has_is_opened_there_only_and_until_it_is_closed() -> None:
    cupy = real_cupy()
    with KVCacheManager(LAYOUT, device_blocks=2, device="cuda") as cache:
        description = cache.memory.share()
        with pytest.raises(ValueError, match="in this process"):
            attach(description)
        memory = cupy.empty(2 * LAYOUT.block_bytes, cupy.uint8)
        with KVCacheManager(
            LAYOUT, device_blocks=2, device="cuda", memory=MemoryOptions(device_memory=memory)
        ) as other:
            with pytest.raises(ValueError, match="caller's"):
                other.memory.share()
    with pytest.raises(PoolClosed):
        attach(description)


@pytest.mark.gpu
def test_the_pinned_tier_of_a_gpu_is_shared_main_memory() -> None:
    real_cupy()
    with KVCacheManager(
        LAYOUT, device_blocks=2, host_blocks=3, device="cuda", memory=MemoryOptions(shared=True)
    ) as cache:
        with attach(cache.memory.share("host")) as attached:
            attached.pool[2] = 5
            assert (cache.memory.host_pool[2] == 5).all() and (cache.memory.host_pool[:2] == 0).all()
    with KVCacheManager(LAYOUT, device_blocks=2, host_blocks=3, device="cuda") as cache:
        with pytest.raises(ValueError, match="shared=True took itself"):
            cache.memory.share("host")


@pytest.mark.gpu
def test_what_a_process_has_enqueued_is_done_before_it_lets_go_of_the_memory(spawn: Spawn) -> None:
    real_cupy()
    with KVCacheManager(LAYOUT, device_blocks=BLOCKS, device="cuda") as cache:
        writer = spawn(fill_and_close)
        writer.send(cache.memory.share())
        assert writer.recv() == "closed"
        assert (cache.memory.device_pool.get() == 5).all()


@pytest.mark.gpu
def test_the_collector_ends_no_capture_where_it_finds_an_attachment(spawn: Spawn) -> None:
    real_cupy()
    with KVCacheManager(LAYOUT, device_blocks=BLOCKS, device="cuda") as cache:
        other = spawn(drop_while_capturing)
        other.send(cache.memory.share())
        assert other.recv() == [1, 1, 1, 1]
        assert other.recv() == "closed"
        assert (cache.memory.device_pool.get() == 6).all()
