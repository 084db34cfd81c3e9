"""The devices that move block bytes: one interface, and the choice of an implementation by name."""

from __future__ import annotations

import os

from kvpool.device.base import Device
from kvpool.device.cpu import CpuDevice
from kvpool.device.cuda import CudaDevice, unusable
from kvpool.device.sim import SimDevice

AUTO = "KVPOOL_DEVICE"
DEVICES: dict[str, type[Device]] = {"cpu": CpuDevice, "cuda": CudaDevice, "sim": SimDevice}


def get_device(spec: str | Device) -> Device:
    """The device that ``spec`` asks for: ``"cpu"``, ``"cuda"``, ``"sim"``, ``"auto"``, or a Device, which is returned as it is.

    ``"auto"`` is the one that the environment variable KVPOOL_DEVICE names, else ``cuda`` where it can be used, else ``cpu``. Raises
    ValueError for another name, TypeError for anything else, and DeviceError, which says what is missing, where there is no ``cuda``.
    """
    if isinstance(spec, Device):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"device={spec!r}: 'auto', 'cpu', 'cuda', 'sim' or a Device is needed, not {type(spec).__name__}")
    if spec not in ("auto", *DEVICES):
        raise ValueError(f"device={spec!r}: must be 'auto', 'cpu', 'cuda', 'sim' or a Device")
    return DEVICES[automatic()[0] if spec == "auto" else spec]()


def automatic() -> tuple[str, str]:
    """The device that ``"auto"`` is on this machine, and why. Raises ValueError where the environment names none."""
    named = os.environ.get(AUTO)
    if named:
        if named not in DEVICES:
            raise ValueError(f"{AUTO}={named!r}: must be one of {', '.join(DEVICES)}")
        return named, f"{AUTO} says so"
    missing = unusable()
    return ("cpu", missing) if missing else ("cuda", "there is a GPU, and CuPy to use it with")
