"""The kernels under the compiler's sanitizers: misaligned words, overflows, and bytes outside of what was allocated."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.shim import SANITIZE

ROOT = Path(__file__).resolve().parents[2]
FILES = ["test_kv_copy.py", "test_copy_fragments.py", "test_token_moves.py"]


def runtime(name: str) -> str:
    """The path of a library of the compiler; skips where there is none."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed; the kernels are built with it for the CPU")
    path = subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(path):
        pytest.skip(f"g++ has no {name}")
    return path


def run_under(sanitizers: str, preloaded: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        SANITIZE: sanitizers,
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("file", FILES)
def test_shim_runs_under_the_sanitizers(file: str) -> None:
    preloaded = [runtime("libasan.so"), runtime("libubsan.so"), runtime("libstdc++.so.6")]
    arguments = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "shim", str(Path(__file__).parent / file)]
    done = run_under("address,undefined", preloaded, *arguments)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


PROBE = """
import ctypes, sys
import numpy as np
from kvpool.device import launches as copies
from kvpool.device.launches import KvPlane, KvTokens
from kvpool.device.launches import Grid
from tests.kernels.shim import ShimLauncher
paged, staging, slots = np.zeros(64, np.uint8), np.zeros(64, np.uint8), np.arange(4)
shift, stride = int(sys.argv[1]), int(sys.argv[2])
launch = copies.kv_copy(
    np.array([[paged.ctypes.data]]), [KvPlane(0, stride, 0, staging.ctypes.data, 0, 16, 0, 1, 16)],
    KvTokens(slots.ctypes.data, 8, 4, 4, 4), gather=True, host=False, grid=Grid(1))
launch.record["bases"][0, 0] += shift
ShimLauncher().launch(launch, 0)
"""


@pytest.mark.parametrize(
    ("shift", "stride", "finding"),
    [(0, 16, ""), (4, 16, "misaligned address"), (0, 32, "heap-buffer-overflow"), (32, 16, "heap-buffer-overflow")],
)
def test_shim_sanitizers_find_what_they_are_there_for(shift: int, stride: int, finding: str) -> None:
    preloaded = [runtime("libasan.so"), runtime("libubsan.so"), runtime("libstdc++.so.6")]
    done = run_under("address,undefined", preloaded, "-c", PROBE, str(shift), str(stride))
    assert (done.returncode == 0) == (not finding), done.stderr
    assert finding in done.stderr
