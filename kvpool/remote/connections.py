"""The peers that have connected to a socket that listens, and the bounds of their number and of what they say."""

from __future__ import annotations

import fcntl
import logging
import socket as sockets
import struct
import termios

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvpool.remote.flows import Flow

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

    ``bytes_most``: a TCP peer that has sent more bytes than that since the last message of which ``heard`` was told is
    disconnected: see ``Flow``. ZeroMQ also keeps every topic of a subscriber, of which nobody is told.
    """

    def __init__(self, socket: zmq.Socket[bytes], most: int, bytes_most: int, guarded: bool = False) -> None:
        socket.handshake_ivl = HANDSHAKE_MS
        socket.tcp_keepalive, socket.tcp_keepalive_idle = 1, KEEPALIVE_S
        self._socket, self._most, self._bytes_most, self._guarded = socket, most, bytes_most, guarded
        self._open: dict[int, Flow] = {}
        self._strangers: dict[int, None] = {}  # those of a guarded socket that have said nothing, the oldest first
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
                if self._guarded:
                    self._strangers[descriptor] = None
                if len(self._open) > self._most:
                    self._refuse(next(iter(self._strangers), descriptor))
        return gone

    def heard(self, frame: zmq.Frame) -> int:
        """Note that a peer has sent this frame of a whole message, and so was let in. Returns its descriptor."""
        descriptor = int(frame.get(zmq.SRCFD))
        self._strangers.pop(descriptor, None)
        if descriptor in self._open:
            self._open[descriptor].message()
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
        self._open[descriptor].shut()
        self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        flow = self._open.pop(descriptor, None)
        if flow is not None:
            flow.end()
            self._cut += flow.cut
        self._strangers.pop(descriptor, None)

    def _endpoint(self) -> str:
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))


def _unread(connection: sockets.socket) -> int:
    """The bytes that a peer has not taken from the system yet."""
    (count,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
    return int(count)
