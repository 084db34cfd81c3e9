"""Fixtures: a cluster for the tests of a module, clusters of a test's own, and queues that are closed at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvpool.storage import StoreWorker
from kvpool.storage.backends.mooncake.mooncake_store import MooncakeStore
from tests.stores.lab import IDENTITY, memory
from tests.stores.mooncake.cluster import Cluster, missing


@pytest.fixture(scope="session")
def installed() -> None:
    if why := missing():
        pytest.skip(why)


@pytest.fixture(scope="package")
def cluster(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A master and a worker that lends 64 MiB, for all tests that break neither."""
    made = Cluster(tmp_path_factory.mktemp("mooncake"), "--default_kv_lease_ttl=2000")
    try:
        made.worker(bytes(32), 64 << 20)
        yield made
    finally:
        made.close()


@pytest.fixture
def own_cluster(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """Starts clusters, with flags of the master, that a test may break."""
    made: list[Cluster] = []

    def start(*flags: str) -> Cluster:
        made.append(Cluster(tmp_path_factory.mktemp("mooncake"), *flags))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture
def secret() -> bytes:
    """The secret of one test: no other test finds its blocks."""
    return os.urandom(32)


@pytest.fixture
def open_at(secret: bytes) -> Iterator[Callable[..., StoreWorker]]:
    """Opens queues over stores of a cluster. They are closed before the cluster ends."""
    queues: list[StoreWorker] = []

    def build(
        master: str,
        *,
        slots: int = 64,
        block_bytes: int = 4096,
        piece: int = 4 << 20,
        row_padding: int = 0,
        **options: Any,
    ) -> Any:
        store = MooncakeStore(master, **({"secret": secret} | options))
        rows = memory(slots, block_bytes + row_padding)
        queues.append(StoreWorker(store, rows, IDENTITY, piece_bytes=piece, row_padding=row_padding))
        return queues[-1]

    yield build
    for queue in queues:
        assert queue.close(600)
