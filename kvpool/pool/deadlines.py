"""Deadlines: the times by which reservations of a pool or a host cache must be published, and which have expired."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

_NEVER = 1 << 62
Key = TypeVar("Key", bound=Hashable)


class Deadlines(Generic[Key]):
    """The deadlines of reservations, by key. Not thread-safe: the owner calls it under its lock."""

    __slots__ = ("_due", "_first", "expired", "overdue")

    def __init__(self) -> None:
        self._due: dict[Key, int] = {}
        # No deadline is before this time, so that most calls compare two numbers and look at no key.
        self._first = _NEVER
        # Keys whose deadline has passed, and whose writer has not ended.
        self.overdue: dict[Key, None] = {}
        # The number of reservations that have expired so far.
        self.expired = 0

    def __bool__(self) -> bool:
        """Whether a reservation can still expire."""
        return bool(self._due)

    def add(self, keys: Iterable[Key], deadline: int) -> None:
        """Set the deadline of keys, in ms on the owner's clock."""
        self._due.update(dict.fromkeys(keys, deadline))
        if self._due:
            self._first = min(self._first, deadline)

    def end(self, keys: Iterable[Key]) -> None:
        """Drop the deadlines of keys whose writer has ended. Keys without a deadline are ignored."""
        if self._due or self.overdue:
            for key in keys:
                self._due.pop(key, None)
                self.overdue.pop(key, None)

    def passed(self, now_ms: int) -> list[Key]:
        """Return the keys whose deadline has passed, and that are not overdue yet."""
        if now_ms < self._first:
            return []
        self._first = min(self._due.values(), default=_NEVER)
        return [key for key, deadline in list(self._due.items()) if deadline <= now_ms]

    def expire(self, keys: Iterable[Key]) -> None:
        """Count keys that ``passed`` has returned as expired."""
        for key in keys:
            # A destructor may have ended one meanwhile. No signal handler runs between these lines, which call nothing.
            if key in self._due:
                self.overdue[key] = None
                self.expired += 1
                del self._due[key]
