"""What tests of several files of this folder begin with. A file that needs another store has its own fixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvpool.storage import StoreWorker
    from tests.stores.disk_lab import Faulty
    from tests.stores.hostkeeping import Engine
    from tests.stores.lab import Clock, Wrong


@pytest.fixture
def store() -> Wrong:
    """A store in memory that does wrong what a test tells it to."""
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
def clock() -> Clock:
    from tests.stores.lab import Clock

    return Clock()


@pytest.fixture
def make(store: Wrong) -> Iterator[Callable[..., Engine]]:
    """Makes engines with a host cache and a keeper over ``store``, or over others, and closes them."""
    from tests.stores.hostkeeping import engines

    yield from engines(store)


@pytest.fixture
def one() -> Iterator[Any]:
    """An engine on a pool of 64 blocks in each tier."""
    from tests.stores.keeping import engine

    made = engine(P=64, S=64)
    with made.cache:
        yield made


@pytest.fixture
def wrong() -> Wrong:
    """A store that has the first 41 tokens, and does wrong what a test tells it to."""
    from tests.stores.keeping import engine, keeper, seed, store, tokens
    from tests.stores.lab import Wrong

    made, memory = engine(P=64, S=64), store()
    with made.cache, keeper(made, memory) as kept:
        seed(made, kept, [tokens(41)])
    return Wrong(memory)
