"""Defers signals: handlers wait until a call has ended, so a handler that raises finds the pool in a consistent state.

Python runs the handlers of signals in the main thread, between any two instructions, whichever thread the system
interrupted. So a signal mask does not defer them. A replacement handler does: it notes the signal for later.
"""

from __future__ import annotations

import os
import signal
import threading

# The functions of ``signal`` convert every handler to an enum and back. That would cost more than the call that is
# protected, so the functions of ``_signal`` are used.
from _signal import getsignal  # type: ignore[import-not-found]
from _signal import signal as set_handler
from _thread import get_ident, interrupt_main
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeAlias, TypeVar

Handler = Callable[[int, FrameType | None], object]
Answer = TypeVar("Answer")

_ALL = tuple(sorted(int(number) for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))
# The signals that every call checks for handlers. Every ``LOOK_AT_ALL``-th call checks all signals; others that then
# have a handler are checked in every call until the next such check.
_NAMES = ("INT", "TERM", "ALRM", "HUP", "QUIT", "USR1", "USR2", "PROF", "VTALRM", "XCPU", "PIPE", "CHLD")
_COMMON = tuple(int(getattr(signal, f"SIG{name}")) for name in _NAMES if hasattr(signal, f"SIG{name}"))
LOOK_AT_ALL = 64

_main = threading.main_thread().ident
# The context that defers signals now.
_current: _Outermost | None = None
# The context that the thread of this process was in when it forked. It ends here too.
_inherited: _Outermost | None = None
_waiting = False
# What is still to be undone, by the next call.
_owed: list[Callable[[], object]] = []
# The signals that have arrived and are deferred, in order.
_noted: dict[int, int] = {}
# The handlers that ``_hold`` replaces.
_real: dict[int, Handler] = {}
_watched, _calls = _ALL, 0
# The handlers that the last check found, and those of them that are functions.
_found: list[Any] = []
_handlers: tuple[tuple[int, Handler], ...] = ()


def _hold(number: int, frame: FrameType | None) -> None:
    """Replaces the handlers of signals. While no call defers signals, it calls the handler that it replaces."""
    if _current is None:
        _real[number](number, frame)
    else:
        _noted[number] = number


def _look(installed: list[Any]) -> None:
    """Note the handlers that were found. The last item of ``installed`` has their signals."""
    global _handlers, _real, _found
    functions = [
        (n, _real[n] if handler is _hold else handler)
        for n, handler in zip(installed[-1], installed[:-1], strict=True)
        if callable(handler)
    ]
    _found = []
    _handlers, _real = tuple(functions), {**_real, **dict(functions)}
    _found = installed


def _watch() -> None:
    """Check all signals. Until the next such check, watch the common ones and those that have a handler."""
    global _watched, _calls, _found
    others = [number for number in _ALL if number not in _COMMON and callable(getsignal(number))]
    _calls, _found, _watched = 0, [], (*_COMMON, *others)


class _Inner:
    """A context inside another one, or on another thread: it defers nothing."""

    undo: Callable[[], object] | None = None

    def __enter__(self) -> _Inner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self.undo is not None:
            self.undo()


