"""Holding back Ctrl-C while a decision is made and handed over, so that no batch of moves is left half-way."""

from __future__ import annotations

# The signal module's own functions turn every handler into an enum and back, which costs more than the call they would protect.
import _signal  # type: ignore[import-not-found]
import threading
from collections.abc import Callable
from signal import SIGINT
from types import FrameType, TracebackType


class DeferInterrupt:
    """Context manager: a SIGINT that arrives inside is delivered at the end. Does nothing outside the main thread."""

    __slots__ = ("_arrived", "_handler")

    def __enter__(self) -> None:
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._arrived: FrameType | bool = False
        if threading.get_ident() == threading.main_thread().ident:
            handler = _signal.getsignal(SIGINT)
            if callable(handler):
                _signal.signal(SIGINT, self._note)
                self._handler = handler

    def _note(self, signal: int, frame: FrameType | None) -> None:
        self._arrived = frame or True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._handler is None:
            return
        _signal.signal(SIGINT, self._handler)
        if self._arrived:
            self._handler(SIGINT, self._arrived if isinstance(self._arrived, FrameType) else None)
