"""Signals that arrive before every instruction, also in the standard library, and two at once: a call has changed
nothing, or is whole, and nothing is lost. What the handler raised is alive while the pool is looked at, so that nothing
is held by a traceback."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvpool.entry.interrupt
from kvpool import operations
from kvpool.entry.interrupt import Bell, DeferSignals
from kvpool.state.records import LIVE, SWAPPED
from tests.copying.test_signals import DEVICES, GIVING, VERBS, Act, Desk, export, pin, reserve
from tests.exact import At

pytestmark = [
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other instructions look for signals there"),
    # What a handler raises inside a destructor is swallowed by the interpreter.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
T, SAMPLE = 4, 12


def apply(desk: Desk) -> Act:
    return lambda: desk.cache.apply([operations.add([[*range(2 * T + 2)]]), operations.match(desk.known)])


def plan(desk: Desk) -> Act:
    return lambda: desk.cache.plan_batch([desk.known, desk.fresh, desk.extra])


def swap_out(desk: Desk) -> Act:
    return lambda: desk.cache.swap_out([desk.drafted])


def resume(desk: Desk) -> Act:
    desk.cache.swap_out([desk.drafted])
    return lambda: desk.cache.resume([desk.drafted])


def set_priority(desk: Desk) -> Act:
    return lambda: desk.cache.set_priority(desk.known, 80, ttl_ms=1000)


def step_tables(desk: Desk) -> Act:
    return lambda: desk.cache.step_tables([desk.sequence, desk.drafted], stream=3)


def asking(desk: Desk) -> Act:
    def act() -> None:
        cache = desk.cache
        cache.cached_blocks(desk.known)
        cache.lacking(desk.known, np.ones((1, 2), bool))
        cache.keys_of([desk.sequence])
        cache.request_stats([desk.sequence])
        assert cache.free_blocks

    return act


MORE = [apply, plan, swap_out, resume, set_priority, step_tables, asking]


def clear(desk: Desk, where: str) -> None:
    live = desk.cache.core.live(int(LIVE | SWAPPED))
    if len(live):
        desk.cache.release(live)
    desk.clear(where)


def places(desk: Desk, verb: Callable[[Desk], Act]) -> Iterator[int]:
    """Where to raise: everywhere, and behind the end; on ``sim``, which compares all memory after each step, at some
    places."""
    if desk.sim is None:
        yield from range(1, 1 << 30)
    desk.ready()
    at = At(1 << 30)
    at.run(verb(desk))
    clear(desk, "")
    count = (1 << 30) - at.left
    yield from np.random.default_rng(count).integers(1, count, SAMPLE).tolist()
    yield 2 * count


@pytest.mark.parametrize("verb", [*VERBS, *MORE], ids=lambda verb: verb.__name__)
@pytest.mark.parametrize("device", DEVICES)
def test_a_signal_before_any_instruction_finds_the_call_undone_or_whole(
    device: str, verb: Callable[[Desk], Act]
) -> None:
    desk = Desk(DEVICES[device]())
    desk.ready()
    act, before = verb(desk), desk.counts()
    act()
    after = desk.counts()
    clear(desk, "")
    for k in places(desk, verb):
        desk.ready()
        at = At(k)
        raised = at.run(verb(desk))
        reached, found, where = at.reached, desk.counts(), f"place {k} {at.where}"
        assert kvpool.entry.interrupt._current is None, f"signals are deferred for ever {where}"
        assert (raised is not None) == reached or verb is export, f"the signal was not delivered {where}"
        if at.ended:
            assert found == after, where
        elif verb in (*GIVING, apply):
            assert found == before, where
        elif "context" not in verb.__name__:
            assert found in (before, after), where
        desk.check(where)
        desk.bytes_are_right(where)
        del raised
        clear(desk, where)
        if not reached:
            break
    assert k > 10


@pytest.mark.parametrize("verb", [pin, reserve], ids=lambda verb: verb.__name__)
def test_two_signals_at_once_leave_nothing_behind(verb: Callable[[Desk], Act]) -> None:
    """At the latest, the next call undoes what nobody got."""
    desk = Desk("cpu")
    desk.ready()
    before = desk.counts()
    verb(desk)()
    after = desk.counts()
    clear(desk, "")
    k, reached = 60, True
    while reached:
        k += 1
        desk.ready()
        # The very first instructions of what undoes are not protected from the second one.
        at = At(k, 8 + k % 30)
        raised = at.run(verb(desk))
        reached = at.reached
        desk.cache.refresh(0)
        assert desk.counts() == (before if raised and not at.ended else after), at.where
        clear(desk, at.where)


def test_deferring_goes_on_after_two_signals_at_once() -> None:
    def act() -> None:
        with DeferSignals():
            pass

    for k in range(1, 60):
        for second in range(1, 12):
            at = At(k, second)
            at.run(act)
            assert kvpool.entry.interrupt._current is None, at.where
            with DeferSignals():
                assert kvpool.entry.interrupt._current is not None
    assert not kvpool.entry.interrupt._noted


def test_a_wait_that_a_handler_leaves_keeps_no_other_thread_waiting() -> None:
    reached, k = True, 0
    while reached:
        k += 1
        bell, rung = Bell(), list[bool]()
        at = At(k)
        at.run(lambda bell=bell: bell.wait_for(lambda: False, 0.001))
        reached = at.reached
        ringer = threading.Thread(target=lambda bell=bell, rung=rung: (bell.ring(), rung.append(True)), daemon=True)
        ringer.start()
        ringer.join(600)
        assert rung, at.where
    assert k > 10


def test_a_bell_wakes_all_who_wait() -> None:
    bell, come, done = Bell(), [False], list[Any]()
    threads = [threading.Thread(target=lambda: done.append(bell.wait_for(lambda: come[0], 60))) for _ in range(4)]
    for thread in threads:
        thread.start()
    come[0] = True
    bell.ring()
    for thread in threads:
        thread.join(600)
    assert done == [True] * 4 and not bell.wait_for(lambda: False, 0) and not bell._waiting
