"""Cases of a test, and seeds of one that draws: a few always, all with ``--exhaustive``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some_of(count: int, cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test: the first ``count`` cases, and in an exhaustive one the others."""
    cases = list(cases)
    rest = [case if isinstance(case, tuple) else (case,) for case in cases[count:]]
    return [*cases[:count], *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in rest)]


def seeds(some: int, all_of_them: int) -> pytest.MarkDecorator:
    """Give a test ``seeds``: the first ``some``, and in an exhaustive test the others up to ``all_of_them``."""
    others = pytest.param(range(some, all_of_them), marks=pytest.mark.exhaustive)
    return pytest.mark.parametrize("seeds", [range(some), others], ids=["some", "others"])
