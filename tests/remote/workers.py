"""Two workers of one test: pools with one secret, the content that one has on its host, and raw requests to its
server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import zmq

from engine import Engine
from kvpool.remote import BlockClient, BlockServer
from kvpool.remote import session as wire
from kvpool.remote.listener import ClientSecret
from kvpool.remote.session import Blocks, Failed, Found, Hello, Message, Received, Session, Welcome
from kvpool.remote.transport import served
from kvpool.state.hashing import remote_password
from kvpool.storage.backends.peer.peer_store import StoreDone, StoreWelcome
from tests.waiting import until

SECRET = bytes(range(32))
SMALL = {"head_dim": 3}
"""Blocks of 192 bytes, which travel in one frame."""
LARGE = {"head_dim": 1024}
"""Blocks of 64 KiB, each of which is sent from its place in the pool."""
HUGE = {"head_dim": 16384}
"""Blocks of 1 MiB: a few of them do not fit into the buffers of a connection."""

Make = Callable[..., Engine]


def worker(make: Make, P: int = 32, S: int = 32, *, layout: dict[str, Any] | None = None, **options: Any) -> Engine:
    """A pool of 4 tokens per block that agrees with the other worker's."""
    return make(4, P, S, layout=SMALL if layout is None else layout, **({"secret": SECRET} | options))


def stored(engine: Engine, count: int, start: int = 0, **names: Any) -> list[int]:
    """The tokens of a prompt whose ``count`` full blocks are on the host now."""
    tokens = list(range(start, start + count * engine.T + 1))
    engine.seed(tokens, **names)
    assert engine.cache.content.offload(engine.prompt(tokens, **names)) == count
    return tokens


def expected(engine: Engine, tokens: Sequence[int]) -> list[bytes]:
    """The bytes of the full blocks of a prompt, as they lie on the host."""
    size = engine.T
    each = engine.expected.of((None, None), [(token, 0) for token in tokens])
    stacked = [np.stack(each[at : at + size], axis=2) for at in range(0, len(tokens) - size + 1, size)]
    return [block.tobytes() for block in stacked]


@contextmanager
def pair(
    make: Make,
    count: int = 4,
    endpoint: str = "tcp://127.0.0.1:*",
    *,
    layout: Any = None,
    limits: Any = None,
    **reads: Any,
) -> Iterator[tuple[Engine, Engine, list[int], BlockServer, BlockClient]]:
    """A worker that serves a prompt of so many blocks, another one, the tokens, and a server and a client of them."""
    there, here = worker(make, layout=layout), worker(make, layout=layout)
    tokens = stored(there, count)
    with BlockServer(there.cache, endpoint, limits=limits) as server:
        with BlockClient(server.endpoint, here.cache, **reads) as client:
            yield there, here, tokens, server, client


def counted(server: Any, **figures: int) -> None:
    """Wait until the server's figures are these."""
    until(lambda: all(getattr(server.stats(), name) == value for name, value in figures.items()), str(figures))


def unpinned(engine: Any) -> None:
    """Wait until no block is lent."""
    until(lambda: not engine.cache.leases, "end of the leases")


