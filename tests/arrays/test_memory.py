"""Both tiers fit into memory that is there, have their shapes, and are given back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.arrays.layout import BlockLayout
from kvpool.device import CpuDevice, get_device
from kvpool.device.main_memory import available_ram
from kvpool.errors import InsufficientMemory, KVPoolError, PoolClosed
from kvpool.memory.pools import BLOCKS_MAX, MemoryPools

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


@pytest.mark.parametrize("order", ["layer_first", "block_first"])
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
def test_pools_are_arrays_of_the_shape_and_type_of_the_layout(order: str, dtype: str) -> None:
    layout = BlockLayout(2, 2, 4, 4, dtype=dtype, order=order)
    pools = make(layout=layout)
    assert pools.device_pool.shape == layout.device_shape(6)
    assert pools.host_pool.shape == layout.host_shape(5)
    assert pools.device_pool.dtype == pools.host_pool.dtype == layout.storage_dtype
    assert not pools.device_pool.any() and not pools.host_pool.any()
    assert pools.flat("device").nbytes == 6 * layout.block_bytes
    assert pools.flat("host").nbytes == 5 * layout.block_bytes


def test_views_are_of_the_memory_that_the_device_copies() -> None:
    pools = make()
    pools.device_pool[:, :, 2] = 7
    pools.device.copy_blocks(np.array([[2, 6 + 4, 4, 0]]))
    assert (pools.host_pool[4] == 7).all()
    assert not pools.host_pool[:4].any()
    assert np.shares_memory(pools.device_pool, pools.flat("device"))


def test_without_a_host_tier_its_arrays_are_empty() -> None:
    pools = make(host_blocks=0)
    assert pools.host_pool.shape == LAYOUT.host_shape(0)
    assert pools.flat("host").size == 0


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


def test_closed_pools_say_so_and_close_again() -> None:
    pools = make()
    assert not pools.closed
    pools.close()
    pools.close()
    assert pools.closed
    for name in ("device_pool", "host_pool"):
        with pytest.raises(PoolClosed):
            getattr(pools, name)


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


def test_when_the_second_tier_fails_the_first_is_given_back() -> None:
    device = SmallDevice({"device": None, "host": None}, fail_tier="host")
    with pytest.raises(InsufficientMemory, match="^host tier"):
        MemoryPools(device, LAYOUT, 1, 1)
    assert device.allocated == ["device"] and device.freed == 1


def test_when_bind_fails_nothing_stays_allocated() -> None:
    device = SmallDevice({"device": None, "host": None})
    first = MemoryPools(device, LAYOUT, 1, 1)
    with pytest.raises(ValueError, match="device"):
        MemoryPools(device, LAYOUT, 1, 1)
    assert device.freed == 2
    assert not first.device_pool.any()


def test_more_than_any_machine_has_is_refused_before_it_is_allocated() -> None:
    layout = BlockLayout(2**20, 2**20, 2**20, 16)
    with pytest.raises(InsufficientMemory):
        MemoryPools(get_device("cpu"), layout, BLOCKS_MAX, 0)
    with pytest.raises(InsufficientMemory):
        MemoryPools(SmallDevice({"device": None, "host": None}), layout, BLOCKS_MAX, 0)


# Bad input


def test_ids_of_both_tiers_together_are_int32() -> None:
    with pytest.raises(ValueError, match="device_blocks=.* host_blocks=.* at most 2147483647"):
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


def test_the_cpu_device_tells_the_memory_of_this_machine() -> None:
    available = get_device("cpu").available_bytes("host")
    assert available is None or available > 0
