"""What calls of the sim device give to engines and tests: gates, and spans of accesses by the host."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


class Gate:
    """Holds back what was enqueued on a stream after ``SimDevice.stall``, until it is opened. It orders no accesses. Thread-safe."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release

    def open(self) -> None:
        """Let the stream go on. Opening twice is fine."""
        self._release()


class HostSpan:
    """A context manager: from entry to exit a thread reads and writes what it declared to ``SimDevice.host_access``."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()
