"""Signals, and calls inside calls: whatever line they meet, the cache is whole and each answer is for its own key."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvpool
from kvpool import BlockNotFound, HostCache, LeaseExpired
from tests.hostcache.conftest import IDENTITY, keys, store

FOLDER = str(Path(kvpool.__file__).parent / "hostcache")
Make = Callable[..., HostCache]


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
        except KeyboardInterrupt as error:
            outcome = error
        finally:
            sys.settrace(before)
        check(outcome)
        reached = count[0] > lines
        lines += 1
    assert lines > 5


def _interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("verb", ["pin", "reserve", "expire", "close", "revoke", "clear"])
def test_an_interrupt_at_any_line_leaves_the_cache_whole(make: Make, verb: str) -> None:
    scenes: list[tuple[HostCache, Any]] = []

    now = 0

    def prepare() -> Callable[[], Any]:
        nonlocal now
        now = 0
        cache = make(clock=lambda: now)
        store(cache, "a", "b")
        lease = cache.pin(keys("a"), owner="me")
        if verb == "expire":
            cache.reserve(keys("d"), deadline_ms=1)
            now = 1
        scenes.append((cache, lease))
        calls: dict[str, Callable[[], Any]] = {
            "pin": lambda: cache.pin(keys("b")),
            "reserve": lambda: cache.reserve(keys("b", "c"), deadline_ms=1),
            "expire": lambda: cache.find(b"d"),
            "close": lease.close,
            "revoke": lambda: cache.revoke("me"),
            "clear": lambda: cache.clear(force=True),
        }
        return calls[verb]

    def check(outcome: Any) -> None:
        nonlocal now
        cache, lease = scenes[-1]
        cache.verify()
        stats = cache.stats()
        assert stats.pinned == stats.leases
        if verb in ("pin", "reserve") and isinstance(outcome, KeyboardInterrupt):
            assert (stats.leases, stats.pending) == (1, 0), "nobody got it"
        if verb == "reserve" and isinstance(outcome, KeyboardInterrupt):
            now = 1
            assert cache.stats().expired_reservations == 0
        if verb == "expire":
            assert (stats.expired_reservations, stats.overdue, cache.find(b"d")) == (1, 1, cache.ABSENT)
            assert cache.abort(keys("d")) == 1

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        at_each_line(prepare, _interrupt, check)
    finally:
        signal.signal(signal.SIGINT, before)


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


def test_a_clock_that_fails_does_not_keep_what_nobody_got() -> None:
    now = [5]
    with HostCache(4, 64, identity=IDENTITY, clock=lambda: now[0]) as cache:
        store(cache, "a")
        before = signal.signal(signal.SIGINT, signal.default_int_handler)

        def act() -> None:
            now[0] = -1
            _interrupt()

        def check(outcome: Any) -> None:
            now[0] = 5
            if isinstance(outcome, (KeyboardInterrupt, ValueError)):
                assert cache.stats().pinned == cache.stats().pending == 0
            elif outcome is not None:
                cache.revoke("me")
            cache.verify()

        def call() -> Any:
            try:
                return cache.pin(keys("a"), owner="me")
            except ValueError as error:
                return error

        try:
            at_each_line(lambda: call, act, check)
        finally:
            signal.signal(signal.SIGINT, before)
