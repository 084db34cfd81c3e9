"""These tests collect garbage all the time: it takes long where a process has much that stays."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def settled() -> None:
    gc.collect()
    gc.freeze()
