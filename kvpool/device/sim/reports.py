"""What the sim device finds: accesses without order, undeclared writes, waits without end. Each report says where the
calls came from."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, FrameType

from kvpool.errors import KVPoolError

_SIM = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(_SIM))) + os.sep
_SHOWN = 5

Site = tuple[tuple[CodeType, int], ...]
"""The lines of a call, innermost first."""


def call_site() -> Site:
    """The frames from the first one outside this folder up to the first one outside the package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename.startswith(_SIM) or frame.f_code.co_filename == contextlib.__file__
    ):
        frame = frame.f_back
    lines = []
    while frame is not None:
        lines.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back if frame.f_code.co_filename.startswith(_PACKAGE) else None
    return tuple(lines)


def lines_of(site: Site) -> str:
    """The lines of a call, for people."""
    return "".join(f"\n        {code.co_filename}:{line} {code.co_name}" for code, line in site)


@dataclass(frozen=True)
class Access:
    """A call that reads or writes blocks. ``where`` is its stream, or the thread of an access by the host."""

    kind: str
    where: str
    site: Site

    def __str__(self) -> str:
        return f"{self.kind} on {self.where}, called at{lines_of(self.site)}"


def host_call(kind: str) -> Access:
    """The call that the calling thread of the host is in."""
    return Access(kind, f"thread {threading.current_thread().name!r}", call_site())


@dataclass(frozen=True)
class Race:
    """Two accesses to the same tokens, in the order of their calls. One of them is a write, and nothing orders them.

    ``does`` says what each does there. ``rows`` are the tokens: (block id, first token, last token exclusive). Arrays
    outside the pools have the ids -1, -2, ... in the order in which they were first named.
    """

    first: Access
    second: Access
    does: tuple[str, str]
    rows: tuple[tuple[int, int, int], ...]

    def __str__(self) -> str:
        rows = self.rows[:_SHOWN]
        shown = [
            f"block {block} tokens {begin}..{end - 1}" if block >= 0 else f"array {-block}"
            for block, begin, end in rows
        ]
        more = f", and {len(self.rows) - _SHOWN} more" if len(self.rows) > _SHOWN else ""
        return (
            f"nothing orders two accesses to {', '.join(shown)}{more}:\n"
            f"    {self.does[0]} by {self.first}\n"
            f"    {self.does[1]} by {self.second}"
        )


class RaceError(KVPoolError, AssertionError):
    """Accesses that no event orders. ``races`` has all of them. ``schedule`` says how to run the same schedule
    again."""

    def __init__(self, races: Sequence[Race], schedule: str) -> None:
        shown = "\n".join(str(race) for race in races[:_SHOWN])
        more = f"\n{len(races) - _SHOWN} more races" if len(races) > _SHOWN else ""
        super().__init__(f"{shown}{more}\n[{schedule}]")
        self.races = list(races)


class UndeclaredWrite(KVPoolError, AssertionError):
    """Bytes changed that nobody had declared to write. ``block`` is the first such block, -1 outside the pools.
    ``tokens`` are the tokens that changed."""

    def __init__(self, what: str, block: int, tokens: Sequence[int], seen: str, schedule: str) -> None:
        super().__init__(f"{what} changed, and nobody had declared to write there; {seen}\n[{schedule}]")
        self.block, self.tokens = block, list(tokens)


class Deadlock(KVPoolError, AssertionError):
    """A wait that can never end: nothing can run, and its event is not complete."""
