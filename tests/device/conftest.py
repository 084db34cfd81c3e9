"""The devices that every test of the contract runs on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.device import CpuDevice
from kvpool.device.base import Device
from kvpool.device.cuda import CudaDevice, unusable
from kvpool.device.sim import SimDevice

SIMS = {
    "sim, nothing early": (0, 0.0),
    "sim, some early": (1, 0.5),
    "sim, most early": (2, 0.9),
    "sim, all at once": (3, 1.0),
}
PATHS = ("plain", "batched", "kernel", "bulk")
GPUS = {f"cuda, {path}": path for path in PATHS}


def gpu_device(path: str | None = None) -> CudaDevice:
    """A device of this machine, or the test is skipped and says why."""
    missing = unusable()
    if missing:
        pytest.skip(missing)
    return CudaDevice(calibration=path)


@pytest.fixture(
    params=[
        "cpu",
        "cpu around the caches",
        *("sim, nothing early", "sim, all at once"),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("sim, some early", "sim, most early")),
        *(pytest.param(name, marks=pytest.mark.gpu) for name in GPUS),
    ]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    if request.param == "cpu around the caches":
        # Large pools are copied in another way; here, all of them.
        monkeypatch.setattr("kvpool.device.copy_plan.CACHED_BYTES_MAX", 0)
    made: Device = CpuDevice()
    if request.param in SIMS:
        seed, progress = SIMS[request.param]
        made = SimDevice(seed, progress=progress, chunk_bytes=48)
    elif request.param in GPUS:
        # Chunks so small that copies meet their ends.
        if not request.config.getoption("--one-chunk"):
            monkeypatch.setattr("kvpool.device.cuda.cuda_memory.CHUNK_BYTES", 4096)
        made = gpu_device(GPUS[request.param])
    yield made
    made.close()


@pytest.fixture
def layout() -> BlockLayout:
    return BlockLayout(2, 2, 16, 4)
