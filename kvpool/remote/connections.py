"""The connections of ZeroMQ's sockets: how many there are, and how many bytes come over each.

ZeroMQ bounds the length of a frame and the number of messages, but not the number of frames of one message: it keeps
all until the last one comes. (Only its draft sockets refuse messages of several frames.) So a thread of this process
asks the system every ``LOOK_S`` how many bytes a TCP connection has brought. If they are too many since the last whole
message, it shuts the connection. What is left: a peer gets as many bytes more into memory as it can send between two
looks, and an empty frame takes 2 bytes on the wire and 64 in memory. The system does not count the bytes of ``ipc``
connections: there, the rights of the folder are the bound.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket as sockets
import struct
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

LOOK_S = 0.02
HANDSHAKE_MS = 2_000
"""A peer that connects and does not finish the handshake within this time is disconnected. ZeroMQ's own default is 30
s."""
KEEPALIVE_S = 60
"""A machine that has disappeared is noticed within some minutes, and then no longer counts."""
GRACE_S = 5.0
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
_log = logging.getLogger(__name__)
_flows: dict[Flow, None] = {}
_starting = threading.Lock()
_thread: threading.Thread | None = None
# Contexts that did not end are kept, because their destructors would block too.
_unended: list[zmq.Context[Any]] = []


class Flow:
    """One connection of a socket of ZeroMQ. ``most``: the bytes that may come without a whole message. ``cut``: whether
    it was shut for more. Whoever has it counts whole ``messages``, and calls ``end``."""

    def __init__(self, descriptor: int, endpoint: str, most: int) -> None:
        self.descriptor = descriptor
        self._endpoint = endpoint
        self.most = most
        self.cut = False
        self.messages = self._noted = self._base = 0
        if endpoint.startswith("tcp:"):
            _flows[self] = None
            _start()

    def end(self) -> None:
        _flows.pop(self, None)

    def look(self) -> None:
        came = self.ask(_received)
        if self.messages != self._noted:
            self._noted, self._base = self.messages, came
        elif came - self._base > self.most and not self.cut:
            self.cut = True
            self.ask(_shut)

    def ask(self, question: Callable[[sockets.socket], int]) -> int:
        """What the system says of this connection, or 0. It may have ended, and its descriptor may be another file of
        the process by now."""
        with suppress(OSError):
            copy = os.dup(self.descriptor)
            try:
                connection = sockets.socket(fileno=copy)
            except OSError:
                os.close(copy)
                raise
            with connection:
                return question(connection) if _belongs(connection, self._endpoint) else 0
        return 0


class Connections:
    """The connections that peers have made to one socket. Only for the thread that owns the socket.

    ZeroMQ accepts every peer, and each takes a file descriptor of the engine's process. It reports them on a monitor.
    Those beyond ``most`` are shut as if the peer had left. Create this object before the socket is bound.

    ``guarded``: peers show a password or a key before their first message, of which the owner tells ``heard``. Then a
    new peer takes the place of the one that has said nothing for longest, if there is one. Otherwise peers without the
    password, which connect again and again, would keep out all who have it.

    ``bytes_most``: a TCP peer that has sent more bytes than that since the last message of which ``heard`` was told is
    disconnected. ZeroMQ also keeps every topic of a subscriber, of which nobody is told.
    """

    def __init__(self, socket: zmq.Socket[bytes], most: int, bytes_most: int, guarded: bool = False) -> None:
        socket.handshake_ivl = HANDSHAKE_MS
        socket.tcp_keepalive, socket.tcp_keepalive_idle = 1, KEEPALIVE_S
        self._socket = socket
        self._most = most
        self._bytes_most = bytes_most
        self._guarded = guarded
        self._open: dict[int, Flow] = {}
        self._ending: set[int] = set()
        self._cut = self.refused = 0
        self.events = socket.get_monitor_socket(_EVENTS)
        """The monitor socket, for polling. ``poll`` reads it."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._open

    @property
    def talkers(self) -> int:
        """How many were disconnected because they had sent too much. For any thread."""
        return self._cut + sum(flow.cut for flow in list(self._open.values()))

    def poll(self) -> list[int]:
        """Note which peers have come and gone, and refuse those that are too many. Returns the descriptors of those
        that have gone. Does not wait."""
        gone = []
        # ZeroMQ frees what waits for an ended connection when its socket is next used.
        self._socket.getsockopt(zmq.EVENTS)
        while self.events.poll(0):
            event = recv_monitor_message(self.events, zmq.NOBLOCK)
            descriptor = int(event["value"])
            # ZeroMQ reports the end of a connection before its descriptor can be reused.
            self._ending.discard(descriptor)
            self._forget(descriptor)
            gone.append(descriptor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open[descriptor] = Flow(descriptor, self._endpoint(), self._bytes_most)
                if len(self._open) > self._most:
                    strangers = (peer for peer, flow in self._open.items() if self._guarded and not flow.messages)
                    self._refuse(next(strangers, descriptor))
        return gone

    def heard(self, frame: zmq.Frame) -> int:
        """Note that a peer has sent this frame of a whole message, and so was let in. Returns its descriptor."""
        descriptor = int(frame.get(zmq.SRCFD))
        if descriptor in self._open:
            self._open[descriptor].messages += 1
        return descriptor

    def end_slowest(self) -> bool:
        """End the connection with the most unread bytes in the system's own queue. Returns False while the last such
        connection has not ended, and if all peers have read everything.

        ZeroMQ then frees what it holds for that peer.
        """
        if self._ending:
            return False
        unread = {descriptor: flow.ask(_unread) for descriptor, flow in self._open.items()}
        slowest = max(unread, key=lambda descriptor: unread[descriptor], default=None)
        if slowest is None or not unread[slowest]:
            return False
        self._ending.add(slowest)
        self._shut(slowest)
        return True

    def close(self) -> None:
        """Stop listening to events. Whoever opened the socket closes it."""
        for descriptor in list(self._open):
            self._forget(descriptor)
        self._socket.disable_monitor()
        self.events.close(linger=0)

    def _refuse(self, descriptor: int) -> None:
        self._shut(descriptor)
        if not self.refused:
            _log.warning("%s has %d connections: others are refused until one has ended", self._endpoint(), self._most)
        self.refused += 1

    def _shut(self, descriptor: int) -> None:
        self._open[descriptor].ask(_shut)
        self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        flow = self._open.pop(descriptor, None)
        if flow is not None:
            flow.end()
            self._cut += flow.cut

    def _endpoint(self) -> str:
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))