class Raw:
    """A client that proves that it knows the secret, and then sends whatever a test likes. A context manager."""

    def __init__(self, endpoint: str, engine: Engine, greets: bool = True, **options: int) -> None:
        self._engine, self._context = engine, zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self._key = wire_key(engine)
        ClientSecret(self._key).apply(self.socket)
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(endpoint)
        self.session: Session | None = None
        if greets:
            self.greet()

    def greet(self) -> None:
        greeted = wire.greeting()
        self.socket.send(greeted)
        [answer] = self.receive()
        self.session = wire.begun(self._key, greeted, answer)

    def hello(self, **other: Any) -> Hello:
        cache = self._engine.cache
        right = {"layout": served(cache).fingerprint, "origin": cache.block_keys([0]).origin[0], "transport": "inline"}
        return Hello(**{"id": 1, "client": "raw"} | right | other)

    def send(self, message: Message | bytes, *frames: bytes, blocks: Sequence[bytes] = ()) -> None:
        """Send a message with its tag, or with a header that is none."""
        assert self.session is not None
        self.socket.send_multipart(packed(self.session, message, *frames, blocks=blocks))

    def receive(self) -> list[bytes]:
        assert self.socket.poll(600_000), "no answer within 600 s"
        return self.socket.recv_multipart()

    def answer(self) -> Received:
        assert self.session is not None
        return self.session.unpack([memoryview(frame) for frame in self.receive()], ANSWERS)

    def ask(self, message: Message | bytes, *frames: bytes, blocks: Sequence[bytes] = ()) -> Any:
        self.send(message, *frames, blocks=blocks)
        return self.answer().message

    def enter(self, **hello: Any) -> Raw:
        """Say hello, and be welcome."""
        assert isinstance(self.ask(self.hello(**hello)), Welcome)
        return self

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.destroy(linger=0)


ANSWERS = (Welcome, Blocks, Found, Failed, StoreWelcome, StoreDone)


def wire_key(engine: Engine) -> bytes:
    return remote_password(engine.cache.core.states.secret).encode()


def packed(session: Session, message: Message | bytes, *frames: Any, blocks: Sequence[Any] = ()) -> list[bytes]:
    """A message as it is sent; bytes stand for its header."""
    header = message if isinstance(message, bytes) else wire.encode(message)
    parts = session.pack(header, frames, blocks, session.mac(blocks))
    session.sent()
    return [bytes(frame) for frame in parts]


class Fake:
    """A server that says whatever a test likes to clients with any pass. A context manager.

    ``answer``: makes the answers to a message, each a list of frames. It gets what was said, decoded if a session has
    begun. ``key``: with it, clients find that they talk to one who knows their secret. ``heard``: all that came.
    """

    def __init__(
        self,
        key: bytes,
        answer: Callable[[Session, Received], list[list[bytes]]],
        kinds: tuple[type[Message], ...],
        endpoint: str = "tcp://127.0.0.1:*",
    ) -> None:
        self.heard: list[bytes] = []
        self._key, self._answer, self._kinds = key, answer, kinds
        self._context: zmq.Context[Any] = zmq.Context()
        self._zap, self.socket = self._context.socket(zmq.REP), self._context.socket(zmq.ROUTER)
        self._zap.bind("inproc://zeromq.zap.01")
        self.socket.linger, self.socket.zap_domain, self.socket.plain_server = 0, b"any", True
        self.socket.bind(endpoint)
        self.endpoint = self.socket.last_endpoint.decode()
        self._sessions: dict[bytes, Session] = {}
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._serve)
        self._thread.start()

    def greeted(self, client: bytes, frames: list[bytes]) -> list[bytes]:
        session, answer = wire.answered(self._key, frames[0])
        assert session is not None
        self._sessions[client] = session
        return [answer]

    def _serve(self) -> None:
        while not self._stop.is_set():
            ready = zmq.select([self._zap, self.socket], [], [], 0.01)[0]
            if self._zap in ready:
                version, number, *rest = self._zap.recv_multipart()
                self.heard += rest
                self._zap.send_multipart([version, number, b"200", b"", b"", b""])
            if self.socket in ready:
                client, *frames = self.socket.recv_multipart()
                self.heard += frames
                self._take(client, frames)

    def _take(self, client: bytes, frames: list[bytes]) -> None:
        session = self._sessions.get(client)
        if session is None:
            answers = [self.greeted(client, frames)]
        else:
            answers = self._answer(session, session.unpack([memoryview(frame) for frame in frames], self._kinds))
        while answers:  # which then belong to ZeroMQ alone
            self.send(client, answers.pop(0))

    def send(self, client: bytes, frames: list[bytes]) -> None:
        self.socket.send_multipart([client, *frames])

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)
