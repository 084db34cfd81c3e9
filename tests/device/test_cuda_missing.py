"""What the cuda device says, and does without, where CuPy, a driver, a GPU or a function of the driver is missing."""

from __future__ import annotations

import configparser
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asv_bench import gpu_bench
from kvpool import KVCacheManager, PoolClosed
from kvpool.__main__ import main
from kvpool.common.arrays.layout import BlockLayout
from kvpool.device import get_device
from kvpool.device.cuda import close_unused, cuda_memory
from kvpool.device.cuda.runtime import CAPTURING, INVALID_HANDLE, NOT_READY, OUT_OF_MEMORY, STICKY, Driver, find_batch
from kvpool.errors import DeviceError
from tests.emulated import build


def cupy_of(count: Any) -> SimpleNamespace:
    """As much of CuPy as counts GPUs."""
    return SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=count)))


def test_the_extras_bring_the_libraries_that_cupy_loads_late() -> None:
    """Such as cuBLAS: without them, a wheel of CuPy multiplies no matrices."""
    options = configparser.ConfigParser()
    options.read(Path(__file__).resolve().parents[2] / "setup.cfg")
    for version in ("12", "13"):
        assert f"cupy-cuda{version}x[ctk]" in options["options.extras_require"][f"cuda{version}"]


def test_a_missing_package_or_driver_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def count() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.delenv("KVPOOL_DEVICE", raising=False)
    for cupy, message in (
        (None, r"needs CuPy.*\.\[cuda12\].*\.\[cuda13\]"),
        (cupy_of(count), "driver: cudaErrorInsufficientDriver"),
        (cupy_of(lambda: 0), "NVIDIA GPU"),
    ):
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        with pytest.raises(DeviceError, match=message):
            get_device("cuda")
    assert get_device("auto").name == "cpu"
    monkeypatch.setenv("KVPOOL_DEVICE", "tpu")
    with pytest.raises(ValueError, match="KVPOOL_DEVICE: .*'tpu'"):
        get_device("auto")


def test_a_driver_without_the_function_has_no_batches() -> None:
    assert find_batch(object()) is None
    assert find_batch(SimpleNamespace(cuGetProcAddress_v2=lambda *arguments: 500)) is None


def test_the_errors_that_do_not_go_away_are_those_that_the_runtime_documents() -> None:
    runtime = pytest.importorskip(
        "cuda.bindings.runtime", reason="cuda-bindings is not installed; it documents every error"
    )
    documented = {error.value for error in runtime.cudaError_t if "relaunched" in (error.__doc__ or "")}
    if not documented:
        pytest.skip("this version of cuda-bindings does not document errors")
    known = {error.value for error in runtime.cudaError_t}
    assert documented <= STICKY and known >= STICKY
    assert not STICKY & {0, 1, OUT_OF_MEMORY, NOT_READY, INVALID_HANDLE, 801, *CAPTURING}


def test_commands_without_a_gpu_say_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main(["replay", "--device", "cuda"]) == 2
    assert "needs CuPy" in capsys.readouterr().err
    monkeypatch.setattr(build, "built", lambda: False)
    with pytest.raises(SystemExit, match="nothing was measured.*CuPy"):
        gpu_bench.main(["--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_memory_of_other_processes_that_another_thread_is_closing_already_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Taken(deque[Any]):
        """Another thread takes the last one between the question and the taking."""

        def __bool__(self) -> bool:
            return True

    monkeypatch.setattr(cuda_memory, "_unused", Taken())
    close_unused()


def test_a_context_that_cannot_be_entered_is_not_left() -> None:
    """To leave it would take the caller's own context from its thread."""
    asked: list[str] = []

    def function(name: str, status: int) -> Any:
        def call(*arguments: Any) -> int:
            asked.append(name)
            if name == "cuDevicePrimaryCtxGetState":
                arguments[2]._obj.value = 1
            return status

        return call

    failing = {"cuPointerGetAttribute": 1, "cuDevicePrimaryCtxRetain": 2, "cuCtxPushCurrent_v2": 201}
    names = (*failing, "cuDevicePrimaryCtxGetState", "cuCtxPopCurrent_v2")
    library = SimpleNamespace(**{name: function(name, failing.get(name, 0)) for name in names})
    assert Driver(lambda name: library).gpu_of(4096, 2) is None
    assert asked.count("cuCtxPushCurrent_v2") == 2 and "cuCtxPopCurrent_v2" not in asked


def test_a_device_with_nothing_to_choose_has_no_calibration() -> None:
    with KVCacheManager(BlockLayout(2, 2, 16, 4), device_blocks=2, device="cpu") as cache:
        assert cache.memory.calibrate() is None
    with pytest.raises(PoolClosed):
        cache.memory.calibrate()
