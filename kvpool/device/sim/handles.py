"""What the sim device returns to engines and tests: gates, and contexts for accesses by the host. Also the device's
lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from kvpool.entry.interrupt import DeferSignals


class EntryLock:
    """A lock that code inside a call may not take again: where that would wait for itself, it is a RuntimeError.

    ``first`` is called each time the lock has been taken. Signal handlers wait until it is free.
    """

    def __init__(self, first: Callable[[], None]) -> None:
        self._lock, self._inside, self._first = threading.Lock(), 0, first
        self._signals = DeferSignals()

    def __enter__(self) -> None:
        if self._inside == threading.get_ident():
            raise RuntimeError(
                "this thread is inside a call of the device: a launched function may touch memory and nothing else"
            )
        self._take(blocking=True)

    def _take(self, blocking: bool) -> bool:
        """Take the lock. Returns whether it was free. ``__exit__`` releases what this has taken."""
        signals = DeferSignals()
        signals.__enter__()
        if not self._lock.acquire(blocking=blocking):
            signals.__exit__(None, None, None)
            return False
        self._inside, self._signals = threading.get_ident(), signals
        try:
            self._first()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signals, self._inside = self._signals, 0
        self._lock.release()
        signals.__exit__(kind, error, trace)

    def pass_through(self) -> None:
        """Take and release the lock, if it is free."""
        if self._take(blocking=False):
            self.__exit__(None, None, None)


class Gate:
    """Holds back what was enqueued on a stream after ``SimDevice.stall``, until it is opened. It orders no accesses.
    Thread-safe."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release

    def open(self) -> None:
        """Let the stream go on. A second call does nothing."""
        self._release()


class HostSpan:
    """A context manager: from entry to exit a thread reads and writes what it declared to ``SimDevice.host_access``."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end

    def __enter__(self) -> None:
        with DeferSignals() as signals:
            self._begin()
            signals.undo = self._end

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
