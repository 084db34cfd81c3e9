"""What most tests of block tables begin with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine import Engine

Two = tuple[Engine, list[int]]


@pytest.fixture
def two(make: Callable[..., Engine]) -> Two:
    """An engine with two sequences, of one token and of five, in one block and in three."""
    engine = make(T=2, P=16)
    return engine, [engine.add([1]).id, engine.add(range(5)).id]