def new_context() -> zmq.Context[Any]:
    """A context whose sockets drop unsent messages when they are closed, unless a socket is told otherwise.

    With ZeroMQ's own default, collecting a context that nobody has closed waits for a peer that is gone.
    """
    context: zmq.Context[Any] = zmq.Context()
    context.linger = 0
    return context


def end(context: zmq.Context[Any], linger_ms: int = 0) -> None:
    """Close the sockets of a context, which no other thread uses any more, and end it.

    Messages may still leave within ``linger_ms``. Rarely, if sockets were watched by monitors, ZeroMQ waits for itself
    without end here. So this waits some seconds longer than that. Then it warns, and keeps the context until the
    process ends.
    """
    ending = threading.Thread(target=partial(context.destroy, linger=linger_ms), name="kvpool-zmq-end", daemon=True)
    ending.start()
    seconds = linger_ms / 1000 + GRACE_S
    ending.join(seconds)
    if ending.is_alive():
        _unended.append(context)
        _log.warning("ZeroMQ did not end within %.0f s: its threads stay until the process ends", seconds)


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


def _unread(connection: sockets.socket) -> int:
    """The bytes that a peer has not taken from the system yet."""
    (count,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
    return int(count)


def _shut(connection: sockets.socket) -> int:
    connection.shutdown(sockets.SHUT_RDWR)
    return 0
