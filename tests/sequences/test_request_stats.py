"""What one request has reused, decoded, dropped and computed in vain, and the same in total."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import Engine
from group_engine import GroupsEngine
from kvpool import RequestStats, UnknownSequence

Make = Callable[..., Engine]
Open = Callable[..., GroupsEngine]
A = list(range(13))


def test_a_request_tells_where_its_tokens_came_from(make: Make) -> None:
    engine = make(T=4, P=8, S=8)
    engine.seed(A[:9])
    engine.cache.offload(engine.prompt(A[:9]))
    for _ in range(2):
        engine.release(engine.add(list(range(500, 530))), store=False)  # the device copies go
    engine.seed([*A[:4], 50, 51, 52, 53, 54])
    request = engine.add(A)
    stats = engine.cache.request_stats(request.id)
    assert stats == RequestStats(13, stats.device, stats.host, 0, 0, 8, 0, 0) and stats.device + stats.host == 8
    assert stats.host == 4
    engine.append(request, [1, 2, 3])
    engine.commit(request)
    assert engine.cache.request_stats(request.id)._replace(device=0, host=0) == (13, 0, 0, 0, 3, 16, 0, 0)


def test_partial_tokens_are_told_apart(make: Make) -> None:
    engine = make(T=4, P=8)
    engine.seed(A)
    request = engine.add([*A[:6], 90, 91])
    assert engine.cache.request_stats(request.id) == (8, 4, 0, 2, 0, 6, 0, 0)


def test_dropped_tokens_are_those_of_rewinds_and_of_drafts_that_were_not_kept(make: Make) -> None:
    engine = make(T=4, P=16)
    request = engine.add(A)
    engine.append(request, [1, 2, 3, 4, 5])
    engine.rewind(request, 2)
    assert engine.cache.request_stats(request.id)[4:] == (3, 0, 2, 0)
    engine.draft(request, [6, 7, 8, 9], [-1, 0, -1, 2])
    engine.keep(request, 4, [2, 3])
    assert engine.cache.request_stats(request.id)[4:] == (5, 0, 4, 0)
    engine.rewind(request, 7)
    assert engine.cache.request_stats(request.id) == (11, 0, 0, 0, 0, 0, 11, 0), (
        "two tokens of the prompt are gone, too"
    )
    stats = engine.cache.stats()
    assert (stats.appended_tokens, stats.dropped_tokens) == (9, 11)


def test_tokens_that_two_requests_compute_at_the_same_time_are_recomputed_by_the_second(make: Make) -> None:
    engine = make(T=4, P=16)
    one, two, three = engine.add(A), engine.add(A), engine.add(A)
    for request in (one, two):
        engine.commit(request)
    engine.release(one)
    engine.commit(three, 9)
    assert engine.cache.request_stats([two.id, three.id]).recomputed.tolist() == [12, 8]
    engine.commit(three)
    assert engine.cache.request_stats(three.id).recomputed == 12
    assert engine.cache.stats().recomputed_tokens == 24
    engine.commit(two)
    engine.release(two)
    engine.release(three)
    assert engine.cache.stats().recomputed_tokens == 24, "what waits is counted once"


def test_what_a_request_recomputes_because_it_was_told_to_is_counted(make: Make) -> None:
    engine = make(T=4, P=16)
    engine.seed(A)
    request = engine.admitted(engine.cache.add_sequence(engine.cache.block_keys(A, reuse=False)), A)
    engine.commit(request)
    assert engine.cache.request_stats(request.id).recomputed == 12


def test_forks_begin_with_the_figures_of_their_parent_and_beams_take_them_over(make: Make) -> None:
    engine = make(T=4, P=16)
    one = engine.add(A)
    engine.append(one, [1, 2, 3])
    engine.rewind(one, 1)
    (two,) = engine.fork(one)
    engine.append(two, [7])
    before = engine.cache.request_stats([one.id, two.id])
    assert [field.tolist() for field in before] == [
        [13, 13], [0, 0], [0, 0], [0, 0], [2, 3], [0, 0], [1, 1], [0, 0],
    ]  # fmt: skip
    engine.reorder([one, two], [1, 1])
    assert engine.cache.request_stats(one.id) == engine.cache.request_stats(two.id) == (13, 0, 0, 0, 3, 0, 1, 0)


def test_a_row_begins_anew(make: Make) -> None:
    engine = make(T=4, P=8, max_sequences=1)
    engine.seed(A)
    engine.seed(A)
    request = engine.add([7, 8])
    assert engine.cache.request_stats(request.id) == (2, 0, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    "kinds",
    [
        [{}, {"window": 6}, {"kind": "recurrent", "snapshot_tokens": 4}],
        [{"kind": "cross"}, {}],
        [{"kind": "recurrent", "snapshot_tokens": 4}],
    ],
    ids=str,
)
def test_groups_count_tokens_once(open_: Open, kinds: list[dict[str, Any]]) -> None:
    engine = open_(*({"host_blocks": 6} | kind for kind in kinds))
    options: dict[str, Any] = {"encoder_tokens": 3} if {"kind": "cross"} in kinds else {}
    engine.seed(A, **options)
    request = engine.add(A, **options)
    engine.append(request, [1, 2, 3])
    engine.commit(request)
    engine.append(request, [4])
    engine.rewind(request, 1)
    assert engine.cache.request_stats(request.id) == (13, 12, 0, 0, 3, 16, 1, 0)
    stats = engine.cache.stats()
    assert (stats.appended_tokens, stats.dropped_tokens) == (4, 1)


def test_one_id_gives_numbers_and_several_give_arrays(make: Make) -> None:
    engine = make(T=4, P=8)
    request = engine.add(A)
    assert all(type(field) is int for field in engine.cache.request_stats(request.id))
    several = engine.cache.request_stats([request.id])
    assert all(field.dtype == np.int32 and field.shape == (1,) for field in several)
    several.prompt[:] = 0
    assert engine.cache.request_stats(request.id).prompt == 13
    with pytest.raises(UnknownSequence):
        engine.cache.request_stats([request.id, 77 << 32])
