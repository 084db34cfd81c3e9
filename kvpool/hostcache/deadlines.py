"""Deadlines: until when each reservation of a host cache is to be published, and which of them have expired."""

from __future__ import annotations

from collections.abc import Iterable

_NEVER = 1 << 62


class Deadlines:
    """The deadlines of reserved keys. Not thread-safe: the cache calls it under its lock."""

    __slots__ = ("_due", "_first", "expired", "overdue")

    def __init__(self) -> None:
        self._due: dict[bytes, int] = {}
        # No deadline is before this time, so that most calls compare two numbers and look at no key.
        self._first = _NEVER
        self.overdue: dict[bytes, None] = {}
        """keys whose deadline has passed, and whose writer has not ended"""
        self.expired = 0
        """how many reservations have expired so far"""

    def __bool__(self) -> bool:
        """Whether a reservation can still expire."""
        return bool(self._due)

    def add(self, keys: Iterable[bytes], deadline: int) -> None:
        """Set the deadline of keys, in ms on the cache's clock."""
        self._due.update(dict.fromkeys(keys, deadline))
        if self._due:
            self._first = min(self._first, deadline)

    def end(self, keys: Iterable[bytes]) -> None:
        """Drop the deadlines of keys whose writer has ended. Keys without a deadline are ignored."""
        if self._due or self.overdue:
            for key in keys:
                self._due.pop(key, None)
                self.overdue.pop(key, None)

    def passed(self, now: int) -> list[bytes]:
        """Return the keys whose deadline has passed, and that are not overdue yet."""
        if now < self._first:
            return []
        self._first = min(self._due.values(), default=_NEVER)
        return [key for key, deadline in self._due.items() if deadline <= now]

    def expire(self, keys: Iterable[bytes]) -> None:
        """Count keys that ``passed`` has returned as expired."""
        for key in keys:
            del self._due[key]
            self.overdue[key] = None
            self.expired += 1
