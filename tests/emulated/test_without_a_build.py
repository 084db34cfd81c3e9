"""What can be said of the emulation without building it: the names of kernels, and what a run without a build says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.device.launches import cuda_source, cuda_sources
from tests.emulated import build, twins
from tests.kernels import shim

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", sorted(path.name for path in Path(str(cuda_sources())).glob("*.cu")))
def test_every_kernel_has_a_twin(name: str) -> None:
    source = cuda_source(name)
    assert twins.kernels(source) == sorted(shim.kernels(source)) != []


def test_kernels_of_any_source_are_found() -> None:
    source = 'extern "C" __global__ void __launch_bounds__(512) first(int* a) {}\n'
    source += 'extern "C" __global__ void second(float b) {}'
    assert twins.kernels(source) == ["first", "second"]


def test_a_run_without_a_build_says_how_to_build(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), build.CACHE: str(tmp_path)}
    for command, said in (
        (["pytest", "--emulated", "-m", "gpu", "tests/gpu"], "python -m tests.emulated build"),
        (["tests.emulated", "status"], "not built"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode in (1, pytest.ExitCode.USAGE_ERROR) and said in done.stdout + done.stderr
