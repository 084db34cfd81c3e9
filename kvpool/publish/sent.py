"""The bytes of messages that ZeroMQ holds."""

from __future__ import annotations

from collections import deque

import zmq

MESSAGE_BYTES = 512
"""Bytes of a message besides its payload."""


class Sent:
    """The bytes of messages that ZeroMQ holds. ZeroMQ itself counts messages, which can be of any size."""

    def __init__(self) -> None:
        self._messages: deque[tuple[zmq.MessageTracker, int]] = deque()
        self.nbytes = 0

    def add(self, frame: zmq.Frame) -> None:
        nbytes = len(frame) + MESSAGE_BYTES
        self._messages.append((frame.tracker, nbytes))
        self.nbytes += nbytes

    def settle(self) -> int:
        """Forget what ZeroMQ has let go of. Returns how many bytes that were."""
        before = self.nbytes
        while self._messages and self._messages[0][0].done:
            self.nbytes -= self._messages.popleft()[1]
        return before - self.nbytes


def tracked(payload: bytes) -> zmq.Frame:
    """A frame that shares the memory of a payload, and knows when ZeroMQ has let go of it."""
    return zmq.Frame(payload, track=True, copy=False)
