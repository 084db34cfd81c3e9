"""The doctor reports a status, a reason and an advice for each part, and its exit status is whether a device can be
used."""

from __future__ import annotations

import configparser
import copy
import functools
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.__main__ import main
from kvpool.common.arguments import first_outside
from kvpool.common.jit import cache
from kvpool.tools.cli import doctor
from kvpool.tools.cli.doctor import ABSENT, FAILED, OK, WARNING

Output = pytest.CaptureFixture[str]
compiling = functools.cache(doctor._numba_cuda)
"""Kernels of tables are compiled once for all tests of this file."""


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without CuPy, with a cache of its own."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(doctor, "_numba_cuda", compiling)
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


@pytest.mark.parametrize(("device", "expected"), [("cpu", 0), ("sim", 0), ("auto", 0), ("cuda", 1)])
def test_the_exit_status_says_whether_the_device_can_be_used(capsys: Output, device: str, expected: int) -> None:
    status, text = answer(capsys, "--device", device)
    assert status == expected
    assert ("device cuda: failed, " in text) == bool(expected)


def test_an_environment_that_names_no_device_is_a_finding(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_DEVICE", "tpu")
    status, text = answer(capsys)
    assert status == 1 and "KVPOOL_DEVICE: expected one of cpu, cuda, sim, got 'tpu'" in text


def test_json_has_every_finding(capsys: Output) -> None:
    status, text = answer(capsys, "--json")
    report = json.loads(text)
    assert status == 0 and report["usable"] and report["auto"]["device"] == "cpu"
    assert report["packages"]["numpy"]["error"] is None and report["packages"]["cupy"]["error"]
    assert report["packages"]["nixl"]["install"] == "pip install --no-deps nixl nixl-cu13"
    assert report["gpus"] == [] and report["copies"] is None


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
    def newer(name: str, capability: tuple[int, int]) -> str:
        raise AttributeError("module 'numpy' has no attribute 'row_stack'")

    def sound(name: str, capability: tuple[int, int]) -> str:
        return ".entry"

    numba_own, installed = "/site/numba/cuda/__init__.py", "/site/numba_cuda/numba/cuda/__init__.py"
    for place, version, compile_for, wrong in (
        (numba_own, "0.30", sound, "Numba's own"),
        (numba_own, None, newer, None),
        (installed, "0.30", sound, None),
        (installed, "0.30", newer, "kernels of tables cannot be compiled: AttributeError: module 'numpy'"),
    ):
        there = SimpleNamespace(__file__=place, compile_for=compile_for, KERNELS={"any": None})
        monkeypatch.setattr(doctor.importlib, "import_module", lambda name, there=there: there)
        package = compiling.__wrapped__(version)
        assert package["place"] == place
        assert package["error"] is None if wrong is None else wrong in package["error"]


# ----------------------------------------
# What is wrong is found and has advice, and only what is needed fails.


ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30


def part(**changes: Any) -> dict[str, Any]:
    known = {"version": "2.0", "error": None, "use": "plots", "install": "pip install x", "minimum": "1.5"}
    return known | {"required": False} | changes


# A machine on which everything is right.
WELL: dict[str, Any] = {
    "packages": {"numpy": part(required=True), "numba-cuda": part(), "cupy": part()},
    "numba.cuda": {"place": "/numba_cuda", "error": None},
    "jit": {"disabled": False, "root": "/cache", "used": 5, "free": GIB, "in_use": True},
    "driver": {"version": 13000, "error": None, "kernel_module": True, "gpu_files": 1},
    "cupy_packages": ["cupy-cuda13x"],
    "gpus": [{"number": 0, "name": "GPU", "memory": 80 * GIB, "driver": 13000}],
    "memory": {"locked_limit": None, "available": 64 * GIB},
}
NO_LIBRARY = "libcuda.so.1: cannot open shared object file"
NOT_THERE = {"version": None, "error": NO_LIBRARY, "kernel_module": False, "gpu_files": 0}
LACKING = {"version": None, "error": "not installed"}
LEFT = "available memory"


def test_a_machine_on_which_everything_is_right_needs_no_advice() -> None:
    assert {(check.status, check.advice) for check in doctor.judge(WELL)} == {(OK, "")}


@pytest.mark.parametrize(
    ("changes", "name", "status", "advice"),
    [
        ({"packages": {"cupy": part(**LACKING)}}, "cupy", ABSENT, "pip install x"),
        ({"packages": {"numpy": part(**LACKING, required=True)}}, "numpy", FAILED, "pip install x"),
        ({"packages": {"cupy": part(error="OSError: libcudart.so")}}, "cupy", WARNING, "pip install x"),
        ({"packages": {"numpy": part(error="OSError: no", required=True)}}, "numpy", FAILED, "pip install x"),
        ({"packages": {"cupy": part(version="1.4.9")}}, "cupy", WARNING, "pip install x"),
        ({"packages": {"numpy": part(version="1.4.9", required=True)}}, "numpy", FAILED, "pip install x"),
        ({"packages": {"cupy": part(version="1.5.0rc1")}}, "cupy", OK, ""),
        ({"packages": {"cupy": part(version="1.10")}}, "cupy", OK, ""),
        ({"packages": {"cupy": part(version=None)}}, "cupy", OK, ""),
        ({"numba.cuda": {"error": "is Numba's own: PYTHONPATH?"}}, "numba.cuda", WARNING, "PYTHONPATH"),
        ({"numba.cuda": {"error": "cannot be compiled"}}, "numba.cuda", WARNING, "pip install x"),
        ({"jit": {"disabled": True}}, "compiled code", WARNING, "unset NUMBA_DISABLE_JIT"),
        ({"jit": {"root": None, "used": None, "free": None}}, "compiled code", WARNING, "NUMBA_CACHE_DIR"),
        ({"jit": {"in_use": False}}, "compiled code", WARNING, "pip install -U"),
        ({"jit": {"free": 1 << 20}}, "compiled code", WARNING, "make room"),
        ({"gpus": [], "driver": NOT_THERE}, "NVIDIA driver", ABSENT, "install NVIDIA's driver"),
        ({"gpus": [], "driver": NOT_THERE | {"kernel_module": True}}, "NVIDIA driver", WARNING, "--gpus all"),
        ({"gpus": [], "driver": {"gpu_files": 0}}, "NVIDIA driver", WARNING, "--gpus all"),
        ({"gpus": [], "cupy_packages": []}, "NVIDIA driver", WARNING, ".[cuda13]"),
        ({"gpus": [], "cupy_packages": [], "driver": {"version": 12080}}, "NVIDIA driver", WARNING, ".[cuda12]"),
        ({"gpus": [], "driver": {"version": 12080}}, "NVIDIA driver", WARNING, "pip uninstall cupy-cuda13x"),
        ({"gpus": [], "driver": {"version": 11080}}, "NVIDIA driver", WARNING, "update the driver"),
        ({"cupy_packages": ["cupy-cuda13x", "cupy"]}, "NVIDIA driver", WARNING, "pip uninstall cupy-cuda13x cupy"),
        ({"memory": {"available": None}}, LEFT, WARNING, "host_blocks"),
        ({"memory": {"available": 1 << 20}}, LEFT, WARNING, "raise the limit"),
    ],
)
def test_what_is_wrong_is_found_and_has_advice(changes: dict[str, Any], name: str, status: str, advice: str) -> None:
    facts = copy.deepcopy(WELL)
    for key, value in changes.items():
        facts[key] = facts[key] | value if isinstance(value, dict) else value
    other = [check for check in doctor.judge(facts) if check.name != name]
    (check,) = [check for check in doctor.judge(facts) if check.name == name]
    assert check.status == status and advice in check.advice
    assert {check.status for check in other} == {OK}, "nothing else is wrong"


@pytest.mark.parametrize(
    ("user", "limit", "gpus", "status"),
    [(1000, GIB, True, WARNING), (0, GIB, True, OK), (1000, 64 * GIB, True, OK), (1000, GIB, False, OK)],
)
def test_a_limit_of_locked_memory_matters_where_memory_is_pinned(
    monkeypatch: pytest.MonkeyPatch, user: int, limit: int, gpus: bool, status: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    facts = WELL | {"memory": {"locked_limit": limit, "available": 64 * GIB}, "gpus": WELL["gpus"] if gpus else []}
    check = doctor.locked_memory(facts)
    assert check.status == status and ("ulimit -l unlimited" in check.advice) == (status == WARNING)


def test_a_verdict_that_failed_is_the_exit_status(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = doctor.Package("nothing_of_this_name", "nothing-of-this-name", "everything", "pip install it")
    monkeypatch.setattr(doctor, "_PARTS", (*doctor._PARTS, broken))
    assert main(["doctor", "--device", "cpu", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    verdict = {"status": "failed", "reason": "not installed (everything)", "advice": "pip install it"}
    assert {"name": "nothing-of-this-name"} | verdict in checks
    assert main(["doctor", "--device", "cpu"]) == 1
    line = r"^nothing-of-this-name: failed, not installed.*\n    advice: pip install it$"
    assert re.search(line, capsys.readouterr().out, re.MULTILINE)


def test_the_cache_that_is_looked_at_is_the_one_in_use() -> None:
    first_outside(np.zeros(1, np.int64), 0)  # compiled here, unless it is kept
    report = doctor.look_at_jit()
    assert report["root"] == str(cache.cache_root()) and report["free"] > 0
    assert report["disabled"] or (report["in_use"] and report["used"] > 0)


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
    monkeypatch.setattr(cache, "cache_root", lambda: tmp_path)
    report = doctor.look_at_jit()
    assert report is not None and report["used"] == 100 and not going.exists()


def test_a_driver_is_seen_by_its_files(tmp_path: Path) -> None:
    assert not doctor.look_at_driver(tmp_path)["kernel_module"] and doctor.look_at_driver(tmp_path)["gpu_files"] == 0
    for name in ("dev/nvidia0", "dev/nvidia1", "dev/nvidiactl", "proc/driver/nvidia/version"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    driver = doctor.look_at_driver(tmp_path)
    assert driver["kernel_module"] and driver["gpu_files"] == 2
    assert (driver["version"] is None) == (driver["error"] is not None)


def test_oldest_versions_are_those_of_the_package() -> None:
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    extras_of_developers = ("test", "bench", "docs", "dev", "coverage")
    extras = "\n".join(
        text for name, text in settings["options.extras_require"].items() if name not in extras_of_developers
    )
    lines = f"{settings['options']['install_requires']}\n{extras}"
    required = dict(re.findall(r"^([\w-]+?)(?:-cuda\d+x)?(?:\[\w+\])?>=([\d.]+)", lines, re.MULTILINE))
    known = {known.package: known.minimum for known in doctor._PARTS if known.minimum}
    assert known == required, "every package that an extra asks for is looked at"
