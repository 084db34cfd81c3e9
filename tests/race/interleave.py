"""Explorer of interleavings: threads run one at a time and are switched between lines, by every schedule up to a number
of preemptions.

A *step* is a line of the code under watch; a thread may be preempted before each. A line that a function comes to again
and again is a step the first ``VISITS`` times of each call: the places of a long loop do not differ. A *schedule* such
as ``a57 b3 a`` says: thread a takes 57 steps, b takes 3, then a runs on. Who is not named by then goes on in the order
of the alphabet, whenever the running one ends or waits for a lock.

Each schedule runs in a fork of the process that made the scene: all begin alike, and what one breaks it breaks for
itself.
"""

from __future__ import annotations

import gc
import os
import pickle
import random
import re
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

from kvpool.errors import KVPoolError

VISITS = 2
LINES_MAX = 200_000
SECONDS_MAX = 600

Turn = tuple[int, int | None]
"""A thread and how many steps it takes; None = as many as it can."""
Schedule = tuple[Turn, ...]
Verb = Callable[[], Any]
Check = Callable[[list[Any]], None]
"""Looks at what each verb returned, or the KVPoolError that it raised, and at the scene; raises if anything is
wrong."""


class Taken(NamedTuple):
    """A turn as it was: who could have had it instead, who could have gone on instead of each step, the function of
    each step, where the turn stopped."""

    thread: int
    instead: tuple[int, ...]
    others: list[tuple[int, ...]]
    functions: list[str]
    at: str


class Scene(NamedTuple):
    """Threads to interleave, one verb each, the judgement, and the files whose lines are steps."""

    verbs: Sequence[Verb]
    check: Check
    files: Collection[str]


class Report(NamedTuple):
    """How many schedules were run, and the first that failed, with what it showed; None where all were right."""

    schedules: int
    failed: str | None
    failure: str | None


class BrokenScene(Exception):
    """The scene cannot be explored, which says nothing about the code under watch."""


class Lock:
    """Stands in for threading.Lock and RLock: a thread that would wait for it lets the explorer run another."""

    def __init__(self, *, reentrant: bool) -> None:
        self._reentrant = reentrant
        self._owner: int | None = None
        self._depth = 0

    def free_for(self, ident: int | None) -> bool:
        return self._owner is None or (self._reentrant and self._owner == ident)

    @property
    def held(self) -> bool:
        """Whether this thread holds it."""
        return self._owner == threading.get_ident()

    def _is_owned(self) -> bool:
        return self.held

    def __enter__(self) -> Lock:
        me = threading.get_ident()
        while not self.free_for(me):
            if _Run.current is None:
                raise AssertionError("a lock is held that nobody will release")
            _Run.current.wait_for(self)
        self._change(me, self._depth + 1)
        return self

    def __exit__(self, *error: object) -> None:
        if not self.held:
            raise AssertionError("a lock is released by a thread that does not hold it")
        self._change(self._owner if self._depth > 1 else None, self._depth - 1)

    def _change(self, owner: int | None, depth: int) -> None:
        self._owner, self._depth = owner, depth
        if _Run.current is not None:
            _Run.current.others = None


