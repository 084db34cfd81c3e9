"""Users' programs are checked by their types: right calls pass, and each wrong call is found where it stands."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted((ROOT / "tests" / "house" / "typed").glob("*.py"))
WRONG = {
    (path.name, line)
    for path in PROGRAMS
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    if text.endswith("# wrong")
}


def command(tool: str) -> list[str]:
    """How a type checker that is installed is started, to print a line for each finding."""
    if tool == "mypy":
        pytest.importorskip("mypy")
        return [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--follow-imports=silent"]
    path = shutil.which(tool, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if path is None:
        pytest.skip("pyright is not installed; it comes with the extra 'dev', and downloads Node.js packages")
    return [path, "--pythonpath", sys.executable]


@pytest.mark.parametrize("tool", ["mypy", pytest.param("pyright", marks=pytest.mark.exhaustive)])
def test_wrong_calls_are_found_and_right_ones_pass(tool: str, tmp_path: Path) -> None:
    programs = [shutil.copy(path, tmp_path) for path in PROGRAMS]
    # An editable installation is found by a hook, which type checkers do not run.
    environment = {**os.environ, "MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}
    words = [*command(tool), *programs]
    run = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    print(run.stdout, run.stderr)
    found = re.findall(r"(\w+\.py):(\d+).*error", run.stdout)
    assert {(name, int(line)) for name, line in found} == WRONG


def test_public_names_are_listed_and_others_are_not() -> None:
    script = "import kvpool; print(*dir(kvpool))"
    listed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    import kvpool

    assert sorted(name for name in listed if not name.startswith("__")) == sorted(set(kvpool.__all__) - {"__version__"})


# ----------------------------------------
# The tree passes mypy and ruff with the project's settings.


@pytest.mark.parametrize(
    "command", [pytest.param("mypy kvpool", marks=pytest.mark.exhaustive), "ruff check .", "ruff format --check ."]
)
def test_tool_finds_nothing(command: str) -> None:
    tool = command.split()[0]
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed; it comes with the extra 'test'")
    done = subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
