"""What tests of several files of this folder begin with. A file that needs another store has its own fixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvpool.storage import StoreWorker
    from tests.stores.disk_lab import Faulty
    from tests.stores.host_lab import Engine
    from tests.stores.lab import Clock, Wrong


@pytest.fixture
def store() -> Wrong:
    """A store in memory that fails as a test directs."""
    from kvpool.storage import MemoryStore
    from tests.stores.lab import BLOCK_BYTES, Wrong

    return Wrong(MemoryStore(256 * BLOCK_BYTES))


@pytest.fixture
def queue(store: Wrong) -> Iterator[StoreWorker]:
    """A queue over ``store`` that saves and loads four blocks at once."""
    from tests.stores.lab import BLOCK_BYTES, open_queue

    with open_queue(store, piece_bytes=4 * BLOCK_BYTES) as made:
        yield made
    assert made.close(600)


@pytest.fixture
def faulty() -> Faulty:
    """What a disk store asks of the system, which fails where a test says so."""
    from tests.stores.disk_lab import Faulty

    return Faulty()


@pytest.fixture
def disk(tmp_path: Path, faulty: Faulty) -> Callable[..., StoreWorker]:
    """Opens a queue over a disk store with room for that many blocks, on the system of the test."""
    from kvpool.storage.backends.disk import DiskStore
    from tests.stores.lab import BLOCK_BYTES, IDENTITY, open_queue

    def build(blocks: int | None = None, name: str = "store", identity: Any = IDENTITY, **options: Any) -> StoreWorker:
        store = DiskStore(tmp_path / name, blocks and blocks * BLOCK_BYTES, system=faulty.system)
        return open_queue(store, identity, **options)

    return build


@pytest.fixture
def clock() -> Clock:
    from tests.stores.lab import Clock

    return Clock()


@pytest.fixture
def make(store: Wrong) -> Iterator[Callable[..., Engine]]:
    """Make engines with a host cache and a storage manager over ``store``, or over others, and close them."""
    from tests.stores.host_lab import engines

    yield from engines(store)


@pytest.fixture
def engine() -> Iterator[Any]:
    """An engine on a pool of 64 blocks in each tier."""
    from tests.stores.pool_lab import make_engine

    made = make_engine(P=64, S=64)
    with made.cache:
        yield made


@pytest.fixture
def wrong() -> Wrong:
    """A store that has the first 41 tokens, and fails as a test directs."""
    from tests.stores.lab import Wrong
    from tests.stores.pool_lab import stocked, tokens

    return Wrong(stocked(tokens(41)))
