"""GroupCommit: calls of several threads share one commit."""

from __future__ import annotations

import threading
from collections.abc import Callable


class _Batch:
    """Calls that wait for the same commit."""

    done = False
    error: Exception | None = None


class GroupCommit:
    """Runs ``commit`` for all who wait for it. Thread-safe.

    While one commit runs, others wait together for the next. So the number of commits follows the speed of the disk,
    and not the number of calls.
    """

    def __init__(self, commit: Callable[[], None]) -> None:
        self._commit, self._changed = commit, threading.Condition()
        self._next, self._running = _Batch(), False

    def wait(self) -> None:
        """Return after a commit that has begun after this call. Raises OSError if that has failed."""
        with self._changed:
            batch = self._next
            self._changed.wait_for(lambda: batch.done or not self._running)
            if not batch.done:
                self._running, self._next = True, _Batch()
        if not batch.done:
            self._run(batch)
        if batch.error is not None:
            raise OSError(getattr(batch.error, "errno", None) or 0, f"the commit has failed: {batch.error}")

    def _run(self, batch: _Batch) -> None:
        try:
            self._commit()
        except Exception as error:  # Whatever it is, all who wait are told.
            batch.error = error
        finally:
            with self._changed:
                batch.done, self._running = True, False
                self._changed.notify_all()
