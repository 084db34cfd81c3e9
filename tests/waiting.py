"""Waiting for what another thread, another process or the network does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], what: str = "change") -> None:
    """Fails when ``what`` does not come in ten minutes."""
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, f"no {what} within 600 s"
        time.sleep(0.002)
