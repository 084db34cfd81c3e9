"""Says that functions are being compiled: on standard error, or in the log of a library."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kvpool.jit.cache import PACKAGE, cache_root

REPLAY, WARM_UP = 270, 588
"""How many functions a first replay and a warm-up compile."""
_LOOPS = 15
"""How often the loop of ``_seconds`` runs in the time that a function takes, as measured."""


class _Announcer:
    """Says once that functions are being compiled, and about how long that takes. A terminal also sees how far it is.
    It has no lock, since functions are compiled under a lock."""

    speaks = False
    """Whether standard error is told too where it is no terminal, as commands do. Else the log is."""
    compiled = 0
    _depth = 0
    _bar: Any = None
    _expected = REPLAY
    _helpers: Callable[[], int] = staticmethod(lambda: 1)

    @contextmanager
    def expecting(self, functions: int, helpers: Callable[[], int]) -> Iterator[None]:
        """A context in which about so many functions are compiled, if none is kept. ``helpers`` lets other processes
        help, when the first one is compiled, and says how many processes compile then."""
        before = self._expected, self._helpers
        self._expected, self._helpers = functions, helpers
        try:
            yield
        finally:
            self._expected, self._helpers = before

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """A context around the compilation of one function and of its callees."""
        with suppress(OSError, ValueError):  # nobody listens: standard error is closed, or a pipe that has ended
            if not self._depth:
                self._begin()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self.compiled += 1
            if self._bar is not None:
                self._bar.update()
                if not self._depth:
                    self._bar.close()

    def _begin(self) -> None:
        terminal, root = sys.stderr is not None and sys.stderr.isatty(), cache_root()
        share = self._expected // self._helpers()
        if not self.compiled:
            kept = "in this process: no folder can keep it" if root is None else f"once; it is kept in {root}"
            line = f"{PACKAGE}: compiling, about {_seconds(share)} s, {kept}"
            if sys.stderr is not None and (terminal or self.speaks):
                print(line, file=sys.stderr, flush=True)
            else:
                logging.getLogger(__name__).info(line)
        with suppress(ImportError):
            from tqdm import tqdm

            total = max(share, self.compiled + 1)
            self._bar = tqdm(total=total, initial=self.compiled, unit=" functions", leave=False, disable=not terminal)


def _seconds(functions: int) -> int:
    """About how long this processor needs for so many functions, from how long it needs for a short loop."""
    begin = time.thread_time()
    for number in range(20_000):
        hash((number, str(number)))
    return max(1, round((time.thread_time() - begin) * _LOOPS * functions))


announcer = _Announcer()
