"""How reservations end, whoever ends them; and what is refused changes nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from engine import Engine
from failing import Rig, on_host_only
from kvpool import (
    BlockLayout,
    DeviceError,
    KVCacheManager,
    KVPoolError,
    OutOfBlocks,
    OutOfSequences,
    PoolBusy,
    PoolClosed,
    Reservation,
    ReservationExpired,
    UnknownSequence,
)
from kvpool.device.base import Event
from kvpool.device.cpu import CpuDevice
from kvpool.device.sim import SimDevice
from kvpool.state import verbs
from loading import picture
from tests import debug

Make = Callable[..., Engine]


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def build(P: int, S: int) -> Rig:
        made.append(Rig(P, S))
        return made[-1]

    yield build
    for one in made:
        if not one.cache.closed:
            one.check_everything()
            one.cache.verify()
            one.cache.close()


def test_a_pool_that_is_too_full_is_left_as_it_is(make: Make) -> None:
    engine = make(T=4, P=4, S=2, max_sequences=2)
    engine.seed(range(9), committed=8)
    engine.add(range(100, 108))
    before = picture(engine)
    with pytest.raises(OutOfBlocks) as raised:
        engine.cache.reserve([*range(8), *range(20, 25)])
    assert (raised.value.needed, raised.value.free) == (2, 0) and picture(engine) == before
    reservation = engine.cache.reserve(list(range(5)))
    before = picture(engine)
    with pytest.raises(OutOfSequences):
        engine.cache.reserve([1])
    assert picture(engine) == before
    reservation.abort()


def test_a_reservation_is_no_sequence(make: Make) -> None:
    engine = make(T=4, P=8)
    reservation, cache = engine.cache.reserve(list(range(6))), engine.cache
    before = picture(engine)
    for call in (
        lambda: cache.append_tokens(reservation.id, [1]),
        lambda: cache.commit(reservation.id),
        lambda: cache.rewind(reservation.id, 1),
        lambda: cache.release(reservation.id),
        lambda: cache.block_table(reservation.id),
        lambda: cache.cached_tokens(reservation.id),
        lambda: cache.evictable_if_released(reservation.id),
        lambda: cache.blocks_needed(sequences=reservation.id, new_tokens=1),
        lambda: cache.copy_batch_block_offsets(np.zeros((1, 8), np.int32), reservation.id),
    ):
        with pytest.raises(UnknownSequence):
            call()
    assert picture(engine) == before
    assert cache.stats().sequences == 0 and cache.stats().reservations == 1
    reservation.abort()


def test_a_closed_reservation_says_so_and_changes_nothing(make: Make) -> None:
    engine = make(T=4, P=8)
    for end in (Reservation.commit, Reservation.abort):
        reservation = engine.cache.reserve(list(range(6)))
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
        engine.cache.reserve(list(range(50, 56)), owner="dead"),
        engine.cache.reserve(list(range(6)), owner="other"),
    )
    lease = engine.cache.pin(engine.keys(range(4)), owner="dead")
    engine.clock.now = 25
    assert [(r.owner, r.age_ms) for r in engine.cache.reservations] == [("dead", 15), ("other", 15)]
    assert "dead" in repr(dead) and "closed=False" in repr(dead)
    assert engine.cache.revoke("dead") == 2 and engine.cache.revoke("dead") == 0
    assert dead.closed and lease.closed and engine.cache.reservations == [other]
    with pytest.raises(ReservationExpired):
        dead.commit()
    other.commit(4)
    assert engine.free() == 12


def test_a_reset_waits_for_loaders_unless_it_is_forced(make: Make) -> None:
    engine = make(T=4, P=8)
    engine.seed(range(5), committed=4)
    reservation, live = engine.cache.reserve(list(range(9))), engine.add([70, 71])
    before = picture(engine)
    with pytest.raises(PoolBusy, match="1 sequences are live and 1 reservations open"):
        engine.cache.reset()
    assert picture(engine) == before
    engine.cache.reset(force=True)
    del engine.live[live.id]
    assert engine.cached() == {} and engine.free() == 8 and reservation.closed
    with pytest.raises(ReservationExpired):
        reservation.commit()
    assert engine.cached() == {}, "what comes late publishes nothing"


def test_a_pool_that_is_closed_says_which_loaders_it_had(make: Make) -> None:
    engine = make(T=4, P=8)
    reservation = engine.cache.reserve(list(range(6)), owner="loader")
    engine.clock.now = 7
    with pytest.raises(KVPoolError, match="0 sequences, 0 leases, 1 reservations"), engine.cache:
        pass
    assert engine.cache.close().reservations == [("loader", 7)] and reservation.closed
    for call in (reservation.commit, reservation.abort, lambda: engine.cache.reserve([1])):
        with pytest.raises(PoolClosed):
            call()


def test_what_is_taken_while_a_pool_closes_has_an_age_of_nothing() -> None:
    late: list[Reservation] = []
    times = iter([0, 5, 20])

    def clock() -> int:
        now = next(times)
        if now == 5:
            late.append(cache.reserve([4, 5], owner="late"))
        return now

    cache = KVCacheManager(BlockLayout(1, 1, 8, 4), device_blocks=4, device="cpu", clock=clock)
    cache.reserve([1, 2, 3], owner="early")
    assert cache.close().reservations == [("early", 5), ("late", 0)] and late[0].closed


@pytest.mark.parametrize("bad", [7, 11, -1, 2**70, 9.0, True, "9", [9]])
def test_bad_counts_are_refused(make: Make, bad: Any) -> None:
    engine = make(T=4, P=8)
    engine.seed(range(9), committed=8)
    reservation = engine.cache.reserve([*range(8), 20, 21])
    before = picture(engine)
    with pytest.raises((ValueError, TypeError), match=r"tokens="):
        reservation.commit(bad)
    assert picture(engine) == before
    reservation.abort()


@pytest.mark.parametrize(
    ("name", "bad", "error"),
    [
        *(("owner", bad, TypeError) for bad in (None, 5, b"x")),
        *(("stream", bad, TypeError) for bad in ("x", 1.5, True)), ("stream", -1, ValueError),
        *(("retention", bad, TypeError) for bad in (5, "x", [5])), ("retention", [(0, 4, 101, None)], ValueError),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(make: Make, name: str, bad: Any, error: type[Exception]) -> None:
    engine = make(T=4, P=8)
    before = picture(engine)
    with pytest.raises(error, match=name):
        engine.cache.reserve([1, 2, 3], **{name: bad})
    with pytest.raises(ValueError, match="another secret"):
        engine.cache.reserve(make(T=4, P=1).prompt([1]))
    with pytest.raises(ValueError, match="max_sequence_tokens=4"):
        make(T=4, P=8, max_sequence_tokens=4).cache.reserve([1] * 5)
    assert picture(engine) == before


def test_a_reservation_that_lost_a_block_can_only_be_aborted(rig: Callable[..., Rig]) -> None:
    one = rig(6, 6)
    on_host_only(one, 0, 8)
    one.device.arm(lambda place: place == 0)
    reservation = one.cache.reserve(list(range(12)))
    one.device.arm()
    before = debug.dump(one.cache.core.tokens)
    with pytest.raises(DeviceError, match="lost a block to a failed copy: abort it"):
        reservation.commit()
    assert debug.dump(one.cache.core.tokens) == before
    reservation.abort()
    assert one.free() == 6 and one.lost == 1


def test_an_interrupt_leaves_no_reservation_half_way(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig(4, 4)
    one.seed(range(100, 116), committed=16)
    one.device.before = lambda: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        one.cache.reserve(list(range(6)))
    one.device.before = None
    assert one.cache.reservations == [] and one.free() == 4, "nobody got it"
    for verb in ("publish_reserved", "abort_reserved"):
        inner = getattr(verbs, verb)

        def change(*args: Any, inner: Any = inner) -> Any:
            signal.raise_signal(signal.SIGINT)
            return inner(*args)

        with monkeypatch.context() as patched:
            patched.setattr(verbs, verb, change)
            with pytest.raises(KeyboardInterrupt), one.cache.reserve(list(range(5))) as reservation:
                reservation.commit(0) if verb == "publish_reserved" else reservation.abort()
        assert reservation.closed and one.free() == 4, "it was done whole"


def test_a_device_that_broke_does_not_hide_what_went_wrong() -> None:
    class Gone(CpuDevice):
        def copy_blocks(self, *args: Any) -> None:
            raise DeviceError("gone", sticky=True)

    cache = KVCacheManager(BlockLayout(1, 1, 8, 4), device_blocks=4, host_blocks=4, device=Gone())
    with pytest.raises(ConnectionError), cache.reserve([1, 2, 3, 4, 5]) as loaded:
        loaded.commit()
        with cache.reserve([7, 8]):
            cache.offload([1, 2, 3, 4, 5])
            raise ConnectionError
    cache.close()


def test_a_device_that_breaks_while_a_loader_waits_is_what_it_is_told() -> None:
    class Gone(SimDevice):
        def synchronize(self, event: Event | None = None) -> None:
            if event is not None:
                raise DeviceError("gone", sticky=True)
            super().synchronize()

    cache = KVCacheManager(BlockLayout(1, 1, 8, 4), device_blocks=2, host_blocks=2, device=Gone(progress=0))
    sequence = cache.add_sequence([1, 2, 3, 4, 5])
    cache.commit(sequence)
    cache.release(sequence)
    with pytest.raises(DeviceError, match="gone"):
        cache.reserve([7, 8, 9, 10, 11])
    cache.close()


def test_a_loader_that_is_revoked_while_it_leaves_is_told_nothing_new(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(T=4, P=4)

    def late(*args: Any) -> None:
        monkeypatch.undo()
        assert engine.cache.revoke("loader") == 1
        engine.cache._reservations.abort(*args)

    with engine.cache.reserve([1, 2, 3], owner="loader"):
        monkeypatch.setattr(engine.cache._reservations, "abort", late)
    assert engine.cache.reservations == [] and engine.free() == 4


def test_a_pin_by_id_outlives_an_abort(make: Make) -> None:
    engine = make(T=4, P=4)
    reservation = engine.cache.reserve(list(range(6)))
    lease = engine.cache.pin_blocks(reservation.blocks[:1])
    reservation.abort()
    engine.cache.verify()
    assert engine.free() == 3
    lease.close()
    assert engine.free() == 4 and engine.cached() == {}


def test_verify_finds_a_reservation_that_nobody_knows(make: Make) -> None:
    engine = make(T=4, P=4)
    reservation = engine.cache.reserve(list(range(6)))
    kept = engine.cache._reservations._open.popitem()
    with pytest.raises(KVPoolError, match="reservations: "):
        engine.cache.verify()
    engine.cache._reservations._open.update([kept])
    word = engine.cache.core.tokens.blocks["word"]
    word[reservation.blocks[0]] += 1
    with pytest.raises(KVPoolError, match="references: "):
        engine.cache.verify()
    word[reservation.blocks[0]] -= 1
    reservation.abort()
