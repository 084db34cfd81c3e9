"""The events of a HostCache, from the ring of events of its state."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from kvpool.hostcache.opaque_keys import unpacked
from kvpool.pool import events as kv_events
from kvpool.state.tiers import CLEARED, CREATED


class HostEvent(NamedTuple):
    """One change of the content of a host cache.

    Attributes
    ----------
    kind : {"created", "stored", "removed", "updated", "cleared"}
        What has happened.
    number : int
        The number of keys in all events before it. A reader that has missed none finds here ``next`` of the event
        before.
    keys : tuple of bytes
        The keys that it is about.
    priority : int
        Their priority.
    """

    kind: kv_events.EventKind
    number: int
    keys: tuple[bytes, ...] = ()
    priority: int = 0

    @property
    def next(self) -> int:
        """The number of the event that follows."""
        return self.number + max(1, len(self.keys))


def decoded(taken: kv_events.Taken) -> list[HostEvent]:
    """The events of what was taken. Neighbours of one kind and priority are one event."""
    records, words, _ = taken.ring
    rows = zip(records["kind"].tolist(), records["priority"].tolist(), strict=True)
    events, number = [], taken.number
    for (kind, priority), same in groupby(enumerate(rows), lambda row: row[1]):
        places = [place for place, _ in same]
        name = kv_events.KINDS[kind]
        if kind in (CREATED, CLEARED):
            events += [HostEvent(name, number + i) for i in range(len(places))]
        else:
            events.append(HostEvent(name, number, tuple(unpacked(words[places])), priority))
        number += len(places)
    return events
