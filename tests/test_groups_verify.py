"""verify() checks every group of layers, and that a sequence is the same in all of them."""

from __future__ import annotations

import pytest

from grouped import encoded, pool_of, seed
from kvpool import IntegrityError
from kvpool.state import debug, verify
from kvpool.state.blocks import EMPTY


@pytest.mark.parametrize("group", [0, 1, 2])
def test_verify_checks_every_group_and_names_the_one_that_is_wrong(group: int) -> None:
    with pool_of("full window recurrent") as cache:
        seed(cache, range(9))
        lists = cache._states[group].lists
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
            words = cache._states[group].blocks["word"]
            held = words.nonzero()[0][0]
            words[held] += 1 << 32
            with pytest.raises(IntegrityError, match=f"^pins: group {group}: "):
                cache.verify()
            words[held] -= 1 << 32


@pytest.mark.parametrize("field", ["generation", "live", "failed", "length", "committed"])
def test_verify_compares_the_rows_of_a_sequence_in_all_groups(field: str) -> None:
    with pool_of("cross full full") as cache:
        sequence = cache.add_sequence(list(range(9)), **encoded(cache))
        rows = cache._states[2].sequences[field]
        before = rows.copy()
        rows[sequence & 0xFFFFFFFF] += 1
        found = list(verify._agreement(cache._states))
        assert [check for check, _ in found] == ["groups"] and f"{field!r} in group 2 than in group 1" in found[0][1]
        rows[:] = before
        cache._states[2].rows[0], kept = 7, int(cache._states[2].rows[0])
        with pytest.raises(IntegrityError, match="group 2"):
            cache.verify()
        cache._states[2].rows[0] = kept
        cache.release(sequence)


def test_a_dump_of_all_groups_shows_a_change_in_any() -> None:
    with pool_of("full window full") as cache:
        before = debug.dump_all(cache._states)
        for state in cache._states:
            state.blocks["uses"][3] += 1
            assert debug.dump_all(cache._states) != before
            state.blocks["uses"][3] -= 1
        assert debug.dump_all(cache._states) == before
