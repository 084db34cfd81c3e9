"""Threads that run no signal handlers, and what callers wait for."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import weakref
from _thread import TIMEOUT_MAX, allocate_lock, start_new_thread
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any


class Bell:
    """What callers wait for, in the place of ``threading.Condition`` and ``threading.Event``. Thread-safe, without a
    lock.

    Those two take their lock in a Python function, ``Condition.__enter__``. The interpreter runs signal handlers right
    after the call that takes it. If one raises there, the ``with`` block has not begun, and the lock stays held: the
    thread that is to notify waits for it for ever. ``tests/copying/test_signals.py`` shows it.
    """

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()

    def ring(self) -> None:
        """Have all who wait ask again."""
        while self._waiting:
            with suppress(IndexError):  # another thread rings, too
                self._waiting.popleft().release()

    def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until a condition holds, at most ``timeout`` seconds. Returns whether it does. The caller holds no lock.
        Whoever makes it true rings then."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not condition():
            waiter = allocate_lock()
            waiter.acquire()
            self._waiting.append(waiter)
            try:
                # Asked again: a ring before this was for nobody.
                left = min(end - time.monotonic(), TIMEOUT_MAX)
                if left <= 0 or condition():
                    return condition()
                waiter.acquire(timeout=left)
            finally:
                with suppress(ValueError):
                    self._waiting.remove(waiter)
        return True


class Worker:
    """A thread that makes calls one after the other. It begins with the first call, and ends with this object or with
    ``close``. Thread-safe.

    It is started in C: ``threading.Thread.start`` waits for an ``Event``, see ``Bell``. In a child of a fork there is
    no such thread, and none is started.
    """

    def __init__(self) -> None:
        self._lock, self._started, self._process = threading.Lock(), False, os.getpid()
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._end = allocate_lock()
        self._end.acquire()
        weakref.finalize(self, self._calls.put, None)

    def post(self, call: Callable[[], object]) -> None:
        """Have the thread make a call. Raises RuntimeError where the system, or an interpreter that ends, gives no
        thread."""
        self.start()
        self._calls.put(call)

    def start(self) -> None:
        """Start the thread, unless it runs. Raises RuntimeError as ``post`` does."""
        with self._lock:
            if self._started and self._process != os.getpid():
                raise RuntimeError("the thread is not in this child of os.fork()")
            if not self._started:
                self._started = True
                try:
                    start_new_thread(_work, (self._calls, self._end))
                except RuntimeError:
                    self._started = False
                    raise

    @property
    def running(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self._started and self._process == os.getpid() and self._end.locked()

    def close(self) -> None:
        """Wait until all calls so far are made, and end the thread. No more calls are posted. A second call does
        nothing."""
        if self.running:
            self._calls.put(None)
            self._end.acquire()
            self._end.release()


def _work(calls: SimpleQueue[Callable[[], object] | None], end: Any) -> None:
    while (call := calls.get()) is not None:
        try:
            call()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        del call
    end.release()
