"""Retired: items that are in use until an event is complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class Retired(Generic[Item]):
    """Items by the stream that uses them, oldest first. The order of two streams is not known.

    ``query`` says whether an event is complete. If it raises, the exception goes on to the caller, and no item is
    forgotten. Not thread-safe.
    """

    def __init__(self, query: Callable[[Any], bool]) -> None:
        self._query = query
        self._streams: dict[int, deque[tuple[Any, Item]]] = {}

    def add(self, stream: int, event: Any, item: Item) -> None:
        """Add an item that is in use until ``event``. The event is later than those of all earlier items of that
        stream."""
        self._streams.setdefault(stream, deque()).append((event, item))

    def reclaim(self) -> Iterator[Item]:
        """Forget the items whose events are complete, and yield each. Iterate to the end."""
        for stream, items in list(self._streams.items()):
            while items and self._query(items[0][0]):
                yield items.popleft()[1]
            if not items:
                del self._streams[stream]

    def count(self, stream: int) -> int:
        """How many items of a stream are not forgotten yet."""
        return len(self._streams.get(stream, ()))

    def oldest(self, stream: int) -> Any:
        """The event of the first item of a stream. There is at least one."""
        return self._streams[stream][0][0]

    def pending(self) -> int:
        """How many items are in use now. Changes nothing, so that a signal handler may ask in the middle of a
        change."""
        found = 0
        for items in list(self._streams.values()):
            events = [event for event, _ in list(items)]
            while events and self._query(events[0]):
                del events[0]
            found += len(events)
        return found

    def __iter__(self) -> Iterator[tuple[Any, Item]]:
        for items in list(self._streams.values()):
            yield from list(items)

    def __len__(self) -> int:
        return sum(map(len, self._streams.values()))

    def clear(self) -> None:
        self._streams.clear()
