"""The command for machines with a GPU: its verbs, bounds and sums, with stand-ins for the tools of such a machine.

Without a GPU it says what is missing, and runs nothing."""

from __future__ import annotations

import os
import shutil
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


TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PYTHON = """#!/bin/sh
if [ "$1" = - ]; then cat > /dev/null; echo "GPU 0: stand-in"; exit 0; fi
echo "$@" >> {folder}/log
case "$*" in *pytest*) exit ${{TESTS_STATUS:-0}} ;; esac
"""
# Takes the log file's pattern, and writes what a worker of this tool reported.
SANITIZER = """#!/bin/sh
echo "$@" >> {folder}/sanitizers
tool=$2
while [ "$1" != --log-file ]; do shift; done
place=${{2%\\%p.log}}
{body}
"""
CLEAN = """case $tool in
racecheck) line="RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" ;;
*) line="ERROR SUMMARY: 0 errors" ;;
esac
echo "========= $line" > ${place}1.log
echo "========= $line" > ${place}2.log
"""


class Machine:
    """A checkout with nothing but the command, and a PATH with stand-ins for the tools."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.command = folder / "checkout" / ".ci" / "gpu"
        self.command.parent.mkdir(parents=True)
        shutil.copy(COMMAND, self.command)
        self.tool("python", PYTHON.format(folder=folder))

    def tool(self, name: str, text: str) -> None:
        place = self.folder / "bin" / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(text)
        place.chmod(0o755)

    def sanitizer(self, body: str) -> None:
        self.tool("compute-sanitizer", SANITIZER.format(folder=self.folder, body=body))

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "CUDA_HOME": str(self.folder)}
        settings = {"PYTHON": str(self.folder / "bin" / "python"), "OUT": str(self.out)} | path | environment
        command = [str(self.command), *arguments]
        return subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=600)

    @property
    def calls(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_each_verb_runs_its_step_alone(machine: Machine) -> None:
    machine.sanitizer(CLEAN)
    table = f"-m asv_bench.gpu_bench --out {machine.out}"
    tests = f"-m pytest -m gpu --junitxml {machine.out}/tests.xml"
    for verb, calls in {"test": [tests], "bench": [table], "sanitize": []}.items():
        (machine.folder / "log").unlink(missing_ok=True)
        done = machine.run(verb)
        assert (done.returncode, machine.calls) == (0, calls), done.stderr
    assert machine.run("-x").returncode == 0 and machine.calls == [f"{tests} -x", table]


def test_nothing_follows_tests_that_fail(machine: Machine) -> None:
    machine.sanitizer(CLEAN)
    assert machine.run(TESTS_STATUS="1").returncode == 1
    assert len(machine.calls) == 1 and not (machine.folder / "sanitizers").exists()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            """
            [ $tool = memcheck ] && echo "========= ERROR SUMMARY: 3 errors" > ${place}2.log
            line="RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"
            [ $tool = racecheck ] && echo "========= $line" > ${place}1.log
            """,
            {"memcheck": "3 errors", "racecheck": "2 errors"},
        ),
        ("[ $tool = initcheck ] && exec sleep 600", {"initcheck": "did not end within 2 s"}),
        ("[ $tool = initcheck ] && exit 7", {"initcheck": "status 7 without a reported error"}),
        ("[ $tool = initcheck ] && rm ${place}1.log ${place}2.log", {"initcheck": "nothing was examined"}),
    ],
    ids=["reports in one worker", "hangs", "fails", "says nothing"],
)
def test_a_tool_that_reports_an_error_or_nothing_has_not_passed_and_all_run_to_their_end(
    machine: Machine, body: str, expected: dict[str, str]
) -> None:
    machine.sanitizer(f"{CLEAN}{body}\nexit 0")
    hangs = "sleep" in body
    done = machine.run("sanitize", SECONDS_MOST="2" if hangs else "540")
    text = (machine.out / "sanitizer" / "sum").read_text()
    assert done.returncode == 3 and text in done.stdout
    lines = dict(line.split(": ", 1) for line in text.splitlines())
    assert list(lines) == list(TOOLS)
    for tool, line in lines.items():
        # A busy machine may need more than 2 s for the others too.
        assert expected.get(tool, "" if hangs else "no errors in 2 processes") in line


@pytest.mark.gpu
def test_an_emulated_driver_is_not_a_gpu(tmp_path: Path) -> None:
    if "KVPOOL_EMULATED" not in os.environ:
        pytest.skip("no emulated run")
    status, out, error = run(tmp_path, PYTHON=sys.executable)
    assert (status, out) == (2, "") and "an emulated driver is no GPU" in error
