"""The progress bar: one for commands, for what is compiled and for memory that is pinned."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


def watched() -> bool:
    """Whether standard error is a terminal. It is none if it is closed, or no file of the usual kind."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, OSError, ValueError):
        return False


def say(line: str) -> None:
    """Write a line to standard error, above the bars that are there."""
    bars = sys.modules.get("tqdm")
    if bars is None:
        print(line, file=sys.stderr, flush=True)
    else:
        bars.tqdm.write(line, file=sys.stderr)


@contextmanager
def shown_progress(total: int | None, unit: str, **look: Any) -> Iterator[Callable[[int], Any]]:
    """A context with a bar of tqdm on standard error, if that is a terminal, and tqdm is there. It gives a function to
    call with the number of units just done, which does nothing where no bar is shown.

    ``total`` counts units, and is None if it is unknown; ``look`` is what else tqdm takes. A bar that is not shown is
    not made at all: tqdm starts a thread with its first one, also with one that is disabled.
    """
    bar = None
    if watched():
        with suppress(ImportError):
            from tqdm import tqdm

            bar = tqdm(total=total, unit=unit, leave=False, file=sys.stderr, **look)
    if bar is None:
        yield lambda count: None
    else:
        with bar:
            yield bar.update
