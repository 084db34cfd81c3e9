"""Rounds: a replay that repeats its trace until it is stopped, while other threads use its pool; and its figures."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from kvpool.errors import KVPoolError
from kvpool.replay.content import Request
from kvpool.replay.engine import Replay, ReplayConfig, worst_blocks
from kvpool.replay.traces import Trace

_SWITCH_SECONDS = 1e-4
"""How long the scheduler's thread may keep the interpreter while another thread waits."""


class Figure(NamedTuple):
    """One figure of a run, its condition in words ("" for none), and whether it meets the condition."""

    name: str
    value: int
    bound: str = ""
    ok: bool = True


def at_least(name: str, value: int, bound: int) -> Figure:
    """A figure that must reach a bound."""
    return Figure(name, value, f">= {bound:,}", value >= bound)


def equal(name: str, value: int, other: int = 0, words: str = "") -> Figure:
    """A figure that must be another one, which ``words`` describe."""
    return Figure(name, value, f"= {other:,} {words}".rstrip(), value == other)


@dataclass(frozen=True)
class Report:
    """The figures of a run, and what went wrong besides them, if anything."""

    title: str
    figures: list[Figure]
    failure: str | None = None
    interrupted: bool = False
    seconds: float = 0.0
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.failure is None and not self.interrupted and all(figure.ok for figure in self.figures)

    def as_dict(self) -> dict[str, Any]:
        """The report as nested dictionaries, lists and numbers, which ``json.dumps`` accepts."""
        return {"passed": self.passed, **asdict(self), "figures": [figure._asdict() for figure in self.figures]}

    def text(self) -> str:
        """The report as text, one line for each figure."""
        lines = [self.title]
        for name, value, bound, ok in self.figures:
            state = ("ok" if ok else "FAILED") if bound else ""
            lines.append(f"{state:<7} {name:<56} {value:>12,}  {bound}".rstrip())
        lines += ["        interrupted: the figures so far"] if self.interrupted else []
        lines += [] if self.failure is None else [f"FAILED  {self.failure}"]
        settings = ", ".join(f"{name} {value}" for name, value in self.config.items() if name != "trace")
        return "\n".join([*lines, f"        {self.seconds:.1f} s; {settings}"] if settings else lines)


class Rounds:
    """Replays a trace again and again. ``admitted`` is called after every request, on the scheduler's thread, with the
    request, or with None if it was skipped. It may ``stop`` the replay; so may other threads."""

    def __init__(self, trace: Trace, config: ReplayConfig, admitted: Callable[[Request | None], Any]) -> None:
        # The list grows by another round of the trace each time the replay comes to its end. To stop the replay, it is
        # cut where the replay is.
        self._requests, self._live, self._admitted = trace.requests, list(trace.requests), admitted
        self.replay = Replay(Trace(trace.name, trace.format, self._live), config, progress=self._next)
        self.stop = threading.Event()
        self.done, self.interrupted = 0, False

    def run(self) -> str | None:
        """Replay until ``stop`` is set, and return what went wrong, if anything. Afterwards ``interrupted`` says
        whether the user has ended it."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            self.replay.run()
        except KeyboardInterrupt:
            self.interrupted = True
        except Exception as error:
            return f"scheduler: {type(error).__name__}: {error}"
        finally:
            sys.setswitchinterval(before)
        return None

    def verify(self) -> str | None:
        """Check the pool after the run, and return what is wrong, if anything."""
        try:
            self.replay.cache.verify()
        except KVPoolError as error:
            return f"after the run: {type(error).__name__}: {error}"
        return None

    def _next(self, count: int) -> None:
        request, cache = self._live[self.done], self.replay.cache
        self.done += count
        fits = worst_blocks(request, cache.tokens_per_block) <= cache.device_blocks
        self._admitted(request if fits else None)
        if self.stop.is_set():
            del self._live[self.done :]
        elif self.done == len(self._live):
            self._live += [replace(request, index=self.done + place) for place, request in enumerate(self._requests)]
