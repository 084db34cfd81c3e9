"""Arrays of other packages are taken wherever a call takes an array, in place, and memory that cannot be read is
refused by name."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from kvpool import BlockLayout, PagedKV, gather_kv
from kvpool.common.arrays.strided import as_strided
from kvpool.device.memory import StridedArray
from kvpool.device.sim import SimDevice
from kvpool.errors import PoolBusy
from tests.interop.arrays import FOREIGN, LAYOUT, DLPackOnly, GpuOnly, OldDLPack, open_pool
from tests.waiting import until

Wrap = Callable[[np.ndarray], Any]
TOKENS = np.arange(17, dtype=np.int32)


@pytest.fixture(params=FOREIGN, ids=lambda wrap: wrap.__name__)
def wrap(request: pytest.FixtureRequest) -> Wrap:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [np.int16, np.int64, np.uint8])
def test_prompts_keys_and_blocks_of_other_packages_are_the_same(wrap: Wrap, dtype: Any) -> None:
    with open_pool(device_blocks=12) as cache:
        tokens = wrap(TOKENS.astype(dtype))
        keys = cache.block_keys(tokens, extra_ids=wrap(np.arange(17)))
        np.testing.assert_array_equal(keys.keys, cache.block_keys(TOKENS, extra_ids=np.arange(17)).keys)
        seq = cache.add_sequence(tokens)
        ids = wrap(np.array([seq]))
        cache.append_tokens(ids, tokens, wrap(np.array([17])))
        assert cache.sequence_length(ids).tolist() == [34]
        cache.commit(ids, wrap(np.array([34])))
        cache.rewind(seq, wrap(np.array([4])))
        cache.release(ids)
        assert cache.match_prefix(tokens).tokens == 16 == cache.match_prefix(TOKENS).tokens
        own = cache.block_keys(TOKENS).keys[:2].copy()
        assert cache.content.offload(wrap(own)) == 2
        for pinned, count in ((wrap(own), 2), ([wrap(own[0].copy())], 1)):
            with cache.pin(pinned) as lease:
                assert len(lease.blocks) == count
        data = np.random.default_rng(3).integers(0, 9, (2, *LAYOUT.host_shape(1)[1:])).astype(np.float16)
        assert cache.imports.import_blocks(keys, [wrap(block) for block in data]) == 2
        with cache.pin(keys.keys[:2]) as lease:
            np.testing.assert_array_equal(cache.memory.host_pool[lease.blocks - cache.device_blocks], data)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_tables_are_written_into_arrays_of_other_packages(wrap: Wrap, device: str) -> None:
    made: Any = SimDevice(0) if device == "sim" else "cpu"
    with open_pool(device=made) as cache:
        target = np.zeros((3, 6), np.int32)
        seq = cache.add_sequence(TOKENS)
        cache.tables.copy_batch_block_offsets(wrap(target), wrap(np.array([seq])), rows=wrap(np.array([2])))
        if device == "sim":
            made.synchronize()
        np.testing.assert_array_equal(target[2, :5], cache.block_table(seq).dense()[0])
        assert not target[:2].any() and target[2, 5] == -1
        cache.release(seq)


def test_slots_layers_and_staging_are_arrays_of_any_package(wrap: Wrap) -> None:
    layers = [np.random.default_rng(i).integers(0, 99, (2, 8, 4, 2, 16)).astype(np.float16) for i in range(3)]
    out, slots = np.zeros((2, 3, 4, 32), np.float16), np.array([9, 8, -1, 31])
    gather_kv(PagedKV.of([wrap(layer) for layer in layers], "vllm_flash_attention"), wrap(slots), wrap(out))
    for token, slot in enumerate(slots):
        for number, layer in enumerate(layers):
            expected = layer[:, slot // 4, slot % 4].reshape(2, 32) if slot >= 0 else 0
            assert (out[:, number, token] == expected).all()


def test_what_dlpack_1_says_is_read_only_is_not_written() -> None:
    target = np.zeros((2, 6), np.int32)
    target.flags.writeable = False
    assert not as_strided("target", DLPackOnly(target)).writable
    with open_pool() as cache:
        seq = cache.add_sequence(TOKENS)
        with pytest.raises(ValueError, match="target: expected an array that can be written, got a read-only one"):
            cache.tables.copy_batch_block_offsets(DLPackOnly(target), seq)
        with pytest.raises(ValueError, match="target: OldDLPack does not give its memory"):
            cache.tables.copy_batch_block_offsets(OldDLPack(target), seq)
        cache.release(seq)


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "tokens": lambda cache, x: cache.block_keys(x),
    "prompt": lambda cache, x: cache.add_sequence(x),
    "extra_ids": lambda cache, x: cache.block_keys(TOKENS, extra_ids=x),
    "ids": lambda cache, x: cache.release(x),
    "sequences": lambda cache, x: cache.blocks_needed(sequences=x),
    "keys": lambda cache, x: cache.pin(x, owner="test"),
    "target": lambda cache, x: cache.tables.copy_batch_block_offsets(x, 0),
    r"data\[0\]": lambda cache, x: cache.imports.import_blocks(cache.block_keys(TOKENS), [x]),
}


def test_what_cannot_be_read_is_refused_by_name(wrap: Wrap) -> None:
    class Refusing(DLPackOnly):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("needs a gradient")

    with open_pool() as cache:
        for name, call in CALLS.items():
            with pytest.raises(TypeError, match=rf"{name}: expected an array in main memory, got GpuOnly in memory of"):
                call(cache, GpuOnly(TOKENS))
        for name in ("tokens", "prompt", "extra_ids", "ids"):
            with pytest.raises(TypeError, match=rf"(?s){name}: .*float32"):
                CALLS[name](cache, wrap(np.zeros(17, np.float32)))
            with pytest.raises(ValueError, match=rf"{name}: expected one dimension, got shape \(17, 1\)"):
                CALLS[name](cache, wrap(TOKENS[:, None]))
    with pytest.raises(ValueError, match="slots: expected native byte order, got >i8"):
        as_strided("slots", np.arange(3, dtype=">i8"))
    with pytest.raises(ValueError, match="x: Refusing does not give its memory: needs a gradient"):
        as_strided("x", Refusing(TOKENS))


def test_addresses_without_a_package_are_arrays_too() -> None:
    with open_pool() as cache:
        strided = StridedArray(TOKENS.ctypes.data, (17,), 4, kind="i", owner=TOKENS)
        np.testing.assert_array_equal(cache.block_keys(strided).keys, cache.block_keys(TOKENS).keys)


# ----------------------------------------
# JAX on the CPU shares the pool's memory.


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax", reason="JAX is not installed; it comes with the extra 'test'")


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "int8"]
)
@pytest.mark.parametrize("tier", ["device", "host"])
def test_jax_reads_the_pool_in_place_under_its_own_name_of_the_type(jax: Any, tier: str, dtype: str) -> None:
    cache = open_pool(BlockLayout(2, 2, 16, 8, dtype=dtype))
    pool = cache.memory.device_pool if tier == "device" else cache.memory.host_pool
    pool[...] = np.random.default_rng(1).integers(0, 50, pool.shape)
    for index in ((), (1,), (1, 0)):
        export = cache.memory.export(tier)[index]
        view = jax.dlpack.from_dlpack(export)
        assert str(view.dtype) == dtype and view.shape == export.shape
        assert view.unsafe_buffer_pointer() == pool[index].ctypes.data
        np.testing.assert_array_equal(np.asarray(view).view(pool.dtype), pool[index])
        doubled = jax.numpy.add(view, view) if "8" not in dtype else view
        assert doubled.shape == export.shape
    with pytest.raises(PoolBusy):
        cache.close()
    del view, doubled

    def closed() -> bool:
        gc.collect()
        with suppress(PoolBusy):
            cache.close()
            return True
        return False

    until(closed, "end of the threads with which JAX reads the pool")


def test_arrays_of_jax_are_arguments(jax: Any) -> None:
    with open_pool(device_blocks=12) as cache:
        tokens = jax.numpy.arange(17)
        cache.append_tokens(cache.add_sequence(tokens), tokens)
        np.testing.assert_array_equal(cache.block_keys(tokens).keys, cache.block_keys(TOKENS).keys)
        cache.release(cache.sequences)
    layers = [jax.numpy.ones((2, 8, 4, 2, 16), jax.numpy.bfloat16) * (i + 1) for i in range(3)]
    out = np.zeros((2, 3, 2, 32), np.uint16)
    gather_kv(PagedKV.of(layers, "vllm_flash_attention"), jax.numpy.asarray([9, 8]), out)
    for i, layer in enumerate(layers):
        assert (out[:, i] == np.asarray(layer).view(np.uint16).ravel()[0]).all()
