"""The safety contract: what a Python exception that comes at any line leaves of a change.

``Changes`` deals with exceptions of signal handlers, such as the KeyboardInterrupt of Ctrl-C, and with those of calls
that a destructor makes inside another call. ``LockHold`` holds the lock over several calls. Pools and host caches are
built on them.
"""

from __future__ import annotations

import signal
import sys
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import starmap
from operator import length_hint, methodcaller
from threading import get_ident
from types import CodeType, FrameType, TracebackType
from typing import Any

from kvpool.errors import IntegrityError

_CALL = methodcaller("__call__")
Step = Callable[[], Any]
"""A ``functools.partial`` of a function that runs no bytecode: a jitted one, or one of C."""


class _Change:
    """Steps, their results so far, and what to do with the last result."""

    __slots__ = ("finish", "left", "results", "steps")

    def __init__(self, steps: tuple[Step, ...], finish: Callable[[Any], object] | None) -> None:
        self.steps, self.finish, self.left = steps, finish, iter(steps)
        self.results: list[Any] = []

    @property
    def is_torn(self) -> bool:
        """Whether a step has begun and has no result."""
        return len(self.steps) - length_hint(self.left) > len(self.results)

    @property
    def is_live(self) -> bool:
        """Whether this thread is in the block that makes it: that of a ``LockHold``."""
        return False

    def begin_again(self) -> None:
        """Begin with the first step that has no result."""
        self.left = iter(self.steps[len(self.results) :])

    def note(self) -> None:
        """Do what is to be done with the last result."""
        if self.finish is not None:
            self.finish(self.results[-1])


class Changes:
    """The changes of one state that have begun and are not finished.

    A context manager that holds nothing. Enter it right after the lock of the state, which is a lock of C::

        with self.lock, self.changes:
            result = self.changes.run(partial(verb, *args), finish=note)

    ``run`` makes the decision, which is one call of a jitted function, and then calls ``finish`` with its result, for
    what Python has to note. If an exception comes between the two, the decision stands, and ``finish`` is called when
    the context is left, or else when it is entered next, by any thread. So ``finish`` may be called twice, and must
    have the same effect as once.

    Notes
    -----
    CPython runs signal handlers in the main thread between two instructions, and destructors wherever memory is
    allocated or freed. This is where their exceptions can come, and why each place is safe:

    - *Before the lock is held.* Nothing has changed. ``with`` on a lock of C has no gap between taking it and the
      block; a context manager in Python has one, between ``__enter__`` and the block, so none may take a lock.
    - *In the block, before the decision.* Nothing has changed, and the change is dropped.
    - *Inside the decision.* No handler runs there: the steps are called by C, and their results are stored by C.
    - *After the decision.* Its result is stored. What is left to do is done when the context is left. A second
      exception may interrupt that: then it is done before anything else under the next hold of the lock.
    - *After the lock is released.* All that was decided is noted. What is decided and not queued stays in the buffers
      of the state, and what is queued and not enqueued in the queue (see ``Transfer``): the next call goes on with
      them.
    - *In a destructor's call inside the block.* It finishes what it began itself, and leaves alone what the calls
      around it have begun: those are on the stack. What it could not finish is finished when the block around it is
      left, or sooner.

    Only if an exception leaves a jitted function itself, nobody knows what has changed. Then ``torn`` is set. The
    owner of the state refuses all later calls, and checks ``torn`` after each decision, since the call of a destructor
    inside may have set it. The compiler is no part of the decision: an exception that leaves it changes nothing.
    """

    def __init__(self) -> None:
        self._open: list[_Change] = []
        self.torn: IntegrityError | None = None
        """Why the state is in doubt, if it is."""
        self.hold: LockHold | None = None
        """The last ``LockHold`` of the lock, unless it was finished."""

    def __enter__(self) -> None:
        if self._open:
            self._settle()
            if self.hold is not None:
                self.hold.check()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self._settle()

    def call(self, function: Callable[..., Any], *args: Any, finish: Callable[[Any], object] | None = None) -> Any:
        """``run`` for a call of one function. Without ``finish``, nothing is left to do once it has its result."""
        if finish is not None:
            return self.run(partial(function, *args), finish=finish)
        left = iter((args,))
        results: list[Any] = []  # ``list[Any]()`` would take longer than the function often does
        try:
            results.extend(starmap(function, left))
        except BaseException as error:
            if not results and not length_hint(left) and not left_compiler(error):
                self._note_torn(error)
            raise
        return results[0]

    def run(self, *steps: Step, finish: Callable[[Any], object] | None = None) -> Any:
        """Make a change and return the result of its last step. The caller holds the lock of the state.

        ``finish`` must not raise, and may be called twice. What the steps raise is raised.
        """
        change = _Change(steps, finish)
        self._open.append(change)
        try:
            change.results.extend(map(_CALL, change.left))
        except BaseException as error:
            if change.is_torn and not left_compiler(error):
                self._note_torn(error)
                self._open.remove(change)
            elif change.results:
                change.begin_again()
            else:
                self._open.remove(change)
            raise
        result = change.results[-1]
        if finish is not None:
            finish(result)
        self._open.remove(change)
        return result

    def begin(self, hold: LockHold) -> None:
        """Have the next context finish a hold, once it has ended."""
        self._open.append(hold)
        self.hold = hold

    def _settle(self) -> None:
        """Finish the changes that no call is making any more."""
        running = [*_running(), *(change for change in self._open if change.is_live)]
        for change in [change for change in self._open if not any(change is other for other in running)]:
            if change.is_torn:
                self._note_torn(None)
            elif change.results:
                change.results.extend(map(_CALL, change.left))
                change.note()
            if change in self._open:  # A destructor in here may have done the same.
                self._open.remove(change)

    def _note_torn(self, error: BaseException | None) -> None:
        if self.torn is None:
            why = "an exception" if error is None else f"{type(error).__name__}: {error}"
            self.torn = IntegrityError("change", f"{why} has left a jitted function half-way")
            self.torn.__cause__ = error


