"""The doctor reports a status, a reason and an advice for each part, and its exit status is whether a device can be
used."""

from __future__ import annotations

import configparser
import functools
import json
import os
import re
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numba.core import config

from kvpool.__main__ import main
from kvpool.common.arguments import first_outside
from kvpool.common.jit import cache
from kvpool.device import cuda
from kvpool.device.cuda import calibration
from kvpool.device.cuda.runtime import Gpu
from kvpool.device.memory import main_memory
from kvpool.tools.cli import doctor
from kvpool.tools.cli.doctor import ABSENT, FAILED, OK, WARNING

Output = pytest.CaptureFixture[str]
compiling = functools.cache(doctor.check_numba_cuda)
"""Kernels of tables are compiled once for all tests of this file."""


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without CuPy, with a cache of its own."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(doctor, "check_numba_cuda", compiling)
    for name in ("KVPOOL_DEVICE", "KVPOOL_COPY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def answer(capsys: Output, *arguments: str) -> tuple[int, str]:
    status = main(["doctor", *arguments])
    return status, capsys.readouterr().out


def test_without_a_gpu_auto_is_the_cpu_and_the_reason_names_the_extra(capsys: Output) -> None:
    status, text = answer(capsys)
    assert status == 0
    assert "device auto: ok, cpu: the cuda device needs CuPy" in text and ".[cuda13]" in text
    assert "GPU 0" not in text and "ulimit -l" in text
    form = re.compile(r"[^:]+: (ok|absent|warning|failed), \S.*|    advice: \S.*")
    assert all(map(form.fullmatch, text.splitlines())), text


def test_the_exit_status_says_whether_the_device_can_be_used(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    for device, expected in (("cpu", 0), ("sim", 0), ("auto", 0), ("cuda", 1)):
        status, text = answer(capsys, "--device", device)
        assert status == expected and ("device cuda: failed, " in text) == bool(expected)
    monkeypatch.setenv("KVPOOL_DEVICE", "tpu")
    status, text = answer(capsys)
    assert status == 1 and "KVPOOL_DEVICE: expected one of cpu, cuda, sim, got 'tpu'" in text


def test_a_package_that_is_there_and_broken_is_not_a_crash(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        if name not in sound:
            raise OSError("libcudart.so: cannot open shared object file")

    sound = {"numpy", "numba"}
    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    status, text = answer(capsys)
    assert status == 0 and "OSError: libcudart.so" in text
    sound.remove("numba")
    assert answer(capsys)[0] == 1, "nothing works without it"


def test_a_numba_cuda_that_is_not_used_or_compiles_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    numba_own, installed = "/site/numba/cuda/__init__.py", "/site/numba_cuda/numba/cuda/__init__.py"
    sound, newer = Mock(), Mock(side_effect=AttributeError("module 'numpy' has no attribute 'row_stack'"))
    for place, version, compile_for, wrong in (
        (numba_own, "0.30", sound, "is Numba's own"),
        (numba_own, None, newer, None),
        (installed, "0.30", sound, None),
        (installed, "0.30", newer, "kernels of tables cannot be compiled: AttributeError: module 'numpy'"),
    ):
        there = SimpleNamespace(__file__=place, compile_for=compile_for, KERNELS={"any": None})
        monkeypatch.setattr(doctor.importlib, "import_module", lambda name, there=there: there)
        checks = compiling.__wrapped__(version)
        assert [check.status for check in checks] == ([] if wrong is None else [WARNING])
        assert wrong is None or wrong in checks[0].reason and checks[0].advice


# ----------------------------------------
# What is wrong is found and has advice, and only what is needed fails.


ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
NEEDED = doctor.Package("numpy", "numpy", "everything", "pip install x", "1.5")
OPTIONAL = NEEDED._replace(use="plots")
GPU = Gpu(0, "GPU", 80 * GIB, 13000, "9.0", 132, "x16", "13.0")
THERE = doctor.SeenDriver(13000, None, kernel_module=True, gpu_files=1)
NOT_THERE = doctor.SeenDriver(None, "libcuda.so.1: cannot open shared object file", kernel_module=False, gpu_files=0)
CUPY = ["cupy-cuda13x"]


@pytest.mark.parametrize(
    ("version", "error", "required", "optional"),
    [
        (None, "not installed", FAILED, ABSENT),
        ("2.0", "OSError: libcudart.so", FAILED, WARNING),
        ("1.4.9", None, FAILED, WARNING),
        ("1.5.0rc1", None, OK, OK),
        ("1.10", None, OK, OK),
        (None, None, OK, OK),
    ],
)
def test_only_a_package_that_is_needed_fails(
    version: str | None, error: str | None, required: str, optional: str
) -> None:
    for part, status in ((NEEDED, required), (OPTIONAL, optional)):
        check = doctor.check_package(part, version, error)
        assert (check.status, check.advice) == (status, "" if status == OK else "pip install x")


@pytest.mark.parametrize(
    ("driver", "cupy", "gpus", "status", "advice"),
    [
        (THERE, CUPY, [GPU], OK, ""),
        (NOT_THERE, CUPY, [], ABSENT, "on a machine with a GPU"),
        (NOT_THERE._replace(kernel_module=True), CUPY, [], WARNING, "--gpus all"),
        (THERE._replace(gpu_files=0), CUPY, [], WARNING, "--gpus all"),
        (THERE, [], [], WARNING, ".[cuda13]"),
        (THERE._replace(version=12080), [], [], WARNING, ".[cuda12]"),
        (THERE._replace(version=12080), CUPY, [], WARNING, "pip uninstall cupy-cuda13x"),
        (THERE._replace(version=11080), CUPY, [], WARNING, "update the driver"),
        (THERE, ["cupy-cuda13x", "cupy"], [GPU], WARNING, "pip uninstall cupy-cuda13x cupy"),
    ],
)
def test_driver_gpus_and_packages_have_to_fit(
    driver: doctor.SeenDriver, cupy: list[str], gpus: list[Gpu], status: str, advice: str
) -> None:
    check = doctor.check_driver(driver, cupy, gpus)
    assert check.status == status and advice in check.advice and bool(advice) == bool(check.advice)


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("numba.core.config.DISABLE_JIT", 1, "unset NUMBA_DISABLE_JIT"),
        ("kvpool.common.jit.cache.cache_root", lambda: None, "NUMBA_CACHE_DIR"),
        ("kvpool.common.jit.keeps", lambda: False, "pip install -U"),
        ("shutil.disk_usage", lambda root: SimpleNamespace(free=1 << 20), "NUMBA_CACHE_DIR"),
    ],
)
def test_compiled_code_that_cannot_be_kept_is_a_warning(
    name: str, value: Any, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("numba.core.config.DISABLE_JIT", 0)
    monkeypatch.setattr("kvpool.common.jit.keeps", lambda: True)
    (sound,) = doctor.check_compiled_code()
    assert (sound.status, sound.advice) == (OK, "")
    monkeypatch.setattr(name, value)
    (check,) = doctor.check_compiled_code()
    assert check.status == WARNING and advice in check.advice


@pytest.mark.parametrize(
    ("user", "limit", "gpus", "status"),
    [
        (1000, GIB, True, WARNING),
        (0, GIB, True, OK),
        (1000, 64 * GIB, True, OK),
        (1000, resource.RLIM_INFINITY, True, OK),
        (1000, GIB, False, OK),
    ],
)
def test_a_limit_of_locked_memory_matters_where_memory_is_pinned(
    monkeypatch: pytest.MonkeyPatch, user: int, limit: int, gpus: bool, status: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    monkeypatch.setattr(main_memory, "available_ram", lambda: 64 * GIB)
    locked, available = doctor.check_memory([GPU] if gpus else [])
    assert locked.status == status and ("ulimit -l unlimited" in locked.advice) == (status == WARNING)
    assert available == ("available memory", OK, "64.00 GiB", "")


@pytest.mark.parametrize(("available", "advice"), [(None, "host_blocks"), (1 << 20, "raise the limit")])
def test_little_or_unknown_memory_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, available: int | None, advice: str
) -> None:
    monkeypatch.setattr(main_memory, "available_ram", lambda: available)
    _, check = doctor.check_memory([])
    assert check.status == WARNING and advice in check.advice


def test_a_gpu_is_named_and_how_copies_are_chosen_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "unusable", lambda: None)
    monkeypatch.setattr(cuda, "describe_gpus", lambda: [GPU])
    monkeypatch.setattr(doctor, "SUITE_RAN_ON", ("GPU",))
    checks = {check.name: check for check in doctor.examine("cuda")}
    assert checks["GPU 0"].reason == "GPU, 80.00 GiB, CUDA 13.0" and checks["device cuda"].status == OK
    assert checks["copies"] == ("copies", OK, "chosen by rule: not measured", "call cache.memory.calibrate() once")
    assert checks["copy kernels"].reason.endswith("the suite of tests has passed on this model")
    path = calibration.place("GPU", 13000)
    rows = (calibration.Measurement("onboard", 4096, 64, "plain", 5.0),)
    calibration.store(path, calibration.made(GPU, rows))
    assert doctor.check_copies(GPU)[0].reason == f"as measured in {path}"
    path.write_text("no")
    assert doctor.check_copies(GPU)[0].status == WARNING
    monkeypatch.setenv("KVPOOL_COPY_PATH", "batched")
    assert doctor.check_copies(GPU)[0].reason == "batched, by KVPOOL_COPY_PATH"


def test_a_verdict_that_failed_is_the_exit_status(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = doctor.Package("nothing_of_this_name", "nothing-of-this-name", "everything", "pip install it")
    monkeypatch.setattr(doctor, "_PARTS", (*doctor._PARTS, broken))
    assert main(["doctor", "--device", "cpu", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)
    verdict = {"status": "failed", "reason": "not installed (everything)", "advice": "pip install it"}
    assert {"name": "nothing-of-this-name"} | verdict in checks
    assert main(["doctor", "--device", "cpu"]) == 1
    line = r"^nothing-of-this-name: failed, not installed.*\n    advice: pip install it$"
    assert re.search(line, capsys.readouterr().out, re.MULTILINE)


def test_the_cache_that_is_looked_at_is_the_one_in_use() -> None:
    first_outside(np.zeros(1, np.int64), 0)  # compiled here, unless it is kept
    (check,) = doctor.check_compiled_code()
    assert config.DISABLE_JIT or f" MiB in {cache.cache_root()}, " in check.reason


def test_compiled_code_that_another_process_removes_meanwhile_is_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept.nbc").write_bytes(bytes(100))
    (tmp_path / "gone.nbc").symlink_to(tmp_path / "nowhere")
    going = tmp_path / "going"
    going.mkdir()
    listed = os.scandir

    def scandir(path: str | Path) -> Any:
        if Path(path) == going:
            going.rmdir()
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert doctor._compiled(tmp_path) == 100 and not going.exists()


def test_oldest_versions_are_those_of_the_package() -> None:
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    extras_of_developers = ("test", "bench", "docs", "dev")
    extras = "\n".join(
        text for name, text in settings["options.extras_require"].items() if name not in extras_of_developers
    )
    lines = f"{settings['options']['install_requires']}\n{extras}"
    required = dict(re.findall(r"^([\w-]+?)(?:-cuda\d+x)?(?:\[\w+\])?>=([\d.]+)", lines, re.MULTILINE))
    known = {known.package: known.minimum for known in doctor._PARTS if known.minimum}
    assert known == required, "every package that an extra asks for is looked at"
