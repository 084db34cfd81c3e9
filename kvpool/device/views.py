"""Views: arrays on the memory of a device for whoever else uses it, and memory of arrays that a device can write."""

from __future__ import annotations

from typing import Any

from kvpool.arrays import dlpack
from kvpool.arrays.strided import StridedArray
from kvpool.device.shared import GpuMemory, MainMemory, handle_of
from kvpool.device.steps import StepTargets
from kvpool.device.tables import Table, host_table


class HostViews:
    """Views of a device whose tiers are main memory. Devices with memory of their own replace what differs.
    Thread-safe."""

    places = {"device": (dlpack.CPU, 0), "host": (dlpack.CPU, 0)}
    """Where a tier is, in the terms of DLPack: the type of the device, and its index."""

    def array(self, memory: StridedArray) -> Any:
        """The same elements as an array of the type that ``Device.allocate`` returns for that memory. The array keeps
        ``owner`` alive."""
        return memory.host_view()

    def pinned(self, memory: StridedArray) -> Any:
        """Pinned memory of this device, bytes without gaps, as an object of the device's own package. It keeps
        ``owner`` alive. Raises TypeError for a device that has none."""
        raise TypeError("this device has no pinned memory")

    def handle(self, array: Any, tier: str) -> MainMemory | GpuMemory:
        """The handle by which another process opens memory of a tier. Raises DeviceError, and ValueError for memory
        that no other process can open."""
        return handle_of(array)

    def table(self, target: Any, name: str = "target", vector: bool = False, itemsize: int = 4) -> Table:
        """The memory that a public call names by its argument ``name``: integers of ``itemsize`` bytes,
        [..., rows, columns], that the device can write.

        The elements of a row follow each other without gaps. A ``vector`` is [n] without gaps; n may be 0. Raises
        TypeError or ValueError, which name the argument, for anything else.
        """
        return host_table(target, name, vector, itemsize)

    def step(self, arrays: Any) -> StepTargets:
        """The memory that a public call names by ``arrays``, a ``StepTables``; attributes that are None are left out.

        Also loads the kernel that will write it. Raises DeviceError, and the errors of ``table``.
        """
        found: StepTargets = arrays.targets(host_table)
        return found
