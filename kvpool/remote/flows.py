"""Bounds the bytes that come over one connection.

ZeroMQ bounds the length of a frame and the number of messages, but not the number of frames of one message: it keeps
all until the last one comes. (Only its draft sockets refuse messages of several frames.) So a thread of this process
asks the system every ``LOOK_S`` how many bytes a TCP connection has brought. If they are too many since the last whole
message, it shuts the connection. What is left: a peer gets as many bytes more into memory as it can send between two
looks, and an empty frame takes 2 bytes on the wire and 64 in memory. The system does not count the bytes of ``ipc``
connections: there, the rights of the folder are the bound.
"""

from __future__ import annotations

import os
import socket as sockets
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

LOOK_S = 0.02
_flows: dict[Flow, None] = {}
_starting = threading.Lock()
_thread: threading.Thread | None = None


class Flow:
    """One connection of a socket of ZeroMQ. ``most``: the bytes that may come without a whole message. ``cut``: whether
    it was shut for more. Whoever has it calls ``message`` for each whole message, and ``end``."""

    def __init__(self, descriptor: int, endpoint: str, most: int) -> None:
        self.descriptor, self._endpoint, self.most, self.cut = descriptor, endpoint, most, False
        self._messages = self._noted = self._base = 0
        if endpoint.startswith("tcp:"):
            _flows[self] = None
            _start()

    def message(self) -> None:
        """A whole message came."""
        self._messages += 1

    def end(self) -> None:
        _flows.pop(self, None)

    def look(self) -> None:
        came = self.ask(_received)
        if self._messages != self._noted:
            self._noted, self._base = self._messages, came
        elif came - self._base > self.most and not self.cut:
            self.cut = True
            self.shut()

    def shut(self) -> None:
        """End the connection as if the peer had left."""
        self.ask(_shut)

    def ask(self, question: Callable[[sockets.socket], int]) -> int:
        """What the system says of this connection, or 0. It may have ended, and its descriptor may be another file of
        the process by now."""
        try:
            copy = sockets.socket(fileno=os.dup(self.descriptor))
        except OSError:
            return 0
        with copy, suppress(OSError):
            return question(copy) if _belongs(copy, self._endpoint) else 0
        return 0


def _start() -> None:
    global _thread
    with _starting:
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_look, name="kvpool-flows", daemon=True)
            _thread.start()


def _look() -> None:
    global _thread
    while True:
        for flow in list(_flows):
            flow.look()
        time.sleep(LOOK_S)
        with _starting:
            if not _flows:
                _thread = None
                return


def _belongs(connection: sockets.socket, endpoint: str) -> bool:
    """Whether one end of a connection is this endpoint."""
    ends = connection.getsockname(), connection.getpeername()
    if connection.family == sockets.AF_UNIX:
        return endpoint in [f"ipc://{os.fsdecode(end)}" for end in ends]
    return int(endpoint.rpartition(":")[2]) in [end[1] for end in ends]


def _received(connection: sockets.socket) -> int:
    (count,) = struct.unpack_from("Q", connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, 136), 128)
    return int(count)


def _shut(connection: sockets.socket) -> int:
    connection.shutdown(sockets.SHUT_RDWR)
    return 0
