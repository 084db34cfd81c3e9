"""Fixtures of the whole suite."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from engine import Engine
    from group_engine import GroupsEngine

# Most tests read device memory through NumPy; those of the GPU ask for it by name.
os.environ.setdefault("KVPOOL_DEVICE", "cpu")


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> Iterator[None]:
    """A run that was started in the background ignores SIGINT, which some tests raise."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    """Opens pools of T tokens per block, P device and S host blocks, each with a fake engine; all are verified and closed at the end."""
    from engine import open_engine

    opened: list[Engine] = []

    def build(T: int = 4, P: int = 8, S: int = 0, **options: Any) -> Engine:
        opened.append(open_engine(T, P, S, **options))
        return opened[-1]

    yield build
    for engine in opened:
        if engine.cache.closed:
            continue
        engine.check_all()
        engine.cache.verify()
        engine.cache.close()


@pytest.fixture
def open_() -> Iterator[Callable[..., GroupsEngine]]:
    """Opens pools of groups of 12 device blocks of 4 tokens each; all are verified and closed at the end."""
    from group_engine import open_groups

    opened: list[GroupsEngine] = []

    def build(*groups: dict[str, Any], **options: Any) -> GroupsEngine:
        made = [{"device_blocks": 12} | group for group in groups]
        opened.append(open_groups(made, **{"max_sequence_tokens": 64} | options))
        return opened[-1]

    yield build
    for engine in opened:
        engine.check_all()
        engine.cache.verify()
        engine.cache.close()
