"""The client's end of the wire: one connection to one server, for one thread at a time."""

from __future__ import annotations

import functools
import itertools
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvpool.common.arrays.digest import check_library
from kvpool.errors import KVPoolError
from kvpool.remote.connections import Flow
from kvpool.remote.listener import ClientCredentials
from kvpool.remote.session import (
    HEAD_BYTES_MAX,
    NO_MAC,
    Failed,
    Malformed,
    Message,
    Received,
    Session,
    begun,
    encode,
    greeting,
)

STOP_POLL_MS = 50
"""How often a call that waits asks whether it should stop."""
IDLE_BYTES_MAX = 64 << 10
"""What a server may say to a client that waits for nothing."""
_BUFFER_BYTES = 8 << 20
"""What the system may hold of a server's messages."""
_ENDED: dict[int, str] = {
    zmq.EVENT_CLOSED: "nobody listens there",
    zmq.EVENT_CONNECT_RETRIED: "nobody listens there",
    zmq.EVENT_DISCONNECTED: "the connection has ended",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not accept this client's secret or keys",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak this protocol, or not with a secret or keys",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the connection has ended",
}


class RemoteError(KVPoolError):
    """The other worker refused, or its answer is one that no server sends.

    Attributes
    ----------
    code : str
        One word for programs.
    reason : str
        A sentence for people.
    blocks : int
        Blocks that had entered the pool before the error.
    """

    def __init__(self, code: str, reason: str) -> None:
        # Both may be the words of another process, and may be printed on a terminal.
        self.code, self.reason, self.blocks = printable(code), printable(reason), 0
        super().__init__(f"{self.code}: {self.reason}")


class RemoteTimeout(RemoteError, TimeoutError):
    """The other worker did not answer in time. Blocks that came before have entered the pool, and nothing else."""

    def __init__(self, reason: str) -> None:
        super().__init__("timeout", reason)


