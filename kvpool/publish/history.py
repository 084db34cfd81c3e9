"""What a publisher can still tell of the past: its latest messages, and a snapshot in place of those that are gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice


class History:
    """The latest messages, bounded in number and in bytes, and one snapshot. Not thread-safe.

    A snapshot is messages that begin with "cleared" and have the state behind message ``number - 1``. They take the numbers before
    ``number``, of messages that whoever gets them has missed anyway: so a reader sees numbers that rise without a gap, and none that it
    has seen before, which it would skip.
    """

    def __init__(self, messages: int, nbytes: int) -> None:
        self._messages_max, self._nbytes_max = messages, nbytes
        self._latest: deque[bytes] = deque()
        self._nbytes = 0
        self.next = 0
        """Number of the next message."""
        self._snapshot: list[bytes] = []
        self._snapshot_at = -1

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
        if self._snapshot_at < self.first:
            self._snapshot = []

    def needs_snapshot(self, start: int) -> bool:
        """Whether the messages from ``start`` on cannot be told without a new snapshot."""
        return start < self.first and not (self._snapshot and start <= self._snapshot_at - len(self._snapshot))

    def keep_snapshot(self, payloads: list[bytes]) -> None:
        """Keep a snapshot of the state as it is now; at most ``next`` payloads."""
        assert len(payloads) <= self.next
        self._snapshot, self._snapshot_at = payloads, self.next

    def since(self, start: int) -> Iterator[tuple[int, bytes]]:
        """(number, payload) of all messages from ``start`` on, behind a snapshot if the first of them are gone."""
        begin = min(start, self.next)
        if start < self.first:
            begin = self._snapshot_at
            yield from enumerate(self._snapshot, begin - len(self._snapshot))
        yield from enumerate(islice(self._latest, max(0, begin - self.first), None), max(begin, self.first))
