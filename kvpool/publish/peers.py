"""A socket that everybody may connect to: as much of ZMTP 3, the protocol of ZeroMQ, as a replay needs, and the bounds
that strangers call for.

ZeroMQ's own ROUTER is for peers that are trusted. A peer chooses its name there, and ends the process if it takes the
one that the next peer would get. And a message may have any number of frames, which are all kept until the last one.
What is left of a peer here: READ_BYTES and one message of FRAMES_MAX frames that came, and one answer that waits.
"""

from __future__ import annotations

import os
import selectors
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice

import zmq

from kvpool.remote import connections

FRAMES_MAX, FRAME_BYTES_MAX, COMMAND_BYTES_MAX = 8, 64, 1024
"""The most that a peer may send in one message, in one frame of it, and in one command of the protocol."""
READ_BYTES = 512
"""What is read from a peer at a time, so that all get their turn."""
SEND_BYTES = 1 << 20
"""The most bytes that the system may hold for a peer."""
_GREETING_BYTES, _MORE, _LONG, _COMMAND = 64, 1, 2, 4
_MECHANISM = slice(12, 32)
_NULL = b"NULL".ljust(20, b"\0")
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + _NULL + bytes(32)


class Gone(Exception):
    """The peer has left, or has sent what no client sends."""


class Peer:
    """One connection. ``open``: until it ends. ``let_in``: whether it has said what it is. ``unsent``: bytes that wait
    until it reads."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with suppress(OSError):  # not for sockets of a file system
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.connection, self.since, self.unsent = connection, time.monotonic(), 0
        self.open, self.let_in = True, False
        self._received, self._greeted = bytearray(), False
        self._message: list[bytes] = []
        self._waiting: deque[memoryview] = deque()
        ready = _property(b"Socket-Type", b"ROUTER") + _property(b"Identity", b"")
        self._queue(_GREETING, _command(b"READY", ready))

    def receive(self) -> list[list[bytes]]:
        """The messages that are whole by now. Does not wait. Raises Gone."""
        try:
            received = self.connection.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            received = b""
        if not received:
            raise Gone
        self._received += received
        if not self._greeted and not self._greet():
            return []
        messages = []
        while (frame := self._frame()) is not None:
            flags, body = frame
            if flags & _COMMAND:
                self._obey(body)
                continue
            self._message.append(body)
            if len(self._message) > FRAMES_MAX or not self.let_in:
                raise Gone
            if not flags & _MORE:
                messages.append(self._message)
                self._message = []
        return messages

    def send(self, frames: list[bytes]) -> None:
        """Queue a message, and send what the system takes. Raises Gone."""
        for place, one in enumerate(frames, 1):
            self._queue(_header(len(one), _MORE if place < len(frames) else 0), one)
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the system takes it. Raises Gone."""
        while self._waiting:
            try:
                done = self.connection.sendmsg(list(islice(self._waiting, 16)))
            except BlockingIOError:
                return
            except OSError:
                raise Gone from None
            self.unsent -= done
            while self._waiting and done >= len(self._waiting[0]):
                done -= len(self._waiting.popleft())
            if done:
                self._waiting[0] = self._waiting[0][done:]

    def _queue(self, *parts: bytes) -> None:
        self._waiting.extend(memoryview(part) for part in parts if part)
        self.unsent += sum(map(len, parts))

    def _greet(self) -> bool:
        """Take the greeting, if it is there."""
        known = min(len(self._received), 12)
        if self._received[:1] != b"\xff" or known > 10 and self._received[10] < 3:
            raise Gone
        if len(self._received) < _GREETING_BYTES:
            return False
        if self._received[_MECHANISM] != _NULL:
            raise Gone
        del self._received[:_GREETING_BYTES]
        self._greeted = True
        return True

    def _frame(self) -> tuple[int, bytes] | None:
        """Take the next frame, if it is there."""
        if len(self._received) < 2:
            return None
        flags, head = self._received[0], 2
        length = self._received[1]
        if flags & _LONG:
            if len(self._received) < 9:
                return None
            (length,), head = struct.unpack_from(">Q", self._received, 1), 9
        if flags > 7 or length > (COMMAND_BYTES_MAX if flags & _COMMAND else FRAME_BYTES_MAX):
            raise Gone
        if len(self._received) < head + length:
            return None
        body = bytes(self._received[head : head + length])
        del self._received[: head + length]
        return flags, body

    def _obey(self, body: bytes) -> None:
        """Do what a command says. Those that are not known are none of ours."""
        name = body[1 : 1 + body[0]] if body else b""
        if name == b"READY":
            self.let_in = True
        elif name == b"ERROR":
            raise Gone
        elif name == b"PING" and not self._waiting:  # Otherwise it has something else to read.
            self._queue(_command(b"PONG", body[7:23]))
            self.flush()