class _Outermost:
    """The context of a call from outside, in the main thread."""

    undo: Callable[[], object] | None = None

    def __enter__(self) -> _Outermost:
        global _current, _calls
        try:
            # Until all replacements are in place, a handler may still run.
            _current = self
            _calls += 1
            if _calls >= LOOK_AT_ALL:
                _watch()
            watched = _watched
            installed = [*map(getsignal, watched), watched]
            if installed != _found:
                _look(installed)
            for number, _ in _handlers:
                set_handler(number, _hold)
            while _owed:
                _owed.pop()()
        except BaseException:
            # A handler that was not yet replaced has raised. Another one may raise at the first call.
            _current = None
            try:
                _restore()
            finally:
                _restore()
            raise
        return self

    # No method, but a function: see ``DeferSignals``. So it finds its context by itself.
    @staticmethod
    def __exit__(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        door = _current or _inherited
        assert door is not None
        undo = door.undo
        try:
            raised = _deliver() if _noted else None
            if undo is not None and (kind is not None or raised is not None):
                callback, undo = undo, None
                callback()
            if raised is not None:
                raise raised
        finally:
            _leave(undo)


Door: TypeAlias = _Outermost | _Inner


def DeferSignals() -> Door:
    """A context manager: a signal that arrives inside, and has a handler in Python, is delivered at the end.

    Each public call that changes something has one around the change, and returns its answer from inside::

        with DeferSignals() as door:
            lease = self._take(...)
            door.undo = lease.close
            return lease

    If the call raises, because the body or a handler raised, ``undo`` is called once, while signals are deferred. The
    caller gets no answer then, so ``undo`` reverts what the answer would have handed out. If a second handler raises
    just then, the next call does it.

    It defers only in the main thread, which runs all handlers. If contexts are nested, signals are delivered at the end
    of the outermost; an inner one calls its own ``undo`` if its body raises.

    The answer is not lost behind the end. There the interpreter would look for signals once more if ``__exit__`` were a
    method. It is a function, and behind the call of a function the interpreter looks next in the code that gets the
    answer (so in CPython 3.11 and later). The call has to return it at once: no call of a function in C may follow the
    context.
    """
    return _Outermost() if _current is None and get_ident() == _main else _Inner()


def _deliver() -> BaseException | None:
    """Have the interpreter run the handlers of the deferred signals, as if these arrived now. Returns the last
    exception that they raised."""
    raised: BaseException | None = None
    while _noted:
        try:
            deliver(_trip)
        except BaseException as error:
            error.__context__ = error.__context__ or raised
            raised = error
    return raised


def _leave(undo: Callable[[], object] | None) -> None:
    """Restore the handlers. A signal that arrives from here on is delivered at once: its handler may raise at any point
    of this function."""
    global _current
    try:
        _current = None
        _restore()
    except BaseException:
        try:
            # This undoes. If another handler raises right here, the next call does it.
            if undo is not None:
                _owed.append(undo)
            with DeferSignals():
                pass
        finally:
            _restore()
        raise


def _restore() -> None:
    """Give the signals their handlers again, and deliver those that were noted."""
    for number, handler in () if _waiting else _handlers:
        if getsignal(number) is _hold:
            set_handler(number, handler)
    if _noted:
        _trip()


def _trip() -> None:
    """Have the interpreter deliver the deferred signals."""
    noted = tuple(_noted)
    # One call trips all signals, so a handler that raises does not keep the others from running.
    list(map(interrupt_main, map(_noted.pop, noted, noted)))  # type: ignore[arg-type]  # any number


def deliver(call: Callable[..., Answer], *args: Any) -> Answer:
    """Make a call that waits, inside ``DeferSignals``. During the call, signals are delivered at once, and exceptions
    of their handlers propagate."""
    global _current, _waiting
    outer, before = _current, _waiting
    if outer is None or get_ident() != _main:
        return call(*args)
    try:
        # The replacements stay in place, even if the call itself defers signals. So signals are deferred again from the
        # first instruction after the call.
        _waiting, _current = True, None
        _trip()
        answer = call(*args)
    except BaseException:
        _current, _waiting = outer, before
        raise
    _current, _waiting = outer, before
    return answer


def _after_fork() -> None:
    """In a child, the thread that forked is the main thread. Nothing is deferred here, even if a handler has forked
    inside a call: the child may never come back to it. Signals that have arrived are the parent's."""
    global _main, _current, _inherited, _waiting
    _inherited = (_current or _inherited) if get_ident() == _main else None
    _main, _current, _waiting = get_ident(), None, False
    _noted.clear()


os.register_at_fork(after_in_child=_after_fork)
