"""verify() checks every group of layers and names the one that is wrong."""

from __future__ import annotations

import pytest

from grouped import pool_of, seed
from kvpool.errors import IntegrityError
from kvpool.state.records import EMPTY


@pytest.mark.parametrize("group", [0, 1, 2])
def test_verify_checks_every_group_and_names_the_one_that_is_wrong(group: int) -> None:
    with pool_of("full window recurrent") as cache:
        seed(cache, range(9))
        lists = cache.core.states[group].lists
        lists[EMPTY, 2] += 1
        with pytest.raises(IntegrityError, match=f"^list links: group {group}: ") as caught:
            cache.verify()
        assert caught.value.check == "list links"
        lists[EMPTY, 2] -= 1


@pytest.mark.parametrize("group", [0, 1, 2])
def test_verify_compares_pins_of_every_group_with_its_leases(group: int) -> None:
    with pool_of("full window full") as cache:
        seed(cache, range(9))
        with cache.pin(cache.block_keys(list(range(9))).keys):
            words = cache.core.states[group].blocks["ref_word"]
            held = words.nonzero()[0][0]
            words[held] += 1 << 32
            with pytest.raises(IntegrityError, match=f"^pins: group {group}: "):
                cache.verify()
            words[held] -= 1 << 32
