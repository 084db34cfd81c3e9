"""Where the tests of this folder run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvpool.device.calibration import PATHS
from kvpool.device.cuda import COPY_PATH, unusable
from tests.device.conftest import fake_cuda as fake_cuda
from tests.device.fake_cupy import FakeCupy
from tests.gpu.machines import FakeMachine, Machine

GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(params=["without a GPU", GPU])
def machine(request: pytest.FixtureRequest, fake_cuda: Callable[..., FakeCupy]) -> Machine:
    return Machine(real_cupy()) if request.param == "gpu" else FakeMachine(fake_cuda())


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One way of copying, for every device."""
    monkeypatch.setenv(COPY_PATH, request.param)
    return str(request.param)


@pytest.fixture
def cupy() -> Any:
    return real_cupy()


def real_cupy() -> Any:
    """CuPy, or the test is skipped and says what is missing."""
    missing = unusable()
    if missing:
        pytest.skip(missing)
    import cupy

    return cupy
