"""MemoryPools: the memory of both tiers, allocated on a device and seen as arrays."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arrays import Array, Int64s, dlpack
from kvpool.common.arrays.layout import BlockLayout, Tier
from kvpool.common.arrays.strided import StridedArray, as_strided
from kvpool.device.base import TIERS, Device
from kvpool.device.regions import BLOCKS_MAX, Part, Region, Regions
from kvpool.device.work import check_spans
from kvpool.errors import InsufficientMemory, PoolClosed

ADDRESSABLE_BYTES = sys.maxsize // 2
"""A bound for the bytes of a tier if the size of memory is unknown."""
ADOPTED_ALIGNMENT = 64
"""In bytes. Memory of the caller must start at a multiple of it, which is a cache line."""
_GONE = "the memory of this pool has been given back"


Layouts = tuple[tuple[BlockLayout, ...], ...]
"""The layouts of the parts of each group."""


class _Need(NamedTuple):
    """One allocation: memory of a tier for the blocks of a part. It may be given by the caller, in some form."""

    tier: str
    nbytes: int
    memory: Any
    name: str


class MemoryPools:
    """The two tiers of one pool. Allocates them on ``device`` and binds it to them.

    Parameters
    ----------
    device
        An open device that serves no other pool.
    layout
        Shape of a block. Or, for groups of blocks that differ, a sequence with one entry for each group: its layout, or
        a sequence with the layouts of its parts, which share the ids of the group and have equal ``tokens_per_block``.
    device_blocks, host_blocks
        Capacities. For groups, a sequence with one number for each. ``PoolConfig`` has checked them and the layouts.
    device_memory, host_memory
        None, an array, or a function (nbytes, alignment) that returns one: see ``KVCacheManager``. If there are several
        parts, a list with one of these for each part, group after group. A single function is called for each part.
    shared
        Whether other processes can open the memory that the device allocates.

    Attributes
    ----------
    layouts
        ``layouts[group][part]``.
    device_blocks, host_blocks
        Blocks of all groups together. Block ids are those of ``Device.bind``: device blocks of all groups, then host
        blocks of all groups.
    device_pools, host_pools
        ``[group][part]``: the memory in ``layout.storage_dtype``, shaped ``layout.device_shape(blocks)`` and
        ``layout.host_shape(blocks)`` for the blocks of the group.
    device_pool, host_pool
        The same arrays, for a pool with only one part.

    After ``close``, all of these attributes raise PoolClosed. Earlier views stay readable, and keep the memory until
    they are gone. ``device_pool`` and ``host_pool`` raise ValueError if there are several parts.

    Raises
    ------
    TypeError, ValueError
        For memory of the caller that does not fit, and more blocks than there are ids; the message names it.
    InsufficientMemory
        When the tiers do not fit; nothing stays allocated.
    """

    def __init__(
        self,
        device: Device,
        layout: Any,
        device_blocks: Any,
        host_blocks: Any = 0,
        device_memory: Any = None,
        host_memory: Any = None,
        shared: bool = False,
    ) -> None:
        self.device, self.shared = device, shared
        self.layouts: Layouts = tuple(map(_each, _each(layout)))
        counts = [_each(device_blocks), _each(host_blocks)]
        self.device_blocks, self.host_blocks = (sum(of_tier) for of_tier in counts)
        if self.device_blocks + self.host_blocks > BLOCKS_MAX:
            raise ValueError(
                f"device_blocks, host_blocks: expected up to {BLOCKS_MAX} together, got {self.device_blocks}, "
                f"{self.host_blocks}"
            )
        needs = _needs(self.layouts, counts, (device_memory, host_memory))
        _check_room(device, needs)
        regions = _regions(self.layouts, counts, _allocate(device, needs, shared))
        self._regions: Regions | None = regions
        self._places = [_places(regions, part) for part in range(max(map(len, self.layouts)))]
        try:
            device.bind(regions.all)
        except BaseException:
            self.close()
            raise

    @property
    def layout(self) -> BlockLayout:
        """The only layout."""
        self._only("layout", "groups[group].layouts")
        return self.layouts[0][0]

    @property
    def device_pools(self) -> tuple[tuple[Any, ...], ...]:
        return self._shaped("device")

    @property
    def host_pools(self) -> tuple[tuple[Array, ...], ...]:
        return self._shaped("host")

    def _shaped(self, tier: Tier) -> tuple[tuple[Any, ...], ...]:
        arrays = []
        for group, (parts, *blocks) in enumerate(self._open().all):
            each = (self.flat(tier, group, part) for part in range(len(parts)))
            flat_parts = zip(each, self.layouts[group], strict=True)
            arrays.append(tuple(shaped(flat, layout, tier, blocks[TIERS.index(tier)]) for flat, layout in flat_parts))
        return tuple(arrays)

    @property
    def device_pool(self) -> Any:
        self._only("device_pool", "device_pools[group][part]")
        return self.device_pools[0][0]

    @property
    def host_pool(self) -> Array:
        self._only("host_pool", "host_pools[group][part]")
        return self.host_pools[0][0]

    def flat(self, tier: str, group: int = 0, part: int = 0) -> Any:
        """The memory of a part as flat bytes: uint8[n]."""
        return self._open().all[group].parts[part][1 + TIERS.index(tier)]

    def address(self, tier: str, group: int = 0, part: int = 0) -> int:
        """The address of the first byte of a part in a tier."""
        return as_strided("pool", self.flat(tier, group, part)).address

    def addresses(self, ids: Int64s, part: int = 0) -> Int64s:
        """The address of the first byte of each block by id, in one part of its group. The bytes of a host block are
        contiguous.

        It is 0 for a block whose group has no such part.
        """
        self._open()
        first, end, base, step = self._places[part]
        place = np.searchsorted(end, ids, "right")
        starts: Int64s = base[place] + (ids - first[place]) * step[place]
        return starts

    @property
    def closed(self) -> bool:
        return self._regions is None

    def close(self) -> None:
        """Free the memory. The device must have finished its copies. A second call does nothing.

        Frees everything, then raises one error of the device, if there was any.
        """
        regions, self._regions = self._regions, None
        _free(self.device, regions.pools if regions is not None else ())

    def _open(self) -> Regions:
        regions = self._regions
        if regions is None:
            raise PoolClosed(_GONE)
        return regions

    def _only(self, name: str, instead: str) -> None:
        if len(self.layouts) > 1 or len(self.layouts[0]) > 1:
            raise ValueError(
                f"{name}: expected {instead}, got groups of {[len(parts) for parts in self.layouts]} parts"
            )


def shaped(array: Any, layout: BlockLayout, tier: Tier, blocks: int) -> Any:
    """Flat memory of a tier as an array with the shape and the storage type of a layout."""
    return array.view(layout.storage_dtype).reshape(layout.tier_shape(tier, blocks))


def _each(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _needs(layouts: Layouts, counts: list[tuple[int, ...]], memory: tuple[Any, Any]) -> list[_Need]:
    """The allocations: first the device tier of every part, then the host tier of every part."""
    needs = []
    parts = sum(map(len, layouts))
    for tier, of_tier, tier_memory in zip(TIERS, counts, memory, strict=True):
        name = f"{tier}_memory"
        sizes = [
            blocks * layout.block_bytes for group, blocks in zip(layouts, of_tier, strict=True) for layout in group
        ]
        each = [tier_memory] * parts
        if parts > 1 and tier_memory is not None and not callable(tier_memory):
            each = list(tier_memory) if isinstance(tier_memory, (list, tuple)) else []
            if len(each) != parts:
                raise ValueError(
                    f"{name}: expected None, a function or a list of {parts}, one for each part, group after group, "
                    f"got {len(each)}"
                )
        names = [name] if parts == 1 else [f"{name}[{i}]" for i in range(parts)]
        needs += [_Need(tier, *need) for need in zip(sizes, each, names, strict=True)]
    return needs


def _regions(layouts: Layouts, counts: list[tuple[int, ...]], pools: list[Any]) -> Regions:
    """The regions to which a device is bound. ``pools`` are in the order of ``_needs``."""
    each = zip(pools[: len(pools) // 2], pools[len(pools) // 2 :], strict=True)
    return Regions(
        [
            Region(tuple(Part(layout, *next(each)) for layout in parts), *blocks)
            for parts, *blocks in zip(layouts, *counts, strict=True)
        ]
    )


def _places(regions: Regions, part: int) -> Int64s:
    """int64[4, 2 * groups]: first id, end of ids, address and step, of the device blocks of one part of each group,
    then of the host blocks.

    Address and step are 0 if a group has no such part.
    """
    groups = len(regions.all)
    places = [(0, 0)] * (2 * groups)
    for group, region in enumerate(regions.all):
        if part < len(region.parts):
            layout, *pools = region.parts[part]
            steps = layout.device_strides(region.device_blocks).block, layout.block_bytes
            for tier, step in enumerate(steps):
                places[tier * groups + group] = as_strided("pool", pools[tier]).address, step
    edges = regions.pool_ids.edges
    return np.array([edges[:-1], edges[1:], *zip(*places, strict=True)], np.int64)


def _check_room(device: Device, needs: list[_Need]) -> None:
    """Raise InsufficientMemory if the device is known to have less than needed."""
    sizes: dict[str, int] = {
        tier: sum(need.nbytes for need in needs if need.tier == tier and need.memory is None) for tier in TIERS
    }
    if device.one_memory:
        sizes = {"device and host": sum(sizes.values())} if sizes["host"] else {"device": sizes["device"]}
    for tiers, requested in sizes.items():
        available = device.available_bytes("host" if tiers == "host" else "device")
        limit = ADDRESSABLE_BYTES if available is None else available
        if requested > limit:
            raise InsufficientMemory(tiers, requested, limit)


def _allocate(device: Device, needs: list[_Need], shared: bool) -> list[Any]:
    """Make all allocations, or raise InsufficientMemory and keep none."""
    pools: list[Any] = []
    try:
        for tier, nbytes, memory, name in needs:
            try:
                pools.append(
                    device.allocate(nbytes, tier, shared)
                    if memory is None
                    else _adopt(device, tier, memory, nbytes, name)
                )
            except MemoryError as error:
                raise InsufficientMemory(tier, nbytes, device.available_bytes(tier) or 0, str(error)) from error
        spans = [(as_strided("pool", pool).address, need) for need, pool in zip(needs, pools, strict=True)]
        check_spans((start, start + need.nbytes, need.name) for start, need in spans if need.memory is not None)
    except BaseException:
        _free(device, pools)
        raise
    return pools


def _free(device: Device, pools: Iterable[Any]) -> None:
    """Free all of it, even if the device refuses some. Then one of its errors is raised."""
    with ExitStack() as stack:
        for pool in pools:
            stack.callback(device.free, pool)


def _adopt(device: Device, tier: str, source: Any, nbytes: int, name: str) -> Any:
    """Use memory of the caller for a tier, after its layout was checked. Raises TypeError, ValueError, and what the
    caller's function raises."""
    array = as_strided(name, source(nbytes, ADOPTED_ALIGNMENT) if callable(source) else source)
    place = device.views.places[tier][0]
    memory = "device" if place == dlpack.CUDA else "host"
    if array.memory != memory:
        raise ValueError(f"{name} is {array.memory} memory: the {device.name} device has this tier in {memory} memory")
    plain = StridedArray(array.address, array.shape, array.itemsize)
    size = array.itemsize * math.prod(array.shape)
    if size != nbytes:
        raise ValueError(f"{name}: expected exactly the {nbytes} bytes of its blocks, got {size}")
    if any(
        extent > 1 and step != dense for extent, step, dense in zip(array.shape, array.steps, plain.steps, strict=True)
    ):
        raise ValueError(
            f"{name}: expected C order without gaps, {plain.steps}, got shape {array.shape} and strides {array.steps}"
        )
    if not array.writable:
        raise ValueError(f"{name}: expected memory that can be written, got read-only memory")
    if array.address % ADOPTED_ALIGNMENT and nbytes:
        raise ValueError(
            f"{name}: expected an address that is a multiple of {ADOPTED_ALIGNMENT}, got {array.address:#x}"
        )
    return device.adopt(StridedArray(array.address, (nbytes,), 1, None, memory, "u", owner=array), tier)
