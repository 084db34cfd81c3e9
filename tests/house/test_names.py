"""No class of the package shares its name with another."""

from __future__ import annotations

import ast

from tests.house.counter import ROOT

PACKAGE = ROOT / "kvpool"
MODULES = sorted(PACKAGE.rglob("*.py"))


def test_no_class_name_stands_twice_in_the_package() -> None:
    files_of: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                files_of.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    twice = {name: files for name, files in files_of.items() if len(files) > 1}
    assert not twice, twice
