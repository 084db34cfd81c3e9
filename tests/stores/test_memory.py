"""MemoryStore keeps the contract."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvpool import HostCache
from kvpool.storage import MemoryStore
from kvpool.storage.backends import tag_limits
from kvpool.storage.backends.tag_limits import TagLimits
from kvpool.storage.store import OK, Space
from kvpool.storage.urls import open_store
from tests.engine import Clock
from tests.stores.contract import LastingContract
from tests.stores.lab import BLOCK_BYTES, memory


class TestMemoryStore(LastingContract):
    @pytest.fixture
    def made(self) -> list[MemoryStore]:
        return []

    @pytest.fixture(params=["lru", "agent"])
    def make(self, request: pytest.FixtureRequest, made: list[MemoryStore]) -> Callable[[int], MemoryStore]:
        def build(blocks: int) -> MemoryStore:
            made.append(MemoryStore(blocks * BLOCK_BYTES, policy=request.param))
            return made[-1]

        return build

    @pytest.fixture
    def again(self, made: list[MemoryStore]) -> Callable[[], MemoryStore]:
        return lambda: made[-1]


# ----------------------------------------
# Another policy than LRU chooses in a store too.


def blocks_of(name: str, count: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(b"%-32s" % f"{name} {place}".encode() for place in range(count)), np.uint8).reshape(
        -1, 32
    )


@pytest.mark.parametrize("kind", ["memory:?", "disk:{folder}?"])
@pytest.mark.parametrize(("policy", "left"), [("lru", (2, 10)), ("agent", (10, 2))])
def test_the_conversation_that_is_away_for_longer_goes_from_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, policy: str, left: tuple[int, int]
) -> None:
    """One comes back every ten seconds, another one every two hundred. There is room for both, and for four more."""
    clock, rows = Clock(), np.arange(12)
    monkeypatch.setattr(tag_limits, "HostCache", partial(HostCache, clock=clock))
    capacity = f"capacity={24 * BLOCK_BYTES}&policy={policy}"
    store = open_store(kind.replace("{folder}", f"{tmp_path}/store") + capacity)
    store.open(Space(bytes(16), memory()))

    def turn(name: str, at: int, count: int = 10) -> None:
        clock.now = 1000 * at
        wanted = blocks_of(name, count)
        codes, _ = store.load(wanted, rows[:count], lambda: False)
        new = wanted[codes != OK]
        macs = np.zeros((len(new), 16), np.uint8)
        assert (store.save(new, rows[: len(new)], macs, bytes(16), 1 << 40, lambda: False) == OK).all()

    for at in range(0, 2_000, 10):
        turn("soon", at)
        if at % 200 == 0:
            turn("late", at)
    turn("soon", 2_000)
    turn("late", 2_001)
    turn("other", 2_002, 12)
    assert tuple((store.find(blocks_of(name, 10)) == OK).sum() for name in ("soon", "late")) == left
    assert store.find(blocks_of("other", 12)).all()
    store.close()


# ----------------------------------------
# A namespace has no more keys than its limit, and memory for them is bounded.


A, B = b"a" * 16, b"b" * 16


def keys(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def test_the_oldest_keys_of_the_tag_go_and_the_beginning_of_a_prompt_is_kept() -> None:
    """The keys that are added, the limit, and what is answered: which are kept, which are new, and which go."""
    limits = TagLimits()
    for new, limit, answer in [
        (keys(1, 2, 3), 3, ([True] * 3, keys(1, 2, 3), [])),
        (keys(1, 4), 3, ([True] * 2, keys(4), keys(2))),
        (keys(5, 6, 7, 8), 3, ([True] * 3 + [False], keys(5, 6, 7), keys(3, 1, 4))),
        (keys(9), 2, ([True], keys(9), keys(5, 6))),
        (keys(10), 0, ([False], [], [])),
        ([], 3, ([], [], [])),
    ]:
        assert limits.add(A, new, limit) == answer
    assert limits.add(B, keys(9), 0).gone == limits.add(B, keys(9), 1).gone == [] and len(limits) == 3


def test_keys_that_were_not_saved_do_not_count_and_those_that_were_not_dropped_do() -> None:
    limits = TagLimits()
    limits.add(A, keys(1, 2), 2)
    limits.discard(A, keys(2, 7))
    assert limits.add(A, keys(3), 2).gone == [] and len(limits) == 2
    gone = limits.add(A, keys(4), 2).gone
    limits.discard(A, keys(4))
    limits.restore(A, gone)
    assert len(limits) == 2 and limits.add(A, keys(5), 2).gone == keys(1)


def test_no_more_keys_are_kept_in_mind_than_the_bound() -> None:
    limits = TagLimits(4)
    limits.add(A, keys(1, 2, 3), 10)
    assert limits.add(B, keys(4, 5, 6), 10).gone == keys(1, 2) and len(limits) == 4
    for number in range(100):
        limits.add(b"%d" % number, keys(number), 10)
    assert len(limits) == 4


def test_a_store_that_has_blocks_of_another_size_is_not_opened() -> None:
    store = MemoryStore(1 << 20)
    store.open(Space(bytes(16), memory(2)))
    key = np.zeros((1, 16), np.uint8)
    assert store.save(key, np.array([0]), key, bytes(16), 1 << 40, lambda: False).tolist() == [OK]
    with pytest.raises(
        ValueError, match=rf"blocks of {BLOCK_BYTES} bytes, which this store has, got {2 * BLOCK_BYTES}"
    ):
        store.open(Space(bytes(16), memory(2, 2 * BLOCK_BYTES)))
