"""What ``verify`` checks of a host cache: each field is corrupted, and the right check must see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool import (
    HostCache,
)
from kvpool.errors import IntegrityError
from kvpool.state.records import LINKED, PUBLISHED
from kvpool.state.records import PENDING as STILL_PENDING
from kvpool.state.verify import findings
from tests.hostcache.conftest import Make, keys, store

PENDING_BLOCK, CACHED, PINNED = 0, 1, 2


def put(field: str, value: Any, block: int = PENDING_BLOCK) -> Callable[[np.ndarray, np.ndarray], None]:
    def corrupt(blocks: np.ndarray, words: np.ndarray) -> None:
        blocks[field][block] = value

    return corrupt


def flip(flag: int, block: int = PENDING_BLOCK) -> Callable[[np.ndarray, np.ndarray], None]:
    def corrupt(blocks: np.ndarray, words: np.ndarray) -> None:
        blocks["flags"][block] ^= flag

    return corrupt


def other_key(blocks: np.ndarray, words: np.ndarray) -> None:
    words[PENDING_BLOCK, 1] ^= 1


@pytest.mark.parametrize(
    ("corrupt", "check"),
    [
        (put("ref_word", 2 << 32), "pins"),
        (put("uses", 1), "pending"),
        (flip(PUBLISHED), "pending"),
        (flip(LINKED), "index"),
        (flip(STILL_PENDING), "representative"),
        (flip(STILL_PENDING, CACHED), "pending"),
        (put("ref_word", 1 << 32, CACHED), "listed or held"),
        (put("ref_word", 2 << 32, PINNED), "pins"),
        (put("key0", 7), "index"),
        (other_key, "key"),
    ],
)
def test_what_is_wrong_is_found(make: Make, corrupt: Any, check: str) -> None:
    cache = make(4, secret=bytes(16))  # with some secrets, another key is in the same bucket of the index
    assert cache.reserve(keys("pending")).blocks.tolist() == [PENDING_BLOCK]
    store(cache, "cached"), store(cache, "pinned")
    cache.pin(keys("pinned"))
    cache.verify()
    state = cache._states[0]
    corrupt(state.blocks, state.tokens)
    with pytest.raises(IntegrityError) as raised:
        cache.verify()
    assert check in {raised.value.check, *_all(cache)}
    cache.close()


def _all(cache: HostCache) -> set[str]:
    """Every check that fails."""
    return {check for check, _ in findings(cache._states[0], np.array([PENDING_BLOCK, PINNED]))}
