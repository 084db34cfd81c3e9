"""Says that functions are being compiled: on standard error, or in the log of a library."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kvpool.jit.cache import PACKAGE, cache_root

_FUNCTIONS, _LOOPS = 269, 3000
"""What a first replay compiles, and how often the loop of ``_seconds`` runs meanwhile, as measured."""


class _Announcer:
    """Says once that functions are being compiled, and about how long that takes. A terminal also sees how far it is.
    It has no lock, since functions are compiled under a lock."""

    speaks = False
    """Whether standard error is told too where it is no terminal, as commands do. Else the log is."""
    compiled = 0
    _depth = 0
    _bar: Any = None

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
        if not self.compiled:
            kept = "in this process: no folder can keep it" if root is None else f"once; it is kept in {root}"
            line = f"{PACKAGE}: compiling, about {_seconds()} s, {kept}"
            if sys.stderr is not None and (terminal or self.speaks):
                print(line, file=sys.stderr, flush=True)
            else:
                logging.getLogger(__name__).info(line)
        with suppress(ImportError):
            from tqdm import tqdm

            total = max(_FUNCTIONS, self.compiled + 1)
            self._bar = tqdm(total=total, initial=self.compiled, unit=" functions", leave=False, disable=not terminal)


def _seconds() -> int:
    """About how long this processor needs for what a first replay compiles, from how long it needs for a short loop."""
    begin = time.thread_time()
    for number in range(20_000):
        hash((number, str(number)))
    return max(1, round((time.thread_time() - begin) * _LOOPS))


announcer = _Announcer()
