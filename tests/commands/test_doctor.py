"""The doctor says what is there, what is missing and how to get it, and its exit status answers whether a device can be
used."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpool.__main__ import main
from kvpool.commands import doctor


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without CuPy, with a cache of its own."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    for name in ("KVPOOL_DEVICE", "KVPOOL_COPY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["doctor", *arguments])
    return status, capsys.readouterr().out


def test_without_a_gpu_auto_is_the_cpu_and_the_reason_names_the_extra(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = answer(capsys)
    assert status == 0
    assert 'device "auto" is cpu: the cuda device needs CuPy' in text and ".[cuda13]" in text
    assert "no GPU that kvpool can use" in text and "ulimit -l" in text


@pytest.mark.parametrize(("device", "expected"), [("cpu", 0), ("sim", 0), ("auto", 0), ("cuda", 1)])
def test_the_exit_status_says_whether_the_device_can_be_used(
    capsys: pytest.CaptureFixture[str], device: str, expected: int
) -> None:
    status, text = answer(capsys, "--device", device)
    assert status == expected
    assert ("device 'cuda' cannot be used" in text) == bool(expected)


def test_an_environment_that_names_no_device_is_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_DEVICE", "tpu")
    status, text = answer(capsys)
    assert status == 1 and "KVPOOL_DEVICE='tpu'" in text


def test_json_has_every_finding(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = answer(capsys, "--json")
    found = json.loads(text)
    assert status == 0 and found["usable"] and found["auto"]["device"] == "cpu"
    assert found["packages"]["numpy"]["error"] is None and found["packages"]["cupy"]["error"]
    assert found["packages"]["nixl"]["install"] == "pip install --no-deps nixl nixl-cu13"
    assert found["gpus"] == [] and found["copies"] is None


def test_a_package_that_is_there_and_broken_is_no_crash(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> None:
        if name not in sound:
            raise OSError("libcudart.so: cannot open shared object file")

    sound = {"numpy", "numba"}
    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    status, text = answer(capsys)
    assert status == 0 and "OSError: libcudart.so" in text
    sound.remove("numba")
    assert answer(capsys)[0] == 1, "nothing works without it"


def test_numbas_own_cuda_in_the_place_of_numba_cuda_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for place, wrong in (("/site/numba/cuda/__init__.py", True), ("/site/numba_cuda/numba/cuda/__init__.py", False)):
        monkeypatch.setattr(
            doctor.importlib, "import_module", lambda name, place=place: SimpleNamespace(__file__=place)
        )
        found = doctor._numba_cuda("0.30")
        assert (found["place"], bool(found["error"])) == (place, wrong)
    monkeypatch.setattr(
        doctor.importlib, "import_module", lambda name: SimpleNamespace(__file__="/site/numba/cuda/__init__.py")
    )
    assert doctor._numba_cuda(None)["error"] is None
