"""A reservation of a pool has a deadline: what is not committed by then hits nobody, and its blocks are nobody else's
before the loader has ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine import Engine, Make
from kvpool import KVCacheManager, OutOfBlocks
from kvpool.errors import PoolBusy, ReservationExpired
from kvpool.pool import Reservation
from loading import load, picture


def late(cache: KVCacheManager) -> tuple[int, int, int]:
    """How many reservations are open, how many have expired, and how many of these are open still."""
    stats = cache.stats()
    return stats.reservations, stats.expired_reservations, stats.overdue_reservations


def test_a_late_commit_is_refused_and_changes_nothing(make: Make) -> None:
    engine, tokens = make(T=4, P=8, event_capacity=16), list(range(9))
    engine.clock.now = 50
    reservation = engine.cache.imports.reserve(tokens, owner="loader", deadline_seconds=0.1)
    load(engine, reservation, tokens)
    assert reservation.deadline == 150
    engine.clock.now = 149
    assert not reservation.overdue and late(engine.cache) == (1, 0, 0)
    engine.clock.now = 150
    before = picture(engine)
    for tokens_that_came in (None, 4):
        with pytest.raises(ReservationExpired, match="of 'loader' was not committed before its deadline: abort it"):
            reservation.commit(tokens_that_came)
    assert picture(engine) == before and engine.cached() == {} and engine.reusable([*tokens, 9]) == 0
    assert reservation.overdue and not reservation.closed and engine.cache.imports.reservations == [reservation]
    assert late(engine.cache) == (1, 1, 1)
    reservation.abort()
    assert late(engine.cache) == (0, 1, 0) and not reservation.overdue and engine.free() == 8
    with pytest.raises(ReservationExpired, match="committed, aborted or revoked"):
        reservation.abort()


def test_a_block_that_may_be_written_late_is_nobodys_until_its_loader_ends(make: Make) -> None:
    engine, tokens = make(T=4, P=4), list(range(8))
    reservation = engine.cache.imports.reserve(tokens, deadline_seconds=0.01)
    blocks = set(reservation.blocks.tolist())
    engine.clock.now = 10
    assert reservation.overdue
    other = engine.add(range(50, 58))
    assert not blocks & set(engine.table(other)) and engine.free() == 0
    with pytest.raises(OutOfBlocks):
        engine.add([99])
    with pytest.raises(PoolBusy, match="1 open reservation"):
        engine.cache.clear()
    load(engine, reservation, tokens)
    engine.check(other)
    reservation.abort()
    assert set(engine.table(engine.add(range(60, 68)))) == blocks


def test_what_is_committed_in_time_never_expires(make: Make) -> None:
    engine, tokens = make(T=4, P=8), list(range(9))
    for deadline in (None, 0.01):
        with engine.cache.imports.reserve(tokens, deadline_seconds=deadline) as reservation:
            load(engine, reservation, tokens)
            engine.clock.now += 9
            reservation.commit()
        engine.clock.now += 1000
        assert late(engine.cache) == (0, 0, 0) and not reservation.overdue
    forever = engine.cache.imports.reserve([1, 2, 3])
    engine.clock.now += 1 << 40
    assert forever.deadline is None and not forever.overdue and late(engine.cache) == (1, 0, 0)
    forever.commit()


def abort(engine: Engine, reservation: Reservation) -> None:
    reservation.abort()


def leave(engine: Engine, reservation: Reservation) -> None:
    with reservation:
        pass


def revoke(engine: Engine, reservation: Reservation) -> None:
    assert engine.cache.revoke("loader") == 1


def reset(engine: Engine, reservation: Reservation) -> None:
    engine.cache.clear(force=True)


@pytest.mark.parametrize("end", [abort, leave, revoke, reset])
def test_what_ends_late_has_expired_even_where_nobody_looked(
    make: Make, end: Callable[[Engine, Reservation], None]
) -> None:
    engine = make(T=4, P=4)
    reservation = engine.cache.imports.reserve(list(range(8)), owner="loader", deadline_seconds=0.01)
    engine.clock.now = 10
    end(engine, reservation)
    assert reservation.closed and not reservation.overdue
    assert late(engine.cache) == (0, 1, 0) and engine.free() == 4


@pytest.mark.parametrize("look", ["stats", "overdue", "another commit"])
def test_a_reservation_that_somebody_has_seen_expire_stays_expired(make: Make, look: str) -> None:
    """A commit that has read the clock before the deadline comes after a call that has seen it pass."""
    engine = make(T=4, P=8)
    reservation = engine.cache.imports.reserve(list(range(8)), deadline_seconds=0.01)
    other = engine.cache.imports.reserve([50])
    engine.clock.now = 10
    calls: dict[str, Callable[[], object]] = {
        "stats": engine.cache.stats,
        "overdue": lambda: reservation.overdue,
        "another commit": other.commit,
    }
    calls[look]()
    engine.clock.now = 9
    with pytest.raises(ReservationExpired):
        reservation.commit()
    assert late(engine.cache)[1:] == (1, 1)
