"""The safety contract: an exception at any line of a call leaves it undone, or done; nothing is lost, no lock held."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

import numpy as np
import pytest

from tests.desk import DEVICES, VERBS, Act, Desk, Verb, alarm, clear, handled
from tests.exact import Alarm, At
from tests.seeds import some_of

pytestmark = [
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other instructions look for signals there"),
    # What a handler raises inside a destructor is swallowed by the interpreter.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
# -- a timer -------------------------------------------------------------------------------------------


def test_a_timer_that_raises_all_the_time_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest's hook fails if the timer raises while it formats what a destructor has swallowed.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    seed = int(np.random.default_rng().integers(1 << 30))
    print("seed", seed)
    random, desk, hits = np.random.default_rng(seed), Desk("cpu"), 0
    acts = [verb for name, verb in VERBS.items() if name not in ("gather", "export")]
    for verb in acts:  # loads what is compiled
        desk.ready()
        verb(desk)()
        desk.clear("")
    here = sys._getframe().f_code

    def ring(number: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code is not here:
            alarm(number, frame)

    for attempt in itertools.count(1):
        desk.ready()
        act = acts[random.integers(len(acts))](desk)
        with handled():
            signal.signal(signal.SIGALRM, ring)
            try:
                signal.setitimer(signal.ITIMER_REAL, float(random.uniform(1e-5, 4e-4)), 1e-3)
                act()
            except Alarm:
                hits += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.signal(signal.SIGALRM, alarm)
        desk.check(f"seed {seed}")
        desk.bytes_are_right(f"seed {seed}")
        desk.clear(f"seed {seed}")
        if hits and attempt >= 50:
            break


# -- an exception before every instruction ---------------------------------------------------------------


SAMPLE = 12


def resume(desk: Desk) -> Act:
    desk.cache.swap_out([desk.drafted])
    return lambda: desk.cache.resume([desk.drafted])


def asking(desk: Desk) -> Act:
    def act() -> None:
        cache = desk.cache
        cache.content.cached_blocks(desk.known)
        cache.content.missing_blocks(desk.known, np.ones((1, 2), bool))
        cache.keys_of([desk.sequence])
        cache.request_stats([desk.sequence])
        assert cache.free_blocks and cache.sequences

    return act


BLOCK = """
def block(desk):
    with desk.cache.exclusive():
        desk.cache.pin(desk.known.keys, owner="reader", stream=3)
        desk.cache.release(desk.both)
"""


def exclusive(desk: Desk) -> Act:
    """A block of another file, so that the exception comes also between its calls."""
    names: dict[str, Callable[[Desk], None]] = {}
    exec(compile(BLOCK, "block of calls", "exec"), names)
    return lambda: names["block"](desk)


ALL = VERBS | {
    "exclusive": exclusive,
    "plan": lambda desk: lambda: desk.cache.plan_batch([desk.known, desk.fresh, desk.extra]),
    "swap_out": lambda desk: lambda: desk.cache.swap_out([desk.drafted]),
    "resume": resume,
    "set_priority": lambda desk: lambda: desk.cache.content.set_priority(desk.known, 80, ttl_ms=1000),
    "step_tables": lambda desk: lambda: desk.cache.tables.step_tables(desk.both, stream=3),
    "asking": asking,
}
SEVERAL = {"exclusive", "pin_context", "reserve_context", "revoke", "import_blocks"}
"""Those that decide more than once."""


def places(desk: Desk, verb: Verb) -> Iterator[int]:
    """Where to raise: at some places, which the length of the call draws, and behind the end."""
    desk.ready()
    at = At(1 << 30)
    at.run(verb(desk))
    clear(desk, "")
    count = (1 << 30) - at.left
    yield from np.random.default_rng(count).integers(1, count, SAMPLE).tolist()
    yield 2 * count


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("device", DEVICES)
def test_an_exception_before_any_instruction_leaves_a_call_undone_or_done(device: str, name: str) -> None:
    raise_at(places, Desk(DEVICES[device]()), name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALL)
def test_an_exception_before_every_instruction_leaves_a_call_undone_or_done(name: str) -> None:
    raise_at(lambda desk, verb: itertools.count(1), Desk("cpu"), name)


def raise_at(places: Callable[[Desk, Verb], Iterable[int]], desk: Desk, name: str) -> None:
    """A call that an exception meets at each of these places, until one is behind its end."""
    verb = ALL[name]
    desk.ready()
    act, before = verb(desk), desk.counts()
    act()
    after = desk.counts()
    clear(desk, "")
    for k in places(desk, verb):
        desk.ready()
        at = At(k)
        raised = at.run(verb(desk))
        reached, where = at.reached, f"place {k} {at.where}"
        assert (raised is not None) == reached or name == "export", f"the exception was lost {where}"
        desk.check(where)
        counts = desk.counts()
        if at.ended:
            assert counts == after, where
        elif name not in SEVERAL:
            assert counts in (before, after), where
        desk.bytes_are_right(where)
        del raised
        clear(desk, where)
        if not reached:
            break
    assert k > 10


@pytest.mark.parametrize("step", some_of(1, [7, 1]))
@pytest.mark.parametrize("name", ["add", "pin", "close_lease", "reserve", "release", "import_blocks"])
def test_two_exceptions_shortly_after_each_other_leave_nothing_behind(name: str, step: int) -> None:
    """The second comes while what the first has left is being finished."""
    desk, verb = Desk("cpu"), VERBS[name]
    for _ in range(2):  # loads what is compiled
        desk.ready()
        verb(desk)()
        clear(desk, "")
    k, reached = 0, True
    while reached:
        k += step
        desk.ready()
        at = At(k, 1 + k % 23)
        raised = at.run(verb(desk))
        reached = at.reached
        desk.check(at.where)
        desk.bytes_are_right(at.where)
        del raised
        clear(desk, at.where)
    assert k > 10
