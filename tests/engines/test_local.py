"""What the plug-ins of local engines keep their prompts by, without an engine."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool.errors import BlockNotFound
from kvpool.integrations.local import Bytes, LocalBlocks, Places, prefix_keys, state_keys
from kvpool.integrations.options import MLX
from kvpool.storage import MemoryStore, Space
from tests.seeds import some_of
from tests.waiting import until

BLOCK = 64
IDENTITY = kvpool.ModelIdentity("tiny", "rev 1", "float16", "2 layers", "mine 1")
OPENED: list[WatchedStore] = []
CONTENT: OrderedDict[bytes, Any] = OrderedDict()
"""What each KeptStore has."""


class WatchedStore(MemoryStore):
    """Remembers whether it is open."""

    is_open = False

    def __init__(self, capacity: int = 1 << 20) -> None:
        super().__init__(capacity)
        OPENED.append(self)

    def open(self, space: Space) -> bytes:
        self.is_open = True
        return super().open(space)

    def close(self) -> None:
        self.is_open = False


class RefusingStore(WatchedStore):
    def open(self, space: Space) -> bytes:
        raise OSError("no way in")


class KeptStore(MemoryStore):
    """Outlives the blocks that open it, as a disk outlives a process."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self._blocks, self._secret = CONTENT, bytes(32)


class DistantStore(KeptStore):
    """What it has is known only after a call."""

    indexed = False


def local_blocks(blocks: int = 4, **options: Any) -> LocalBlocks:
    """Blocks whose lock this thread holds, as a plug-in does in each of its calls."""
    read = MLX.read({"host_bytes": blocks * BLOCK, **options})
    lock = threading.RLock()
    lock.acquire()
    return LocalBlocks(BLOCK, IDENTITY, blocks * BLOCK, read, lock)


@pytest.fixture
def held() -> Iterator[LocalBlocks]:
    blocks = local_blocks()
    yield blocks
    blocks._cache.verify()
    blocks.close()


def fill(memory: Bytes) -> Any:
    def write(places: Places, rows: Places) -> None:
        memory[rows] = places[:, None]

    return write


@pytest.mark.parametrize("error", [OSError("no"), KeyboardInterrupt()])
def test_a_write_that_fails_keeps_nothing_and_its_keys_can_be_put_again(held: LocalBlocks, error: Exception) -> None:
    def write(places: Places, rows: Places) -> None:
        raise error

    held.put([b"a"], fill(held.memory))
    with pytest.raises(type(error)):
        held.put([b"a", b"b", b"c"], write)
    assert held.lookup([b"a", b"b", b"c"]).tolist() == [True, False, False]
    assert held._cache.usage().pending == 0
    held.put([b"a", b"b", b"c"], fill(held.memory))
    with held.pin([b"a", b"b", b"c"]) as lease:
        assert held.memory[lease.blocks][:, 0].tolist() == [0, 1, 2]


def test_nothing_is_written_or_published_if_all_is_here(held: LocalBlocks) -> None:
    def write(places: Places, rows: Places) -> None:
        raise AssertionError(f"{places}")

    held.put([b"a", b"b"], fill(held.memory))
    before = held._cache.stats()
    held.put([b"a", b"b"], write)
    held.put([], write)
    assert held._cache.stats().published_blocks == before.published_blocks == 2
    assert not +held.skipped


def test_a_state_comes_back_whole_or_not_at_all(held: LocalBlocks) -> None:
    state = np.random.default_rng(0).bytes(3 * BLOCK - 8)
    held.put_state(b"s", state)
    assert held.state(b"s") == state
    held.put([b"other"], fill(held.memory))
    held.put([b"another"], fill(held.memory))
    assert held.state(b"s") is None
    held.put_state(b"t", bytes(4 * BLOCK))
    assert held.state(b"t") is None
    assert held.skipped["crowded"] == 1


@pytest.fixture(params=["KeptStore", "DistantStore"])
def shared(request: pytest.FixtureRequest) -> str:
    """The text of an empty store that outlives the blocks that open it."""
    CONTENT.clear()
    return f"{__name__}.{request.param}:"


def restarted(blocks: LocalBlocks, count: int, **options: Any) -> LocalBlocks:
    """Blocks over the same store, as after a restart."""
    assert blocks.drain(600)
    blocks.close()
    return local_blocks(count, **options)


@pytest.mark.parametrize("load_share", some_of(2, [0.01, 0.5, 0.25, 0.75, 1.0]))
@pytest.mark.parametrize("count", some_of(3, [1, 2, 8, 5]))
def test_a_state_of_any_size_that_fits_is_found_after_a_restart(shared: str, count: int, load_share: float) -> None:
    states = {b"%d" % n: np.random.default_rng(n).bytes(n * BLOCK - 8 - n % 3) for n in range(1, count + 1)}
    options = {"stores": [shared], "load_share": load_share}
    blocks = local_blocks(count, **options)
    for key, state in states.items():
        blocks.put_state(key, state)
        assert blocks.drain(600)
    blocks = restarted(blocks, count, **options)
    for key in [*states, *reversed(states), *states]:
        assert blocks.longest_state([b"none", key]) == 1
        assert blocks.state(key) == states[key]
    assert not +blocks.skipped
    blocks._cache.verify()
    blocks.close()