def printable(text: str) -> str:
    """Words of another process, as they may be shown on a terminal."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


class Stopped(Exception):
    """Nobody waits for the call any more."""


Stop = Callable[[], bool]


def never() -> bool:
    return False


class Connection:
    """One connection to a server. It ends with the first error: another one would not know what was under way here.

    ``frame_bytes``, ``messages``: the longest frame of an answer, and how many answers may be under way. Calls raise
    RemoteTimeout if no answer comes within ``timeout_ms``, which may be set, or the connection has ended. They raise
    RemoteError: its code is "credentials" if the server does not let this client in, "impostor" if it does not prove
    that it knows the secret, "malformed" for what no server sends, and what the server says if it refuses. They raise
    Stopped when ``stop()`` says so.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        credentials: ClientCredentials,
        *,
        timeout_ms: int,
        frame_bytes: int,
        messages: int,
    ) -> None:
        check_library("kvpool.remote", "remote")
        self._endpoint = endpoint
        self._key = credentials.wire_key
        self.timeout_ms = timeout_ms
        self._most = (messages + 1) * (frame_bytes + HEAD_BYTES_MAX) + _BUFFER_BYTES
        self.number = itertools.count(1).__next__
        """Gives a number for the next message."""
        self.welcome: Any = None
        self._flow: Flow | None = None
        self._session: Session | None = None
        self._socket = socket = context.socket(zmq.DEALER)
        # Another connection could not know what was under way on this one.
        socket.linger, socket.ipv6, socket.reconnect_ivl = 0, "[" in endpoint, -1
        socket.rcvhwm, socket.maxmsgsize = messages, max(HEAD_BYTES_MAX, frame_bytes)
        credentials.apply(socket)
        self._monitor = socket.get_monitor_socket(functools.reduce(operator.or_, [zmq.EVENT_CONNECTED, *_ENDED]))
        socket.connect(endpoint)

    def greet(self, hello: Message, kind: type[Message], stop: Stop = never) -> Received:
        """Have the server prove that it knows the secret, and say what this client wants, under a number of its own.
        Returns the answer, whose message is ``welcome`` from then on."""
        greeted = greeting()
        self._send([greeted])
        answer = self._receive(self.timeout_ms, stop) or []
        with self._malformed():
            self._session = begun(self._key, greeted, bytes(answer[0]) if len(answer) == 1 else b"")
        if self._session is None:
            reason = f"{self._endpoint} does not prove that it knows the secret: it is another program, or has another"
            raise RemoteError("impostor", reason)
        received = self.ask(replace(hello, id=self.number()), [], kind, stop)
        self.welcome = received.message
        return received

    def send(self, message: Message, frames: Sequence[Any] = (), blocks: Sequence[Any] = ()) -> None:
        """Send a message, after ``greet``. Blocks are sealed."""
        assert self._session is not None
        mac = self._session.mac(blocks) if blocks else NO_MAC
        if self._flow is not None:
            self._flow.most = self._most
        if self._send(self._session.pack(encode(message), frames, blocks, mac)):
            self._session.sent()

    def receive(
        self, accepted: tuple[type[Message], ...], stop: Stop = never, wait_ms: float | None = None
    ) -> Received | None:
        """The next message, or None if there is none within ``wait_ms``, if that is given."""
        assert self._session is not None
        frames = self._receive(self.timeout_ms if wait_ms is None else wait_ms, stop, wait_ms is None)
        if frames is None:
            return None
        with self._malformed():
            received = self._session.unpack(frames, (*accepted, Failed))
        if isinstance(received.message, Failed):
            raise RemoteError(received.message.code, received.message.reason)
        return received

    def ask(
        self,
        message: Message,
        frames: Sequence[Any],
        kind: type[Message],
        stop: Stop = never,
        blocks: Sequence[Any] = (),
    ) -> Received:
        """Send a message and wait for its answer, if no other is under way."""
        self.send(message, frames, blocks)
        received = self.receive((kind,), stop)
        assert received is not None
        with self._malformed():
            if received.message.id != message.id:
                raise Malformed(f"an answer to message {received.message.id}, which does not wait for one")
        self.rest()
        return received

    def verify_mac(self, blocks: Sequence[Any], mac: bytes) -> bool:
        assert self._session is not None
        return self._session.verify_mac(blocks, mac)

    def rest(self) -> None:
        """No answer is under way."""
        if self._flow is not None:
            self._flow.most = IDLE_BYTES_MAX

    def ended(self) -> bool:
        """Whether the connection has ended while nobody used it."""
        return bool(self._monitor.poll(0))

    def close(self) -> None:
        if self._flow is not None:
            self._flow.end()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _send(self, frames: Sequence[Any]) -> bool:
        """Send, unless there is nobody to send it to: the monitor tells why."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def _receive(self, wait_ms: float, stop: Stop, must: bool = True) -> list[memoryview] | None:
        end = time.monotonic() + wait_ms / 1e3
        while True:
            left_ms = (end - time.monotonic()) * 1e3
            ready = zmq.select([self._socket, self._monitor], [], [], max(0.0, min(left_ms, STOP_POLL_MS)) / 1e3)[0]
            if self._monitor in ready:
                self._note(recv_monitor_message(self._monitor))
            elif self._socket in ready:
                frames = [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
                if self._flow is not None:
                    self._flow.messages += 1
                return frames
            if stop():
                raise Stopped
            if left_ms <= 0:
                if must:
                    raise RemoteTimeout(f"{self._endpoint} did not answer for {self.timeout_ms} ms")
                return None

    def _note(self, event: Any) -> None:
        """Note what has become of the connection."""
        kind = int(event["event"])
        if kind == zmq.EVENT_CONNECTED:
            self._flow = Flow(int(event["value"]), self._endpoint, IDLE_BYTES_MAX)
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise RemoteError("credentials", f"{self._endpoint}: {_ENDED[kind]}")
        else:
            raise RemoteTimeout(f"{self._endpoint}: {_ENDED[kind]}")

    @contextmanager
    def _malformed(self) -> Iterator[None]:
        try:
            yield
        except Malformed as error:
            raise RemoteError("malformed", f"{self._endpoint} sent {error}") from None