class _Thread:
    """One verb on a thread of its own, which runs only while the explorer has given it the turn."""

    def __init__(self, run: _Run, number: int, verb: Verb) -> None:
        self.run, self.number, self.verb = run, number, verb
        self.budget: int | None = None
        self.waiting: Lock | None = None
        self.done = False
        self.outcome: Any = None
        self.at = "its start"
        self.others: list[tuple[int, ...]] = []
        self.functions: list[str] = []
        self.go = threading.Lock()
        self.go.acquire()
        self.thread = threading.Thread(target=self._body, daemon=True)
        self.thread.start()

    @property
    def runnable(self) -> bool:
        return not self.done and (self.waiting is None or self.waiting.free_for(self.thread.ident))

    def _body(self) -> None:
        self.go.acquire()
        sys.settrace(self._trace)
        try:
            self.outcome = self.verb()
        except KVPoolError as error:
            self.outcome = error
        except BaseException:
            self.run.failure = f"thread {_name(self.number)}: {traceback.format_exc()}"
        finally:
            sys.settrace(None)
        self.done, self.at = True, "its end"
        self.run.back.release()

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Called at every call of a function; what it returns is called at every line of it."""
        if not self.run.watches(frame.f_code):
            return None
        visits: dict[int, int] = {}

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "line":
                seen = visits.get(frame.f_lineno, 0)
                visits[frame.f_lineno] = seen + 1
                self.run.count_line()
                if seen < VISITS:
                    self._step(frame)
            return line

        return line

    def _step(self, frame: FrameType) -> None:
        if self.budget == 0:
            self.at = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
            self.park()
        if self.budget is not None:
            self.budget -= 1
        if self.run.others is None:
            self.run.others = self.run.others_than(self)
        self.others.append(self.run.others)
        self.functions.append(frame.f_code.co_name)

    def park(self) -> None:
        """Give the turn back, and return when it comes again."""
        self.run.back.release()
        self.go.acquire()


class _Run:
    """One execution of a scene by one schedule."""

    current: _Run | None = None

    def __init__(self, scene: Scene) -> None:
        self.failure: str | None = None
        self.turns: list[Taken] = []
        self.back = threading.Lock()
        self.back.acquire()
        self._files, self._watched = scene.files, dict[CodeType, bool]()
        self._lines = 0
        self.others: tuple[int, ...] | None = None  # than the running thread, until a lock changes hands
        self.threads: list[_Thread] = []
        for i, verb in enumerate(scene.verbs):
            self.threads.append(_Thread(self, i, verb))

    def others_than(self, thread: _Thread) -> tuple[int, ...]:
        return tuple(t.number for t in self.threads if t is not thread and t.runnable)

    def watches(self, code: CodeType) -> bool:
        known = self._watched.get(code)
        if known is None:
            # Opening a view of the state reads addresses, which is no step worth a schedule of its own.
            known = self._watched[code] = code.co_filename in self._files and not code.co_name.endswith("_of")
        return known

    def count_line(self) -> None:
        self._lines += 1
        if self._lines > LINES_MAX:
            self.failure = f"no end after {LINES_MAX} lines"
            self.running().park()

    def running(self) -> _Thread:
        return next(t for t in self.threads if t.thread.ident == threading.get_ident())

    def wait_for(self, lock: Lock) -> None:
        """Called by the running thread: others go on until the lock is free."""
        me = self.running()
        me.waiting, me.at = lock, "a lock"
        me.park()
        me.waiting = None

    def follow(self, schedule: Schedule) -> None:
        """Run to the end, or to the first failure."""
        _Run.current = self
        for thread, steps in schedule:
            self._turn(self.threads[thread], steps)
        while self.failure is None and not all(t.done for t in self.threads):
            runnable = [t for t in self.threads if t.runnable]
            if not runnable:
                self.failure = "deadlock: every thread that is left waits for a lock"
                return
            self._turn(runnable[0], None)
        _Run.current = None

    def _turn(self, thread: _Thread, steps: int | None) -> None:
        if self.failure is not None:
            return
        if not thread.runnable:
            raise BrokenScene(
                f"{_name(thread.number)} has a turn and cannot run: a wrong schedule, or a scene that is not "
                "deterministic"
            )
        thread.budget, thread.others, instead = steps, [], self.others_than(thread)
        self.others, thread.functions = None, []
        thread.go.release()
        self.back.acquire()
        if self.failure is None and steps is not None and len(thread.others) != steps:
            raise BrokenScene(
                f"a turn of {steps} steps took {len(thread.others)}: a wrong schedule, or a scene that is not "
                "deterministic"
            )
        self.turns.append(Taken(thread.number, instead, thread.others, thread.functions, thread.at))


def _name(thread: int) -> str:
    return chr(ord("a") + thread)


def show(schedule: Schedule) -> str:
    """``a57 b3 a``: what ``read_schedule`` reads."""
    return " ".join(f"{_name(thread)}{'' if steps is None else steps}" for thread, steps in schedule)


def read_schedule(text: str) -> Schedule:
    return tuple(
        (ord(name) - ord("a"), int(steps) if steps else None) for name, steps in re.findall(r"([a-z])(\d*)", text)
    )


def run(scene: Scene, schedule: Schedule) -> tuple[list[Taken], str | None]:
    """Run one schedule in a fork; returns the turns as they were, and what went wrong or None. Raises BrokenScene."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(scene, schedule, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if not answer:
        raise BrokenScene(f"schedule {show(schedule)!r}: the process died with status {status}")
    turns, failure, broken = pickle.loads(answer)
    if broken is not None:
        raise BrokenScene(f"schedule {show(schedule)!r}: {broken}")
    return turns, failure


