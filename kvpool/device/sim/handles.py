"""What calls of the sim device give to engines and tests: gates, and spans of accesses by the host; and the lock of the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class EntryLock:
    """A lock that nothing which runs inside a call may take again: RuntimeError says so where it would wait for itself.

    ``first`` is called whenever it has been taken.
    """

    def __init__(self, first: Callable[[], None]) -> None:
        self._lock, self._inside, self._first = threading.Lock(), 0, first

    def __enter__(self) -> None:
        if self._inside == threading.get_ident():
            raise RuntimeError("this thread is inside a call of the device: a launched function may touch memory and nothing else")
        self._lock.acquire()
        self._inside = threading.get_ident()
        self._first()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._inside = 0
        self._lock.release()

    def pass_through(self) -> None:
        """Take and leave the lock, if it is free."""
        if self._lock.acquire(blocking=False):
            self._inside = threading.get_ident()
            self._first()
            self.__exit__(None, None, None)


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
