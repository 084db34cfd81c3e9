"""KV events as callers see them: what was stored, removed, updated or cleared, in the order of the decisions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.state.blocks import DEVICE_BLOCKS, EVENT_NEXT, EVENT_READ, EVENTS, State

KINDS = ("created", "stored", "removed", "updated", "cleared")
TIERS = ("device", "host")


@dataclass(frozen=True, eq=False)
class Event:
    """One change of what is cached.

    ``number`` counts blocks, not events: a reader that has seen everything finds it equal to ``next`` of the event before; a larger one
    is a gap, and the difference is what was lost. ``keys`` uint64[n, 2], a chain for "stored"; ``parent`` uint64[2] of its first
    block; ``tokens`` int32[n, tokens_per_block], for "stored" only; ``namespace`` as in BlockKeys. "created" has the capacities.
    """

    kind: str
    number: int
    tier: str | None = None
    keys: npt.NDArray[np.uint64] | None = None
    parent: npt.NDArray[np.uint64] | None = None
    tokens: npt.NDArray[np.int32] | None = None
    namespace: int = 0
    priority: int = 0
    device_blocks: int = 0
    host_blocks: int = 0

    @property
    def next(self) -> int:
        return self.number + (1 if self.keys is None else len(self.keys))


def announce(state: State) -> None:
    """Write the first event of a pool into the ring."""
    if state.header[EVENTS]:
        state.events[0]["kind"] = 0
        state.header[EVENT_NEXT] = 1


def take(state: State) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int32], int]:
    """Copy and empty the ring under the state lock: records, their tokens, number of the first."""
    first, last = int(state.header[EVENT_READ]), int(state.header[EVENT_NEXT])
    if first == last:
        return state.events[:0], state.event_tokens[:0], first
    places = np.arange(first, last) % int(state.header[EVENTS])
    state.header[EVENT_READ] = last
    return state.events[places], state.event_tokens[places], first


def decode(records: npt.NDArray[np.void], tokens: npt.NDArray[np.int32], first: int, state: State) -> list[Event]:
    """Events from copied records; records of one chain that were stored by one call become one event."""
    events = []
    starts = np.flatnonzero((records["group"] == 0) | (np.arange(len(records)) == 0))
    for start, end in zip(starts, np.append(starts[1:], len(records)), strict=False):
        head, kind = records[start], KINDS[int(records[start]["kind"])]
        number = first + int(start)
        if kind == "created":
            device = int(state.header[DEVICE_BLOCKS])
            events.append(Event(kind, number, device_blocks=device, host_blocks=len(state.blocks) - device))
        elif kind == "cleared":
            events.append(Event(kind, number))
        else:
            part = records[start:end]
            keys = np.stack([part["key0"], part["key1"]], axis=1).view(np.uint64)
            parent = np.array([head["parent0"], head["parent1"]], np.int64).view(np.uint64)
            own = tokens[start:end] if kind == "stored" else None
            events.append(Event(kind, number, TIERS[int(head["tier"])], keys, parent, own, int(head["namespace"]), int(head["priority"])))
    return events
