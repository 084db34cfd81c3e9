"""Callbacks: what is called when a request is done or returned, by the thread that polls."""

from __future__ import annotations

import os
import select
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from kvpool.common.changes import from_handler
from kvpool.storage.store_requests import StoreRequest


class Callbacks:
    """Requests whose callbacks are to be called, in order. ``called(request)`` follows those of one. Requests are added
    by any thread, and one thread polls."""

    def __init__(self, called: Callable[[StoreRequest], object]) -> None:
        self._called, self._ready = called, deque[StoreRequest]()
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._signal)

    def add(self, request: StoreRequest) -> None:
        """A request is done or returned. To add it twice is the same as once."""
        if request.on_done or request.on_returned:
            self._ready.append(request)
            os.eventfd_write(self._signal, 1)

    @property
    def ready(self) -> bool:
        """Whether ``poll`` has a call to make."""
        return bool(self._ready)

    def fileno(self) -> int:
        """A file descriptor that can be read when ``poll`` has a call to make."""
        return self._signal

    def wait(self, timeout: float) -> bool:
        """Wait until ``poll`` has a call to make, at most ``timeout`` seconds. Returns whether it has."""
        return self.ready or bool(select.select([self._signal], [], [], timeout)[0])

    def poll(self) -> bool:
        """Make the calls. Returns whether there were any. Clears ``fileno``."""
        if not self._ready:
            return False
        with suppress(BlockingIOError):
            os.eventfd_read(self._signal)
        try:
            # Those of a callback that polls are made by the call around it.
            while self._ready and not (request := self._ready[0]).in_callback:
                self._call(request)
                self._ready.popleft()
        except BaseException:
            if self._ready:
                os.eventfd_write(self._signal, 1)
            raise
        return True

    def _call(self, request: StoreRequest) -> None:
        """Make the calls of a request. Each is dropped after it was made, so that none is lost."""
        request.in_callback = True
        try:
            for calls in (request.on_done, request.on_returned if request.returned else []):
                while calls:
                    try:
                        calls[0](request)
                    except BaseException as error:
                        if not from_handler(error):
                            del calls[0]
                        raise
                    del calls[0]
        finally:
            request.in_callback = False
        self._called(request)
