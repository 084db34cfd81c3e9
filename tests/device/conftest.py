"""The devices that every test of the contract runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvpool.device import CpuDevice
from kvpool.device.base import Device
from kvpool.device.cuda import CudaDevice, unusable
from kvpool.device.cuda_batch import find_batch
from kvpool.device.sim import SimDevice
from kvpool.layout import BlockLayout
from tests.device.fake_cupy import FakeCupy

SIMS = {"sim, nothing early": (0, 0.0), "sim, some early": (1, 0.5), "sim, most early": (2, 0.9), "sim, all at once": (3, 1.0)}
PATHS = ("plain", "batched", "kernel")
FAKES = {f"cuda without a GPU, {path}": path for path in PATHS}
GPUS = {f"cuda, {path}": path for path in PATHS}


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., FakeCupy]:
    """Has the cuda device find a CuPy without a GPU, and no calibration of this machine's."""

    def install(batches: bool = True) -> FakeCupy:
        cupy = FakeCupy(batches)
        monkeypatch.setattr("kvpool.device.cuda._cupy", lambda: cupy)
        monkeypatch.setattr("kvpool.device.cuda._launchers", {})
        monkeypatch.setattr("kvpool.device.cuda.find_batch", lambda: find_batch(cupy.library))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return cupy

    return install


def gpu_device(path: str | None = None) -> CudaDevice:
    """A device of this machine, or the test is skipped and says why."""
    missing = unusable()
    if missing:
        pytest.skip(missing)
    return CudaDevice(calibration=path)


@pytest.fixture(params=["cpu", "cpu around the caches", *SIMS, *FAKES, *(pytest.param(name, marks=pytest.mark.gpu) for name in GPUS)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fake_cuda: Callable[..., FakeCupy]) -> Iterator[Device]:
    if request.param == "cpu around the caches":
        # Large pools are copied in another way; here, all of them.
        monkeypatch.setattr("kvpool.device.block_copy.CACHED_BYTES_MAX", 0)
    made: Device = CpuDevice()
    if request.param in SIMS:
        seed, progress = SIMS[request.param]
        made = SimDevice(seed, progress=progress, chunk_bytes=48)
    elif request.param in FAKES:
        # Chunks so small that copies meet their ends.
        monkeypatch.setattr("kvpool.device.pinned.CHUNK_BYTES", 4096)
        cupy = fake_cuda()
        made = CudaDevice(calibration=FAKES[request.param])
    elif request.param in GPUS:
        monkeypatch.setattr("kvpool.device.pinned.CHUNK_BYTES", 4096)
        made = gpu_device(GPUS[request.param])
    yield made
    made.close()
    if request.param in FAKES:
        assert not cupy.runtime.registered and list(cupy.runtime.streams) == [0]


@pytest.fixture
def layout() -> BlockLayout:
    return BlockLayout(2, 2, 16, 4)
