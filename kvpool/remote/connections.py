"""Bounds the peers of a socket that listens. If memory runs out, it ends the connection of the peer that reads
least."""

from __future__ import annotations

import fcntl
import logging
import os
import socket as sockets
import struct
import termios
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

HANDSHAKE_MS = 2_000
"""A peer that connects and does not finish the handshake within this time is disconnected. ZeroMQ's own default is 30
s."""
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
    """

    def __init__(self, socket: zmq.Socket[bytes], most: int, guarded: bool = False) -> None:
        socket.handshake_ivl = HANDSHAKE_MS
        socket.tcp_keepalive, socket.tcp_keepalive_idle = 1, KEEPALIVE_S
        self._socket, self._most, self._guarded = socket, most, guarded
        self._open: set[int] = set()
        self._strangers: dict[int, None] = {}  # those of a guarded socket that have said nothing, the oldest first
        self._ending: set[int] = set()
        self.refused = 0
        self.events = socket.get_monitor_socket(_EVENTS)
        """The monitor socket, for polling. ``poll`` reads it."""

    def __len__(self) -> int:
        return len(self._open)

    def poll(self) -> None:
        """Note which peers have come and gone, and refuse those that are too many. Does not wait."""
        # ZeroMQ frees what waits for an ended connection when its socket is next used.
        self._socket.getsockopt(zmq.EVENTS)
        while True:
            try:
                event = recv_monitor_message(self.events, zmq.NOBLOCK)
            except zmq.Again:
                return
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
        unread = {one: _unread(copy) for one in self._open if (copy := self._copy(one)) is not None}
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
    with connection:
        try:
            (count,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
        except OSError:
            return 0
    return int(count)
