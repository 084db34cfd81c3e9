"""What the safety contract is made of: changes that are finished by the next call, states in doubt, waits."""

from __future__ import annotations

import gc
import itertools
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from numba.core import config

from kvpool import PoolClosed
from kvpool.common.changes import Changes, LockHold, from_handler
from kvpool.common.threads import Bell
from kvpool.state import verbs
from tests.desk import VERBS, Desk, Ends, P, T, alarm, clear, handled
from tests.exact import Alarm, At

pytestmark = [
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other instructions look for signals there"),
    # What a handler raises inside a destructor is swallowed by the interpreter.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
in_machine_code = pytest.mark.skipif(
    bool(config.DISABLE_JIT),
    reason="NUMBA_DISABLE_JIT: nothing is compiled, and CPython 3.11 crashes in callbacks of its collector",
)
# -- the contract itself ---------------------------------------------------------------------------------


class Box:
    """A state with a number in it, of which ``Changes`` take care."""

    def __init__(self) -> None:
        self.lock, self.changes, self.seen = threading.RLock(), Changes(), list[object]()

    def change(self, *steps: Callable[[], object], finish: Callable[[Any], object] | None = None) -> Any:
        with self.lock, self.changes:
            return self.changes.run(*steps, finish=finish or self.seen.append)


def fail(error: BaseException) -> Callable[[], object]:
    def call() -> None:
        raise error

    return call


def failing_at_first(box: Box, times: int) -> Callable[[object], None]:
    """What finishes a change, and raises that many times before."""
    left = [times]

    def finish(result: object) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise Alarm
        box.seen.append(result)

    return finish


@pytest.mark.parametrize("times", range(3))
def test_a_change_that_was_made_is_finished_when_the_context_is_left(times: int) -> None:
    box = Box()
    with suppress(Alarm):
        box.change(lambda: 7, finish=failing_at_first(box, times))
    with suppress(Alarm), box.lock, box.changes:
        pass
    assert box.seen == [7] and box.changes.torn is None and not box.changes._open


def test_what_finishes_a_change_may_enter_the_context_again() -> None:
    box, left = Box(), [2]

    def finish(result: object) -> None:
        left[0] -= 1
        with box.lock, box.changes:
            box.seen.append(result)
        if left[0] > 0:
            raise Alarm

    with suppress(Alarm):
        box.change(lambda: 7, finish=finish)
    assert box.seen == [7, 7] and not box.changes._open


@pytest.mark.parametrize("verb", ["run", "call"])
def test_only_an_exception_out_of_a_step_tears_a_state(verb: str) -> None:
    box = Box()
    with pytest.raises(OverflowError), box.lock, box.changes:
        getattr(box.changes, verb)(fail(OverflowError("half-way")))
    assert "OverflowError: half-way" in str(box.changes.torn) and not box.seen


@pytest.mark.parametrize(("times", "seen"), [(0, ["inner", "outer"]), (2, ["outer", "inner"])])
def test_a_call_inside_a_change_finishes_its_own_at_the_latest_before_the_one_around_it_ends(
    times: int, seen: list[str]
) -> None:
    box = Box()

    def inner() -> str:
        with suppress(Alarm):
            box.change(lambda: "inner", finish=failing_at_first(box, times))
        return "outer"

    box.change(inner)
    assert box.seen == seen and not box.changes._open


class Block(LockHold):
    """A hold of a box."""

    __slots__ = ("_box",)

    def __init__(self, box: Box) -> None:
        super().__init__(box.lock, box.changes)
        self._box = box

    def prepare(self) -> None:
        self._box.seen.append("prepare")

    def finish_up(self) -> None:
        self._box.seen.append("finish")

    def leave(self, raised: bool) -> None:
        with self._box.lock, self._box.changes:
            self._box.seen.append(f"leave {raised}")


def blocks() -> Callable[[Box], None]:
    """A function of another file, so that exceptions come also where it enters and leaves its block."""
    names: dict[str, Any] = {"Block": Block}
    text = "def block(box):\n    with Block(box):\n        box.seen.append(box.changes.hold.is_live)\n"
    exec(compile(text, "block of calls", "exec"), names)
    return names["block"]  # type: ignore[no-any-return]


def test_a_hold_is_finished_before_its_end_and_raises_what_its_block_raises() -> None:
    box = Box()
    blocks()(box)
    assert box.seen == ["prepare", True, "finish", "leave False"] and box.changes.hold is None
    with pytest.raises(ZeroDivisionError), Block(box):
        1 / 0  # noqa: B018
    assert box.seen[4:] == ["prepare", "finish", "leave True"] and not box.changes._open


@pytest.mark.parametrize("second", range(24))
def test_a_hold_ends_wherever_exceptions_come_though_their_tracebacks_are_kept(second: int) -> None:
    """With a second exception shortly after the first, too."""
    block, reached, k = blocks(), True, 0
    while reached:
        k += 1
        box, at = Box(), At(k, second)
        raised = at.run(lambda box=box: block(box))  # type: ignore[misc]
        reached = at.reached
        assert (raised is not None) == reached, at.where
        assert not box.lock._is_owned(), at.where  # type: ignore[attr-defined]
        with box.lock, box.changes:
            assert box.changes.hold is None and not box.changes._open, at.where
        assert True not in box.seen or "finish" in box.seen, at.where
    assert k > 20


def test_an_exception_is_known_to_come_from_a_handler() -> None:
    with handled(signal.SIGUSR1, alarm):
        try:
            signal.raise_signal(signal.SIGUSR1)
        except Alarm as error:
            assert from_handler(error)
    assert from_handler(KeyboardInterrupt()) and not from_handler(OSError())


def half_way(*arguments: object) -> None:
    """In the place of a jitted function: it ends half-way."""
    raise ArithmeticError("half-way")


def test_a_pool_whose_verb_has_ended_half_way_refuses_all_but_stats_verify_and_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk("cpu")
    desk.ready()
    cache, copies = desk.cache, desk.cache.core.transfer.moved.nbytes
    with monkeypatch.context() as patched, pytest.raises(ArithmeticError):
        patched.setattr(verbs, "commit", half_way)
        cache.commit(cache.add_sequence([1]))
    for call in (
        lambda: cache.add_sequence([1, 2]),
        lambda: cache.pin(desk.known.keys),
        lambda: cache.match_prefix([1]),
        lambda: cache.block_table([desk.sequence]),
        lambda: cache.content.prefetch(desk.known),
        lambda: cache.memory.export("host"),
        desk.lease.close,
        desk.reservation.abort,
        cache.events,
        cache.clear,
    ):
        with pytest.raises(PoolClosed, match="in doubt: .*ArithmeticError: half-way"):
            call()
    assert cache.stats().sequences and cache.core.transfer.moved.nbytes == copies
    cache.verify()
    assert cache.close(force=True).sequences
    assert cache._pools.closed


def test_a_refusal_tears_no_pool() -> None:
    desk = Desk("cpu")
    desk.ready()
    for call in (
        lambda: desk.cache.add_sequence(range(1000, 1000 + T * P)),
        lambda: desk.cache.commit(desk.sequence, 1000),
        lambda: desk.cache.pin([bytes(16)]),
        lambda: desk.cache.release(12345),
        lambda: desk.cache.imports.reservations[0].commit(10**6),
    ):
        with pytest.raises(Exception):  # noqa: B017
            call()
    desk.check("")


@in_machine_code
def test_a_handler_that_ends_a_compilation_tears_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpool.common.jit import Dispatcher

    if Dispatcher is None:
        pytest.skip("Numba compiles")
    desk = Desk("cpu")
    compiled = type(verbs.commit)(verbs.commit.py_func)
    monkeypatch.setattr(type(compiled), "library", lambda *_: signal.raise_signal(signal.SIGALRM))
    monkeypatch.setattr(verbs, "commit", compiled)
    with handled(), pytest.raises(Alarm):
        desk.cache.commit(desk.cache.add_sequence([1]))
    monkeypatch.undo()
    desk.check("")


def test_a_destructor_that_tears_the_state_ends_the_call_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk("cpu")
    desk.ready()
    cache = desk.cache
    learn, queued, other = cache.core.names.learn, cache.core.transfer._decided, cache.add_sequence([1])

    def meanwhile(keys: Any) -> None:
        monkeypatch.setattr(cache.core.names, "learn", learn)
        owners.clear()
        gc.collect()
        learn(keys)

    monkeypatch.setattr(verbs, "commit", half_way)
    owners = [Ends(lambda: cache.commit(other))]
    monkeypatch.setattr(cache.core.names, "learn", meanwhile)
    with pytest.raises(PoolClosed, match="in doubt"):
        cache.add_sequence([*range(2 * T), 7])
    assert cache.core.transfer._decided == queued, "its moves were queued"


@in_machine_code
@pytest.mark.parametrize("come", ["destructor", "weakref", "collector"])
def test_a_callback_that_raises_anywhere_leaves_a_call_done(come: str) -> None:
    """Its exception reaches nobody.

    In the interpreter, every jitted function sets a context variable (``np.errstate``). ``ContextVar.set`` of CPython
    3.11 can start a collection while it holds no reference to the old values: a callback that sets a variable frees
    them.
    """
    desk = Desk("cpu")
    for k in range(3, 40, 3):
        desk.ready()
        calls: list[int] = []

        def act(calls: list[int] = calls) -> None:
            calls.append(desk.cache.add_sequence([1, 2, 3]))
            raise Alarm

        kept: list[Any] = []
        if come == "destructor":
            Ends(act)
        elif come == "weakref":
            target = Box()
            target.seen.append(target)
            kept.append(weakref.ref(target, lambda _, act=act: act()))
            del target
        else:
            gc.callbacks.append(lambda phase, _, act=act: act() if phase == "start" else None)
        before = gc.get_threshold()
        gc.set_threshold(k, 10**6, 10**6)
        gc.enable()
        try:
            got = desk.cache.add_sequence(desk.fresh)
        finally:
            gc.set_threshold(*before)
            if come == "collector":
                gc.callbacks.pop()
        gc.collect()
        assert got in desk.cache.sequences and set(calls) <= set(desk.cache.sequences)
        desk.check(f"threshold {k}")
        clear(desk, f"threshold {k}")


def test_a_clock_that_raises_changes_nothing() -> None:
    desk = Desk("cpu")
    for name, verb in VERBS.items():
        desk.ready()
        act, before, returned = verb(desk), desk.counts(), False
        desk.cache.core.clock = fail(Alarm())  # type: ignore[assignment]
        with suppress(Alarm):
            act()
            returned = True
        desk.cache.core.clock = desk.clock
        desk.check(name)
        if not returned and name not in ("revoke", "pin_context", "reserve_context"):
            assert desk.counts() == before, name
        clear(desk, name)


# -- waiting ---------------------------------------------------------------------------------------------


def everywhere(call: Callable[[], object]) -> Iterator[At]:
    """Calls that an exception meets at each of their instructions."""
    for k in itertools.count(1):
        at = At(k)
        at.run(call)
        yield at
        if not at.reached:
            break


def test_a_condition_keeps_its_lock_where_a_handler_raises() -> None:
    """Why ``Bell`` is there: this is what it would do otherwise."""
    condition = threading.Condition(threading.Lock())
    kept = 0
    for _ in everywhere(lambda: condition.__enter__() and condition.__exit__(None, None, None)):
        kept += not condition.acquire(blocking=False)
        condition.release()
    assert kept


def test_a_wait_that_a_handler_ends_keeps_no_other_thread_waiting() -> None:
    bell, places = Bell(), 0
    for at in everywhere(lambda: bell.wait_for(lambda: False, 0.001)):
        places += 1
        ringer = threading.Thread(target=bell.ring, daemon=True)
        ringer.start()
        ringer.join(600)
        assert not ringer.is_alive(), at.where
    assert places > 10


def test_a_bell_wakes_all_who_wait() -> None:
    bell, come = Bell(), [False]
    with ThreadPoolExecutor(4) as threads:
        waits = [threads.submit(bell.wait_for, lambda: come[0], 60) for _ in range(4)]
        come[0] = True
        bell.ring()
        assert all(wait.result() for wait in waits)
    assert not bell.wait_for(lambda: False, 0) and not bell._waiting


# -- Ctrl-C ----------------------------------------------------------------------------------------------


PROGRAM = """
import signal
import kvpool
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may have had it ignored
layout = kvpool.BlockLayout(layers=2, kv_heads=2, head_dim=8, tokens_per_block=4)
with kvpool.KVCacheManager(layout, device_blocks=16, host_blocks=8, device="cpu") as cache:
    for i in range(10**9):
        sequence = cache.add_sequence([i, 2, 3, 4, 5, 6])
        cache.commit(sequence)
        cache.release(sequence)
        if i == 100:  # all code is loaded: a callback of llvmlite's swallows what is raised in it
            print("ready", flush=True)
"""


def test_a_program_ends_on_ctrl_c_like_any_other() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGINT and errors.rstrip().endswith("KeyboardInterrupt"), errors


def test_a_pool_in_a_notebook_goes_on_after_ctrl_c() -> None:
    desk, pressed, armed = Desk("cpu"), 0, list[bool]()
    desk.cache.release(desk.cache.add_sequence([1, 2, 3]))
    last: BaseException | None = None  # as a notebook keeps the last error, with all that it refers to

    def press(number: int, frame: object) -> None:
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    with handled(signal.SIGALRM, press):
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        for _ in range(20):
            try:
                while True:
                    armed[:] = [True]  # again, since a destructor swallows what is raised in it
                    desk.cache.release(desk.cache.add_sequence([*range(2 * T), 8]))
            except KeyboardInterrupt as error:
                last, pressed = error, pressed + 1
            desk.check("")
            clear(desk, "")
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert pressed == 20 and last is not None
