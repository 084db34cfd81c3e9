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
    given = [{table!r}, "--output", {results!r}, *given[2:]]
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
    environment["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT)])
    return subprocess.run(
        [str(COMMAND), *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )


def test_its_steps_are_the_check_the_tests_and_the_table_with_the_records(
    tmp_path: Path, python: Path, log: Path
) -> None:
    done = run(tmp_path, python, "tests/gpu/test_numba.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("GPU 0: Emulated GPU (not a GPU), 4,096 MiB, driver's CUDA 13000\nGPU 1: ")
    assert "test_tables_of_a_step_arrive_on_a_stream" in done.stdout
    assert done.stderr.count("compute-sanitizer was not found") == 1
    assert log.read_text().splitlines() == [
        "python -",
        "python -m pytest -m gpu tests/gpu/test_numba.py",
        "python -m asv_bench.gpu_table --prove --command .ci/gpu",
    ]
    results = (tmp_path / "RESULTS.md").read_text()
    assert "Emulated GPU (not a GPU), CUDA 13.0, compute capability 9.0, commit" in results
    assert "`.ci/gpu`. nvidia-smi says nothing" in results
    assert [row["path"] for row in json.loads((tmp_path / "proven.json").read_text())] == ["bulk", "kernel"]


def test_where_there_is_a_sanitizer_the_tests_run_under_each_of_its_tools(
    tmp_path: Path, python: Path, log: Path
) -> None:
    executable(tmp_path / "compute-sanitizer", SANITIZER.format(log=log, python=shlex.quote(str(python))))
    done = run(tmp_path, python, "tests/gpu/test_numba.py")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [line.split() for line in log.read_text().splitlines() if line.startswith("compute-sanitizer")]
    assert [words[2] for words in runs] == ["memcheck", "racecheck", "initcheck", "synccheck"]
    assert all("--error-exitcode" in words for words in runs) and "--report-api-errors" in runs[0]
    assert done.stdout.count("test_tables_of_a_step_arrive_on_a_stream") >= 5, "each selects tests"


@pytest.mark.parametrize("failing", ["pytest", "compute-sanitizer"])
def test_tests_that_fail_end_it_and_a_sanitizer_that_fails_comes_after_the_table(
    tmp_path: Path, python: Path, log: Path, failing: str
) -> None:
    executable(tmp_path / "compute-sanitizer", "#!/bin/sh\nexit 3\n")
    arguments = ["--no-such-option"] if failing == "pytest" else ["tests/gpu/test_numba.py"]
    done = run(tmp_path, python, *arguments)
    assert done.returncode == (3 if failing == "compute-sanitizer" else pytest.ExitCode.USAGE_ERROR)
    written = failing != "pytest"
    assert ("asv_bench" in log.read_text()) == (tmp_path / "RESULTS.md").exists() == written
    assert (tmp_path / "proven.json").exists() == written
