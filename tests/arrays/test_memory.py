"""Both tiers fit into memory that is there, have their shapes, and are given back."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.device import CpuDevice, get_device
from kvpool.device.memory.main_memory import available_ram
from kvpool.device.memory.pools import BLOCKS_MAX, MemoryPools
from kvpool.errors import DeviceError, InsufficientMemory, KVPoolError, PoolClosed
from tests.device.regions import BLOCKS, DEVICE_BLOCKS, HOST_BLOCKS, LAYOUTS, ids_of
from tests.interop.arrays import aligned

GIB = 1 << 30
LAYOUT = BlockLayout(2, 2, 4, 4)


class SmallDevice(CpuDevice):
    """A device that says how much it has, and counts what it gave."""

    def __init__(self, available: dict[str, int | None], one_memory: bool = False, fail_tier: str = "") -> None:
        super().__init__()
        self.available = available
        self.one_memory = one_memory
        self.fail_tier = fail_tier
        self.allocated: list[str] = []
        self.freed = 0

    def available_bytes(self, tier: str) -> int | None:
        return self.available[tier]

    def allocate(self, nbytes: int, tier: str, shared: bool = False) -> Any:
        if tier == self.fail_tier:
            raise MemoryError
        self.allocated.append(tier)
        return super().allocate(nbytes, tier, shared)

    def free(self, array: Any) -> None:
        self.freed += 1
        super().free(array)


def make(device_blocks: int = 6, host_blocks: int = 5, layout: BlockLayout = LAYOUT) -> MemoryPools:
    return MemoryPools(get_device("cpu"), layout, device_blocks, host_blocks)


def test_views_are_of_the_memory_that_the_device_copies() -> None:
    pools = make()
    pools.device_pool[:, :, 2] = 7
    pools.device.copy_blocks(np.array([[2, 6 + 4, 4, 0]]))
    assert (pools.host_pool[4] == 7).all()
    assert not pools.host_pool[:4].any()
    assert np.shares_memory(pools.device_pool, pools.flat("device"))


# Giving it back


def test_views_outlive_the_pools_and_memory_goes_with_the_last_one() -> None:
    pools = make()
    pools.device_pool[...] = 3
    view = pools.device_pool[0]
    memory = [weakref.ref(pools.flat("device").base), weakref.ref(pools.flat("host").base)]
    pools.close()
    gc.collect()
    assert (view == 3).all()
    assert memory[0]() is not None and memory[1]() is None
    del view
    gc.collect()
    assert memory[0]() is None


# What does not fit


def test_what_does_not_fit_says_how_much_was_asked_for_and_how_much_there_is() -> None:
    block = LAYOUT.block_bytes
    device = SmallDevice({"device": 4 * GIB, "host": block})
    with pytest.raises(InsufficientMemory) as caught:
        MemoryPools(device, LAYOUT, 1, 2)
    assert (caught.value.requested, caught.value.available, caught.value.tier) == (2 * block, block, "host")
    assert (
        f"{2 * block} bytes" in str(caught.value)
        and f"{block} bytes" in str(caught.value)
        and "GiB" in str(caught.value)
    )
    assert isinstance(caught.value, MemoryError) and isinstance(caught.value, KVPoolError)
    assert device.allocated == []
    MemoryPools(device, LAYOUT, 1, 1)


def test_tiers_of_one_memory_have_to_fit_together() -> None:
    block = LAYOUT.block_bytes
    room = {"device": 3 * block, "host": 3 * block}
    with pytest.raises(InsufficientMemory, match="device and host") as caught:
        MemoryPools(SmallDevice(dict(room), one_memory=True), LAYOUT, 2, 2)
    assert (caught.value.requested, caught.value.available) == (4 * block, 3 * block)
    MemoryPools(SmallDevice(dict(room), one_memory=True), LAYOUT, 2, 1)
    MemoryPools(SmallDevice(dict(room)), LAYOUT, 2, 2)
    with pytest.raises(InsufficientMemory, match="^device tier"):
        MemoryPools(SmallDevice(dict(room), one_memory=True), LAYOUT, 4, 0)


def test_a_device_that_does_not_know_its_room_is_asked_for_the_memory() -> None:
    MemoryPools(SmallDevice({"device": None, "host": None}), LAYOUT, 1, 1)
    with pytest.raises(InsufficientMemory) as caught:
        MemoryPools(SmallDevice({"device": None, "host": None}, fail_tier="device"), LAYOUT, 1, 1)
    assert caught.value.requested == LAYOUT.block_bytes


def test_more_than_any_machine_has_is_refused_before_it_is_allocated() -> None:
    layout = BlockLayout(2**20, 2**20, 2**20, 16)
    with pytest.raises(InsufficientMemory):
        MemoryPools(get_device("cpu"), layout, BLOCKS_MAX, 0)
    with pytest.raises(InsufficientMemory):
        MemoryPools(SmallDevice({"device": None, "host": None}), layout, BLOCKS_MAX, 0)


# Bad input


def test_ids_of_both_tiers_together_are_int32() -> None:
    with pytest.raises(ValueError, match="device_blocks, host_blocks: expected up to 2147483647 together, got "):
        make(2**30, 2**30)


# How much there is


@pytest.fixture
def write(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Lay out a made-up proc and sys."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


MEMINFO = {"proc/meminfo": "MemTotal: 4096 kB\nMemAvailable: 1024 kB\n"}


def test_available_ram_is_what_the_kernel_says_where_nothing_limits_it(write: Any) -> None:
    assert available_ram(write(MEMINFO)) == 1 << 20
    write({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"})
    assert available_ram(write({})) == 1 << 20


def test_available_ram_is_unknown_where_the_system_says_nothing(tmp_path: Path, write: Any) -> None:
    assert available_ram(tmp_path) is None
    assert available_ram(write({"proc/meminfo": "MemTotal: 4096 kB\n"})) is None
    assert available_ram(write({"proc/meminfo": "MemAvailable: lots\n"})) is None


def test_the_tightest_group_above_the_process_decides(write: Any) -> None:
    groups = "sys/fs/cgroup"
    root = write(
        MEMINFO
        | {
            "proc/self/cgroup": "0::/a/b\n",
            f"{groups}/a/memory.max": "9000\n",
            f"{groups}/a/memory.current": "5000\n",
            f"{groups}/a/memory.stat": "anon 1\ninactive_file 500\n",
            f"{groups}/a/b/memory.max": "max\n",
            f"{groups}/a/b/memory.current": "4000\n",
        }
    )
    assert available_ram(root) == 9000 - 5000 + 500


def test_a_group_over_its_limit_has_no_room(write: Any) -> None:
    root = write(
        MEMINFO
        | {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "10\n", "sys/fs/cgroup/memory.current": "50\n"}
    )
    assert available_ram(root) == 0


def test_groups_of_version_one_count_and_a_name_from_outside_falls_back_to_the_mount(write: Any) -> None:
    memory = "sys/fs/cgroup/memory"
    root = write(
        MEMINFO
        | {
            "proc/self/cgroup": "5:devices:/x\n4:memory:/docker/abc\n0::/\n",
            f"{memory}/memory.limit_in_bytes": "8000\n",
            f"{memory}/memory.usage_in_bytes": "3000\n",
            f"{memory}/memory.stat": "total_inactive_file 1000\n",
        }
    )
    assert available_ram(root) == 6000


def test_nonsense_in_group_files_is_passed_over(write: Any) -> None:
    root = write(MEMINFO | {"proc/self/cgroup": "garbage\n0::/a\n", "sys/fs/cgroup/a/memory.max": "soon\n"})
    assert available_ram(root) == 1 << 20


def test_the_cpu_device_reports_the_memory_of_this_machine() -> None:
    available = get_device("cpu").available_bytes("host")
    assert available is None or available > 0


# ----------------------------------------
# Memory of pools of several groups and parts: one allocation per tier and part, seen as arrays, all or nothing.


PARTS = [(group, part) for group, parts in enumerate(LAYOUTS) for part in range(len(parts))]
SIZES = {
    tier: [blocks[group] * LAYOUTS[group][part].block_bytes for group, part in PARTS]
    for tier, blocks in (("device", DEVICE_BLOCKS), ("host", HOST_BLOCKS))
}
ROOM = {"device": None, "host": None}


def make_groups(device: Any = None, **options: Any) -> MemoryPools:
    return MemoryPools(device or CpuDevice(), LAYOUTS, DEVICE_BLOCKS, HOST_BLOCKS, **options)


def test_every_part_has_arrays_of_its_layout_for_the_blocks_of_its_group() -> None:
    pools = make_groups()
    assert [len(parts) for parts in pools.device_pools] == [len(parts) for parts in pools.host_pools] == [2, 1, 1, 1]
    for group, part in PARTS:
        layout = LAYOUTS[group][part]
        assert pools.layouts[group][part] is layout
        assert pools.device_pools[group][part].shape == layout.device_shape(DEVICE_BLOCKS[group])
        assert pools.host_pools[group][part].shape == layout.host_shape(HOST_BLOCKS[group])
        assert pools.device_pools[group][part].dtype == pools.host_pools[group][part].dtype == layout.storage_dtype
        for tier, views in (("device", pools.device_pools), ("host", pools.host_pools)):
            view = views[group][part]
            assert pools.address(tier, group, part) == pools.flat(tier, group, part).ctypes.data == view.ctypes.data
            assert view.nbytes == pools.flat(tier, group, part).nbytes and not view.any()
    assert (pools.device_blocks, pools.host_blocks) == (sum(DEVICE_BLOCKS), sum(HOST_BLOCKS))
    pools.close()


def test_one_group_of_one_part_is_the_same_in_both_forms() -> None:
    layout = LAYOUTS[0][0]
    for form, blocks in ((layout, (3, 2)), ([layout], ([3], [2])), ([[layout]], ((3,), (2,)))):
        pools = MemoryPools(CpuDevice(), form, *blocks)
        assert pools.layout is layout and pools.layouts == ((layout,),)
        assert np.shares_memory(pools.device_pool, pools.device_pools[0][0]) and np.shares_memory(
            pools.host_pool, pools.flat("host")
        )
        pools.close()


@pytest.mark.parametrize(
    "layouts", [LAYOUTS, LAYOUTS[:1], [LAYOUTS[1], LAYOUTS[2]]], ids=["groups", "parts", "groups of one part"]
)
def test_what_is_the_only_one_is_refused_where_there_are_several(layouts: Any) -> None:
    pools = MemoryPools(CpuDevice(), layouts, [1] * len(layouts), [0] * len(layouts))
    instead = {"layout": "groups[group].layouts"}
    for name in ("layout", "device_pool", "host_pool"):
        with pytest.raises(
            ValueError, match=re.escape(f"expected {instead.get(name, f'{name}s[group][part]')}, got groups of ")
        ):
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
    single, pools = make(), make_groups()
    for each in (single, single, pools, pools):
        each.close()
        assert each.closed
    for call in (
        lambda: single.device_pool,
        lambda: single.host_pool,
        lambda: pools.device_pools,
        lambda: pools.host_pools,
        lambda: pools.flat("device"),
        lambda: pools.addresses(np.arange(1)),
    ):
        with pytest.raises(PoolClosed):
            call()


# What does not fit


@pytest.mark.parametrize("tier", ["device", "host"])
def test_the_sum_of_all_parts_has_to_fit_into_a_tier(tier: str) -> None:
    whole = sum(SIZES[tier])
    with pytest.raises(InsufficientMemory, match=f"^{tier} tier") as caught:
        make_groups(SmallDevice(ROOM | {tier: whole - 1}))
    assert (caught.value.requested, caught.value.available) == (whole, whole - 1)
    make_groups(SmallDevice(ROOM | {tier: whole})).close()


@pytest.mark.parametrize("fail_at", range(2 * len(PARTS)))
def test_when_any_allocation_fails_those_before_it_are_given_back(fail_at: int) -> None:
    class Failing(SmallDevice):
        def allocate(self, nbytes: int, tier: str, shared: bool = False) -> Any:
            if len(self.allocated) == fail_at:
                raise MemoryError
            return super().allocate(nbytes, tier, shared)

    device = Failing(dict(ROOM))
    with pytest.raises(InsufficientMemory) as caught:
        make_groups(device)
    tier, place = ("device", "host")[fail_at // len(PARTS)], fail_at % len(PARTS)
    assert (caught.value.tier, caught.value.requested) == (tier, SIZES[tier][place])
    assert device.freed == fail_at


def test_when_bind_fails_no_part_stays_allocated() -> None:
    device = SmallDevice(dict(ROOM))
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

    device = Refusing(dict(ROOM))
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
    device = SmallDevice(dict(ROOM))
    pools = make_groups(device, device_memory=mine["device"], host_memory=tuple(mine["host"]))
    assert device.allocated == ["host"]
    for place, (group, part) in enumerate(PARTS):
        for tier in ("device", "host"):
            if mine[tier][place] is not None:
                assert pools.address(tier, group, part) == mine[tier][place].ctypes.data
    pools.close()


def test_memory_of_the_caller_needs_no_room_and_the_rest_does() -> None:
    arrays = [aligned(size) for size in SIZES["device"]]
    rest = SIZES["device"][3]
    for room in (rest, rest - 1):
        device = SmallDevice({"device": room, "host": None})
        make_groups(SmallDevice({"device": 0, "host": None}), device_memory=arrays).close()
        if room == rest:
            make_groups(device, device_memory=[*arrays[:3], None, arrays[4]]).close()
        else:
            with pytest.raises(InsufficientMemory, match="^device tier"):
                make_groups(device, device_memory=[*arrays[:3], None, arrays[4]])


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
    device = SmallDevice(dict(ROOM))
    with pytest.raises(ValueError, match=rf"device_memory\[0\]: .*got some that {tier}_memory\[{place}\] has too"):
        make_groups(device, device_memory=mine["device"], host_memory=mine["host"])
    assert device.freed == 2 * len(PARTS)
    mine[tier][place] = aligned(SIZES[tier][place])
    make_groups(device, device_memory=mine["device"], host_memory=mine["host"]).close()


def test_more_blocks_than_ids_are_refused() -> None:
    device = SmallDevice(dict(ROOM))
    with pytest.raises(ValueError, match=f"device_blocks, host_blocks: expected up to {BLOCKS_MAX} together, got "):
        MemoryPools(device, LAYOUTS[:2], [2**30, 2**30], [0, 0])
    assert not device.allocated


def test_groups_without_a_host_tier_have_empty_arrays() -> None:
    pools = MemoryPools(CpuDevice(), LAYOUTS, DEVICE_BLOCKS, [0] * len(LAYOUTS))
    assert pools.host_blocks == 0 and all(pool.size == 0 for parts in pools.host_pools for pool in parts)
    pools.close()
