"""Memory of pools of several groups and parts: one allocation per tier and part, seen as arrays, all or nothing."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from kvpool.device import CpuDevice
from kvpool.errors import DeviceError, InsufficientMemory, PoolClosed
from kvpool.memory.pools import BLOCKS_MAX, MemoryPools
from tests.arrays.test_memory import SmallDevice
from tests.device.regions import BLOCKS, DEVICE_BLOCKS, HOST_BLOCKS, LAYOUTS, ids_of
from tests.interop.arrays import aligned

PARTS = [(group, part) for group, parts in enumerate(LAYOUTS) for part in range(len(parts))]
SIZES = {
    tier: [blocks[group] * LAYOUTS[group][part].block_bytes for group, part in PARTS]
    for tier, blocks in (("device", DEVICE_BLOCKS), ("host", HOST_BLOCKS))
}
ROOM = {"device": None, "host": None}


def make(device: Any = None, **options: Any) -> MemoryPools:
    return MemoryPools(device or CpuDevice(), LAYOUTS, DEVICE_BLOCKS, HOST_BLOCKS, **options)


def test_every_part_has_arrays_of_its_layout_for_the_blocks_of_its_group() -> None:
    pools = make()
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
        with pytest.raises(ValueError, match=re.escape(instead.get(name, f"{name}s[group][part]")) + "$"):
            getattr(pools, name)
    pools.close()


def test_the_address_of_a_block_is_where_its_bytes_begin_in_the_first_part_of_its_group() -> None:
    pools = make()
    expected = {}
    for group, (layout, *_) in enumerate(LAYOUTS):
        on_device = np.moveaxis(pools.device_pools[group][0], 2 if layout.order == "layer_first" else 0, 0)
        for block, view in zip(ids_of(group), [*on_device, *pools.host_pools[group][0]], strict=True):
            expected[block] = view.ctypes.data
    random = np.random.default_rng(0)
    for ids in (np.arange(BLOCKS), random.permutation(BLOCKS), np.array([], np.int64), np.array([BLOCKS - 1])):
        assert pools.addresses(ids).tolist() == [expected[block] for block in ids.tolist()]
    pools.close()


def test_closed_pools_of_groups_say_so() -> None:
    pools = make()
    pools.close()
    for call in (
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
        make(SmallDevice(ROOM | {tier: whole - 1}))
    assert (caught.value.requested, caught.value.available) == (whole, whole - 1)
    make(SmallDevice(ROOM | {tier: whole})).close()


@pytest.mark.parametrize("fail_at", range(2 * len(PARTS)))
def test_when_any_allocation_fails_those_before_it_are_given_back(fail_at: int) -> None:
    class Failing(SmallDevice):
        def allocate(self, nbytes: int, tier: str, shared: bool = False) -> Any:
            if len(self.allocated) == fail_at:
                raise MemoryError
            return super().allocate(nbytes, tier, shared)

    device = Failing(dict(ROOM))
    with pytest.raises(InsufficientMemory) as caught:
        make(device)
    tier, place = ("device", "host")[fail_at // len(PARTS)], fail_at % len(PARTS)
    assert (caught.value.tier, caught.value.requested) == (tier, SIZES[tier][place])
    assert device.freed == fail_at


def test_when_bind_fails_no_part_stays_allocated() -> None:
    device = SmallDevice(dict(ROOM))
    first = make(device)
    with pytest.raises(ValueError, match="of its own"):
        make(device)
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
    pools = make(device)
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
    pools = make(device, device_memory=mine["device"], host_memory=tuple(mine["host"]))
    assert device.allocated == ["host"]
    for place, (group, part) in enumerate(PARTS):
        for tier in ("device", "host"):
            if mine[tier][place] is not None:
                assert pools.address(tier, group, part) == mine[tier][place].ctypes.data
    pools.close()


def test_memory_of_the_caller_needs_no_room_and_the_rest_does() -> None:
    given = [aligned(size) for size in SIZES["device"]]
    rest = SIZES["device"][3]
    for room in (rest, rest - 1):
        device = SmallDevice({"device": room, "host": None})
        make(SmallDevice({"device": 0, "host": None}), device_memory=given).close()
        if room == rest:
            make(device, device_memory=[*given[:3], None, given[4]]).close()
        else:
            with pytest.raises(InsufficientMemory, match="^device tier"):
                make(device, device_memory=[*given[:3], None, given[4]])


def test_a_function_is_called_for_each_part_in_order() -> None:
    asked = []

    def give(nbytes: int, alignment: int) -> Any:
        asked.append((nbytes, alignment))
        return aligned(nbytes)

    make(device_memory=give).close()
    assert asked == [(size, 64) for size in SIZES["device"]]


def test_memory_of_the_caller_for_several_parts_is_refused_by_place() -> None:
    for tier, sizes in SIZES.items():
        right = [aligned(size) for size in sizes]
        for wrong in (right[:-1], [*right, right[0]], right[0], 7, np.zeros(len(PARTS))):
            with pytest.raises(ValueError, match=f"{tier}_memory: accepted are None, a function, and a list of 5"):
                make(**{f"{tier}_memory": wrong})
        with pytest.raises(ValueError, match=rf"{tier}_memory\[1\] has .* bytes: accepted are exactly"):
            make(**{f"{tier}_memory": [right[0], aligned(64), *right[2:]]})


@pytest.mark.parametrize(("tier", "place"), [("device", 3), ("host", 0), ("host", 4)])
def test_no_two_parts_or_tiers_of_the_caller_share_bytes(tier: str, place: int) -> None:
    mine = {name: [aligned(size) for size in sizes] for name, sizes in SIZES.items()}
    raw = aligned(SIZES["device"][0] + SIZES[tier][place])
    mine["device"][0] = raw[: SIZES["device"][0]]
    start = (SIZES["device"][0] - 1) // 64 * 64
    mine[tier][place] = raw[start : start + SIZES[tier][place]]
    device = SmallDevice(dict(ROOM))
    with pytest.raises(ValueError, match=rf"device_memory\[0\] and {tier}_memory\[{place}\] share bytes"):
        make(device, device_memory=mine["device"], host_memory=mine["host"])
    assert device.freed == 2 * len(PARTS)
    mine[tier][place] = aligned(SIZES[tier][place])
    make(device, device_memory=mine["device"], host_memory=mine["host"]).close()


def test_more_blocks_than_ids_are_refused() -> None:
    device = SmallDevice(dict(ROOM))
    with pytest.raises(ValueError, match=f"together they must be at most {BLOCKS_MAX}"):
        MemoryPools(device, LAYOUTS[:2], [2**30, 2**30], [0, 0])
    assert not device.allocated


def test_groups_without_a_host_tier_have_empty_arrays() -> None:
    pools = MemoryPools(CpuDevice(), LAYOUTS, DEVICE_BLOCKS, [0] * len(LAYOUTS))
    assert pools.host_blocks == 0 and all(pool.size == 0 for parts in pools.host_pools for pool in parts)
    pools.close()
