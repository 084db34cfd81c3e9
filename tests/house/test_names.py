"""Names are given once: no file and no class of the package shares its name with another."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tests.house.counter import ROOT

PACKAGE = ROOT / "kvpool"
MODULES = sorted(PACKAGE.rglob("*.py"))
ANY = 0.08
"""The most of all annotated arguments that are ``Any``."""
COMMANDS = {"plan.py", "replay.py", "store.py"}
"""Modules of commands are named by their command."""


def test_no_file_name_stands_twice_in_the_package() -> None:
    names = Counter(path.name for path in MODULES if path.stem not in ("__init__", "__main__"))
    modules = [path for path in MODULES if path.parent.name != "commands" or path.name not in COMMANDS]
    twice = [name for name in names if sum(path.name == name for path in modules) > 1]
    assert not twice, twice


PUBLIC_TWICE = {"Event", "Plan"}
"""What users import by two names: an event of the pool and of a device, the plan of a prompt and of a survey."""


def test_no_class_name_stands_twice_in_the_package() -> None:
    files_of: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                files_of.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    twice = {name: files for name, files in files_of.items() if len(files) > 1 and name not in PUBLIC_TWICE}
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
    anything = [
        argument for argument in annotated if ast.unparse(argument.annotation or argument) in ("Any", "typing.Any")
    ]
    print(f"{len(anything)} of {len(annotated)}")
    assert len(anything) <= ANY * len(annotated)
