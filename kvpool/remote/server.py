"""The server's end of the wire, for all that is served: it lets peers in, greets them, and passes on what they ask."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import zmq

from kvpool.common.arrays.digest import check_library
from kvpool.remote.connections import Connections, end, new_context
from kvpool.remote.listener import ServerCredentials, binding
from kvpool.remote.session import (
    HEAD_BYTES_MAX,
    NO_MAC,
    Failed,
    Malformed,
    Message,
    Received,
    Session,
    answered,
    encode,
)

MESSAGES_PER_TURN = 16
_DOMAIN = b"kvpool"
"""ZeroMQ refuses everybody while nobody answers for a domain, but only if it is set and enforced."""
_BUFFER_BYTES = 1 << 20
"""What the system may hold of a peer's messages."""
_log = logging.getLogger(__name__)


class Refused(Exception):
    """A request that is answered with ``Failed``."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(eq=False)
class ClientSession:
    """A peer that was let in, and has greeted. ``hello``: what it has said of itself first, if it has."""

    id: bytes
    session: Session
    descriptor: int
    hello: Any = None


class Backend(Protocol):
    """What is served. All calls come on the server's thread, and do not wait."""

    @property
    def accepted(self) -> tuple[type[Message], ...]:
        """The kinds of messages that clients may send."""

    def take(self, client: ClientSession, received: Received) -> None:
        """Begin what a message asks for. Raises Malformed, Refused."""

    def has_room(self) -> bool:
        """Whether another message may be read."""

    def turn(self) -> int | None:
        """Go on with what is under way. Returns after how many ms there should be another turn; None: when something
        comes."""

    def disconnect(self) -> None:
        """The server ends; clients can still be sent messages."""

    def disconnected(self) -> None:
        """All clients are disconnected, and what was sent to them is dropped."""


@dataclass
class Counts:
    """``malformed``: messages that no client sends. ``failed``: answers with an error, also to those. ``dropped``:
    answers that could not be sent, because the client has gone or has too many unread."""

    malformed: int = 0
    failed: int = 0
    dropped: int = 0