def _child(scene: Scene, schedule: Schedule, writing: int) -> None:
    try:
        signal.alarm(SECONDS_MAX)
        gc.disable()  # a collection would call finalizers at other lines in each run
        execution = _Run(scene)
        failure = broken = None
        try:
            execution.follow(schedule)
            failure = execution.failure
            if failure is None:
                scene.check([thread.outcome for thread in execution.threads])
        except BrokenScene as error:
            broken = str(error)
        except BaseException:
            failure = traceback.format_exc()
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps((execution.turns, failure, broken)))
    finally:
        os._exit(0)


def explore(
    scene: Scene, preemptions: int | None = 1, most: int | None = None, seed: int = 0, inside: str | None = None
) -> Report:
    """Run schedules with at most ``preemptions`` (None: any number), fewest first; stops at the first that fails. With
    ``inside``, threads are preempted before lines of functions of that name only.

    Where a thread ends or waits, each other one that could go on is tried, at no cost. Those with one preemption more
    are run in an order that ``seed`` draws, since neighbours end alike. After ``most`` schedules (None: all) it ends.
    """
    draw = random.Random(seed)
    gc.collect()
    gc.freeze()  # so that a fork does not copy what a collection would touch
    level: deque[Schedule] = deque(((thread, None),) for thread in range(len(scene.verbs)))
    count = spent = 0
    while level:
        following: deque[Schedule] = deque()
        while level:
            if count == most:
                return Report(count, None, None)
            schedule = level.popleft()
            turns, failure = run(scene, schedule)
            count += 1
            if failure is not None:
                where = ", ".join(f"{_name(t.thread)} {len(t.others)} steps to {t.at}" for t in turns)
                return Report(count, show(schedule), f"{where}\n{failure}")
            level += _alternatives(schedule, turns)
            if preemptions is None or spent < preemptions:
                following += _preempted(schedule, turns, inside)
        draw.shuffle(following)
        level, spent = following, spent + 1
    return Report(count, None, None)


def _before(turns: list[Taken]) -> Schedule:
    return tuple((turn.thread, len(turn.others)) for turn in turns)


def _preempted(schedule: Schedule, turns: list[Taken], inside: str | None) -> Iterator[Schedule]:
    """The schedules with one preemption more, after those that this one has."""
    for i in range(len(schedule) - 1, len(turns)):
        for step in range(1, len(turns[i].others)):
            if inside is not None and turns[i].functions[step] != inside:
                continue
            for other in turns[i].others[step]:
                yield (*_before(turns[:i]), (turns[i].thread, step), (other, None))


def _alternatives(schedule: Schedule, turns: list[Taken]) -> Iterator[Schedule]:
    """The schedules in which another thread goes on where one ended or waits."""
    for i in range(len(schedule), len(turns)):
        for other in turns[i].instead:
            yield (*_before(turns[:i]), (other, None))
