"""Says that functions are being compiled: in a terminal, or in the log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kvpool.jit.folders import cache_root
from kvpool.jit.sources import PACKAGE

_LOOPS = 3900
"""How often the loop of ``_seconds`` runs in the time of a first replay, as measured."""
_log = logging.getLogger(__name__)


class _Announcer:
    """Says once that functions are being compiled, and about how long that takes; a terminal also sees how many. It has
    no lock, since Numba compiles under a lock of its own."""

    def __init__(self) -> None:
        self.known = 0
        self.speaks = False
        """Whether standard error is told too where it is no terminal, as commands do. Else the log is."""
        self._compiled = self._depth = 0
        self._bar: Any = None

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """A context around the compilation of one function and of its callees."""
        if not self._depth:
            with suppress(OSError, ValueError):  # nobody listens: standard error is closed, or a pipe that has ended
                self._begin()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._compiled += 1
            if self._bar is not None:
                self._bar.update()
                if not self._depth:
                    self._bar.close()
                    self._bar = None

    def _begin(self) -> None:
        terminal = sys.stderr is not None and sys.stderr.isatty()
        if not self._compiled:
            root = cache_root()
            kept = "in this process: no folder can keep it" if root is None else f"once; it is kept in {root}"
            line = f"{PACKAGE}: compiling, about {_seconds()} s, {kept}"
            if sys.stderr is not None and (terminal or self.speaks):
                print(line, file=sys.stderr, flush=True)
            else:
                _log.info(line)
        if not terminal:
            return
        try:
            from tqdm import tqdm
        except ImportError:
            return
        total = max(self.known, self._compiled + 1)
        self._bar = tqdm(total=total, initial=self._compiled, unit=" functions", leave=False, file=sys.stderr)


def _seconds() -> int:
    """About how long this processor needs for what a first replay compiles, from how long it needs for a short loop."""
    begin = time.thread_time()
    for number in range(20_000):
        hash((number, str(number)))
    return max(1, round((time.thread_time() - begin) * _LOOPS))


announcer = _Announcer()