class Peers:
    """The peers that have connected to an endpoint, up to ``most``. For one thread. None: there are none.

    If all places are taken, a new peer gets that of a peer that has not ended its handshake. ``endpoint``: where it
    listens. ``refused``: connections that were ended for want of places. Raises zmq.ZMQError for an endpoint that is
    not available.
    """

    def __init__(self, endpoint: str | None, most: int) -> None:
        self._most, self._peers, self.refused = most, dict[Peer, None](), 0
        self._selector, self._path, self._listens = selectors.EpollSelector(), "", False
        self._listener: socket.socket | None = None
        self.endpoint: str | None = None
        if endpoint is None:
            return
        try:
            self._listen(endpoint)
            self._take_peers()
        except OSError as error:
            self.close()
            raise zmq.ZMQError(error.errno, f"{error.strerror} (addr={endpoint!r:.80})") from None

    def _listen(self, endpoint: str) -> None:
        scheme, _, place = endpoint.partition("://")
        if scheme == "ipc":
            self._listener = listener = socket.socket(socket.AF_UNIX)
            with suppress(OSError):  # What a process that was killed has left would be in the way.
                if stat.S_ISSOCK(os.stat(place, follow_symlinks=False).st_mode):
                    os.unlink(place)
            listener.bind(place if place[0] != "@" else "\0" + place[1:])
            self.endpoint, self._path = endpoint, place if place[0] != "@" else ""
        else:
            host, _, port = place.rpartition(":")
            family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
            number = 0 if port in ("*", "0") else int(port) if port.isdecimal() else -1
            if not 0 <= number < 1 << 16:
                raise OSError(22, "no port")
            flags = socket.AI_PASSIVE
            found = socket.getaddrinfo(host.strip("[]").replace("*", "") or None, number, family, flags=flags)
            self._listener = listener = socket.socket(family)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(found[0][4])
            name = listener.getsockname()
            shown = f"[{name[0]}]" if family == socket.AF_INET6 else name[0]
            self.endpoint = f"tcp://{shown}:{name[1]}"
        listener.setblocking(False)
        listener.listen(100)

    def fileno(self) -> int:
        """A descriptor that can be read while there is something to do."""
        return self._selector.fileno()

    @property
    def unsent(self) -> int:
        """Bytes that wait until peers read. For any thread."""
        return sum(peer.unsent for peer in list(self._peers))

    def poll(self) -> list[tuple[Peer, list[bytes]]]:
        """Take peers, send what waits, and return the messages that have come. Does not wait."""
        messages = []
        self._take_peers()
        comes = False
        for key, events in self._selector.select(0):
            peer: Peer | None = key.data
            if peer is None:
                comes = True
            elif peer.open:
                with self._may_go(peer):
                    if events & selectors.EVENT_READ:
                        messages += [(peer, message) for message in peer.receive()]
                    if events & selectors.EVENT_WRITE:
                        peer.flush()
        if comes:  # Who has spoken meanwhile keeps its place.
            self._accept()
        late = time.monotonic() - connections.HANDSHAKE_MS / 1e3
        for peer in [one for one in self._peers if not one.let_in and one.since < late]:
            self._end(peer)
        return messages

    def send(self, peer: Peer, frames: list[bytes]) -> None:
        """Send a message to a peer that is open, or as much of it as the peer has room for now."""
        with self._may_go(peer):
            peer.send(frames)

    @contextmanager
    def _may_go(self, peer: Peer) -> Iterator[None]:
        """End the connection of a peer that goes meanwhile. Else be told when there is room for what it has not been
        sent."""
        try:
            yield
        except Gone:
            self._end(peer)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        if self._selector.get_key(peer.connection).events != events:
            self._selector.modify(peer.connection, events, peer)

    def _take_peers(self) -> None:
        if self._listener is not None and not self._listens:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._listens = True

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(self._most):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # There are no descriptors. The next poll tries again.
                self._selector.unregister(self._listener)
                self._listens = False
                return
            peer = Peer(connection)
            self._peers[peer] = None
            self._selector.register(connection, selectors.EVENT_READ, peer)
            if len(self._peers) > self._most:
                self.refused += 1
                self._end(next(one for one in self._peers if not one.let_in))
            if peer.open:
                with self._may_go(peer):
                    peer.flush()

    def _end(self, peer: Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        peer.open = False
        del self._peers[peer]

    def close(self) -> None:
        for peer in list(self._peers):
            self._end(peer)
        self._selector.close()
        if self._listener is not None:
            self._listener.close()
        if self._path:
            with suppress(OSError):
                os.unlink(self._path)


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


def _command(name: bytes, content: bytes) -> bytes:
    body = bytes([len(name)]) + name + content
    return _header(len(body), _COMMAND) + body


def _header(length: int, flags: int) -> bytes:
    return bytes([flags, length]) if length < 256 else struct.pack(">BQ", flags | _LONG, length)
