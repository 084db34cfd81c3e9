"""The memory of every group and part: exported and lent one by one, brought by the caller, and copied by the layout of
its own."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from groups_lab import FULL, NARROW, WIDE, WINDOWED, GroupEngine, T
from kvpool import KVCacheManager, MemoryOptions, PagedKV, gather_kv, scatter_kv
from kvpool.errors import PoolBusy
from tests.interop.arrays import aligned

A = list(range(100, 140))
PLACES = [(0, 0), (0, 1), (1, 0)]
LAYOUTS = {(0, 0): WIDE, (0, 1): NARROW, (1, 0): NARROW}


def open_groups(**options: Any) -> KVCacheManager:
    return KVCacheManager(groups=[FULL, WINDOWED], device_blocks=[6, 5], host_blocks=[4, 3], device="cpu", **options)


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize(("group", "part"), PLACES)
def test_an_export_is_the_memory_of_its_group_and_part(tier: str, group: int, part: int) -> None:
    with open_groups() as cache:
        memory = {"device": cache.memory.device_pools, "host": cache.memory.host_pools}
        pool, export = memory[tier][group][part], cache.memory.export(tier, group=group, part=part)
        assert (export.tier, export.group, export.part) == (tier, group, part)
        assert export.dtype == LAYOUTS[group, part].dtype_name
        for view in (np.from_dlpack(export), np.asarray(export)):
            assert (view.shape, view.strides, view.dtype) == (pool.shape, pool.strides, pool.dtype)
            assert view.ctypes.data == pool.ctypes.data
            view[...] = 7
        assert (pool == 7).all()
        assert sum((part == 7).sum() for pools in memory.values() for parts in pools for part in parts) == pool.size
        assert np.asarray(export[1:]).ctypes.data == pool[1:].ctypes.data and export[1:].group == group
        with pytest.raises(PoolBusy, match="views of exported memory live: 1"):
            cache.close()
        del view


@pytest.mark.parametrize("place", PLACES)
def test_a_view_keeps_the_memory_of_its_part_and_no_other(place: tuple[int, int]) -> None:
    alive: dict[tuple[int, int], Any] = {}
    left = iter(PLACES)

    def give(nbytes: int, alignment: int) -> Any:
        raw = aligned(nbytes)
        alive[next(left)] = weakref.ref(raw)
        return raw

    cache = open_groups(memory=MemoryOptions(device_memory=give))
    view = np.from_dlpack(cache.memory.export(group=place[0], part=place[1]))
    cache.close(force=True)
    del cache
    gc.collect()
    assert [name for name, raw in alive.items() if raw() is not None] == [place]
    del view
    gc.collect()
    assert all(raw() is None for raw in alive.values())


def test_what_is_exported_is_named() -> None:
    with open_groups() as cache:
        for group, part, name in (
            *((None, 0, "group"), (2, 0, "group"), ("a", 0, "group")),
            *((1, 1, "part"), (0, -1, "part"), (0, None, "part")),
        ):
            with pytest.raises((TypeError, ValueError), match=f"{name}: .*{part if name == 'part' else group}"):
                cache.memory.export(group=group, part=part)  # type: ignore[arg-type]
    with KVCacheManager(groups=[FULL], device_blocks=[6], device="cpu") as cache:
        for part, pool in enumerate(cache.memory.device_pools[0]):
            assert np.asarray(cache.memory.export(part=part)).ctypes.data == pool.ctypes.data


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize(("group", "part"), PLACES)
def test_kv_is_copied_into_and_out_of_each_part(tier: str, group: int, part: int) -> None:
    layout = LAYOUTS[group, part]
    with open_groups() as cache:
        pool = (cache.memory.device_pools if tier == "device" else cache.memory.host_pools)[group][part]
        paged = PagedKV.of_pool(layout, pool, tier)
        assert (paged.blocks, paged.tokens_per_block) == (pool.nbytes // layout.block_bytes, T)
        slots = np.random.default_rng(0).permutation(paged.blocks * T)[:9]
        shape = (layout.planes, layout.layers, 9, layout.kv_heads, layout.head_dim)
        source = np.random.default_rng(1).integers(0, 200, shape).astype(layout.storage_dtype)
        scatter_kv(paged, slots, source)
        out = np.zeros_like(source)
        gather_kv(paged, slots, out)
        np.testing.assert_array_equal(out, source)
        assert np.count_nonzero(pool) == np.count_nonzero(source)


def requests(engine: GroupEngine) -> None:
    """Evicts, offloads and onboards in every group, and compares every byte."""
    for first in (100, 200, 100):
        tokens = list(range(first, first + 17))
        sequence = engine.add(tokens)
        engine.cache.commit(sequence)
        engine.release(sequence)
    engine.cache.verify()
    assert engine.reusable(list(range(100, 118))) >= 16


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("as_function", [False, True])
def test_each_part_lies_in_memory_of_the_caller_and_works(device: str, as_function: bool) -> None:
    blocks = {"device": 6, "host": 5}
    mine = {tier: [aligned(count * LAYOUTS[place].block_bytes) for place in PLACES] for tier, count in blocks.items()}
    left = {tier: iter(arrays) for tier, arrays in mine.items()}
    options: dict[str, Any] = {
        f"{tier}_memory": (lambda nbytes, alignment, tier=tier: next(left[tier])) if as_function else mine[tier]
        for tier in mine
    }
    engine = GroupEngine([6, 6], [5, 5], device=device, memory=MemoryOptions(**options))
    for (group, part), at_device, at_host in zip(PLACES, mine["device"], mine["host"], strict=True):
        assert engine.cache.memory.device_pools[group][part].ctypes.data == at_device.ctypes.data
        assert engine.cache.memory.host_pools[group][part].ctypes.data == at_host.ctypes.data
    requests(engine)
    assert engine.findings() == []
    assert all(array.any() for arrays in mine.values() for array in arrays), "it was used, and stays"


def test_a_table_of_the_caller_has_the_rows_of_every_group() -> None:
    table = np.full((2, 3, 8), 77, np.int32)
    engine = GroupEngine([8, 8], memory=MemoryOptions(table=table), max_sequences=3, max_sequence_tokens=32)
    assert (table == -1).all()
    first, two = engine.add(A[:18]), engine.add(A[20:24])
    for group in (0, 1):
        block_table = engine.cache.block_table([first, two], group=group)
        assert np.shares_memory(block_table.table, table[group]) and not np.shares_memory(
            block_table.table, table[1 - group]
        )
        np.testing.assert_array_equal(table[group][block_table.rows], block_table.table[block_table.rows])
    engine.cache.commit([first, two])
    held = (table >= 0).sum(axis=2)
    assert sorted(held[0].tolist()) == [0, 1, 5] and sorted(held[1].tolist()) == [0, 1, 3], "the window has passed two"
    engine.release(first, two)
    assert (table == -1).all()
    assert engine.findings() == []


def test_a_table_for_other_groups_is_refused() -> None:
    for shape in ((3, 8), (1, 3, 8), (2, 8, 3), (6, 8)):
        memory = MemoryOptions(table=np.zeros(shape, np.int32))
        with pytest.raises(ValueError, match=r"table: expected \[groups, max_sequences, columns\] = \[2, 3, 8\], got"):
            open_groups(memory=memory, max_sequences=3, max_sequence_tokens=32)
