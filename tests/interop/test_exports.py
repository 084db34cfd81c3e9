"""Exports give a pool's memory to other packages in place: type, shape, strides, what may be written, and what cannot
be given."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from kvpool import BlockLayout, KVCacheManager, PoolClosed
from kvpool.common.arrays import dlpack
from kvpool.common.arrays.strided import as_strided
from tests.interop.arrays import described, open_pool

TYPES = {
    "bfloat16": (4, 16),
    "float8_e4m3fn": (10, 8),
    "float8_e4m3fnuz": (11, 8),
    "float8_e5m2": (12, 8),
    "float8_e5m2fnuz": (13, 8),
}
TYPES |= {
    "float8_e8m0fnu": (14, 8),
    "float16": (2, 16),
    "float32": (2, 32),
    "int8": (0, 8),
    "uint16": (1, 16),
    "bool": (6, 8),
}
VERSIONS = [None, (0, 8), (1, 0), (1, 1), (2, 0)]


def pool_of(cache: KVCacheManager, tier: str) -> np.ndarray:
    return cache.memory.device_pool if tier == "device" else cache.memory.host_pool


INDICES = [
    0,
    -1,
    np.int64(1),
    slice(1, None),
    (1, 0),
    (0, 1, slice(None, None, 2)),
    (..., 3),
    (1, ..., slice(None, None, -2)),
    (),
]


@pytest.mark.parametrize("index", [*INDICES, (0, 0, 1, 2, 1, 5)])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_part_is_what_numpy_calls_it(tier: str, index: Any) -> None:
    with open_pool() as cache:
        pool = pool_of(cache, tier)
        pool[...] = np.arange(pool.size).reshape(pool.shape) % 2000
        whole = cache.memory.export(tier)
        for part in (np.asarray(whole[index]), np.from_dlpack(whole[index])):
            expected = (
                pool[index][...] if not isinstance(index, tuple) or len(index) < 6 else pool[0, 0, 1, 2, 1, 5, ...]
            )
            assert (part.ctypes.data, part.shape) == (expected.ctypes.data, expected.shape)
            np.testing.assert_array_equal(part, expected)
        np.testing.assert_array_equal(np.asarray(whole[1:][0]), pool[1])
        del part


def test_an_index_that_would_copy_or_names_nothing_is_refused() -> None:
    copying = [None, True, 1.5, "a", [0], np.array([0, 1]), (0, None), (0, [1]), np.bool_(True)]
    nothing = [9, (0,) * 7, 1 << 70, -(1 << 70), (0, 1 << 70), np.uint64(1 << 63), slice(0, 2, 0), (...,) * 2]
    with open_pool() as cache:
        export: Any = cache.memory.export()
        for indices, error in ((copying, TypeError), (nothing, IndexError)):
            for index in indices:
                with pytest.raises(error):
                    export[index]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", TYPES)
def test_capsules_name_the_type_the_version_and_the_place(name: str, version: Any) -> None:
    with open_pool(BlockLayout(2, 2, 8, 4, dtype=name)) as cache:
        export = cache.memory.export("host")[1:, 1]
        capsule = export.__dlpack__(max_version=version)
        tensor, head = described(capsule)
        assert (tensor.code, tensor.bits, tensor.lanes) == (*TYPES[name], 1)
        assert (tensor.device_type, tensor.device_id) == export.__dlpack_device__() == (1, 0)
        assert tensor.data + tensor.byte_offset == cache.memory.host_pool[1:, 1].ctypes.data
        assert tensor.shape == export.shape
        itemsize = tensor.bits // 8
        assert tuple(step * itemsize for step in tensor.strides) == export.strides
        assert (head is not None) == (version is not None and version[0] >= 1)
        if head is not None:
            assert (head.major, head.minor, head.flags) == (1, int(name.startswith("float8")), 0)
        raw, _ = described(cache.memory.export("host", raw=True).__dlpack__(max_version=version))
        storage = cache.layout.storage_dtype
        assert raw.bits == 8 * storage.itemsize
        assert raw.code == (1 if name in dlpack.TYPE_CODES else TYPES[name][0])
        del capsule


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_types_without_a_name_in_numpy_go_raw_with_a_tag(dtype: str) -> None:
    with open_pool(BlockLayout(2, 2, 8, 4, dtype=dtype)) as cache:
        export, raw = cache.memory.export(), cache.memory.export(raw=True)
        assert (export.dtype, raw.dtype) == (dtype, cache.layout.storage_dtype.name)
        view = np.from_dlpack(raw)
        assert view.dtype == cache.layout.storage_dtype and view.ctypes.data == cache.memory.device_pool.ctypes.data
        assert np.asarray(export).dtype == view.dtype
        del view
        with pytest.raises((BufferError, RuntimeError)):
            np.from_dlpack(export)


def test_what_is_read_only_stays_so_in_every_protocol() -> None:
    with open_pool() as cache:
        export = cache.memory.export("host", writable=False)[2]
        assert not np.asarray(export).flags.writeable and not np.from_dlpack(export).flags.writeable
        assert not as_strided("x", export).writable and as_strided("x", cache.memory.export()).writable
        _, head = described(export.__dlpack__(max_version=(1, 0)))
        assert head is not None and head.flags == dlpack.READ_ONLY
        with pytest.raises(BufferError, match=r"read-only.*max_version=\(1, 0\), or copy=True"):
            export.__dlpack__()


def test_a_copy_is_made_where_it_is_asked_for_and_nowhere_else() -> None:
    with open_pool() as cache:
        export = cache.memory.export("host", writable=False)
        capsule = export.__dlpack__(max_version=(1, 0), copy=True)
        tensor, head = described(capsule)
        assert tensor.data != cache.memory.host_pool.ctypes.data and head is not None and head.flags == dlpack.COPIED
        copied = np.asarray(export, copy=True)
        copied[...] = 1
        assert not cache.memory.host_pool.any() and np.asarray(export, np.float32).dtype == np.float32
        assert not np.shares_memory(copied, cache.memory.host_pool)
        for _ in range(2):
            in_place, _ = described(export.__dlpack__(max_version=(1, 0), copy=False))
            assert in_place.data == cache.memory.host_pool.ctypes.data
        # A copy is nobody's view: the pool closes while it lives.
    assert copied.all()


def test_capsules_that_cannot_be_given_are_refused() -> None:
    with open_pool() as cache:
        seq = cache.add_sequence([1, 2, 3])
        for producer in (cache.memory.export(), cache.block_table(seq)):
            for name, value in (("dl_device", (2, 0)), ("stream", 1), ("stream", 0)):
                with pytest.raises((BufferError, ValueError), match=f"{name}: expected .*"):
                    producer.__dlpack__(max_version=(1, 0), **{name: value})
            assert producer.__dlpack__(max_version=(1, 0), dl_device=(1, 0), stream=-1) is not None
        assert not hasattr(cache.memory.export(), "__cuda_array_interface__")
        for name, value in (("tier", "gpu"), ("tier", None), ("writable", 1), ("raw", "yes")):
            with pytest.raises((TypeError, ValueError), match=f"{name}: .*{value!r}"):
                cache.memory.export(**{name: value})  # type: ignore[arg-type]
        cache.release(seq)


def test_block_tables_are_read_in_place_and_follow_the_sequences() -> None:
    with open_pool() as cache:
        seq = cache.add_sequence(list(range(9)))
        table = cache.block_table(seq)
        view = np.from_dlpack(table)
        assert view.ctypes.data == table.table.ctypes.data and not view.flags.writeable
        row = int(table.rows[0])
        np.testing.assert_array_equal(view[row, :3], table.dense()[0])
        cache.append_tokens(seq, list(range(8)))
        np.testing.assert_array_equal(view[row, :5], cache.block_table(seq).dense()[0])
        strided = as_strided("table", table)
        assert (strided.address, strided.writable, strided.kind, strided.itemsize) == (view.ctypes.data, False, "i", 4)
        with pytest.raises(BufferError, match="read-only"):
            table.__dlpack__()
        copied, _ = described(table.__dlpack__(copy=True))
        assert copied.data != view.ctypes.data
        cache.release(seq)


def test_exports_of_a_closed_pool_give_nothing() -> None:
    cache = open_pool()
    export = cache.memory.export()
    cache.close()
    for use in (export.__dlpack__, export.__array__, lambda: export[0].__dlpack__(), cache.memory.export):
        with pytest.raises(PoolClosed):
            use()


def test_capsules_that_are_none_or_too_new_are_refused() -> None:
    with open_pool() as cache:
        capsule = cache.memory.export().__dlpack__(max_version=(1, 0))
        _, head = dlpack.opened(capsule)
        assert head is not None
        head.major = 2
        with pytest.raises(BufferError, match=r"DLPack: expected a version below 2, got 2\.0"):
            dlpack.opened(capsule)
        head.major = 1
        del capsule
        name = ctypes.pythonapi.PyCapsule_New
        name.restype, name.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        for other in (name(8, b"used_dltensor", None), object()):
            with pytest.raises(ValueError, match="no DLPack capsule"):
                dlpack.opened(other)
