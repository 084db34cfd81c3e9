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


def run_under(*arguments: str) -> subprocess.CompletedProcess[str]:
    preloaded = [runtime(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")]
    variables = {SANITIZE: "address,undefined", "LD_PRELOAD": " ".join(preloaded), "ASAN_OPTIONS": "detect_leaks=0"}
    environment = {**os.environ, **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.exhaustive
def test_shim_runs_under_the_sanitizers() -> None:
    files = [str(Path(__file__).parent / file) for file in FILES]
    done = run_under("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "shim", *files)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


PROBE = """
import ctypes, os
import numpy as np
from kvpool.device import launches as copies
from kvpool.device.launches import KvPlane, KvTokens
from kvpool.device.launches import Grid
from tests.kernels.shim import ShimLauncher, library
paged, staging, slots = np.zeros(64, np.uint8), np.zeros(64, np.uint8), np.arange(4)
library("kv_copy.cu")
for shift, stride in CASES:
    print(shift, stride, flush=True)
    child = os.fork()
    if not child:
        os.dup2(1, 2)
        launch = copies.kv_copy(
            np.array([[paged.ctypes.data]]), [KvPlane(0, stride, 0, staging.ctypes.data, 0, 16, 0, 1, 16)],
            KvTokens(slots.ctypes.data, 8, 4, 4, 4), gather=True, host=False, grid=Grid(1))
        launch.record["bases"][0, 0] += shift
        ShimLauncher().launch(launch, 0)
        os._exit(0)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
FINDINGS = {
    (0, 16): "",
    (4, 16): "misaligned address",
    (0, 32): "heap-buffer-overflow",
    (32, 16): "heap-buffer-overflow",
}


@pytest.mark.exhaustive
def test_shim_sanitizers_find_what_they_are_there_for() -> None:
    """Each launch in a child of its own, which a finding ends."""
    done = run_under("-c", PROBE.replace("CASES", str([*FINDINGS])))
    assert done.returncode == 0, done.stderr
    for (shift, stride), finding in FINDINGS.items():
        said = done.stdout.partition(f"{shift} {stride}\n")[2].partition("ended ")
        assert (said[2].split()[0] == "0") == (not finding) and finding in said[0], said[0]