@pytest.mark.parametrize("load_share", [0.01, 0.25, 0.5, 1.0])
def test_a_prompt_of_any_size_that_fits_is_found_after_a_restart(shared: str, load_share: float) -> None:
    keys = [b"%d" % n for n in range(12)]
    options = {"stores": [shared], "load_share": load_share}
    blocks = local_blocks(12, **options)
    blocks.put(keys, fill(blocks.memory))
    blocks = restarted(blocks, 12, **options)
    for _ in range(2):
        assert blocks.here([*keys, b"none"]) == 12
        with blocks.opened(keys) as (memory, rows):
            assert memory[rows][:, 0].tolist() == [*range(12)]
    with pytest.raises(BlockNotFound), blocks.opened([*keys, b"none"]):
        pass
    assert blocks.story(keys, 12, 1)[0].total() == 12
    blocks.close()


def test_blocks_are_copied_window_by_window_while_others_take_the_room(shared: str) -> None:
    keys = [b"%d" % n for n in range(8)]
    blocks = local_blocks(8, stores=[shared])
    blocks.put(keys, fill(blocks.memory))
    blocks = restarted(blocks, 8, stores=[shared])
    blocks.put([b"a", b"b", b"c"], fill(blocks.memory))
    with blocks.pin([b"a", b"b", b"c"]), blocks.opened(keys) as (memory, rows):
        assert memory[rows][:, 0].tolist() == [*range(8)]
        assert memory is not blocks.memory
    blocks.close()


def test_states_that_were_only_looked_for_take_no_room_from_others(shared: str) -> None:
    names = [b"%d" % n for n in range(6)]
    blocks = local_blocks(8, stores=[shared])
    for name in names:
        blocks.put_state(name, name * 90)
        assert blocks.drain(600)
    blocks = restarted(blocks, 8, stores=[shared])
    assert blocks.longest_state(names) == 0
    for name in reversed(names):
        assert blocks.state(name) == name * 90
    assert not +blocks.skipped
    blocks.close()


def test_what_comes_after_a_gap_takes_no_room_from_the_next_prompt(shared: str) -> None:
    """A prompt reads nothing after the first block that does not come."""
    blocks = local_blocks(16, stores=[shared])
    blocks.put([b"%d" % n for n in range(16)], fill(blocks.memory))
    blocks = restarted(blocks, 16, stores=[shared])
    for first in (1, 9):
        assert blocks.here([b"none", *(b"%d" % n for n in range(first, first + 7))]) == 0
    assert blocks._storage is not None
    stats = blocks._storage.stats()
    assert (stats.loaded_blocks, stats.promoted_blocks, stats.refused) == (14, 0, 0)
    blocks.close()


def test_a_read_that_fails_takes_no_room_from_the_next_prompt(shared: str) -> None:
    blocks = local_blocks(8, stores=[shared])
    blocks.put([b"%d" % n for n in range(8)], fill(blocks.memory))
    blocks = restarted(blocks, 8, stores=[shared])
    with pytest.raises(BlockNotFound), blocks.opened([b"0", b"none", b"1", b"2"]):
        pass
    assert blocks._storage is not None and blocks._storage.stats().promoted_blocks == 0
    assert blocks.here([b"%d" % n for n in range(4, 8)]) == 4
    blocks.close()


def test_a_state_whose_piece_has_left_the_store_is_counted(shared: str) -> None:
    blocks = local_blocks(8, stores=[shared])
    blocks.put_state(b"s", bytes(6 * BLOCK))
    blocks = restarted(blocks, 8, stores=[shared])
    CONTENT.popitem()
    assert blocks.state(b"s") is None
    assert blocks.skipped == {"gone": 1}
    blocks.close()


def test_keys_of_other_settings_differ() -> None:
    for make in (lambda settings: prefix_keys([1, 2, 3, 4], 2, settings)[1:], state_keys_of):
        keys = {key for settings in (b"", b"a", b"b", bytes(32)) for key in make(settings)}
        assert len(keys) == 4 * len(make(b""))


def state_keys_of(settings: bytes) -> list[bytes]:
    return state_keys([1, 2, 3, 4], 3, range(1, 5), settings)


@pytest.mark.parametrize("second", ["RefusingStore:", "WatchedStore:64?color=red", "Absent:"])
def test_a_store_that_does_not_open_leaves_none_open(second: str) -> None:
    OPENED.clear()
    with pytest.raises((OSError, TypeError, ValueError, ImportError)):
        local_blocks(stores=[f"{__name__}.WatchedStore:", f"{__name__}.{second}"])
    assert OPENED
    until(lambda: not any(store.is_open for store in OPENED))


def test_what_has_no_room_is_counted_and_nothing_is_written(held: LocalBlocks) -> None:
    held.put([b"a", b"b", b"c", b"d"], fill(held.memory))
    with held.pin([b"a", b"b", b"c", b"d"]):
        held.put([b"e"], fill(held.memory))
    assert held.skipped == {"crowded": 1}
    assert held.here([b"a", b"b", b"c", b"d", b"e"]) == 4
