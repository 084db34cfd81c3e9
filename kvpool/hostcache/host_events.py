"""The events of a HostCache, from the ring of events of its state."""

from __future__ import annotations

from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias, cast

from kvpool.hostcache.opaque_keys import unpacked
from kvpool.pool import events as kv_events
from kvpool.state.tiers import CLEARED, CREATED

HostEventKind: TypeAlias = Literal["created", "stored", "removed", "updated", "cleared"]


class HostEvent(NamedTuple):
    """One change of the content of a host cache. ``kind`` is "created", "stored", "removed", "updated" or "cleared".

    ``number`` counts keys. For a reader that has seen everything, it equals ``next`` of the event before.
    """

    kind: HostEventKind
    number: int
    keys: tuple[bytes, ...] = ()
    priority: int = 0

    @property
    def next(self) -> int:
        return self.number + max(1, len(self.keys))


def decoded(taken: kv_events.Taken) -> list[HostEvent]:
    """The events of what was taken. Neighbours of one kind and priority are one event."""
    records, words, _ = taken.ring
    rows = zip(records["kind"].tolist(), records["priority"].tolist(), strict=True)
    events, number = [], taken.number
    for (kind, priority), same in groupby(enumerate(rows), lambda row: row[1]):
        places = [place for place, _ in same]
        name = cast("HostEventKind", kv_events.KINDS[kind])
        if kind in (CREATED, CLEARED):
            events += [HostEvent(name, number + i) for i in range(len(places))]
        else:
            events.append(HostEvent(name, number, tuple(unpacked(words[places])), priority))
        number += len(places)
    return events
