"""The devices that every test of the contract runs on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpool.device import CpuDevice
from kvpool.device.base import Device
from kvpool.device.sim import SimDevice
from kvpool.layout import BlockLayout

SIMS = {"sim, nothing early": (0, 0.0), "sim, some early": (1, 0.5), "sim, most early": (2, 0.9), "sim, all at once": (3, 1.0)}


@pytest.fixture(params=["cpu", "cpu around the caches", *SIMS])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    if request.param == "cpu around the caches":
        # Large pools are copied in another way; here, all of them.
        monkeypatch.setattr("kvpool.device.block_copy._CACHED_BYTES_MAX", 0)
    made: Device = CpuDevice()
    if request.param in SIMS:
        seed, progress = SIMS[request.param]
        made = SimDevice(seed, progress=progress, chunk_bytes=48)
    yield made
    made.close()


@pytest.fixture
def layout() -> BlockLayout:
    return BlockLayout(2, 2, 16, 4)
