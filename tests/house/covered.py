"""``python -m tests.house.covered``: the lines of ``kvpool/`` that the tests reach, against a baseline.

Runs pytest under coverage.py: the tests of README.md's command, and then those of ``INTERPRETED`` once more with
``NUMBA_DISABLE_JIT=1``, since lines of jitted functions are seen in the interpreter only. Prints a table of files and
each line that the baseline does not have as uncovered. ``--save`` writes the baseline.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "build" / "coverage"
BASELINE = Path(__file__).with_name("uncovered.txt")
INTERPRETED = ("arrays", "copying", "device", "holders", "hostcache", "model", "sequences", "state", "tables")
SETTINGS = f"""\
[run]
source = {ROOT / "kvpool"}
data_file = {DATA / "data"}
parallel = true
patch = subprocess, _exit
core = ctrace
disable_warnings = no-data-collected
"""


class Line(NamedTuple):
    """An uncovered line: where it is, the innermost function that has it, and its text."""

    file: str
    function: str
    text: str
    number: int

    @property
    def key(self) -> tuple[str, str]:
        """What stays equal when lines above are edited and when a function moves to another file."""
        return self.function, self.text


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Put the tracer of coverage.py back, which tests that trace calls themselves have replaced (pytest hook)."""
    session: Any = item.session
    tracer = session.__dict__.setdefault("tracer", sys.gettrace())
    if sys.gettrace() is not tracer:
        sys.settrace(tracer)


def run(arguments: Sequence[str], *, interpreter: bool) -> int:
    """Run pytest under coverage.py, and return its exit status."""
    DATA.mkdir(parents=True, exist_ok=True)
    settings = DATA / "settings"
    settings.write_text(SETTINGS, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if interpreter:
        environment["NUMBA_DISABLE_JIT"] = "1"
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.house.covered"]
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", *options, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def functions_of(source: str) -> dict[int, str]:
    """The innermost function or class of each line that is in one."""
    names: dict[int, str] = {}

    def enter(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inner = f"{prefix}.{child.name}" if prefix else child.name
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                names.update(dict.fromkeys(range(first, (child.end_lineno or first) + 1), inner))
            enter(child, inner)

    enter(ast.parse(source), "")
    return names


def measured() -> list[Line]:
    """Combine what all runs have measured."""
    import coverage

    measurement = coverage.Coverage(config_file=str(DATA / "settings"))
    measurement.load()
    if any(DATA.glob("data.*")):
        measurement.combine()
        measurement.save()
    measurement.report()
    uncovered = []
    for path in sorted((ROOT / "kvpool").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines, functions, name = source.splitlines(), functions_of(source), str(path.relative_to(ROOT))
        missing = measurement.analysis2(str(path))[3]
        uncovered += [Line(name, functions.get(number, ""), lines[number - 1].strip(), number) for number in missing]
    return uncovered


def save(lines: list[Line], path: Path = BASELINE) -> None:
    """Write the baseline."""
    path.write_text("".join(f"{line.file}\t{line.function}\t{line.text}\n" for line in lines), encoding="utf-8")


def load(path: Path = BASELINE) -> list[Line]:
    """Read the baseline; without one, nothing was covered."""
    rows = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Line(*row.split("\t", 2), 0) for row in rows]


def lost(before: list[Line], after: list[Line]) -> list[Line]:
    """The uncovered lines that the baseline does not have: no longer covered, or new and not covered."""
    known = Counter(line.key for line in before)
    lines = []
    for line in after:
        known[line.key] -= 1
        if known[line.key] < 0:
            lines.append(line)
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if a line is not covered that the baseline does not list, 0 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.house.covered", description=__doc__)
    parser.add_argument("--add", action="store_true", help="add to what earlier runs measured")
    parser.add_argument("--report", action="store_true", help="run no tests")
    parser.add_argument("--save", action="store_true", help=f"write {BASELINE.relative_to(ROOT)}")
    parser.add_argument("--interpreter", action="store_true", help="run the tests given in the interpreter")
    parser.add_argument("--workers", default="auto", help="processes that run tests (default: one a core)")
    options, rest = parser.parse_known_args(arguments)
    if not options.report:
        if not options.add:
            shutil.rmtree(DATA, ignore_errors=True)
        for chosen, interpreter in _runs(rest, options.interpreter):
            status = run(["-n", options.workers, "--dist", "worksteal", *chosen], interpreter=interpreter)
            if status:
                print(f"pytest ended with status {status}: what failing tests do not reach counts as uncovered")
    uncovered = measured()
    lines = lost(load(), uncovered)
    for line in lines:
        print(f"{line.file}:{line.number}: {line.function}: {line.text}")
    if options.save:
        save(uncovered)
        return 0
    return 1 if lines else 0


def _runs(given: Sequence[str], interpreter: bool) -> Iterable[tuple[Sequence[str], bool]]:
    if given:
        return [(given, interpreter)]
    folders = [f"tests/{folder}" for folder in INTERPRETED]
    return [(folders, True)] if interpreter else [((), False), (folders, True)]


if __name__ == "__main__":
    sys.exit(main())
