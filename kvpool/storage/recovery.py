"""Recovery: what a signal handler that raises in a call leaves half-way, the next call gives up."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from kvpool.errors import KVPoolError


class Recovery:
    """Is entered by each call that changes an object with one caller. It holds nothing.

    If any exception but those that calls are said to raise leaves a call, such as one of a signal handler, the next
    call that enters calls ``recover`` first. That brings the object into an order that it could have been in. It may be
    interrupted too; then it is called again.
    """

    def __init__(self, recover: Callable[[], object]) -> None:
        self._recover, self.needed = recover, False

    def __enter__(self) -> None:
        if self.needed:
            self._recover()
        self.needed = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, (KVPoolError, TypeError, ValueError)):
            self.needed = False
