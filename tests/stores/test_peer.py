"""PeerStore keeps the contract, over a server of another thread or of another process that is killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("zmq")

from kvpool.stores import MemoryStore
from kvpool.stores.peer import PeerStore
from kvpool.stores.serving import StoreServer
from tests.stores.contract import LastingContract
from tests.stores.lab import BLOCK_BYTES

SECRET = b"known to the clients only"


@pytest.fixture
def servers() -> Iterator[list[StoreServer]]:
    made: list[StoreServer] = []
    yield made
    assert all(server.close() for server in made)


class TestPeerStore(LastingContract):
    @pytest.fixture
    def make(self, servers: list[StoreServer]) -> Callable[[int], PeerStore]:
        def build(blocks: int) -> PeerStore:
            servers.append(StoreServer(MemoryStore(blocks * BLOCK_BYTES), block_bytes=BLOCK_BYTES, secret=SECRET))
            return PeerStore(servers[-1].endpoint, secret=SECRET)

        return build

    @pytest.fixture
    def again(self, servers: list[StoreServer]) -> Callable[[], PeerStore]:
        return lambda: PeerStore(servers[-1].endpoint, secret=SECRET)
