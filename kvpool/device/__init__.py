"""The devices that move the bytes of blocks: how one is chosen by name."""

from __future__ import annotations

import os

from kvpool.device.base import Device
from kvpool.device.cpu import CpuDevice
from kvpool.device.cuda import CudaDevice, unusable
from kvpool.device.sim import SimDevice

AUTO = "KVPOOL_DEVICE"
DEVICES: dict[str, type[Device]] = {"cpu": CpuDevice, "cuda": CudaDevice, "sim": SimDevice}


def get_device(spec: str | Device) -> Device:
    """Return a device by its name.

    Parameters
    ----------
    spec : {"auto", "cpu", "cuda", "sim"} or Device
        For "auto", the environment variable KVPOOL_DEVICE decides. Without it the device is ``cuda`` where that can be
        used, else ``cpu``. A Device is returned as it is.

    Returns
    -------
    Device
        A new device, which is not bound to a pool.

    Raises
    ------
    TypeError, ValueError
        For anything else.
    DeviceError
        For ``cuda`` where it cannot be used; it names what is missing.
    """
    if isinstance(spec, Device):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"device: expected 'auto', 'cpu', 'cuda', 'sim' or a Device, got {spec!r:.80}")
    if spec not in ("auto", *DEVICES):
        raise ValueError(f"device: expected 'auto', 'cpu', 'cuda', 'sim' or a Device, got {spec!r:.80}")
    return DEVICES[automatic()[0] if spec == "auto" else spec]()


def automatic() -> tuple[str, str]:
    """The device that ``"auto"`` means on this machine, and the reason. Raises ValueError where the environment
    variable names no device."""
    named = os.environ.get(AUTO)
    if named:
        if named not in DEVICES:
            raise ValueError(f"{AUTO}: expected one of {', '.join(DEVICES)}, got {named!r:.80}")
        return named, f"{AUTO} says so"
    missing = unusable()
    return ("cpu", missing) if missing else ("cuda", "there is a GPU, and CuPy to use it with")
