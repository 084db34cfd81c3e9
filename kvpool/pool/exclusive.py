"""Exclusive: a context manager for several calls of one thread, with no call of another thread between them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, TypeVar

from kvpool.common.changes import LockHold
from kvpool.errors import PoolClosed
from kvpool.pool.core import Core

Call = TypeVar("Call", bound=Callable[..., Any])
NAMES = "match_prefix, pin, add_sequence, add_sequence_batch, append_tokens, commit, release or Lease.close"
_allowed: set[CodeType] = set()


def allowed_inside(call: Call) -> Call:
    """Mark a public call that is allowed inside ``exclusive``: it waits for nothing, and decides once."""
    _allowed.add(call.__code__)
    return call


class Exclusive(LockHold):
    """The context manager of ``KVCacheManager.exclusive``, for one block. ``settle`` is that of the pool's leases."""

    __slots__ = ("_core", "_settle")

    def __init__(self, core: Core, settle: Callable[[LockHold], list[Exception]]) -> None:
        super().__init__(core.lock, core.changes)
        self._core, self._settle = core, settle

    def check(self, call: str = "") -> None:
        """Raise RuntimeError, with the name of the call, unless the call is allowed inside the block. A call is the
        function that code outside the package has called: in the block, or in a destructor. ``call``: its name, if
        known."""
        if not self.is_live:
            return
        frame: FrameType | None = sys._getframe(1)
        name = ""
        while frame is not None and str(frame.f_globals.get("__name__")).startswith("kvpool."):
            if frame.f_code in _allowed:
                return
            name, frame = frame.f_code.co_name, frame.f_back
        raise RuntimeError(f"exclusive: expected {NAMES}, got {call or name}")

    def ask(self) -> None:
        self._core.refuse_inside("exclusive")
        self.now_ms = self._core.now()

    def prepare(self) -> None:
        self._core.check_open()
        self._core.transfer.collect()

    def finish_up(self) -> None:
        self._core.transfer.let_go()

    def leave(self, raised: bool) -> None:
        """Enqueue the copies of the block, oldest first, and close the leases whose copies the device refuses."""
        core = self._core
        core.flush()
        if raised:
            with suppress(PoolClosed):
                self._settle(self)
            return
        if core.changes.torn is not None:
            core.check_open()
        for error in self._settle(self):
            raise error
