"""MemoryPools: the memory of both tiers, allocated on a device and seen as arrays."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool import dlpack
from kvpool.device.base import TIERS, Device
from kvpool.errors import InsufficientMemory, PoolClosed
from kvpool.layout import BlockLayout, integer_argument
from kvpool.strided import StridedArray, as_strided

BLOCKS_MAX = 2**31 - 1
"""Blocks of both tiers together: ids are int32."""
ADDRESSABLE_BYTES = sys.maxsize // 2
"""More than any tier can have, where nobody knows how much memory there is."""
ADOPTED_ALIGNMENT = 64
"""Bytes: what the memory that a caller brings starts at a multiple of, a line of a cache."""
_GONE = "the memory of this pool has been given back"


class MemoryPools:
    """The two tiers of one pool. Allocates them on ``device`` and binds it to them.

    Parameters
    ----------
    device
        An open device that serves no other pool.
    layout
        Shape of a block.
    device_blocks, host_blocks
        Capacities: at least 1 and at least 0, together below 2**31.

    device_memory, host_memory
        None, an array, or a function (nbytes, alignment) that gives one: see ``KVCacheManager``.

    Attributes
    ----------
    device_pool, host_pool
        The tiers in ``layout.storage_dtype``, shaped ``layout.device_shape(device_blocks)`` and
        ``layout.host_shape(host_blocks)``. They raise PoolClosed after ``close``; views made before stay readable, and
        keep the memory until they are gone.
    device_bytes, host_bytes
        The same memory as flat uint8 arrays. The host tier is NumPy's; the device tier is the device's own kind of array.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong type or value; the message names it.
    InsufficientMemory
        When the tiers do not fit; nothing stays allocated.
    """

    def __init__(
        self, device: Device, layout: BlockLayout, device_blocks: int, host_blocks: int = 0, device_memory: Any = None,
        host_memory: Any = None,
    ) -> None:  # fmt: skip
        if not isinstance(device, Device):
            raise TypeError(f"device={device!r}: a Device is needed, not {type(device).__name__}")
        if not isinstance(layout, BlockLayout):
            raise TypeError(f"layout={layout!r}: a BlockLayout is needed, not {type(layout).__name__}")
        self.device_blocks = integer_argument("device_blocks", device_blocks, 1, BLOCKS_MAX)
        self.host_blocks = integer_argument("host_blocks", host_blocks, 0, BLOCKS_MAX)
        if self.device_blocks + self.host_blocks > BLOCKS_MAX:
            raise ValueError(f"device_blocks={device_blocks} and host_blocks={host_blocks}: together they must be at most {BLOCKS_MAX}")
        self.device, self.layout = device, layout
        sizes = {"device": self.device_blocks * layout.block_bytes, "host": self.host_blocks * layout.block_bytes}
        given = {"device": device_memory, "host": host_memory}
        _check_room(device, {tier: nbytes if given[tier] is None else 0 for tier, nbytes in sizes.items()})
        self._pools: dict[str, Any] | None = _allocate(device, sizes, given)
        self._bases = [as_strided(tier, pool).address for tier, pool in self._pools.items()]
        try:
            device.bind(layout, self.device_bytes, self.host_bytes, self.device_blocks, self.host_blocks)
        except BaseException:
            self.close()
            raise

    @property
    def device_bytes(self) -> Any:
        return self._bytes("device")

    @property
    def host_bytes(self) -> NDArray[np.uint8]:
        return self._bytes("host")

    @property
    def device_pool(self) -> Any:
        return self.device_bytes.view(self.layout.storage_dtype).reshape(self.layout.device_shape(self.device_blocks))

    @property
    def host_pool(self) -> NDArray[Any]:
        return self.host_bytes.view(self.layout.storage_dtype).reshape(self.layout.host_shape(self.host_blocks))

    def address(self, tier: str) -> int:
        """Of the first byte of a tier."""
        if self.closed:
            raise PoolClosed(_GONE)
        return self._bases[TIERS.index(tier)]

    def addresses(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Address of the first byte of each block by id; all bytes of a host block follow its first."""
        if self.closed:
            raise PoolClosed(_GONE)
        host = ids >= self.device_blocks
        device_step = self.layout.device_strides(self.device_blocks).block
        at_device = self._bases[0] + ids * device_step
        at_host = self._bases[1] + (ids - self.device_blocks) * self.layout.block_bytes
        return np.where(host, at_host, at_device)

    @property
    def closed(self) -> bool:
        return self._pools is None

    def close(self) -> None:
        """Give the memory back to the device, which must have finished its copies. Closing twice is fine."""
        pools, self._pools = self._pools, None
        for pool in (pools or {}).values():
            self.device.free(pool)

    def _bytes(self, tier: str) -> Any:
        if self._pools is None:
            raise PoolClosed(_GONE)
        return self._pools[tier]


