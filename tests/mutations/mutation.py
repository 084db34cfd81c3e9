"""A mutation: one rule of the package taken out, or got wrong, and the tests that must notice."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
Nodes = list[ast.expr] | list[ast.stmt]


class Mutation(NamedTuple):
    """In ``function``, the code ``before`` stands once and becomes ``after``; ``harm`` is what a user would see of it.

    ``function`` is the end of a dotted name in the package, as long as it must be to mean one place: a
    function, ``Class.method``, a class, or a constant, with modules before it if need be. ``before`` and ``after`` are
    statements, or both are an expression; an empty ``after`` takes statements out. Comments, line breaks and
    needless parentheses do not matter.

    Every one of ``tests``, node ids of pytest, must then fail. They run in the interpreter (NUMBA_DISABLE_JIT), where a
    changed module costs nothing.
    """

    name: str
    function: str
    before: str
    after: str
    harm: str
    tests: tuple[str, ...]

    def code(self) -> tuple[Nodes, Nodes]:
        """What is replaced, and what replaces it."""
        before, after = ast.parse(self.before).body, ast.parse(self.after).body
        match before, after:
            case [ast.Expr(old)], [ast.Expr(new)]:
                return [old], [new]
        return before, after
