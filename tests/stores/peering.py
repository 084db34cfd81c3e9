"""What the tests of PeerStore share: servers that are closed at the end, clients, and a client without manners."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvpool.remote.listener import ClientSecret
from kvpool.storage import MemoryStore
from kvpool.storage.backends.peer.peer_store import PeerStore, StoreCall, wire_key
from kvpool.storage.backends.peer.store_server import StoreServer
from kvpool.storage.backends.shared_secret import SharedSecret
from kvpool.storage.store import Space, Store
from tests.remote import workers
from tests.stores.lab import BLOCK_BYTES, memory

ROOT = Path(__file__).parents[2]
SECRET = b"known to all clients, and nobody"
WIRE_KEY = wire_key(SharedSecret(SECRET))
KEY, MAC, TAG = bytes(32), bytes(16), "0" * 32
SPACE = Space(bytes(16), memory())


@pytest.fixture
def servers() -> Iterator[list[StoreServer]]:
    made: list[StoreServer] = []
    yield made
    assert all(server.close(600) for server in made)


Serve = Callable[..., StoreServer]


@pytest.fixture
def serve(servers: list[StoreServer]) -> Serve:
    def start(store: Store | None = None, **options: Any) -> StoreServer:
        arguments = {"block_bytes": BLOCK_BYTES} | ({} if "keys" in options else {"secret": SECRET}) | options
        servers.append(StoreServer(MemoryStore(64 * BLOCK_BYTES) if store is None else store, **arguments))
        return servers[-1]

    return start


def client(server: StoreServer | str, **options: Any) -> PeerStore:
    return PeerStore(
        server if isinstance(server, str) else server.endpoint, **{"secret": SECRET, "timeout": 600.0, **options}
    )


class Raw(workers.Raw):
    """A client that sends what a test likes."""

    def __init__(self, endpoint: str, **options: int) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        for name, value in options.items():
            setattr(self.socket, name, value)
        self._key = WIRE_KEY
        ClientSecret(self._key).apply(self.socket)
        self.socket.connect(endpoint)
        self.greet()

    def close(self) -> None:
        self._context.destroy(linger=0)


def call(kind: str, number: int = 1, wait_ms: int = 1000, **fields: Any) -> StoreCall:
    return StoreCall(number, kind, wait_ms, **fields)
