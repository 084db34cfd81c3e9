"""A prompt that the pool can never hold is refused as such, by name, and holds up no other; one that may fit later
waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import Engine
from group_engine import GroupsEngine
from kvpool import OutOfBlocks
from tests import debug

Make = Callable[..., Engine]
Open = Callable[..., GroupsEngine]
A = list(range(1000, 1400))
T = 4
CROSS, RECURRENT = {"kind": "cross"}, {"kind": "recurrent"}


def everything(engine: GroupsEngine) -> list[bytes]:
    return [debug.dump(state) for state in engine.states()]


def test_a_prompt_that_fits_exactly_waits_and_one_block_more_never_fits(make: Make) -> None:
    engine = make(T=T, P=20)
    busy = engine.add([7])
    with pytest.raises(OutOfBlocks):
        engine.cache.add_sequence(A[: 20 * T])
    with pytest.raises(ValueError, match="^prompt: 21 device blocks are needed at once, of 20: it can never fit$"):
        engine.cache.add_sequence(A[: 20 * T + 1])
    with pytest.raises(ValueError, match="never"):
        engine.cache.reserve(A[: 20 * T + 1])
    engine.release(busy)
    engine.add(A[: 20 * T])


def test_a_batch_goes_on_without_it_and_names_it(make: Make) -> None:
    engine = make(T=T, P=20)
    batch = [A[:5], A[:200], A[20:24], A[200:276], A[:300]]
    with pytest.raises(ValueError, match=r"^prompts\[1\]: 50 device blocks .* never"):
        engine.cache.add_sequence_batch(batch)
    assert engine.free() == 20
    admission = engine.cache.add_sequence_batch(batch, allow_partial_batch=True)
    assert sorted(admission.refused) == [1, 4], "those behind the first that waits are named too"
    assert all("never" in why for why in admission.refused.values())
    assert admission.admitted == 2 and len(admission.ids) == 3, "the fourth may fit later"
    assert admission.ids[1] == -1 and engine.free() == 17
    assert admission.missed_blocks.tolist() == [2, 0, 1]
    for sequence, tokens in ((admission.ids[0], A[:5]), (admission.ids[2], A[20:24])):
        assert engine.cache.sequence_length(int(sequence)) == len(tokens)
    engine.cache.release(admission.ids[admission.ids >= 0])
    rest = engine.cache.add_sequence_batch(batch[len(admission.ids) :], allow_partial_batch=True)
    assert rest.admitted == 1 and rest.ids[1] == -1 and list(rest.refused) == [1]


def test_a_batch_of_nothing_else_is_refused_whole(make: Make) -> None:
    engine = make(T=T, P=4)
    admission = engine.cache.add_sequence_batch([A[:40], A[:80]], allow_partial_batch=True)
    assert admission.ids.tolist() == [-1, -1] and admission.admitted == 0 and sorted(admission.refused) == [0, 1]


def test_nothing_is_refused_in_a_batch_that_fits(make: Make) -> None:
    assert make(T=T, P=4).cache.add_sequence_batch([A[:4]]).refused == {}


@pytest.mark.parametrize(
    ("groups", "fits", "never", "which"),
    [
        ([{"device_blocks": 40}, {"device_blocks": 20}], 80, 81, 1),
        ([{"device_blocks": 20}, {"device_blocks": 40, "window": 8}], 80, 81, 0),
        ([{"device_blocks": 40}, {"device_blocks": 20, "window": 8}], 80, 81, 1),
        # A state every 8 tokens, the one behind the last full block that can be reused, and the running one.
        ([{"device_blocks": 90}, RECURRENT | {"device_blocks": 5, "snapshot_tokens": 8}], 31, 39, 1),
    ],
)
def test_every_kind_of_group_is_counted_as_it_is_kept(
    open_: Open, groups: list[Any], fits: int, never: int, which: int
) -> None:
    engine = open_(*groups, max_sequence_tokens=None)
    engine.release(engine.add(A[:fits]))
    before = everything(engine)
    with pytest.raises(ValueError, match=f"device blocks of group {which} are needed at once, of .*never"):
        engine.cache.add_sequence(A[200 : 200 + never])
    admission = engine.cache.add_sequence_batch([A[200 : 200 + never]], allow_partial_batch=True)
    assert list(admission.refused) == [0] and everything(engine) == before
    engine.add(A[200:204])


def test_of_encoders_that_never_fit_the_others_are_admitted(open_: Open) -> None:
    engine = open_({"device_blocks": 30}, CROSS | {"device_blocks": 4})
    admission = engine.cache.add_sequence_batch([A[:6], A[6:12]], encoder_tokens=[17, 16], allow_partial_batch=True)
    assert admission.admitted == 1 and admission.ids[0] == -1
    assert "5 device blocks of group 1" in admission.refused[0]


def test_a_prompt_longer_than_the_device_fits_where_a_window_has_passed_what_is_cached(make: Make) -> None:
    engine = make(T=T, P=6, window=8, max_sequence_tokens=400)
    with pytest.raises(
        ValueError,
        match="^prompt: 10 device blocks .* as a whole; add its first tokens, commit them, append the others",
    ):
        engine.cache.add_sequence(A[:40])
    sequence = engine.add(A[:8])
    for start in range(8, 40, 4):
        engine.commit(engine.append(sequence, A[start : start + 4]))
    engine.release(sequence)
    again = engine.add(A[:40])
    assert again.cached >= 36, "its window is cached, so that it needs few blocks"


def test_refused_prompts_leave_what_the_others_are_told_in_place(make: Make) -> None:
    """What a batch with refused prompts is told and given is what the same batch without them is."""
    batch, rng = [A[: 5 + 3 * i] for i in range(5)], np.random.default_rng(5)
    for _ in range(20):
        mixed, places = list(batch), []
        for _ in range(int(rng.integers(1, 4))):
            mixed.insert(int(rng.integers(0, len(mixed) + 1)), A[:300])
        places = [i for i, tokens in enumerate(mixed) if len(tokens) < 300]
        plain, other = make(T=T, P=12), make(T=T, P=12)
        for engine in (plain, other):
            engine.seed(A[:9], committed=8)
        expected = plain.cache.add_sequence_batch(batch, allow_partial_batch=True)
        found = other.cache.add_sequence_batch(mixed, allow_partial_batch=True)
        own = [i for i in places if i < len(found.ids)]
        assert len(own) == found.admitted == expected.admitted
        for ours, theirs in zip(found[1:-1], expected[1:-1], strict=True):
            assert ours[own].tolist() == theirs.tolist()
        assert sorted(found.refused) == sorted(set(range(len(mixed))) - set(places))
