"""The command for machines with a GPU says what is missing on others, and runs nothing there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.device.cuda import unusable

COMMAND = Path(__file__).resolve().parents[2] / ".ci" / "gpu"
RESULTS = COMMAND.parents[1] / "asv_bench" / "RESULTS.md"


def run(folder: Path, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run([str(COMMAND)], cwd=folder, env=os.environ | environment, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path) -> None:
    missing = unusable()
    if missing is None:
        pytest.skip("there is a GPU here")
    before = RESULTS.exists() and RESULTS.read_bytes()
    assert run(tmp_path, PYTHON=sys.executable) == (
        2,
        "",
        f"nothing was run, as there is no GPU to run it on: {missing}\n",
    )
    assert (RESULTS.exists() and RESULTS.read_bytes()) == before


@pytest.mark.gpu
def test_an_emulated_driver_is_no_gpu(tmp_path: Path) -> None:
    if "KVPOOL_EMULATED" not in os.environ:
        pytest.skip("no emulated run")
    status, out, error = run(tmp_path, PYTHON=sys.executable)
    assert (status, out) == (2, "") and "an emulated driver is no GPU" in error


def test_without_an_environment_it_says_how_to_make_one(tmp_path: Path) -> None:
    status, out, error = run(tmp_path, PYTHON=str(tmp_path / "python"))
    assert (status, out) == (2, "") and "pip install" in error
