"""Seeds of tests that draw: a few always, all with ``--exhaustive``."""

from __future__ import annotations

import pytest


def seeds(some: int, all_of_them: int) -> pytest.MarkDecorator:
    """Give a test ``seeds``: the first ``some``, and in an exhaustive test the others up to ``all_of_them``."""
    others = pytest.param(range(some, all_of_them), marks=pytest.mark.exhaustive)
    return pytest.mark.parametrize("seeds", [range(some), others], ids=["some", "others"])
