"""Tests of the emulation need it: others than those of what needs no build are collected in an emulated run only."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests import emulated
from tests.emulated import lab
from tests.emulated.lab import Driver

collect_ignore_glob = [] if emulated.running() else ["test_[!w]*.py"]


@pytest.fixture
def driver() -> Iterator[Driver]:
    """On GPU 0; nothing runs unless somebody waits."""
    made = lab.driver()
    made.use(0)
    made.quiet()
    yield made
    made.status("cuCtxSynchronize")
    made.quiet(int(threading.get_ident()), 0.3, 100)