def _check_room(device: Device, sizes: dict[str, int]) -> None:
    """Raise InsufficientMemory for what the device is known not to have."""
    if device.one_memory:
        sizes = {"device and host": sum(sizes.values())} if sizes["host"] else {"device": sizes["device"]}
    for tiers, requested in sizes.items():
        available = device.available_bytes("host" if tiers == "host" else "device")
        limit = ADDRESSABLE_BYTES if available is None else available
        if requested > limit:
            raise InsufficientMemory(tiers, requested, limit)


def _allocate(device: Device, sizes: dict[str, int], given: dict[str, Any]) -> dict[str, Any]:
    """Both tiers, or InsufficientMemory and none of them."""
    pools: dict[str, Any] = {}
    try:
        for tier, nbytes in sizes.items():
            try:
                pools[tier] = device.allocate(nbytes, tier) if given[tier] is None else _adopt(device, tier, given[tier], nbytes)
            except MemoryError as error:
                raise InsufficientMemory(tier, nbytes, device.available_bytes(tier) or 0, str(error)) from error
        if given["device"] is not None and given["host"] is not None:
            _check_apart(*pools.values())
    except BaseException:
        for pool in pools.values():
            device.free(pool)
        raise
    return pools


def _check_apart(device_pool: Any, host_pool: Any) -> None:
    """Raise ValueError for tiers that share bytes."""
    starts, sizes = [as_strided("pool", pool).address for pool in (device_pool, host_pool)], (device_pool.nbytes, host_pool.nbytes)
    if starts[0] < starts[1] + sizes[1] and starts[1] < starts[0] + sizes[0]:
        raise ValueError("device_memory and host_memory share bytes: accepted is memory of its own for each tier")


def _adopt(device: Device, tier: str, given: Any, nbytes: int) -> Any:
    """Memory of the caller's as the tier, once its layout is right. Raises TypeError, ValueError, and what the caller's function raises."""
    name = f"{tier}_memory"
    found = as_strided(name, given(nbytes, ADOPTED_ALIGNMENT) if callable(given) else given)
    place = device.dlpack_device(tier)[0]
    memory = "device" if place == dlpack.CUDA else "host"
    if found.memory != memory:
        raise ValueError(f"{name} is {found.memory} memory: the {device.name} device has this tier in {memory} memory")
    plain = StridedArray(found.address, found.shape, found.itemsize)
    size = found.itemsize * math.prod(found.shape)
    if size != nbytes:
        raise ValueError(f"{name} has {size} bytes: accepted are exactly the {nbytes} of its blocks")
    if any(extent > 1 and step != dense for extent, step, dense in zip(found.shape, found.steps, plain.steps, strict=True)):
        raise ValueError(f"{name} has shape {found.shape} and strides {found.steps}: accepted is C order without gaps, {plain.steps}")
    if not found.writable:
        raise ValueError(f"{name} is read-only: accepted is memory that can be written")
    if found.address % ADOPTED_ALIGNMENT and nbytes:
        raise ValueError(f"{name} is at {found.address:#x}: accepted is a multiple of {ADOPTED_ALIGNMENT}")
    return device.adopt(StridedArray(found.address, (nbytes,), 1, None, memory, "u", owner=found), tier)
