"""The command for machines with a GPU, run as it stands: its steps in their order, over the emulated driver.

What it starts is a Python that hides the emulation from the check, and collects the tests without running them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asv_bench import gpu_bench
from asv_bench.gpu_table import Result
from tests.commands.test_benchmarks import BENCHMARKS

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
COMMAND = ROOT / ".ci" / "gpu"

# The steps: a check that comes by standard input, the tests, the benchmarks.
PYTHON = """#!{python}
import os, sys
given = sys.argv[1:]
with open({log!r}, "a") as log:
    print("python", *given, file=log)
if given == ["-"]:
    os.environ.pop("KVPOOL_EMULATED")
elif given[:4] == ["-m", "pytest", "-m", "gpu"]:
    given = [*given[:4], "--co", "-q", *given[4:]]
elif given[:2] != ["-m", "asv_bench.gpu_bench"]:
    sys.exit(f"no step of it: {{given}}")
os.execv(sys.executable, [sys.executable, *given])
"""


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def python(tmp_path: Path, log: Path) -> Path:
    return executable(tmp_path / "python", PYTHON.format(python=sys.executable, log=str(log)))


def run(folder: Path, python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": str(python), "PATH": f"{folder}:/usr/bin:/bin"}
    environment |= {"OUT": str(folder / "out"), "WORKERS": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT)])
    return subprocess.run(
        [str(COMMAND), *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )


def test_its_steps_are_the_check_the_tests_and_the_benchmarks(tmp_path: Path, python: Path, log: Path) -> None:
    """The benchmarks run whole, in quick sizes, and nothing that is written looks like figures of a GPU."""
    pytest.importorskip("asv")
    if not (ROOT / ".git").exists():
        pytest.skip("asv needs a checkout of git")
    done = run(tmp_path, python, "tests/gpu/test_numba.py")
    out = tmp_path / "out"
    assert done.returncode == 0, done.stdout + done.stderr + (out / "asv.log").read_text()
    assert done.stdout.startswith("GPU 0: Emulated GPU (not a GPU), 4,096 MiB, driver's CUDA 13000\nGPU 1: ")
    assert "test_tables_of_a_step_arrive_on_a_stream" in done.stdout
    assert done.stderr.count("compute-sanitizer was not found") == 1
    assert log.read_text().splitlines() == [
        "python -",
        f"python -m pytest -m gpu --junitxml {out}/tests.xml tests/gpu/test_numba.py",
        f"python -m asv_bench.gpu_bench --out {out}",
    ]
    assert done.stdout.count(gpu_bench.NO_GPU) == 2 and "There is no baseline for it." in done.stdout
    text = (out / "RESULTS.md").read_text()
    assert "# Copies on a GPU (not a GPU: an emulated driver)\n\n**Unfit for a baseline: the driver is emulated" in text
    assert "Emulated GPU (not a GPU), CUDA 13.0, compute capability 9.0. nvidia-smi did not run" in text
    (path,) = (out / "asv" / "emulated-driver").glob("*-*.json")
    result = Result.load(path)
    measured = {benchmark.owner.__name__ for benchmark in BENCHMARKS if benchmark.module == "gpu"}
    assert not result.failed and set(result.params) == measured
    assert measured - set(result.figures) <= {"PeerCopies", "PeerTokens"}, "only peers may be missing"
    with pytest.raises(ValueError, match="the driver is emulated"):
        gpu_bench.record(path)
