"""No class of the package shares its name with another, and few arguments are typed as anything."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.house.counter import ROOT

PACKAGE = ROOT / "kvpool"
MODULES = sorted(PACKAGE.rglob("*.py"))
ANY = 0.08
"""The most of all annotated arguments that are ``Any``."""


def test_no_class_name_stands_twice_in_the_package() -> None:
    files_of: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                files_of.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    twice = {name: files for name, files in files_of.items() if len(files) > 1}
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


@pytest.mark.exhaustive
def test_few_arguments_may_be_anything() -> None:
    annotated = [argument for path in MODULES for argument in arguments_of(path)]
    anything = [
        argument for argument in annotated if ast.unparse(argument.annotation or argument) in ("Any", "typing.Any")
    ]
    print(f"{len(anything)} of {len(annotated)}")
    assert len(anything) <= ANY * len(annotated)
