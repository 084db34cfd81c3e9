"""Where the tests of this folder run."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.device.cuda import COPY_PATH, unusable
from kvpool.device.cuda.calibration import PATHS
from tests.gpu.machines import Machine

GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture
def machine() -> Machine:
    return Machine(real_cupy())


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
