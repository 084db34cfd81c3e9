"""The devices that move block bytes: one interface, and the choice of an implementation by name."""

from __future__ import annotations

from kvpool.device.base import Device
from kvpool.device.cpu import CpuDevice
from kvpool.device.sim import SimDevice


def get_device(spec: str | Device) -> Device:
    """The device that ``spec`` asks for: ``"cpu"``, ``"auto"`` (today the same), ``"sim"``, or a Device, which is returned as it is.

    Raises ValueError for another name and TypeError for anything else.
    """
    if isinstance(spec, Device):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"device={spec!r}: 'cpu', 'auto', 'sim' or a Device is needed, not {type(spec).__name__}")
    if spec not in ("cpu", "auto", "sim"):
        raise ValueError(f"device={spec!r}: must be 'cpu', 'auto', 'sim' or a Device")
    return SimDevice() if spec == "sim" else CpuDevice()
