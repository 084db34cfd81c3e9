"""Both tiers fit into memory that is there, have their shapes, and are given back."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.device import CpuDevice
from kvpool.device.memory.main_memory import available_ram
from kvpool.device.memory.pools import BLOCKS_MAX, MemoryPools
from kvpool.errors import DeviceError, InsufficientMemory, KVPoolError, PoolClosed
from tests.device.regions import BLOCKS, DEVICE_BLOCKS, HOST_BLOCKS, LAYOUTS, ids_of
from tests.interop.arrays import aligned

LAYOUT = BlockLayout(2, 2, 4, 4)


class SmallDevice(CpuDevice):
    """A device that reports how much it has, counts what it gave, and fails at an allocation if it is set to."""

    def __init__(self, available: dict[str, int | None], one_memory: bool = False, fail_at: int | None = None) -> None:
        super().__init__()
        self.available = available
        self.one_memory = one_memory
        self.fail_at = fail_at
        self.allocated: list[str] = []
        self.freed = 0

    def available_bytes(self, tier: str) -> int | None:
        return self.available[tier]

    def allocate(self, nbytes: int, tier: str, shared: bool = False) -> Any:
        if len(self.allocated) == self.fail_at:
            raise MemoryError
        self.allocated.append(tier)
        return super().allocate(nbytes, tier, shared)

    def free(self, array: Any) -> None:
        self.freed += 1
        super().free(array)


# Giving it back


def test_views_outlive_the_pools_and_memory_goes_with_the_last_one() -> None:
    pools = MemoryPools(CpuDevice(), LAYOUT, 6, 5)
    pools.device_pool[...] = 3
    view = pools.device_pool[0]
    device_memory, host_memory = (weakref.ref(pools.flat(tier).base) for tier in ("device", "host"))
    pools.close()
    gc.collect()
    assert (view == 3).all()
    assert device_memory() is not None and host_memory() is None
    del view
    gc.collect()
    assert device_memory() is None


# What does not fit


@pytest.mark.parametrize("tier", ["device", "host"])
def test_the_sum_of_all_parts_has_to_fit_into_a_tier(tier: str) -> None:
    whole = sum(SIZES[tier])
    device = SmallDevice(ROOM | {tier: whole - 1})
    with pytest.raises(InsufficientMemory, match=rf"^{tier} tier.*{whole} bytes.*GiB.*{whole - 1} bytes") as caught:
        make_groups(device)
    assert (caught.value.requested, caught.value.available, caught.value.tier) == (whole, whole - 1, tier)
    assert isinstance(caught.value, MemoryError) and isinstance(caught.value, KVPoolError)
    assert device.allocated == []
    make_groups(SmallDevice(ROOM | {tier: whole})).close()


def test_more_than_any_machine_has_is_refused_before_it_is_allocated() -> None:
    device = SmallDevice(ROOM)
    with pytest.raises(InsufficientMemory):
        MemoryPools(device, BlockLayout(2**20, 2**20, 2**20, 16), BLOCKS_MAX, 0)
    with pytest.raises(ValueError, match=f"device_blocks, host_blocks: expected up to {BLOCKS_MAX} together, got "):
        MemoryPools(device, LAYOUTS[:2], [2**30, 2**30], [0, 0])
    assert not device.allocated


def test_tiers_of_one_memory_have_to_fit_together() -> None:
    block = LAYOUT.block_bytes
    room: dict[str, int | None] = {"device": 3 * block, "host": 3 * block}
    for one_memory, *blocks in ((True, 2, 1), (False, 2, 2)):
        MemoryPools(SmallDevice(room, one_memory), LAYOUT, *blocks)
    with pytest.raises(InsufficientMemory, match="device and host") as caught:
        MemoryPools(SmallDevice(room, one_memory=True), LAYOUT, 2, 2)
    assert (caught.value.requested, caught.value.available) == (4 * block, 3 * block)
    with pytest.raises(InsufficientMemory, match="^device tier"):
        MemoryPools(SmallDevice(room, one_memory=True), LAYOUT, 4, 0)


# How much there is


GROUPS, OLD_GROUPS = "sys/fs/cgroup", "sys/fs/cgroup/memory"
MEMINFO = {"proc/meminfo": "MemTotal: 4096 kB\nMemAvailable: 1024 kB\n"}
TOP = {**MEMINFO, "proc/self/cgroup": "0::/\n", f"{GROUPS}/memory.current": "50\n"}
SYSTEMS: dict[str, tuple[dict[str, str], int | None]] = {
    "an empty system": ({}, None),
    "no available memory": ({"proc/meminfo": "MemTotal: 4096 kB\n"}, None),
    "nonsense": ({"proc/meminfo": "MemAvailable: lots\n"}, None),
    "no groups": (MEMINFO, 1 << 20),
    "no limit": (TOP | {f"{GROUPS}/memory.max": "max\n"}, 1 << 20),
    "over the limit": (TOP | {f"{GROUPS}/memory.max": "10\n"}, 0),
    "nonsense in a group": (
        MEMINFO | {"proc/self/cgroup": "garbage\n0::/a\n", f"{GROUPS}/a/memory.max": "soon\n"},
        1 << 20,
    ),
    "a tight group above a loose one": (
        MEMINFO
        | {
            "proc/self/cgroup": "0::/a/b\n",
            f"{GROUPS}/a/memory.max": "9000\n",
            f"{GROUPS}/a/memory.current": "5000\n",
            f"{GROUPS}/a/memory.stat": "anon 1\ninactive_file 500\n",
            f"{GROUPS}/a/b/memory.max": "max\n",
            f"{GROUPS}/a/b/memory.current": "4000\n",
        },
        9000 - 5000 + 500,
    ),
    "a group of version one, by a name from outside": (
        MEMINFO
        | {
            "proc/self/cgroup": "5:devices:/x\n4:memory:/docker/abc\n0::/\n",
            f"{OLD_GROUPS}/memory.limit_in_bytes": "8000\n",
            f"{OLD_GROUPS}/memory.usage_in_bytes": "3000\n",
            f"{OLD_GROUPS}/memory.stat": "total_inactive_file 1000\n",
        },
        6000,
    ),
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_available_ram_is_what_the_kernel_and_the_tightest_group_leave(tmp_path: Path, system: str) -> None:
    files, available = SYSTEMS[system]
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_ram(tmp_path) == available


# ----------------------------------------
# Memory of pools of several groups and parts: one allocation per tier and part, seen as arrays, all or nothing.


PARTS = [(group, part) for group, parts in enumerate(LAYOUTS) for part in range(len(parts))]
SIZES = {
    tier: [blocks[group] * LAYOUTS[group][part].block_bytes for group, part in PARTS]
    for tier, blocks in (("device", DEVICE_BLOCKS), ("host", HOST_BLOCKS))
}
ROOM: dict[str, int | None] = {"device": None, "host": None}


def make_groups(device: Any = None, **options: Any) -> MemoryPools:
    return MemoryPools(device or CpuDevice(), LAYOUTS, DEVICE_BLOCKS, HOST_BLOCKS, **options)


def test_every_part_has_arrays_of_its_layout_for_the_blocks_of_its_group() -> None:
    pools = make_groups()
    assert [len(parts) for parts in pools.device_pools] == [len(parts) for parts in pools.host_pools] == [2, 1, 1, 1]
    for group, part in PARTS:
        layout = LAYOUTS[group][part]
        for tier, views, shape in (
            ("device", pools.device_pools, layout.device_shape(DEVICE_BLOCKS[group])),
            ("host", pools.host_pools, layout.host_shape(HOST_BLOCKS[group])),
        ):
            view, flat = views[group][part], pools.flat(tier, group, part)
            assert (view.shape, view.dtype, view.nbytes) == (shape, layout.storage_dtype, flat.nbytes)
            assert pools.address(tier, group, part) == flat.ctypes.data == view.ctypes.data and not view.any()
    pools.close()


@pytest.mark.parametrize("layouts", [LAYOUTS, LAYOUTS[:1]], ids=["groups", "parts"])
def test_what_is_the_only_one_is_refused_where_there_are_several(layouts: Any) -> None:
    pools = MemoryPools(CpuDevice(), layouts, [1] * len(layouts), [0] * len(layouts))
    for name, instead in (
        ("layout", "groups[group].layouts"),
        ("device_pool", "device_pools[group][part]"),
        ("host_pool", "host_pools[group][part]"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"expected {instead}, got groups of ")):
            getattr(pools, name)
    pools.close()


def test_the_address_of_a_block_is_where_its_bytes_begin_in_the_first_part_of_its_group() -> None:
    pools = make_groups()
    expected = {}
    for group, (layout, *_) in enumerate(LAYOUTS):
        on_device = np.moveaxis(pools.device_pools[group][0], 2 if layout.order == "layer_first" else 0, 0)
        for block, view in zip(ids_of(group), [*on_device, *pools.host_pools[group][0]], strict=True):
            expected[block] = view.ctypes.data
    random = np.random.default_rng(0)
    for ids in (np.arange(BLOCKS), random.permutation(BLOCKS), np.array([], np.int64), np.array([BLOCKS - 1])):
        assert pools.addresses(ids).tolist() == [expected[block] for block in ids.tolist()]
    pools.close()


def test_closed_pools_say_so_and_close_again() -> None:
    single, pools = MemoryPools(CpuDevice(), LAYOUT, 6, 5), make_groups()
    for each in (single, single, pools, pools):
        each.close()
        assert each.closed
    for call in (
        lambda: single.device_pool,
        lambda: pools.host_pools,
        lambda: pools.flat("device"),
        lambda: pools.addresses(np.arange(1)),
    ):
        with pytest.raises(PoolClosed):
            call()


# What does not fit


@pytest.mark.parametrize("fail_at", range(2 * len(PARTS)))
def test_when_any_allocation_fails_those_before_it_are_given_back(fail_at: int) -> None:
    device = SmallDevice(ROOM, fail_at=fail_at)
    with pytest.raises(InsufficientMemory) as caught:
        make_groups(device)
    tier, place = ("device", "host")[fail_at // len(PARTS)], fail_at % len(PARTS)
    assert (caught.value.tier, caught.value.requested) == (tier, SIZES[tier][place])
    assert device.freed == fail_at


def test_when_bind_fails_no_part_stays_allocated() -> None:
    device = SmallDevice(ROOM)
    first = make_groups(device)
    with pytest.raises(ValueError, match="of its own"):
        make_groups(device)
    assert device.freed == 2 * len(PARTS) and len(device.allocated) == 4 * len(PARTS)
    first.device_pools[3][0][...] = 1
    first.close()
    assert device.freed == 4 * len(PARTS)


@pytest.mark.parametrize("refused", range(2 * len(PARTS)))
def test_memory_that_the_device_does_not_take_back_keeps_no_other_from_going_back(refused: int) -> None:
    class Refusing(SmallDevice):
        def free(self, array: Any) -> None:
            super().free(array)
            if self.freed == refused + 1:
                raise DeviceError("refused once")

    device = Refusing(ROOM)
    pools = make_groups(device)
    with pytest.raises(DeviceError, match="refused once"):
        pools.close()
    assert device.freed == 2 * len(PARTS)
    pools.close()
    assert device.freed == 2 * len(PARTS)


# Memory of the caller's


def test_a_list_is_the_memory_of_each_part_and_none_in_it_is_allocated() -> None:
    mine = {tier: [aligned(size) for size in sizes] for tier, sizes in SIZES.items()}
    mine["host"][1] = None
    device = SmallDevice(ROOM)
    pools = make_groups(device, device_memory=mine["device"], host_memory=tuple(mine["host"]))
    assert device.allocated == ["host"]
    for place, (group, part) in enumerate(PARTS):
        for tier in ("device", "host"):
            if mine[tier][place] is not None:
                assert pools.address(tier, group, part) == mine[tier][place].ctypes.data
    pools.close()


def test_memory_of_the_caller_needs_no_room_and_the_rest_does() -> None:
    arrays = [aligned(size) for size in SIZES["device"]]
    make_groups(SmallDevice({"device": 0, "host": None}), device_memory=arrays).close()
    rest, but_one = SIZES["device"][3], [*arrays[:3], None, arrays[4]]
    make_groups(SmallDevice({"device": rest, "host": None}), device_memory=but_one).close()
    with pytest.raises(InsufficientMemory, match="^device tier"):
        make_groups(SmallDevice({"device": rest - 1, "host": None}), device_memory=but_one)


def test_a_function_is_called_for_each_part_in_order() -> None:
    asked = []

    def give(nbytes: int, alignment: int) -> Any:
        asked.append((nbytes, alignment))
        return aligned(nbytes)

    make_groups(device_memory=give).close()
    assert asked == [(size, 64) for size in SIZES["device"]]


def test_memory_of_the_caller_for_several_parts_is_refused_by_place() -> None:
    for tier, sizes in SIZES.items():
        right = [aligned(size) for size in sizes]
        for wrong in (right[:-1], [*right, right[0]], right[0], 7, np.zeros(len(PARTS))):
            with pytest.raises(ValueError, match=f"{tier}_memory: expected None, a function or a list of 5"):
                make_groups(**{f"{tier}_memory": wrong})
        with pytest.raises(ValueError, match=rf"{tier}_memory\[1\]: expected exactly.*got .*"):
            make_groups(**{f"{tier}_memory": [right[0], aligned(64), *right[2:]]})


@pytest.mark.parametrize(("tier", "place"), [("device", 3), ("host", 0), ("host", 4)])
def test_no_two_parts_or_tiers_of_the_caller_share_bytes(tier: str, place: int) -> None:
    mine = {name: [aligned(size) for size in sizes] for name, sizes in SIZES.items()}
    raw = aligned(SIZES["device"][0] + SIZES[tier][place])
    mine["device"][0] = raw[: SIZES["device"][0]]
    start = (SIZES["device"][0] - 1) // 64 * 64
    mine[tier][place] = raw[start : start + SIZES[tier][place]]
    device = SmallDevice(ROOM)
    with pytest.raises(ValueError, match=rf"device_memory\[0\]: .*got some that {tier}_memory\[{place}\] has too"):
        make_groups(device, device_memory=mine["device"], host_memory=mine["host"])
    assert device.freed == 2 * len(PARTS)
    mine[tier][place] = aligned(SIZES[tier][place])
    make_groups(device, device_memory=mine["device"], host_memory=mine["host"]).close()
