"""JAX on the CPU, and PyTorch where it is installed, share the pool's memory both ways."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from kvpool import BlockLayout, PagedKV, PoolBusy, gather_kv
from tests.interop.arrays import LAYOUT, aligned, open_pool

TOKENS = np.arange(17, dtype=np.int32)


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax", reason="JAX is not installed; it comes with the extra 'test'")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is not installed; no extra brings it")


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "int8"]
)
@pytest.mark.parametrize("tier", ["device", "host"])
def test_jax_reads_the_pool_in_place_under_its_own_name_of_the_type(jax: Any, tier: str, dtype: str) -> None:
    cache = open_pool(BlockLayout(2, 2, 16, 8, dtype=dtype))
    pool = cache.device_pool if tier == "device" else cache.host_pool
    pool[...] = np.random.default_rng(1).integers(0, 50, pool.shape)
    for index in ((), (1,), (1, 0)):
        export = cache.export(tier)[index]
        view = jax.dlpack.from_dlpack(export)
        assert str(view.dtype) == dtype and view.shape == export.shape
        assert view.unsafe_buffer_pointer() == pool[index].ctypes.data
        np.testing.assert_array_equal(np.asarray(view).view(pool.dtype), pool[index])
        doubled = jax.numpy.add(view, view) if "8" not in dtype else view
        assert doubled.shape == export.shape
    with pytest.raises(PoolBusy):
        cache.close()
    del view, doubled
    gc.collect()
    cache.close()


def test_jax_says_what_it_cannot_take_in_place(jax: Any) -> None:
    with open_pool() as cache:
        with pytest.raises(jax.errors.JaxRuntimeError, match="striding"):
            jax.dlpack.from_dlpack(cache.export()[:, :, 1:2])
        with pytest.raises(BufferError, match="read-only"):
            jax.dlpack.from_dlpack(cache.export(writable=False))
        gc.collect()


def test_arrays_of_jax_are_arguments(jax: Any) -> None:
    with open_pool(device_blocks=12) as cache:
        tokens = jax.numpy.arange(17)
        seq = cache.add_sequence(tokens)
        cache.append_tokens(seq, tokens)
        assert cache.match_prefix(tokens) == cache.match_prefix(TOKENS)
        np.testing.assert_array_equal(cache.block_keys(tokens).keys, cache.block_keys(TOKENS).keys)
        cache.release(seq)
        layers = [jax.numpy.ones((2, 8, 4, 2, 16), jax.numpy.bfloat16) * (i + 1) for i in range(3)]
        out = np.zeros((2, 3, 2, 32), np.uint16)
        gather_kv(PagedKV.of(layers, "vllm_flash_attention"), jax.numpy.asarray([9, 8]), out)
        for i, layer in enumerate(layers):
            assert (out[:, i] == np.asarray(layer).view(np.uint16).ravel()[0]).all()


def test_jax_may_own_the_memory_of_a_tier(jax: Any) -> None:
    nbytes = 6 * LAYOUT.block_bytes
    owned = jax.dlpack.from_dlpack(aligned(nbytes))
    with open_pool(device_memory=owned) as cache:
        assert cache.device_pool.ctypes.data == owned.unsafe_buffer_pointer()
        cache.device_pool[...] = 0
        view = jax.dlpack.from_dlpack(cache.export())
        assert view.unsafe_buffer_pointer() == owned.unsafe_buffer_pointer()
        del view
    assert not np.asarray(owned).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8"])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_torch_reads_and_writes_the_pool_in_place(torch: Any, tier: str, dtype: str) -> None:
    cache = open_pool(BlockLayout(2, 2, 16, 8, dtype=dtype))
    pool = cache.device_pool if tier == "device" else cache.host_pool
    view = torch.from_dlpack(cache.export(tier))
    assert (
        str(view.dtype) == f"torch.{dtype}" and tuple(view.shape) == pool.shape and view.data_ptr() == pool.ctypes.data
    )
    part = torch.from_dlpack(cache.export(tier)[1:, 0])
    assert part.data_ptr() == pool[1:, 0].ctypes.data
    assert tuple(step * part.element_size() for step in part.stride()) == pool[1:, 0].strides
    part.fill_(1)
    np.testing.assert_array_equal(view.view(torch.uint8).numpy(), pool.view(np.uint8))
    del view
    with pytest.raises(PoolBusy, match="live: 1"):
        cache.close()
    del part
    cache.close()


def test_tensors_of_torch_are_arguments_and_may_own_a_tier(torch: Any) -> None:
    owned = torch.from_numpy(aligned(6 * LAYOUT.block_bytes))
    with open_pool(device_memory=owned) as cache:
        tokens = torch.arange(17)
        seq = cache.add_sequence(tokens)
        target = torch.zeros((1, 6), dtype=torch.int32)
        cache.copy_batch_block_offsets(target, seq)
        np.testing.assert_array_equal(target.numpy()[0, :5], cache.block_table(seq).dense()[0])
        cache.release(seq)
        assert cache.device_pool.ctypes.data == owned.data_ptr()
