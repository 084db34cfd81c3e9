"""Callbacks: the callbacks of a store's requests that are to be made, by the thread that polls."""

from __future__ import annotations

import os
import select
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from kvpool.storage.store_requests import StoreRequest

_LONGEST_WAIT = 1e6
"""Seconds, which poll(2) takes as an int32 of milliseconds."""


class Callbacks:
    """Requests whose callbacks are to be made, in order. A request may be here twice: each callback is made once.

    ``fileno`` can be read while there is a request.
    """

    def __init__(self) -> None:
        self._requests: deque[StoreRequest] = deque()
        self.fileno = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fileno)

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, request: StoreRequest) -> None:
        """A request is done or returned."""
        self._requests.append(request)
        os.eventfd_write(self.fileno, 1)

    def wait(self, timeout: float) -> bool:
        """Wait until there is a request, at most ``timeout`` seconds. Returns whether there is."""
        descriptors = select.poll()  # select.select refuses descriptors from 1,024 on
        descriptors.register(self.fileno, select.POLLIN)
        return bool(self) or bool(descriptors.poll(min(timeout, _LONGEST_WAIT) * 1000))

    def make(self, over: Callable[[StoreRequest], None]) -> bool:
        """Make the callbacks. Returns whether there were any. ``over`` gets each request after its callbacks."""
        requests = self._requests
        if not requests:
            return False
        with suppress(BlockingIOError):
            os.eventfd_read(self.fileno)
        try:
            # Those of a callback that polls are made by the call around it.
            while requests and not (request := requests[0]).in_callback:
                _call_back(request)
                over(request)
                requests.popleft()
        except BaseException:
            if requests:
                os.eventfd_write(self.fileno, 1)
            raise
        return True


def _call_back(request: StoreRequest) -> None:
    """Make the calls of a request, each once."""
    request.in_callback = True
    try:
        while request.on_done:
            request.on_done.pop(0)(request)
        while request.returned and request.on_returned:
            request.on_returned.pop(0)(request)
    finally:
        request.in_callback = False