class Server:
    """A socket that clients connect to, and a thread for it, which ``start`` starts. ``endpoint``: where it listens.

    ``frame_bytes``, ``messages``: the longest frame of a client, and how many of its messages ZeroMQ may hold.
    ``answers``: how many answers it may hold for a client. Raises zmq.ZMQError for an endpoint that is not available.
    ``close`` frees everything, even if ``start`` was not called.
    """

    def __init__(
        self,
        backend: Backend,
        endpoint: str,
        credentials: ServerCredentials,
        *,
        connections: int,
        stall_ms: int,
        frame_bytes: int,
        messages: int,
        answers: int,
    ) -> None:
        check_library("kvpool.remote", "remote")
        self._backend = backend
        self._credentials = credentials
        self._clients: dict[bytes, ClientSession] = {}
        self._posted = deque[Callable[[], object]]()
        self.counts = Counts()
        self.stopping = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvpool-server", daemon=True)
        self._context: zmq.Context[Any] | None = new_context()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        self._socket = socket = self._context.socket(zmq.ROUTER)
        socket.linger, socket.ipv6 = 0, "[" in endpoint
        # An answer to a client that has gone, or that reads nothing, is an error here instead of being dropped in
        # silence.
        socket.router_mandatory = True
        socket.sndhwm, socket.rcvhwm, socket.rcvbuf = answers, messages, _BUFFER_BYTES
        socket.maxmsgsize = max(HEAD_BYTES_MAX, frame_bytes)
        if stall_ms and endpoint.startswith("tcp:"):
            socket.tcp_maxrt = stall_ms
        socket.zap_domain, socket.zap_enforce_domain = _DOMAIN, True
        credentials.apply(socket)
        bytes_most = (messages + 1) * (frame_bytes + HEAD_BYTES_MAX) + 2 * _BUFFER_BYTES
        self.connections = Connections(socket, connections, bytes_most, guarded=True)
        try:
            with binding(endpoint):
                socket.bind(endpoint)
        except BaseException:
            self.close()
            raise
        self.endpoint = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def start(self) -> None:
        self._thread.start()

    # -- for any thread ----------------------------------------------------------------------------

    def post(self, call: Callable[[], object]) -> None:
        """Have the thread call something soon. It is not called once the server ends."""
        self._posted.append(call)
        with self._closing:
            if self._context is not None:
                os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Disconnect all clients, wait for the thread, and free what it had. May be called again."""
        # In this order: if an exception of a handler comes in between, another ``close`` wakes the thread.
        self.stopping = True
        self.post(lambda: None)
        if self._thread.ident is not None:
            self._thread.join()
        with self._closing:
            context, self._context = self._context, None
        if context is not None:
            if self._thread.ident is None:
                self._close_sockets()
            end(context)
            os.close(self._bell)

    # -- for the thread ----------------------------------------------------------------------------

    def send(
        self,
        client: ClientSession,
        message: Message,
        frames: Sequence[Any] = (),
        blocks: Sequence[Any] = (),
        mac: bytes = NO_MAC,
    ) -> bool:
        """Queue a message for a client. Returns False, and counts that, if it has gone or has too many unread. Does not
        wait."""
        if not self._send(client.id, client.session.pack(encode(message), frames, blocks, mac)):
            return False
        client.session.sent()
        return True

    def fail(self, client: ClientSession, id: int, code: str, reason: str) -> None:
        """Answer a request with an error."""
        self.counts.failed += 1
        self.send(client, Failed(id, code, reason))

    def guard(self, client: ClientSession, id: int, call: Callable[[], object]) -> None:
        """Do something for a request of a client, and answer it with the error that it raises, which so does not end
        the service for all others."""
        try:
            call()
        except Malformed as error:
            self.counts.malformed += 1
            self.fail(client, error.id or id, "malformed", str(error))
        except Refused as error:
            self.fail(client, id, error.code, str(error))
        except Exception as error:
            _log.exception("a request of client %s failed", client.id.hex())
            self.fail(client, id, "internal", type(error).__name__)

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._zap, self._bell, self.connections.events):
            poller.register(source, zmq.POLLIN)
        try:
            while not self.stopping:
                poller.register(self._socket, zmq.POLLIN if self._backend.has_room() else 0)
                ready = dict(poller.poll(self._backend.turn()))
                self._note_ends(self.connections.poll())
                if self._zap in ready:
                    self._authenticate()
                if self._bell in ready:
                    os.eventfd_read(self._bell)
                while self._posted:
                    self._posted.popleft()()
                if self._socket in ready:
                    self._read()
            self._backend.disconnect()
        finally:
            self.stopping = True
            self._close_sockets()
            self._backend.disconnected()

    def _close_sockets(self) -> None:
        self.connections.close()
        self._socket.close(linger=0)
        self._zap.close(linger=0)  # Connections do not end, and keep what was sent, while it is open and nobody reads.

    def _authenticate(self) -> None:
        """Answer ZeroMQ, which asks whether a peer may connect (RFC 27)."""
        frames = self._zap.recv_multipart()
        version, number, shown = frames[0], frames[1], frames[6:]
        status = [b"200", b"OK"] if self._credentials.admits(shown) else [b"400", b"not known"]
        self._zap.send_multipart([version, number, *status, b"", b""])

    def _note_ends(self, descriptors: Sequence[int]) -> None:
        if descriptors:
            self._clients = {id: client for id, client in self._clients.items() if client.descriptor not in descriptors}

    def _read(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            if not self._backend.has_room():
                return
            try:
                sender, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            descriptor = self.connections.heard(sender)
            client = self._clients.get(sender.bytes)
            if client is None:
                self._greet(sender.bytes, descriptor, frames)
            else:
                self.guard(client, 0, partial(self._take, client, frames))

    def _greet(self, sender: bytes, descriptor: int, frames: list[Any]) -> None:
        self._note_ends(self.connections.poll())  # it may have come in this turn
        session, answer = answered(self._credentials.wire_key, frames[0].bytes if len(frames) == 1 else b"")
        if session is None:
            self.counts.malformed += 1
        if self._send(sender, [answer]) and session is not None and descriptor in self.connections:
            self._clients[sender] = ClientSession(sender, session, descriptor)

    def _take(self, client: ClientSession, frames: list[Any]) -> None:
        received = client.session.unpack([frame.buffer for frame in frames], self._backend.accepted)
        id = received.message.id
        if id == 0:
            raise Malformed("id: expected 1 and more, got 0")
        self.guard(client, id, lambda: self._backend.take(client, received))

    def _send(self, client: bytes, frames: list[Any]) -> bool:
        for _ in range(2):
            try:
                self._socket.send_multipart([client, *frames], zmq.NOBLOCK, copy=False)
                return True
            except zmq.Again:
                # Only now does ZeroMQ note what the client has read meanwhile.
                self._socket.getsockopt(zmq.EVENTS)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
        self.counts.dropped += 1
        return False
