"""The CuPy without a GPU has nothing that CuPy has not."""

from __future__ import annotations

import inspect

import pytest

from tests.device.fake_cupy import FakeArray, FakeCupy, FakeRuntime

HELPERS = {"note", "handle", "reachable", "enqueue", "advance", "step", "reach"}


def test_every_name_of_it_is_one_of_cupy() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed; the stand-in for it is compared with it")
    runtime = cupy.cuda.runtime
    names = [name for name, _ in inspect.getmembers(FakeRuntime) if not name.startswith("_") and name not in HELPERS]
    assert not [name for name in names if not hasattr(runtime, name)]
    kinds = ("memoryTypeUnregistered", "memoryTypeDevice", "memoryTypeManaged")
    for name in ("memcpyDefault", "streamNonBlocking", "eventDisableTiming", *kinds):
        assert int(getattr(runtime, name)) == getattr(FakeRuntime, name)
    for name in vars(FakeCupy().cuda):
        assert hasattr(cupy.cuda, name)
    assert hasattr(cupy.cuda.Stream, "from_external")
    for name in ("compile", "get_function"):
        assert hasattr(cupy.RawModule, name)
    for name in ("view", "reshape", "transpose", "get", "set", "device", "__cuda_array_interface__", "__dlpack__"):
        assert hasattr(cupy.ndarray, name)
    assert {"get", "set"} <= set(vars(FakeArray))
    error = runtime.CUDARuntimeError(700)
    assert isinstance(error, RuntimeError) and error.status == 700 and "cudaErrorIllegalAddress" in str(error)
