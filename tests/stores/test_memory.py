"""MemoryStore keeps the contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpool.stores import MemoryStore
from kvpool.stores.tag_limits import TagLimits
from tests.stores.contract import LastingContract
from tests.stores.lab import BLOCK_BYTES


class TestMemoryStore(LastingContract):
    @pytest.fixture
    def made(self) -> list[MemoryStore]:
        return []

    @pytest.fixture
    def make(self, made: list[MemoryStore]) -> Callable[[int], MemoryStore]:
        def build(blocks: int) -> MemoryStore:
            made.append(MemoryStore(blocks * BLOCK_BYTES))
            return made[-1]

        return build

    @pytest.fixture
    def again(self, made: list[MemoryStore]) -> Callable[[], MemoryStore]:
        return lambda: made[-1]


# ----------------------------------------
# A namespace has no more keys than its limit, and memory for them is bounded.


A, B = b"a" * 16, b"b" * 16


def keys(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def test_the_oldest_key_of_the_tag_goes_first() -> None:
    limits = TagLimits()
    assert limits.add(A, keys(1, 2, 3), 3) == ([True] * 3, keys(1, 2, 3), [])
    assert limits.add(B, keys(9), 1).gone == []
    assert limits.add(A, keys(1, 4), 3) == ([True] * 2, keys(4), keys(2))
    assert len(limits) == 4


def test_of_more_keys_than_the_limit_the_first_are_kept() -> None:
    """The beginning of a prompt is worth more than its end."""
    limits = TagLimits()
    limits.add(A, keys(1, 2), 3)
    assert limits.add(A, keys(3, 4, 5, 6), 3) == ([True, True, True, False], keys(3, 4, 5), keys(1, 2))


def test_a_limit_of_nothing_accepts_nothing_and_keeps_nothing() -> None:
    limits = TagLimits()
    assert limits.add(A, keys(1), 0) == ([False], [], []) and len(limits) == 0
    assert limits.add(A, [], 3) == ([], [], [])


def test_a_smaller_limit_drops_what_is_too_much() -> None:
    limits = TagLimits()
    limits.add(A, keys(1, 2, 3, 4), 4)
    assert limits.add(A, keys(5), 2).gone == keys(1, 2, 3) and len(limits) == 2


def test_keys_that_were_not_saved_do_not_count() -> None:
    limits = TagLimits()
    limits.add(A, keys(1, 2), 2)
    limits.discard(A, keys(2, 7))
    assert limits.add(A, keys(3), 2).gone == [] and len(limits) == 2


def test_keys_that_could_not_be_dropped_count_as_the_oldest() -> None:
    limits = TagLimits()
    limits.add(A, keys(1, 2), 2)
    gone = limits.add(A, keys(3), 2).gone
    limits.discard(A, keys(3))
    limits.restore(A, gone)
    assert len(limits) == 2 and limits.add(A, keys(4), 2).gone == keys(1)


def test_no_more_keys_are_kept_in_mind_than_the_bound() -> None:
    limits = TagLimits(4)
    limits.add(A, keys(1, 2, 3), 10)
    assert limits.add(B, keys(4, 5, 6), 10).gone == keys(1, 2) and len(limits) == 4
    for number in range(100):
        limits.add(b"%d" % number, keys(number), 10)
    assert len(limits) == 4
