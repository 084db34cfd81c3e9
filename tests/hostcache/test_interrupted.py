"""Exceptions of handlers, and calls inside calls: whatever instruction they meet, the cache is whole, what nobody
received is listed, and each answer is for its own key."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from numba import config

import kvpool
from kvpool import HostCache, PoolClosed
from kvpool.errors import BlockNotFound, LeaseExpired
from kvpool.state import hostcache
from kvpool.state.saving import SAVERS
from tests.desk import Ends, works_in_another_thread
from tests.exact import At
from tests.hostcache.conftest import Make, calls, keys, store
from tests.seeds import some_of

FOLDER = str(Path(kvpool.__file__).parent / "hostcache")
instructions = pytest.mark.skipif(
    bool(config.DISABLE_JIT) or sys.version_info[:2] != (3, 11), reason="other instructions look for signals there"
)
STEPS = pytest.mark.parametrize("step", some_of(1, [5, 1]))
"""Before every fifth instruction; with ``--exhaustive`` before each."""


def at_each_line(
    prepare: Callable[[], Callable[[], Any]], act: Callable[[], object], check: Callable[[Any], None]
) -> None:
    """``act`` before one line of the package after the other, in calls that ``prepare`` gives."""
    lines, reached = 0, True
    while reached:
        call, count = prepare(), [0]

        def trace(frame: FrameType, event: str, arg: Any, count: list[int] = count, line: int = lines) -> Any:
            if not frame.f_code.co_filename.startswith(FOLDER):
                return None
            if event == "line":
                count[0] += 1
                if count[0] == line + 1:
                    sys.settrace(None)
                    act()
                    sys.settrace(trace)
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            outcome = call()
        finally:
            sys.settrace(before)
        check(outcome)
        reached = count[0] > lines
        lines += 1
    assert lines > 5


class Scene:
    """A cache that has some of everything, and calls on it, each from the same state."""

    def __init__(self, make: Make) -> None:
        self.now = 0
        self.cache = make(8, clock=lambda: self.now, event_capacity=64, history=8)
        self.cursor = self.cache.open_dirty_cursor(pending=True)

    def ready(self) -> None:
        cache = self.cache
        cache.clear()
        store(cache, "a", "b", "old", "older")
        self.lease = cache.pin(keys("a", "b"), owner="me")
        cache.reserve(keys("mine"))
        cache.reserve(keys("late"), deadline_seconds=0.001)
        self.before = cache.stats().expired_reservations

    def counts(self) -> tuple[Any, ...]:
        """What is held, and what is here."""
        cache, here = self.cache, self.cache.lookup(keys("a", "b", "old", "older", "mine", "late", "new")).tolist()
        held, gone = [lease.keys for lease in cache.leases], [cache.explain(key).reason for key in keys("a", "older")]
        return held, cache.reserved_keys, cache.overdue(), here, gone, cache.usage()

    def check(self, where: str) -> None:
        """Invariants; no lock is held; what is held is what is listed."""
        cache = self.cache
        assert not cache._lock._is_owned(), where  # type: ignore[attr-defined]
        works_in_another_thread(lambda: cache.find(b"a"), where)
        cache.verify()
        assert cache._changes.torn is None and not cache._changes._open, where
        stats = cache.stats()
        assert stats.pinned == len({block for lease in cache.leases for block in lease.blocks.tolist()}), where
        assert stats.pending == len(cache.reserved_keys), where
        assert stats.expired_reservations - self.before == stats.overdue, where

    def clear(self, where: str) -> None:
        """All that is held can be found, and given back."""
        for lease in self.cache.leases:
            lease.close()
        self.cache.abort(self.cache.reserved_keys)
        self.now = 0
        assert not self.cache._states[0].blocks["ref_word"].any(), f"a block is held by nobody {where}"
        self.cache.events()
        self.cache.verify()


Act = Callable[[], object]


def expire(scene: Scene) -> Act:
    def act() -> None:
        scene.now = 1
        scene.cache.find(b"late")

    return act


def read(scene: Scene) -> Act:
    def act() -> None:
        with scene.cache.pin(keys("a", "old")):
            pass

    return act


VERBS: dict[str, Callable[[Scene], Act]] = {
    "pin": lambda scene: lambda: scene.cache.pin(keys("b", "old")),
    "read": read,
    "reserve": lambda scene: (
        lambda: scene.cache.reserve(keys("b", "new", "more", "most", "new"), deadline_seconds=0.005)
    ),
    "publish": lambda scene: lambda: scene.cache.publish(keys("mine", "late")),
    "abort": lambda scene: lambda: scene.cache.abort(keys("mine", "late")),
    "expire": expire,
    "close": lambda scene: scene.lease.close,
    "close_unused": lambda scene: lambda: scene.lease.close(used=False),
    "revoke": lambda scene: lambda: scene.cache.revoke("me"),
    "forget": lambda scene: lambda: scene.cache.forget(keys("older", "mine", "no")),
    "clear": lambda scene: lambda: scene.cache.clear(force=True),
    "touch": lambda scene: lambda: scene.cache.touch(keys("old", "a")),
    "set_priority": lambda scene: lambda: scene.cache.set_priority(keys("old"), 80, ttl_ms=5),
    "read_dirty": lambda scene: lambda: scene.cache.read_dirty(scene.cursor, keys("a", "old")),
    "candidates": lambda scene: lambda: scene.cache.eviction_candidates(scene.cursor, 9, 4),
    "cursor": lambda scene: lambda: scene.cache.close_dirty_cursor(scene.cache.open_dirty_cursor(pending=False)),
    "refresh": lambda scene: lambda: scene.cache.refresh(),
    "events": lambda scene: lambda: scene.cache.events(),
    "stats": lambda scene: lambda: scene.cache.stats(),
}
SEVERAL = {"read", "reserve"}
"""Those that decide more than once: ``reserve`` even if it names a key twice."""


def moments(scene: Scene, step: int = 1, second: Callable[[int], int] = lambda k: 0, within: str = "") -> Iterator[At]:
    """A signal before each ``step``-th instruction of a call that the caller makes; what it leaves is looked at."""
    for k in itertools.count(1, step):
        scene.ready()
        at = At(k, second(k), within)
        yield at
        scene.check(at.where)
        scene.clear(at.where)
        if not at.reached:
            break
    assert k > 5


@instructions
@STEPS
@pytest.mark.parametrize("name", VERBS)
def test_an_exception_before_any_instruction_leaves_a_call_undone_or_done(make: Make, name: str, step: int) -> None:
    scene, verb = Scene(make), VERBS[name]
    for _ in range(2):  # loads what is compiled
        scene.ready()
        act, before = verb(scene), scene.counts()
        act()
        after = scene.counts()
        scene.clear("")
    for at in moments(scene, step):
        raised = at.run(verb(scene)) is not None
        assert raised == at.reached, f"the exception was lost {at.where}"
        if at.ended:
            assert scene.counts() == after, at.where
        elif name not in SEVERAL and not (name == "expire" and scene.now):
            assert scene.counts() in (before, after), at.where
        if name == "cursor" and not at.ended:  # nobody got its number
            for cursor in set(range(SAVERS)) - {scene.cursor}:
                scene.cache.close_dirty_cursor(cursor)


FEW = pytest.mark.parametrize("name", ["pin", "reserve", "publish", "expire", "close", "forget"])


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other instructions look for signals there")
@FEW
def test_an_exception_at_any_call_leaves_nothing_that_is_not_listed(make: Make, name: str) -> None:
    scene = Scene(make)
    for at in moments(scene, within=FOLDER):
        at.run(VERBS[name](scene))


@instructions
@STEPS
@FEW
def test_two_exceptions_shortly_after_each_other_leave_nothing_behind(make: Make, name: str, step: int) -> None:
    """The second comes while what the first has left is being finished."""
    scene = Scene(make)
    for at in moments(scene, step, lambda k: 1 + k % 23):
        at.run(VERBS[name](scene))


@contextmanager
def in_the_change(cache: HostCache, act: Act) -> Iterator[None]:
    """Have a destructor act in the middle of the next change."""
    run, left = cache._changes.run, [act]

    def nested(*steps: Any, **options: Any) -> Any:
        if left:
            Ends(left.pop()).itself = None  # type: ignore[assignment]
        return run(*steps, **options)

    cache._changes.run = nested  # type: ignore[method-assign]
    yield
    del cache._changes.run
    assert not left


@instructions
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@STEPS
@pytest.mark.parametrize("inner", ["pin", "publish", "close"])
@pytest.mark.parametrize("outer", ["reserve", "forget", "close"])
def test_an_exception_in_a_destructor_inside_a_call_leaves_both_whole(
    make: Make, outer: str, inner: str, step: int
) -> None:
    scene = Scene(make)
    for at in moments(scene, step):
        with in_the_change(scene.cache, partial(at.run, VERBS[inner](scene))), suppress(LeaseExpired):
            VERBS[outer](scene)()  # LeaseExpired: the same lease, twice


def test_a_cache_whose_verb_has_ended_half_way_refuses_all_but_stats_verify_and_close(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(make)
    scene.ready()
    cache = scene.cache

    def fail(*_: object) -> None:
        raise ArithmeticError("half-way")

    with monkeypatch.context() as patched, pytest.raises(ArithmeticError):
        patched.setattr(hostcache, "touch", fail)
        cache.touch(keys("a"))
    for call in (
        *calls(cache),
        partial(cache.open_dirty_cursor, pending=False),
        partial(cache.read_dirty, scene.cursor, keys("a")),
        scene.lease.close,
    ):
        with pytest.raises(PoolClosed, match="in doubt: .*ArithmeticError: half-way"):
            call()
    scene.now = 1
    cache.close_dirty_cursor(scene.cursor)
    assert cache.stats().pinned == 2 and cache.expired_reservations == 0
    cache.verify()
    cache.close()


def test_a_call_inside_a_call_asks_for_its_own_key(make: Make) -> None:
    cache = make()
    store(cache, "here")
    inside: list[int] = []

    def check(state: int) -> None:
        assert state == cache.HERE

    at_each_line(lambda: lambda: cache.find(b"here"), lambda: inside.append(cache.find(b"no")), check)
    assert set(inside) == {cache.ABSENT}


def test_a_refusal_inside_a_refusal_names_its_own_key(make: Make) -> None:
    cache = make()
    store(cache, "a", "b", "c")

    def refused(call: Callable[[list[bytes]], Any], *names: str) -> str:
        with pytest.raises(BlockNotFound) as error:
            call(keys(*names))
        return str(error.value)

    def check(message: str) -> None:
        assert b"mine".hex() in message

    for call in (cache.pin, cache.publish):
        inside = partial(refused, cache.pin, "a", "b", "c", "other")
        at_each_line(partial(partial, refused, call, "mine"), inside, check)


def test_a_lease_that_is_closed_while_its_owner_is_revoked_is_closed_once(make: Make) -> None:
    scenes: list[tuple[HostCache, Any]] = []

    def prepare() -> Callable[[], Any]:
        cache = make()
        store(cache, "a")
        scenes.append((cache, cache.pin(keys("a"), owner="me")))
        return lambda: cache.revoke("me")

    def close() -> None:
        try:
            scenes[-1][1].close()
        except LeaseExpired:
            pass

    def check(revoked: int) -> None:
        cache, lease = scenes[-1]
        cache.verify()
        assert lease.closed and cache.stats().pinned == 0 and revoked in (0, 1)

    at_each_line(prepare, close, check)