class _Special:
    """A special method that an instance makes anew for each use: a callable of any kind."""

    def __init__(self, make: Callable[[Any], Callable[..., Any]]) -> None:
        self._make = make

    def __get__(self, instance: object, owner: type) -> Any:
        return self if instance is None else self._make(instance)

    def __call__(self, instance: object, *args: object) -> Any:
        return self._make(instance)(*args)


class LockHold(_Change):
    """A context manager: changes of one thread under one hold of the lock, whatever exception comes where.

    ``lock`` is the lock of the state, and ``changes`` its changes. ``now_ms`` is the time inside, where no clock is
    read. A subclass says what is done by ``check``, ``ask``, ``prepare``, ``finish_up`` and ``leave``.

    Notes
    -----
    A method of Python cannot take or release a lock: an exception before its first line, or after its last one, would
    keep the lock locked. So the lock is taken by ``with`` in a generator, which C resumes when the block begins. Inside
    the block, nothing but the callable that ends it refers to the generator, and that callable does not pass it to
    Python. However the block ends, the interpreter then drops the callable. That ends the generator in C, which
    releases the lock, even if a traceback keeps everything else.

    Whoever enters ``changes`` next, if only ``leave``, finds that the hold has ended, and calls ``finish_up``.
    """

    __slots__ = ("_changes", "_generator", "_lock", "_ref", "_thread", "now_ms")

    def __init__(self, lock: AbstractContextManager[Any], changes: Changes) -> None:
        super().__init__((), None)
        self.results.append(None)
        self._lock, self._changes, self._thread, self.now_ms = lock, changes, 0, 0
        self._generator: Generator[None, None, None] | None = None
        self._ref: Callable[[], Any] = _no_generator

    __enter__ = _Special(lambda self: self._made().__next__)
    __exit__ = _Special(lambda self: self._made_end())

    def check(self, call: str = "") -> None:
        """Raise RuntimeError in a call that is not allowed inside. Called in each that enters ``changes``."""

    def ask(self) -> None:
        """Called before the lock is taken. What it raises is raised."""

    def prepare(self) -> None:
        """Called with the lock held, before the block. What it raises is raised."""

    def finish_up(self) -> None:
        """Called with the lock held, once the block has ended. Must not raise, and may be called twice."""

    def leave(self, raised: bool) -> None:
        """Called without the lock, after the block, unless an exception comes before it. ``raised``: by the block."""

    @property
    def is_held(self) -> bool:
        """Whether the block has not ended. A thread without the lock may get an outdated answer."""
        # No variable may refer to the generator: a traceback would keep it.
        return getattr(self._ref(), "gi_frame", None) is not None

    @property
    def is_live(self) -> bool:
        """Whether this thread is inside the block."""
        return self._thread == get_ident() and self.is_held

    def _made(self) -> Any:
        if self._thread:
            raise RuntimeError("exclusive: expected a new context manager for each block, got one that was entered")
        self._make_generator()
        self.ask()
        return self._ref()

    def _make_generator(self) -> None:
        """Make the generator if it is missing: at first, and after a refused attempt to enter has dropped it."""
        if self._ref() is None and not self._thread:
            self._generator = self._held()
            self._ref = weakref.ref(self._generator)

    def _held(self) -> Generator[None, None, None]:
        with self._lock:
            with self._changes:
                self.prepare()
            self._thread = get_ident()
            self._changes.begin(self)
            yield

    def _made_end(self) -> Callable[..., None]:
        self._make_generator()  # CPython 3.14 reads __exit__ before __enter__
        end = partial(self._end)
        end.generator, self._generator = self._generator, None  # type: ignore[attr-defined]
        return end

    def _end(self, kind: object = None, *error: object) -> None:
        self._ref().close()
        self.leave(kind is not None)

    def note(self) -> None:
        self.finish_up()
        self._changes.hold = None


def _no_generator() -> None:
    """No reference: the block was not entered."""


def _running() -> Iterator[_Change]:
    """The changes that calls on the stack of this thread are making or finishing."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in _CODES and "change" in frame.f_locals:
            yield frame.f_locals["change"]
        frame = frame.f_back


_CODES = Changes.run.__code__, Changes._settle.__code__


def left_compiler(error: BaseException) -> bool:
    """Whether an exception comes out of Numba or the compiler of this package, so that no jitted code has run."""
    return any(name.startswith(("numba.", "kvpool.common.jit.compiler")) for name, _ in _places(error))


def from_handler(error: BaseException) -> bool:
    """Whether an exception may be one that a signal handler has raised: it left one, or it is no ``Exception``, as the
    KeyboardInterrupt of Ctrl-C is none."""
    if not isinstance(error, Exception):
        return True
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    return any(code in handlers for _, code in _places(error))


def _places(error: BaseException) -> Iterator[tuple[str, CodeType]]:
    """The modules and the code that an exception has left."""
    trace = error.__traceback__
    while trace is not None:
        yield str(trace.tb_frame.f_globals.get("__name__")), trace.tb_frame.f_code
        trace = trace.tb_next


def _code_of(handler: object) -> CodeType | None:
    """The code of a handler in Python: a function, a method, or an object that can be called."""
    called = getattr(type(handler), "__call__", None)  # noqa: B004
    for function in (handler, getattr(handler, "__func__", None), called):
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None
