"""Waiting for what other threads, another process or the network do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def until(condition: Callable[[], Any], what: str = "change") -> None:
    """Fails when ``what`` does not come in ten minutes."""
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, f"no {what} within 600 s"
        time.sleep(0.002)


def at_once(call: Callable[[Any], Any], arguments: Iterable[Any]) -> list[Any]:
    """What a function returns for each argument, in threads of their own; raises what one of them has raised."""
    values = [*arguments]
    with ThreadPoolExecutor(len(values)) as pool:
        return [*pool.map(call, values)]
