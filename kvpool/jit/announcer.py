"""Says in a terminal that functions are being compiled."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvpool.jit.folders import cache_root
from kvpool.jit.sources import PACKAGE


class _Announcer:
    """Says in a terminal that functions are being compiled, and shows how many. It has no lock, since Numba compiles
    under a lock of its own."""

    def __init__(self) -> None:
        self.known = 0
        self._compiled = self._depth = 0
        self._bar: Any = None

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """A context around the compilation of one function and of its callees."""
        if not self._depth:
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
        if sys.stderr is None or not sys.stderr.isatty():
            return
        if not self._compiled:
            root = cache_root()
            kept = "in this process: no folder can keep it" if root is None else f"once; it is kept in {root}"
            print(f"{PACKAGE}: compiling, about 20 s, {kept}", file=sys.stderr, flush=True)
        try:
            from tqdm import tqdm
        except ImportError:
            return
        total = max(self.known, self._compiled + 1)
        self._bar = tqdm(total=total, initial=self._compiled, unit=" functions", leave=False, file=sys.stderr)


announcer = _Announcer()
