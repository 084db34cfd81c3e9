"""What one request has reused, decoded, dropped and computed in vain, and the same in total."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engine import Engine
from kvpool import UnknownSequence

Make = Callable[..., Engine]
A = list(range(13))


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
