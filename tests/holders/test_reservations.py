"""A loader fills exactly what the pool lacks, and what it fills is found by nobody before it says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine import Make
from kvpool import BlockLayout, KVCacheManager, KVPoolError, OutOfBlocks, PagedKV, scatter_kv
from kvpool.device.base import DeviceEvent
from kvpool.device.cpu import CpuDevice
from kvpool.device.sim import SimDevice
from kvpool.errors import DeviceError, OutOfSequences, PoolBusy, ReservationExpired, UnknownSequence
from kvpool.pool import Reservation
from loading import kv, load, picture
from tests.sequences.test_arguments import ID_CALLS

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"order": "block_first"},
    {"tokens": "HND"},
    {"planes": 1, "order": "block_first", "tokens": "HND"},
]


@pytest.mark.parametrize("whole", [False, True], ids=["with the skip", "by the slots alone"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("length", "cached"), [(17, 0), (18, 8), (18, 10), (16, 15), (3, 2)])
def test_a_loader_brings_what_the_pool_lacks_and_touches_nothing_else(
    make: Make, layout: dict[str, Any], length: int, cached: int, whole: bool
) -> None:
    engine, tokens = make(T=4, P=8, layout=layout), list(range(length))
    if cached:
        engine.seed([*tokens[:cached], 99], committed=cached)
    reservation = engine.cache.imports.reserve(tokens)
    assert reservation.skip_prefix_n_tokens == cached and reservation.tokens == length
    assert len(reservation.blocks) == -(-length // 4) and reservation.blocks.dtype == np.int32
    slots = reservation.slot_mapping
    assert slots.dtype == np.int64 and slots.tolist() == [
        -1 if i < cached else reservation.blocks[i // 4] * 4 + i % 4 for i in range(length)
    ]
    wanted = engine.cache.memory.device_pool.copy()
    load(engine, reservation, tokens, whole=whole)
    scatter_kv(PagedKV.of_pool(engine.cache.layout, wanted), slots[cached:].copy(), kv(engine, tokens)[:, :, cached:])
    np.testing.assert_array_equal(engine.cache.memory.device_pool, wanted)
    reservation.commit()
    engine.cache.verify()
    assert engine.reusable([*tokens, 77]) == length
    assert engine.add([*tokens, 77]).cached == length, "the engine compares every byte of it"


def test_a_prompt_that_is_cached_whole_leaves_nothing_to_load(make: Make) -> None:
    engine = make(T=4, P=6)
    engine.seed(range(9), committed=8)
    with engine.cache.imports.reserve(list(range(8))) as reservation:
        assert reservation.skip_prefix_n_tokens == 8 and (reservation.slot_mapping == -1).all()
        assert engine.free() == 4, "only what is cached is held"
        reservation.commit()
    assert engine.reusable(range(9)) == 8


def test_an_abort_takes_back_a_block_that_a_part_was_copied_into(make: Make) -> None:
    engine = make(T=4, P=8)
    engine.seed(range(7), committed=7)
    order = engine.order()  # six that hold nothing, and the two that are cached
    for prompt in ([*range(6), *range(50, 60)], [*range(6), 50], [*range(3), 50, 51]):
        reservation = engine.cache.imports.reserve(prompt)
        assert reservation.skip_prefix_n_tokens % 4
        reservation.abort()
        assert engine.order()[:6] == order[:6] and sorted(engine.order()) == sorted(order) and len(engine.cached()) == 1
        assert engine.reusable([*range(8)]) == 7 and engine.reusable(prompt) == reservation.skip_prefix_n_tokens
    assert engine.cache.add_sequence_batch([[100 + i] for i in range(8)]).admitted == 8, "no block is missing"
    engine.cache.verify()


# ----------------------------------------
# How reservations end, whoever ends them; and what is refused changes nothing.


def test_a_pool_that_is_too_full_is_left_as_it_is(make: Make) -> None:
    engine = make(T=4, P=4, S=2, max_sequences=2)
    engine.seed(range(9), committed=8)
    engine.add(range(100, 108))
    before = picture(engine)
    with pytest.raises(OutOfBlocks):
        engine.cache.imports.reserve([*range(8), *range(20, 25)])
    assert picture(engine) == before
    with engine.cache.imports.reserve(list(range(5))):
        before = picture(engine)
        with pytest.raises(OutOfSequences):
            engine.cache.imports.reserve([1])
        assert picture(engine) == before


def test_a_reservation_is_not_a_sequence(make: Make) -> None:
    engine = make(T=4, P=8)
    reservation, cache = engine.cache.imports.reserve(list(range(6))), engine.cache
    before = picture(engine)
    for call in ID_CALLS.values():
        with pytest.raises(UnknownSequence):
            call(cache, reservation.id)
    assert picture(engine) == before
    assert cache.stats().sequences == 0 and cache.stats().reservations == 1
    reservation.abort()


def test_a_closed_reservation_says_so_and_changes_nothing(make: Make) -> None:
    engine = make(T=4, P=8)
    for end in (Reservation.commit, Reservation.abort):
        reservation = engine.cache.imports.reserve(list(range(6)))
        end(reservation)
        before = picture(engine)
        for again in (reservation.commit, reservation.abort, lambda r=reservation: r.commit(6)):
            with pytest.raises(ReservationExpired, match=f"{reservation.id}"):
                again()
        assert picture(engine) == before


def test_a_loader_that_is_gone_can_be_revoked(make: Make) -> None:
    engine = make(T=4, P=12)
    engine.seed(range(5), committed=4)
    engine.clock.now = 10
    dead, other = (
        engine.cache.imports.reserve(list(range(50, 56)), owner="dead"),
        engine.cache.imports.reserve(list(range(6)), owner="other"),
    )
    lease = engine.cache.pin(engine.keys(range(4)), owner="dead")
    engine.clock.now = 25
    assert [(r.owner, r.age_ms) for r in engine.cache.imports.reservations] == [("dead", 15), ("other", 15)]
    assert "dead" in repr(dead) and "closed=False" in repr(dead)
    assert engine.cache.revoke("dead") == 2 and engine.cache.revoke("dead") == 0
    assert dead.closed and lease.closed and engine.cache.imports.reservations == [other]
    with pytest.raises(ReservationExpired):
        dead.commit()
    other.commit(4)
    assert engine.free() == 12


def test_a_reset_waits_for_loaders_unless_it_is_forced(make: Make) -> None:
    engine = make(T=4, P=8)
    engine.seed(range(5), committed=4)
    reservation, live = engine.cache.imports.reserve(list(range(9))), engine.add([70, 71])
    before = picture(engine)
    with pytest.raises(PoolBusy, match="1 live sequence and 1 open reservation:"):
        engine.cache.clear()
    assert picture(engine) == before
    engine.cache.clear(force=True)
    del engine.live[live.id]
    assert engine.cached() == {} and engine.free() == 8 and reservation.closed
    with pytest.raises(ReservationExpired):
        reservation.commit()
    assert engine.cached() == {}, "what comes late publishes nothing"


def test_what_is_taken_while_a_pool_closes_has_an_age_of_nothing() -> None:
    late: list[Reservation] = []
    times = iter([0, 5, 20])

    def clock() -> int:
        now = next(times)
        if now == 5:
            late.append(cache.imports.reserve([4, 5], owner="late"))
        return now

    cache = KVCacheManager(BlockLayout(1, 1, 8, 4), device_blocks=4, device="cpu", clock=clock)
    cache.imports.reserve([1, 2, 3], owner="early")
    assert cache.close().reservations == [("early", 5), ("late", 0)] and late[0].closed


def test_bad_counts_are_refused(make: Make) -> None:
    engine = make(T=4, P=8)
    engine.seed(range(9), committed=8)
    reservation = engine.cache.imports.reserve([*range(8), 20, 21])
    before = picture(engine)
    for bad in (7, 11, -1, 2**70, 9.0, True, "9", [9]):
        with pytest.raises((ValueError, TypeError), match=r"tokens: .*"):
            reservation.commit(bad)  # type: ignore[arg-type]
    assert picture(engine) == before
    reservation.abort()


def test_a_device_that_broke_does_not_hide_what_went_wrong() -> None:
    class Gone(CpuDevice):
        def copy_blocks(self, *args: Any) -> None:
            raise DeviceError("gone", sticky=True)

    cache = KVCacheManager(BlockLayout(1, 1, 8, 4), device_blocks=4, host_blocks=4, device=Gone())
    with pytest.raises(ConnectionError), cache.imports.reserve([1, 2, 3, 4, 5]) as loaded:
        loaded.commit()
        with cache.imports.reserve([7, 8]):
            cache.content.offload([1, 2, 3, 4, 5])
            raise ConnectionError
    cache.close()


def test_a_device_that_breaks_while_a_loader_waits_is_reported_to_it() -> None:
    class Gone(SimDevice):
        def synchronize(self, event: DeviceEvent | None = None) -> None:
            if event is not None:
                raise DeviceError("gone", sticky=True)
            super().synchronize()

    cache = KVCacheManager(BlockLayout(1, 1, 8, 4), device_blocks=2, host_blocks=2, device=Gone(progress=0))
    sequence = cache.add_sequence([1, 2, 3, 4, 5])
    cache.commit(sequence)
    cache.release(sequence)
    with pytest.raises(DeviceError, match="gone"):
        cache.imports.reserve([7, 8, 9, 10, 11])
    cache.close()


def test_a_loader_that_is_revoked_while_it_leaves_gets_no_new_error(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(T=4, P=4)

    def late(*args: Any) -> None:
        monkeypatch.undo()
        assert engine.cache.revoke("loader") == 1
        engine.cache._reservations.end(*args)

    with engine.cache.imports.reserve([1, 2, 3], owner="loader"):
        monkeypatch.setattr(engine.cache._reservations, "end", late)
    assert engine.cache.imports.reservations == [] and engine.free() == 4


def test_a_pin_by_id_outlives_an_abort(make: Make) -> None:
    engine = make(T=4, P=4)
    reservation = engine.cache.imports.reserve(list(range(6)))
    lease = engine.cache.pin_blocks(reservation.blocks[:1])
    reservation.abort()
    engine.cache.verify()
    assert engine.free() == 3
    lease.close()
    assert engine.free() == 4 and engine.cached() == {}


def test_verify_finds_a_reservation_that_nobody_knows(make: Make) -> None:
    engine = make(T=4, P=4)
    reservation = engine.cache.imports.reserve(list(range(6)))
    kept = engine.cache._reservations._open.popitem()
    with pytest.raises(KVPoolError, match="reservations: "):
        engine.cache.verify()
    engine.cache._reservations._open.update([kept])
    word = engine.cache.core.tokens.blocks["ref_word"]
    word[reservation.blocks[0]] += 1
    with pytest.raises(KVPoolError, match="references: "):
        engine.cache.verify()
    word[reservation.blocks[0]] -= 1
    reservation.abort()
