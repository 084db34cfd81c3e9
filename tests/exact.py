"""A signal that arrives before a chosen instruction. The interpreter runs its handler where it does by itself."""

from __future__ import annotations

import dis
import functools
import gc
import signal
import sys
from _thread import interrupt_main
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

# Behind these, or at the next one in the calling function, the interpreter looks for signals.
LOOKS = {
    "RESUME",
    "CALL",
    "CALL_KW",
    "CALL_FUNCTION_EX",
    "JUMP_BACKWARD",
    "POP_JUMP_BACKWARD_IF_TRUE",
    "POP_JUMP_BACKWARD_IF_FALSE",
    "POP_JUMP_BACKWARD_IF_NONE",
    "POP_JUMP_BACKWARD_IF_NOT_NONE",
    "BEFORE_WITH",
    "YIELD_VALUE",
    "RETURN_VALUE",
}
TESTS = str(Path(__file__).parent)
# A simulated device is in doubt where a handler raises in it, like one of which nobody knows what it has done.
_SIM = str(Path(__file__).parents[1] / "kvpool" / "device" / "sim")


class Alarm(Exception):
    """What the handler raises."""


def alarm(number: int, frame: FrameType | None) -> None:
    again, At.again = At.again, None
    if again is not None:
        sys.settrace(again)
    raise Alarm


@functools.cache
def _points(code: CodeType) -> frozenset[int]:
    return frozenset(at for at in range(0, len(code.co_code), 2) if dis.opname[code.co_code[at]] in LOOKS)


def _in_the_device(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith(_SIM):
        frame = frame.f_back
    return frame is not None


class At:
    """Sends SIGALRM before the k-th of these instructions, in whatever file but a test's, and once more ``second`` of
    them later, if the first has raised. ``within``: count only those in this folder. ``reached``: whether there are as
    many. ``ended``: whether the call had returned when the handler ran."""

    again: At | None = None

    def __init__(self, k: int, second: int = 0, within: str = "") -> None:
        self._within = within
        self.left, self._second, self.where, self.ended, self.answer = k, second, "", False, None
        # ``-trip`` calls a C function, and no instruction of this tracer looks for signals behind it.
        self._trip = type("Trip", (), {"__neg__": functools.partial(interrupt_main, signal.SIGALRM)})()

    @property
    def reached(self) -> bool:
        return self.left <= 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> At | None:
        if event == "call":
            file = frame.f_code.co_filename
            if file.startswith((TESTS, "<frozen")) or not file.startswith(self._within):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode" and frame.f_lasti in _points(frame.f_code):
            if self.left in (1, 1 - self._second) and _in_the_device(frame):
                return self
            self.left -= 1
            if self.left in (0, -self._second if self._second else 0):
                sys.settrace(None)
                At.again = self if self._second and not self.left else None
                place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                self.where += f"at {place}, before {dis.opname[frame.f_code.co_code[frame.f_lasti]]} "
                -self._trip  # type: ignore[operator]  # noqa: B018
                return self
        return self

    def run(self, act: Callable[[], Any]) -> BaseException | None:
        """What the call raised. The garbage collector is off: what a handler raises in a callback is lost."""
        before, raised, collects = signal.signal(signal.SIGALRM, alarm), None, gc.isenabled()
        gc.disable()
        hook, sys.unraisablehook = sys.unraisablehook, lambda found: None  # pytest's own is no place for a signal
        try:
            try:
                sys.settrace(self)
                self.answer = act()
                self.ended = True
                sys.settrace(None)
            except Alarm as error:
                raised = error
            sys.settrace(None)
        except Alarm as error:  # the second one, right behind the first
            raised = error
        finally:
            sys.settrace(None)
            At.again, sys.unraisablehook = None, hook
            kept = signal.getsignal(signal.SIGALRM) is alarm
            signal.signal(signal.SIGALRM, before)
            if collects:
                gc.enable()
        assert kept, f"the handler was not given back {self.where}"
        return raised
