"""The command for machines with a GPU, run as it stands: its steps in their order, over the emulated driver.

What it starts is a Python that says it is not emulated, and does the first step whole and the others at a small size.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
COMMAND = ROOT / ".ci" / "gpu"

# The steps: a check that comes by standard input, the tests, the table.
PYTHON = """#!{python}
import os, sys
given = sys.argv[1:]
with open({log!r}, "a") as log:
    print("python", *given, file=log)
if given == ["-"]:
    os.environ.pop("KVPOOL_EMULATED")
elif given[:4] == ["-m", "pytest", "-m", "gpu"]:
    given = [*given[:4], "--co", "-q", *given[4:]]
elif given[:2] == ["-m", "asv_bench.gpu_table"]:
    given = [{table!r}, *given[2:], "--output", {results!r}]
else:
    sys.exit(f"no step of it: {{given}}")
os.execv(sys.executable, [sys.executable, *given])
"""
TABLE = """
import pathlib
import sys
from functools import partial
from asv_bench import gpu_table
from tests.gpu.test_benchmarks import SIZES

for owner, sizes in SIZES.items():
    for name, value in sizes.items():
        setattr(owner, name, value)
records = pathlib.Path(__file__).with_name("proven.json")
records.write_text("[]")
gpu_table.prove = partial(gpu_table.prove, file=records)
gpu_table.main(sys.argv[1:])
"""
SANITIZER = """#!/bin/sh
echo compute-sanitizer "$@" >> {log}
while [ "$1" != {python} ]; do shift; done
exec "$@"
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
    (tmp_path / "table.py").write_text(TABLE)
    places = {"table": str(tmp_path / "table.py"), "results": str(tmp_path / "RESULTS.md")}
    return executable(tmp_path / "python", PYTHON.format(python=sys.executable, log=str(log), **places))


def run(folder: Path, python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": str(python), "PATH": f"{folder}:/usr/bin:/bin"}
    environment |= {"OUT": str(folder / "out"), "WORKERS": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT)])
    return subprocess.run(
        [str(COMMAND), *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )


def test_its_steps_are_the_check_the_tests_and_the_table(tmp_path: Path, python: Path, log: Path) -> None:
    done = run(tmp_path, python, "tests/gpu/test_numba.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("GPU 0: Emulated GPU (not a GPU), 4,096 MiB, driver's CUDA 13000\nGPU 1: ")
    assert "test_tables_of_a_step_arrive_on_a_stream" in done.stdout
    assert done.stderr.count("compute-sanitizer was not found") == 1
    out = tmp_path / "out"
    assert log.read_text().splitlines() == [
        "python -",
        f"python -m pytest -m gpu --junitxml {out}/tests.xml tests/gpu/test_numba.py",
        f"python -m asv_bench.gpu_table --command .ci/gpu bench --output {out}/RESULTS.md",
    ]
    results = (tmp_path / "RESULTS.md").read_text()
    assert "Emulated GPU (not a GPU), CUDA 13.0, compute capability 9.0, commit" in results
    assert "`.ci/gpu bench`. nvidia-smi says nothing" in results
    assert json.loads((tmp_path / "proven.json").read_text()) == [], "only `prove` records"


def test_sanitizers_select_tests(tmp_path: Path, python: Path, log: Path) -> None:
    text = SANITIZER.format(log=log, python=shlex.quote(str(python)))
    report = 'while [ "$1" != --log-file ]; do shift; done\necho "ERROR SUMMARY: 0 errors" > "$2"\n'
    executable(tmp_path / "compute-sanitizer", text.replace("while", report + "while", 1))
    done = run(tmp_path, python, "sanitize")
    assert done.returncode == 0, done.stdout + done.stderr
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        output = (tmp_path / "out" / "sanitizer" / f"{tool}.out").read_text()
        assert "test_tables_of_a_step_arrive_on_a_stream" in output


def test_tests_that_fail_end_it_before_the_table(tmp_path: Path, python: Path, log: Path) -> None:
    done = run(tmp_path, python, "--no-such-option")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "asv_bench" not in log.read_text() and not (tmp_path / "RESULTS.md").exists()
