"""Bounds the peers of a socket that listens. If memory runs out, it ends the connection of the peer that reads
least."""

from __future__ import annotations

import fcntl
import logging
import os
import socket as sockets
import struct
import termios
import time
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

HANDSHAKE_MS = 2_000
"""A peer that connects and does not finish the handshake within this time is disconnected. ZeroMQ's own default is 30
s."""
ASK_EVERY_S = 0.1
"""How often the system is asked how much each peer has sent."""
KEEPALIVE_S = 60
"""A machine that has disappeared is noticed within some minutes, and then no longer counts."""
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
_log = logging.getLogger(__name__)


class Connections:
    """The connections that peers have made to one socket. Only for the thread that owns the socket.

    ZeroMQ accepts every peer, and each takes a file descriptor of the engine's process. It reports them on a monitor.
    Those beyond ``most`` are shut as if the peer had left. Create this object before the socket is bound.

    ``guarded``: peers show a password or a key before their first message, of which the owner tells ``heard``. Then a
    new peer takes the place of the one that has said nothing for longest, if there is one. Otherwise peers without the
    password, which connect again and again, would keep out all who have it.

    ``said_most``: a TCP peer that has sent more bytes than that is disconnected. ZeroMQ keeps every frame of a message
    until the last one comes, and every topic of a subscriber. The system does not tell how much came over ``ipc``.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], most: int, guarded: bool = False, said_most: int | None = None
    ) -> None:
        socket.handshake_ivl = HANDSHAKE_MS
        socket.tcp_keepalive, socket.tcp_keepalive_idle = 1, KEEPALIVE_S
        self._socket, self._most, self._guarded = socket, most, guarded
        self._open: set[int] = set()
        self._strangers: dict[int, None] = {}  # those of a guarded socket that have said nothing, the oldest first
        self._ending: set[int] = set()
        self._said_most, self._ask_again = said_most, 0.0
        self.refused = self.talkers = 0
        self.events = socket.get_monitor_socket(_EVENTS)
        """The monitor socket, for polling. ``poll`` reads it."""

    def __len__(self) -> int:
        return len(self._open)

    def poll(self) -> None:
        """Note which peers have come and gone, refuse those that are too many, and end those that say too much. Does
        not wait."""
        # ZeroMQ frees what waits for an ended connection when its socket is next used.
        self._socket.getsockopt(zmq.EVENTS)
        while True:
            try:
                event = recv_monitor_message(self.events, zmq.NOBLOCK)
            except zmq.Again:
                break
            descriptor = int(event["value"])
            # ZeroMQ reports the end of a connection before its descriptor can be reused.
            self._ending.discard(descriptor)
            self._forget(descriptor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open.add(descriptor)
                if self._guarded:
                    self._strangers[descriptor] = None
                if len(self._open) > self._most:
                    self._refuse(next(iter(self._strangers), descriptor))

        if self._said_most is not None and time.monotonic() >= self._ask_again:
            self._ask_again = time.monotonic() + ASK_EVERY_S
            for descriptor in list(self._open):
                if self._of(descriptor, _said) > self._said_most:
                    self._shut(descriptor)
                    self.talkers += 1

    def heard(self, frame: zmq.Frame) -> None:
        """Note that the peer that has sent this frame was let in."""
        self._strangers.pop(int(frame.get(zmq.SRCFD)), None)

    def end_slowest(self) -> bool:
        """End the connection with the most unread bytes in the system's own queue. Returns False while the last such
        connection has not ended, and if all peers have read everything.

        ZeroMQ then frees what it holds for that peer.
        """
        if self._ending:
            return False
        unread = {one: self._of(one, _unread) for one in self._open}
        slowest = max(unread, key=lambda one: unread[one], default=None)
        if slowest is None or not unread[slowest]:
            return False
        self._ending.add(slowest)
        self._shut(slowest)
        return True

    def close(self) -> None:
        """Stop listening to events. Whoever opened the socket closes it."""
        self._socket.disable_monitor()
        self.events.close(linger=0)

    def _refuse(self, descriptor: int) -> None:
        self._shut(descriptor)
        if not self.refused:
            _log.warning("%s has %d connections: others are refused until one has ended", self._endpoint(), self._most)
        self.refused += 1

    def _forget(self, descriptor: int) -> None:
        self._open.discard(descriptor)
        self._strangers.pop(descriptor, None)

    def _shut(self, descriptor: int) -> None:
        self._forget(descriptor)
        copy = self._copy(descriptor)
        if copy is not None:
            with copy:
                try:
                    copy.shutdown(sockets.SHUT_RDWR)
                except OSError:  # the peer was faster
                    pass

    def _of(self, descriptor: int, count: Callable[[sockets.socket], int]) -> int:
        """A count of bytes that the system has of a connection, or 0."""
        copy = self._copy(descriptor)
        if copy is None:
            return 0
        with copy:
            try:
                return count(copy)
            except OSError:
                return 0

    def _copy(self, descriptor: int) -> sockets.socket | None:
        """A descriptor of the same connection, or None if it has ended: the number may be another file of the process
        by now."""
        try:
            copy = sockets.socket(fileno=os.dup(descriptor))
        except OSError:
            return None
        if _belongs(copy, self._endpoint()):
            return copy
        copy.close()
        return None

    def _endpoint(self) -> str:
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))


def _belongs(connection: sockets.socket, endpoint: str) -> bool:
    """Whether a peer has connected to this endpoint here."""
    try:
        here: Any = connection.getsockname()
        connection.getpeername()
    except OSError:
        return False
    if connection.family == sockets.AF_UNIX:
        return endpoint == f"ipc://{os.fsdecode(here)}"
    return endpoint.startswith("tcp://") and here[1] == int(endpoint.rpartition(":")[2])


def _unread(connection: sockets.socket) -> int:
    """The bytes that a peer has not taken from the system yet."""
    (count,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
    return int(count)


def _said(connection: sockets.socket) -> int:
    """The bytes that a TCP peer has sent so far."""
    (count,) = struct.unpack_from("Q", connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, 136), 128)
    return int(count)
