"""Replays of missed messages, for everybody who reaches the socket.

It speaks ZMTP 3, the protocol of ZeroMQ, as far as a replay needs it, over asyncio. ``zmq.ROUTER`` was measured, and no
option of it bounds strangers. A peer chooses its routing id there. One that takes the id which the next peer would get
aborts the process, also under ROUTER_HANDOVER, and ZAP is asked before the id is said. And all frames of a message are
kept until its last one: under MAXMSGSIZE=64 and RCVHWM=1, 64 MiB of empty frames took 2,052 MiB.

asyncio listens, reads, waits and holds back. What is left of a peer here: what one read has brought (at most 256 KiB),
one message of FRAMES_MAX frames, one answer that waits, and SEND_BYTES of the system.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass

import zmq

from kvpool.errors import PoolClosed
from kvpool.remote import connections
from kvpool.remote.listener import binding

FRAMES_MAX, FRAME_BYTES_MAX, COMMAND_BYTES_MAX = 8, 64, 1024
"""The most that a peer may send in one message, in one frame of it, and in one command of the protocol."""
SEND_BYTES = 1 << 20
"""The most bytes that the system may hold for a peer."""
END = (-1).to_bytes(8, "big", signed=True)
"""The number of the message, without a payload, that ends a replay."""
_MORE, _LONG, _COMMAND = 1, 2, 4
_NULL = b"NULL".ljust(20, b"\0")
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + _NULL + bytes(32)
_log = logging.getLogger(__name__)


class _Gone(Exception):
    """The peer has sent what no client sends."""


class _Peer:
    """One connection. ``telling``: what sends it a replay. ``unsent``: gives the bytes that wait until it reads."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self.end = reader, writer, writer.transport.abort
        self.unsent = writer.transport.get_write_buffer_size
        writer.transport.set_write_buffer_limits(0)
        self.let_in, self.idle_since = False, 0.0
        self.telling: asyncio.Future[None] | None = None

    @property
    def asks(self) -> bool:
        """Whether a replay is under way."""
        return self.telling is not None and not self.telling.done()

    async def greet(self) -> None:
        """The handshake. Raises _Gone."""
        properties = b"\x0bSocket-Type\0\0\0\x06ROUTER\x08Identity\0\0\0\0"
        self._writer.write(_GREETING + _frame(b"\x05READY" + properties, _COMMAND))
        greeting = await self._reader.readexactly(len(_GREETING))
        if greeting[0] != 0xFF or greeting[10] < 3 or greeting[12:32] != _NULL:
            raise _Gone
        flags, body = await self._read()
        if not flags & _COMMAND or not body.startswith(b"\x05READY"):
            raise _Gone
        self.let_in, self.idle_since = True, time.monotonic()

    async def messages(self) -> AsyncIterator[list[bytes]]:
        """What the peer says, message by message. Raises _Gone."""
        message: list[bytes] = []
        while True:
            flags, body = await self._read()
            if flags & _COMMAND:
                self._obey(body)
            elif len(message) == FRAMES_MAX:
                raise _Gone
            else:
                message.append(body)
                if not flags & _MORE:
                    yield message
                    message = []
            await asyncio.sleep(0)  # Another peer has its turn.

    async def send(self, frames: list[bytes]) -> None:
        """Send a message, when the system has all of those before it. Raises OSError."""
        *others, last = frames
        await self._writer.drain()
        # asyncio of Python 3.12.1 never holds back after ``writelines``.
        self._writer.write(b"".join([*(_frame(one, _MORE) for one in others), _frame(last)]))
        await asyncio.sleep(0)

    async def _read(self) -> tuple[int, bytes]:
        """The flags of the next frame, and its content."""
        flags, length = await self._reader.readexactly(2)
        if flags & _LONG:
            length = int.from_bytes(bytes([length]) + await self._reader.readexactly(7), "big")
        if flags > _MORE + _LONG + _COMMAND or length > (COMMAND_BYTES_MAX if flags & _COMMAND else FRAME_BYTES_MAX):
            raise _Gone
        return flags, await self._reader.readexactly(length)

    def _obey(self, body: bytes) -> None:
        """Do what a command says. Those that are not known are none of ours."""
        if body.startswith(b"\x05ERROR"):
            raise _Gone
        # Who has something else to read gets no answer to a heartbeat.
        if body.startswith(b"\x04PING") and not self.unsent():
            self._writer.write(_frame(b"\x04PONG" + body[7:23], _COMMAND))


