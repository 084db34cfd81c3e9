"""Two workers of one test: pools with one secret, the content that one has on its host, and raw requests to its
server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zmq

from engine import Engine
from kvpool.remote.endpoints import ClientPassword
from kvpool.remote.frames import Find, Get, Hello, Message, encode
from kvpool.remote.served import served
from kvpool.state.hashing import remote_password

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
    assert engine.cache.offload(engine.prompt(tokens, **names)) == count
    return tokens


def expected(engine: Engine, tokens: Sequence[int]) -> list[bytes]:
    """The bytes of the full blocks of a prompt, as they lie on the host."""
    size = engine.T
    each = engine.expected.of((None, None), [(token, 0) for token in tokens])
    stacked = [np.stack(each[at : at + size], axis=2) for at in range(0, len(tokens) - size + 1, size)]
    return [block.tobytes() for block in stacked]


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for another thread or the network; fails when ``what`` does not come."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, f"no {what} within 20 s"
        time.sleep(0.002)


class Raw:
    """A peer that sends whatever a test likes. A context manager."""

    def __init__(self, endpoint: str, engine: Engine, **options: int) -> None:
        self._engine, self._context = engine, zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        ClientPassword(remote_password(engine.cache.core.states.secret)).apply(self.socket)
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(endpoint)

    def fields(self, **other: Any) -> dict[str, Any]:
        cache = self._engine.cache
        right = {"layout": served(cache).fingerprint, "origin": cache.block_keys([0]).origin[0], "transport": "inline"}
        return {"id": 1, "client": "raw"} | right | other

    def hello(self, **other: Any) -> bytes:
        return encode(Hello(**self.fields(**other)))

    def get(self, **other: Any) -> bytes:
        return encode(Get(**self.fields(**({"group": 0} | other))))

    def find(self, **other: Any) -> bytes:
        return encode(Find(**self.fields(**other)))

    def send(self, *frames: bytes | Message) -> None:
        self.socket.send_multipart([encode(one) if isinstance(one, Message) else one for one in frames])

    def receive(self) -> list[bytes]:
        assert self.socket.poll(20_000), "no answer within 20 s"
        return self.socket.recv_multipart()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.destroy(linger=0)
