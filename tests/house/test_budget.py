"""Every folder has a budget of net lines, and names are given once. A folder that grows past its line is a decision
that somebody takes here."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.house.counter import ROOT, report, sizes, totals

PACKAGE = ROOT / "kvpool"
MODULES = sorted(PACKAGE.rglob("*.py"))
LINES = {
    "asv_bench": 1580,
    "asv_bench/benchmarks": 1777,
    "cuda": 340,
    "docs": 220,
    "examples": 1180,
    "kvpool": 535,
    "kvpool/arrays": 713,
    "kvpool/commands": 1082,
    "kvpool/copying": 598,
    "kvpool/device": 4143,
    "kvpool/engines": 3006,
    "kvpool/entry": 432,
    "kvpool/hostcache": 970,
    "kvpool/jit": 644,
    "kvpool/keepers": 2032,
    "kvpool/memory": 825,
    "kvpool/observe": 403,
    "kvpool/planner": 1334,
    "kvpool/pool": 3209,
    "kvpool/publish": 662,
    "kvpool/remote": 1670,
    "kvpool/replay": 2023,
    "kvpool/state": 5790,
    "kvpool/stores": 4144,
    "kvpool/tables": 630,
    "tests": 1709,
    "tests/arrays": 832,
    "tests/commands": 850,
    "tests/copying": 1763,
    "tests/device": 2539,
    "tests/emulated": 2834,
    "tests/engines": 4507,
    "tests/examples": 391,
    "tests/golden": 667,
    "tests/gpu": 1400,
    "tests/holders": 1015,
    "tests/hostcache": 1719,
    "tests/house": 1758,
    "tests/interop": 970,
    "tests/kernels": 1438,
    "tests/model": 2763,
    "tests/mutations": 3994,
    "tests/observe": 1030,
    "tests/planner": 769,
    "tests/publish": 1568,
    "tests/race": 2859,
    "tests/remote": 2181,
    "tests/replay": 1296,
    "tests/sequences": 3144,
    "tests/share": 672,
    "tests/state": 2028,
    "tests/stores": 9847,
    "tests/tables": 835,
}
"""The most net lines of each folder."""
DENSITY = {"kvpool": 10.21, "tests": 11.2}
"""The most tokens of a line, over all of them."""
FILES = 186
ANY = 0.08
"""The most of all annotated arguments that are ``Any``."""
COMMANDS = {"plan.py", "replay.py", "store.py"}
"""Modules of commands are named by their command."""


def test_every_folder_keeps_its_budget() -> None:
    table = sizes()
    print(report(table))
    assert table.keys() == LINES.keys(), "every folder has a line here, and every line a folder"
    over = [
        f"{name}: {size.lines} lines, {LINES[name]} allowed" for name, size in table.items() if size.lines > LINES[name]
    ]
    assert not over, "; ".join(over)


@pytest.mark.parametrize("top", DENSITY)
def test_lines_are_no_denser_than_they_were(top: str) -> None:
    assert totals(sizes())[top].density <= DENSITY[top] + 0.05


def test_the_package_has_few_files_and_no_file_name_twice() -> None:
    names = Counter(path.name for path in MODULES if path.stem not in ("__init__", "__main__"))
    own = [path for path in MODULES if path.parent.name != "commands" or path.name not in COMMANDS]
    twice = [name for name in names if sum(path.name == name for path in own) > 1]
    assert not twice, twice
    assert len(MODULES) <= FILES


PUBLIC_TWICE = {"Event", "Plan"}
"""What users import by two names: an event of the pool and of a device, the plan of a prompt and of a survey."""


def test_no_class_name_stands_twice_in_the_package() -> None:
    found: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    twice = {name: files for name, files in found.items() if len(files) > 1 and name not in PUBLIC_TWICE}
    assert not twice, twice


def arguments_of(path: Path) -> list[ast.arg]:
    """The annotated arguments of all functions of a file."""
    functions = [
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)
    ]
    everything = [
        argument
        for function in functions
        for argument in (
            *function.args.posonlyargs,
            *function.args.args,
            *function.args.kwonlyargs,
            *filter(None, (function.args.vararg, function.args.kwarg)),
        )
    ]
    return [argument for argument in everything if argument.annotation is not None]


def test_few_arguments_may_be_anything() -> None:
    annotated = [argument for path in MODULES for argument in arguments_of(path)]
    anything = [one for one in annotated if ast.unparse(one.annotation or one) in ("Any", "typing.Any")]
    print(f"{len(anything)} of {len(annotated)}")
    assert len(anything) <= ANY * len(annotated)