class ReplayServer:
    """A socket that replays a history to up to ``most`` peers. For one event loop; the counts are for any thread.

    A replay is a place in the history, not a copy of it: of the messages to a client, at most one is on its way. A
    client has one replay: a new request replaces its last one. If all places are taken, a new peer gets that of a peer
    that has not ended its handshake, or else of the one that has asked for nothing for longest. Who is in the middle of
    a replay keeps its place.

    ``endpoint``: where it listens; None: nowhere. ``snapshot``: a function that makes the history cover a message
    number. ``topic``: the frame before the number of each message; None leaves that frame out. The counts are: replays
    that reached their end, replays that ended early, requests that were none, peers that got no place, and idle peers
    that lost theirs.

    Raises zmq.ZMQError for an endpoint that is not available.
    """

    def __init__(
        self, endpoint: str | None, most: int, history: History, snapshot: Callable[[int], None], topic: bytes | None
    ) -> None:
        self._most = most
        self._history = history
        self._snapshot = snapshot
        self._topic = topic
        self._peers: dict[_Peer, None] = {}
        self._listener: socket.socket | None = None
        self.endpoint = endpoint
        self.done = self.cut = self.malformed = self.refused = self.displaced = 0
        if endpoint is not None:
            try:
                self._listener = _listen(endpoint)
            except (OSError, ValueError, OverflowError) as error:
                number = getattr(error, "errno", None) or errno.EINVAL
                raise zmq.ZMQError(number, f"{os.strerror(number)} (addr={endpoint!r:.80})") from None
            if endpoint.startswith("tcp:"):
                host, port = self._listener.getsockname()[:2]
                self.endpoint = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def unsent(self) -> int:
        """Bytes that wait until peers read. For the loop's thread."""
        return sum(peer.unsent() for peer in self._peers)

    async def listen(self) -> None:
        """Serve from now on, until the loop ends."""
        if self._listener is not None:
            serve = asyncio.start_unix_server if self._listener.family == socket.AF_UNIX else asyncio.start_server
            await serve(self._serve, sock=self._listener)

    def close(self) -> None:
        """Leave the endpoint, when the loop has ended."""
        if self._listener is None:
            return
        self._listener.close()
        path = str(self.endpoint).partition("://")[2]
        if self._listener.family == socket.AF_UNIX and path[0] != "@":
            with suppress(OSError):
                os.unlink(path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = _Peer(reader, writer)
        self._peers[peer] = None
        if len(self._peers) > self._most:
            last = self._least()
            if last.let_in:
                self.displaced += 1
            else:
                self.refused += 1
            del self._peers[last]
            last.end()
        try:
            await asyncio.wait_for(peer.greet(), connections.HANDSHAKE_MS / 1e3)
            async for request in peer.messages():
                if len(request) != 2 or request[0] or len(request[1]) != 8:
                    self.malformed += 1
                    continue
                self._cut(peer)
                peer.telling = asyncio.ensure_future(self._tell(peer, Place(int.from_bytes(request[1], "big"))))
        except (TimeoutError, _Gone, OSError, EOFError):
            pass
        finally:
            self._cut(peer)
            self._peers.pop(peer, None)
            peer.end()

    def _cut(self, peer: _Peer) -> None:
        """End a replay that is under way."""
        if peer.asks and peer.telling is not None:
            self.cut += peer.telling.cancel()

    def _least(self) -> _Peer:
        """The peer that loses its place. The newest has not ended its handshake."""
        *others, newest = self._peers
        idle = [peer for peer in others if not peer.asks]
        return min(idle, key=lambda peer: (peer.let_in, peer.idle_since), default=newest)

    async def _tell(self, peer: _Peer, place: Place) -> None:
        """Send a peer a replay, as fast as it reads."""
        head = [b"", *([] if self._topic is None else [self._topic])]
        try:
            while True:
                if not self._history.covers(place):
                    self._snapshot(place.next)
                told = self._history.at(place)
                if told is None:
                    break
                place.next += 1
                await peer.send([*head, told[0].to_bytes(8, "big"), told[1]])
            await peer.send([b""] * len(head) + [END, b""])
            self.done += 1
            peer.idle_since = time.monotonic()
        except (OSError, PoolClosed):
            peer.end()
        except Exception:
            _log.exception("a replay has ended")
            peer.end()


def _listen(endpoint: str) -> socket.socket:
    """A socket that listens. What it is told of buffers holds for the connections to it."""
    scheme, _, place = endpoint.partition("://")
    if scheme == "ipc":
        listener = socket.socket(socket.AF_UNIX)
        try:
            with binding(endpoint):
                with suppress(OSError):  # What a process that was killed has left would be in the way.
                    os.unlink(place)
                listener.bind(place if place[0] != "@" else "\0" + place[1:])
                listener.listen(100)
        except BaseException:
            listener.close()
            raise
    else:
        host, _, port = place.rpartition(":")
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        address = host.strip("[]").replace("*", ""), 0 if port == "*" else int(port)
        listener = socket.create_server(address, family=family, backlog=100)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return listener


def _frame(body: bytes, flags: int = 0) -> bytes:
    size, long = len(body), _LONG if len(body) > 255 else 0
    return bytes([flags | long]) + size.to_bytes(8 if long else 1, "big") + body


@dataclass
class Place:
    """The place of a reader in the history: the number of the message that it gets next, and the snapshot that it is
    reading."""

    next: int
    snapshot: int | None = None


class History:
    """The latest messages, bounded in number and in bytes, and one snapshot. Not thread-safe.

    A snapshot is a sequence of messages. The first says "cleared"; the others have the state after message
    ``number - 1``. Their numbers are the last ones before ``number``. The messages that had these numbers are gone, so
    a reader of the snapshot has missed them. It sees numbers that rise without a gap, and none that it has seen before
    and would skip.
    """

    def __init__(self, messages: int, nbytes: int) -> None:
        self._messages_max, self._nbytes_max = messages, nbytes
        self._latest: deque[bytes] = deque()
        self._nbytes = 0
        self.next = 0
        """Number of the next message."""
        self._snapshot: list[bytes] = []
        self._snapshot_at, self._snapshot_id = -1, 0

    @property
    def first(self) -> int:
        """Number of the oldest message that is kept."""
        return self.next - len(self._latest)

    def add(self, payload: bytes) -> None:
        self._latest.append(payload)
        self._nbytes += len(payload)
        self.next += 1
        while len(self._latest) > self._messages_max or self._nbytes > self._nbytes_max:
            self._nbytes -= len(self._latest.popleft())
        if self._snapshot and self._snapshot_at < self.first:
            # A reader in the middle of an old snapshot needs another.
            self._snapshot, self._snapshot_id = [], self._snapshot_id + 1

    def covers(self, place: Place) -> bool:
        """Whether everything from a place on can be sent without a new snapshot."""
        if place.snapshot is None and place.next >= self.first:
            return True
        return (
            place.snapshot == self._snapshot_id
            or bool(self._snapshot)
            and place.next <= self._snapshot_at - len(self._snapshot)
        )

    def keep_snapshot(self, payloads: list[bytes]) -> None:
        """Keep a snapshot of the present state: at most ``next`` payloads."""
        assert len(payloads) <= self.next
        self._snapshot, self._snapshot_at = payloads, self.next
        self._snapshot_id += 1

    def at(self, place: Place) -> tuple[int, bytes] | None:
        """Number and payload of the message at a place that is covered. If that message is gone, the place moves to the
        begin of the snapshot. None at the end."""
        if place.snapshot is not None and place.snapshot == self._snapshot_id and place.next == self._snapshot_at:
            place.snapshot = None
        if place.next >= self.next:
            return None
        if place.snapshot is None and place.next >= self.first:
            return place.next, self._latest[place.next - self.first]
        if place.snapshot != self._snapshot_id:
            place.next, place.snapshot = self._snapshot_at - len(self._snapshot), self._snapshot_id
        return place.next, self._snapshot[place.next - self._snapshot_at]
