"""Mutants made by rule from the syntax tree, of the rooms where a wrong line costs most. Nobody wrote down what a user
would see of one, nor which tests must fail: any test that reaches the line may."""

from __future__ import annotations

import ast
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.house.covered import INTERPRETED
from tests.mutations.anchors import Package, Place
from tests.mutations.bench import Bench

ROOMS = ("state", "pool", "hostcache", "remote", "storage")
TESTS = tuple(f"tests/{folder}" for folder in (*INTERPRETED, "race", "remote", "stores"))
SECONDS = 30.0

_PAIRS: tuple[tuple[str, type[ast.AST], type[ast.AST]], ...] = (
    ("off", ast.Lt, ast.LtE),
    ("off", ast.Gt, ast.GtE),
    ("negate", ast.Eq, ast.NotEq),
    ("negate", ast.Is, ast.IsNot),
    ("negate", ast.In, ast.NotIn),
    ("swap", ast.And, ast.Or),
)
_OTHER = {a: (operator, b) for operator, *pair in _PAIRS for a, b in (pair, reversed(pair))}


class Mutant(NamedTuple):
    """Other code in place of one node. ``name`` is module, function, a number in it, and operator."""

    name: str
    place: Place
    after: list[ast.AST]

    def __str__(self) -> str:
        return f"{self.name}: {ast.unparse(self.place.code())}"


def mutants(package: Package, room: str) -> Iterator[Mutant]:
    """All of a folder or a file, such as ``pool/transfer``."""
    numbers: Counter[str] = Counter()
    for place in package.within(room):
        for operator, after in _changes(place):
            name, depth = place.owner.name, place.owner.depth
            function = f"{'.'.join(name[:-depth])}:{'.'.join(name[-depth:])}"
            numbers[function] += 1
            yield Mutant(f"{function}:{numbers[function]}:{operator}", place, after)


def _changes(place: Place) -> Iterator[tuple[str, list[ast.AST]]]:
    """Operators, and what each puts in place of a node. A condition is fixed: its negation fails more tests."""
    node = place.nodes()[0]
    match place.parent, place.field:
        case (ast.If() | ast.IfExp(), "test") | (ast.comprehension(), "ifs"):
            yield "true", [ast.Constant(True)]
            yield "false", [ast.Constant(False)]
        case ast.While(), "test":
            yield "false", [ast.Constant(False)]
        case ast.BoolOp(ast.And()), "values":
            yield "true", [ast.Constant(True)]
        case ast.BoolOp(ast.Or()), "values":
            yield "false", [ast.Constant(False)]
        case (ast.Compare(), "left" | "comparators") | (ast.BinOp(op=ast.Add() | ast.Sub()), _):
            if isinstance(node, ast.Constant) and type(node.value) is int:
                yield "off", [ast.Constant(node.value + 1)]
    match node:
        case ast.Expr(ast.Call()) | ast.AugAssign():
            yield "drop", []
        case ast.Assign(targets) if not any(_is_new_name(part) for target in targets for part in ast.walk(target)):
            yield "drop", []
        case ast.cmpop() | ast.boolop() if type(node) in _OTHER:
            operator, other = _OTHER[type(node)]
            yield operator, [other()]


def _is_new_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


class Reach:
    """Which tests reach a node."""

    def __init__(self, copy: Bench, tests: Sequence[str]) -> None:
        import coverage

        self._seconds: dict[str, float] = {}
        self._reaching: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        paths = [copy.folder / test for test in tests]
        for file in (file for path in paths for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])):
            data = coverage.CoverageData(str(copy.folder / "reach"))
            data.erase()
            seconds = copy.reached(file, copy.folder / "reach")
            if not seconds:
                print(f"LEFT OUT {file.relative_to(copy.folder)}", flush=True)
                continue
            self._seconds |= seconds
            data.read()
            for source in data.measured_files():
                for line, tests_there in data.contexts_by_lineno(source).items():
                    self._reaching[source, line].update(tests_there)
        copy.patience = 4 * SECONDS

    def tests(self, place: Place) -> list[str]:
        """The fastest, as many as take half a minute."""
        line = getattr(place.code(), "lineno", 0)
        reaching = self._reaching[str(place.owner.file), line] & self._seconds.keys()
        fastest = sorted(reaching, key=lambda test: (self._seconds[test], test))
        sums = itertools.accumulate(self._seconds[test] for test in fastest)
        return [test for test, until in zip(fastest, sums, strict=True) if until < SECONDS or test == fastest[0]]


def killer(copy: Bench, mutant: Mutant, tests: Sequence[str]) -> str:
    """The first of some tests that fails with a mutant, or "" where none does."""
    if not tests:
        return ""
    try:
        failed, _ = copy.changed(*copy.package.changed(mutant.place, 1, mutant.after), tests, "-x")
    except RuntimeError:
        return "the import of the package"
    return failed[0] if failed else ""
