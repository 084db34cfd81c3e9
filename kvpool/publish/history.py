"""What a publisher can still send of the past: its latest messages, and a snapshot in place of older ones."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass
class Place:
    """The place of a reader in the history: the number of the message that it gets next, and the snapshot that it is
    reading."""

    next: int
    snapshot: int | None = None


class History:
    """The latest messages, bounded in number and in bytes, and one snapshot. Not thread-safe.

    A snapshot is a sequence of messages. The first says "cleared"; the others have the state after message
    ``number - 1``. Their numbers are the last ones before ``number``. The messages that had these numbers are gone, so
    a reader of the snapshot has missed them. It sees numbers that rise without a gap, and none that it has seen before
    and would skip.
    """

    def __init__(self, messages: int, nbytes: int) -> None:
        self._messages_max, self._nbytes_max = messages, nbytes
        self._latest: deque[bytes] = deque()
        self._nbytes = 0
        self.next = 0
        """Number of the next message."""
        self._snapshot: list[bytes] = []
        self._snapshot_at, self._snapshot_id = -1, 0

    @property
    def first(self) -> int:
        """Number of the oldest message that is kept."""
        return self.next - len(self._latest)

    def add(self, payload: bytes) -> None:
        self._latest.append(payload)
        self._nbytes += len(payload)
        self.next += 1
        while len(self._latest) > self._messages_max or self._nbytes > self._nbytes_max:
            self._nbytes -= len(self._latest.popleft())
        if self._snapshot and self._snapshot_at < self.first:
            # A reader in the middle of an old snapshot needs another.
            self._snapshot, self._snapshot_id = [], self._snapshot_id + 1

    def covers(self, place: Place) -> bool:
        """Whether everything from a place on can be sent without a new snapshot."""
        if place.snapshot is None and place.next >= self.first:
            return True
        return (
            place.snapshot == self._snapshot_id
            or bool(self._snapshot)
            and place.next <= self._snapshot_at - len(self._snapshot)
        )

    def keep_snapshot(self, payloads: list[bytes]) -> None:
        """Keep a snapshot of the present state: at most ``next`` payloads."""
        assert len(payloads) <= self.next
        self._snapshot, self._snapshot_at = payloads, self.next
        self._snapshot_id += 1

    def at(self, place: Place) -> tuple[int, bytes] | None:
        """Number and payload of the message at a place that is covered. If that message is gone, the place moves to the
        begin of the snapshot. None at the end."""
        if place.snapshot is not None and place.snapshot == self._snapshot_id and place.next == self._snapshot_at:
            place.snapshot = None
        if place.next >= self.next:
            return None
        if place.snapshot is None and place.next >= self.first:
            return place.next, self._latest[place.next - self.first]
        if place.snapshot != self._snapshot_id:
            place.next, place.snapshot = self._snapshot_at - len(self._snapshot), self._snapshot_id
        return place.next, self._snapshot[place.next - self._snapshot_at]
