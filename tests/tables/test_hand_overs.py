"""Hand-overs of block tables, whatever their form: which sequences are refused, and what becomes of buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine import Engine, open_engine, small_layout
from kvpool import DeviceError, KVCacheManager, PoolClosed, UnknownSequence
from kvpool.device.base import Stream
from tests.tables.hand_overs import FORMS, Form, Late, picture

Make = Callable[..., Engine]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


def test_wrong_sequences_are_refused_and_nothing_is_changed(make: Make, form: Form) -> None:
    engine, stranger = make(T=2, P=16), open_engine(2, 4, 0)
    live, gone, foreign = engine.add([1]).id, engine.add(range(5)), stranger.add([1]).id
    engine.release(gone)
    out, untouched = form.targets(3, 4), form.targets(3, 4)
    for ids, error in (
        ([live, live], ValueError),
        ([live, gone.id], UnknownSequence),
        (foreign, UnknownSequence),
        (-1, UnknownSequence),
        ([live, 2**63 - 1], UnknownSequence),
        ([1.5], TypeError),
        (None, TypeError),
        ([[1]], (TypeError, ValueError)),
    ):
        before = picture(engine)
        with pytest.raises(error):  # type: ignore[call-overload]
            form.call(engine.cache, out, ids)
        assert picture(engine) == before and str(out) == str(untouched)
    stranger.cache.close()


def test_a_closed_pool_hands_nothing_over(make: Make, form: Form) -> None:
    engine = make(T=2, P=16)
    sequence, out = engine.add([1]), form.targets(2, 4)
    form.call(engine.cache, out, sequence.id)
    engine.cache.close()
    for ids in (sequence.id, []):
        with pytest.raises(PoolClosed):
            form.call(engine.cache, out, ids)
    assert not engine.cache._staging._buffers


def test_sequences_that_outgrow_their_buffer_before_the_snapshot_are_staged_whole(
    make: Make, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    engine = make(T=1, P=1100)
    sequence, out = engine.add([1]), form.targets(1, 1100)
    take, grown = engine.cache._staging.take, []

    def meanwhile(nbytes: int, stream: Stream) -> Any:
        buffer = take(nbytes, stream)
        if not grown:
            grown.append(engine.cache.append_tokens(sequence.id, range(1050)))
        return buffer

    monkeypatch.setattr(engine.cache._staging, "take", meanwhile)
    form.call(engine.cache, out, sequence.id)
    form.check(engine.cache, out, [sequence.id])
    engine.cache.rewind(sequence.id, 1050)


def test_a_buffer_that_a_failed_hand_over_may_still_read_waits_for_its_event(form: Form) -> None:
    device = Late()
    cache = KVCacheManager(small_layout(2), device_blocks=16, host_blocks=0, device=device)
    sequence, out = cache.add_sequence(range(5)), form.targets(1, 3)
    device.refusals = 1
    with pytest.raises(DeviceError, match="staging refused"):
        form.call(cache, out, sequence)
    assert cache.stats().hand_overs == 1 and not cache._staging._free
    cache.verify()
    form.call(cache, out, sequence)
    form.check(cache, out, [sequence])
    assert len(cache._staging._buffers) == 2
    cache.release(sequence)
    cache.close()
