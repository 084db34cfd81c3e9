"""PoolMemory: the memory of a pool as arrays, lent to other packages, and attached by other processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast
from weakref import WeakSet

from kvpool.common.arguments import bool_argument
from kvpool.common.arrays import Array
from kvpool.common.arrays.layout import Tier, integer_argument
from kvpool.device.base import DeviceArray, tier_argument
from kvpool.device.memory.attachments import SharedTier, Sharing
from kvpool.device.memory.export import Export, Lending, Loan, TierPlace
from kvpool.device.memory.pools import MemoryPools
from kvpool.pool.core import Core

if TYPE_CHECKING:
    from kvpool.device.cuda.calibration import Calibration


class PoolMemory:
    """The memory of both tiers as arrays, and its exports. It is ``KVCacheManager.memory``.

    Notes
    -----
    Thread-safe. Nothing here changes the pool. A pool with one group of layers of one layout has ``device_pool`` and
    ``host_pool``; every pool has ``device_pools`` and ``host_pools``.

    Examples
    --------
    >>> import kvpool
    >>> layout = kvpool.BlockLayout(layers=2, kv_heads=2, head_dim=8, tokens_per_block=4)
    >>> with kvpool.KVCacheManager(layout, device_blocks=8, host_blocks=2, device="cpu") as cache:
    ...     print(cache.memory.device_pool.shape, cache.memory.host_pool.shape)
    (2, 2, 8, 4, 2, 8) (2, 2, 2, 4, 2, 8)
    """

    def __init__(self, core: Core, pools: MemoryPools, sharing: Sharing, loans: WeakSet[Loan]) -> None:
        self._core, self._pools, self._sharing, self._loans = core, pools, sharing, loans

    @property
    def device_pools(self) -> tuple[tuple[DeviceArray, ...], ...]:
        """The device tier: for each group of layers, an array for each of its layouts, as ``device_pool``."""
        return self._pools.device_pools

    @property
    def host_pools(self) -> tuple[tuple[Array, ...], ...]:
        """The host tier: for each group of layers, an array for each of its layouts, as ``host_pool``."""
        return self._pools.host_pools

    @property
    def device_pool(self) -> DeviceArray:
        """The device tier of a pool with one group of layers of one layout.

        Its shape is ``layout.device_shape(device_blocks)``, and its dtype ``layout.storage_dtype``. In main memory it
        is a NumPy array, on a GPU a CuPy array. Other packages take it by DLPack or ``__cuda_array_interface__``; see
        also ``export``.

        Raises
        ------
        ValueError
            For a pool with several groups or layouts, which has ``device_pools``.
        """
        return self._pools.device_pool

    @property
    def host_pool(self) -> Array:
        """The host tier of a pool with one group of layers of one layout.

        A NumPy array, whose shape is ``layout.host_shape(host_blocks)``, in which every block is contiguous. Block id
        ``device_blocks + i`` is its block i.

        Raises
        ------
        ValueError
            For a pool with several groups or layouts, which has ``host_pools``.
        """
        return self._pools.host_pool

    def export(
        self,
        tier: Tier = "device",
        *,
        writable: bool = True,
        raw: bool = False,
        group: int | None = None,
        part: int = 0,
    ) -> Export:
        """Export a tier to arrays of other packages, without a copy.

        Parameters
        ----------
        tier : {"device", "host"}, default "device"
            The tier.
        writable : bool, default True
            False marks the export as read-only.
        raw : bool, default False
            True exports types that NumPy has no name for (bfloat16, float8) as unsigned integers, for packages that
            have no name for them either.
        group : int, optional
            The index of a group of layers, required where there are several.
        part : int, default 0
            The index of one of the layouts of the group.

        Returns
        -------
        Export
            The memory of ``device_pools[group][part]`` or ``host_pools[group][part]``.

        Raises
        ------
        TypeError, ValueError
            For a bad argument.
        PoolClosed
            After the pool was closed.
        """
        core, tier = self._core, tier_argument(tier)
        g = core.config.group(group)
        place = TierPlace(tier, g, integer_argument("part", part, 0, len(core.config.groups[g].layouts) - 1))
        core.check_open()
        # Made here, since the pool may not refer to anything that refers to it: its memory is freed with the last
        # reference to it.
        lending = Lending(core.device, self._pools, self._loans, lambda: core.lock, core.check_open, core.follow)
        return Export.of_place(lending, place, bool_argument("writable", writable), bool_argument("raw", raw))

    def share(self, tier: Tier = "device") -> SharedTier:
        """Describe a tier so that another process on this machine can attach it by ``kvpool.attach``.

        Both tiers of a pool with ``shared=True`` can be shared, and on a GPU the device tier of any pool. Memory of the
        caller cannot. The description can be pickled.

        Parameters
        ----------
        tier : {"device", "host"}, default "device"
            The tier.

        Returns
        -------
        SharedTier
            The description.

        Raises
        ------
        TypeError, ValueError
            For a bad argument, and for memory that cannot be shared.
        DeviceError, MemoryError, PoolClosed
            Where the device or the memory fails; after the pool was closed.

        Notes
        -----
        The description lets processes of the same user read and write all KV of the tier, and cannot be revoked: give
        it only to processes that you trust.

        A loader in the other process writes blocks of an ``Imports.reserve`` without a stream. A reader there reads
        blocks of a ``KVCacheManager.pin`` without a stream. Close a pool on a GPU after its attachments; elsewhere the
        order does not matter.
        """
        tier = tier_argument(tier)
        self._core.check_open()
        return self._sharing.describe(tier)

    def calibrate(self) -> Calibration | None:
        """Measure which way of copying is the fastest on this device, and use it from now on.

        Returns
        -------
        Calibration or None
            The measurements, or None for a device that has only one way.

        Raises
        ------
        DeviceError, MemoryError, PoolClosed
            Where the device or the memory fails; after the pool was closed.

        Notes
        -----
        It takes seconds. The result is kept on disk for other processes. The pool's blocks are not touched.
        """
        self._core.check_open()
        return cast("Calibration | None", self._core.device.calibrate())
