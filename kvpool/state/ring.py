"""The ring of KV events: what was stored, removed, updated or cleared, numbered in the order of the decisions."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.records import (
    DEVICE,
    EXTRA,
    HOST,
    blocks_of,
    constants,
    counters_of,
    event_extra_of,
    event_tokens_of,
    events_of,
    extra_of,
    ring_of,
    tokens_of,
)

CREATED, STORED, REMOVED, UPDATED, CLEARED = constants(*range(5))


@jit
def _slot(h):
    """Count the next event and return its place. A full ring loses its oldest event. It is counted if nobody has read
    it."""
    ring = ring_of(h)
    if ring.next - ring.read == h.event_capacity:
        ring.read += 1
        if ring.read > ring.seen:
            counters_of(h).events_dropped += 1
    ring.next += 1
    return (ring.next - 1) % h.event_capacity


@jit(forceinline=True)
def emit(h, kind, b):
    """Record an event about block ``b`` in its present state. Costs one comparison if nobody wants events."""
    if h.event_capacity != 0:
        _record(h, kind, np.int64(b))


@jit
def _record(h, kind, b):
    blocks, events = blocks_of(h), events_of(h)
    ring = ring_of(h)
    before = (ring.next - 1) % h.event_capacity
    first = ring.next == ring.call
    i = _slot(h)
    tier = DEVICE if b < h.device_blocks else HOST
    joins = (
        kind == STORED
        and not first
        and events[before].kind == STORED
        and events[before].group == h.group
        and events[before].tier == tier
        and events[before].priority == blocks[b].priority
        and events[before].key0 == blocks[b].parent0
        and events[before].key1 == blocks[b].parent1
    )
    events[i].kind, events[i].tier, events[i].priority, events[i].joined = (
        kind,
        tier,
        blocks[b].priority,
        1 if joins else 0,
    )
    events[i].group = h.group
    events[i].key0, events[i].key1 = blocks[b].key0, blocks[b].key1
    events[i].parent0, events[i].parent1 = blocks[b].parent0, blocks[b].parent1
    events[i].namespace = blocks[b].namespace
    events[i].extra = 1 if kind == STORED and blocks[b].flags & EXTRA else 0
    # In a pool of host blocks only they are a key of the caller's, which every event tells.
    if kind == STORED or h.device_blocks == 0:
        copied, tokens = event_tokens_of(h), tokens_of(h)
        for t in range(h.width):
            copied[i, t] = tokens[b, t]
    if events[i].extra:
        told, own = event_extra_of(h), extra_of(h)
        for t in range(h.width):
            told[i, t] = own[b, t]


@jit
def emit_cleared(h):
    if h.event_capacity == 0:
        return
    i = _slot(h)
    events_of(h)[i].kind = CLEARED
    events_of(h)[i].joined, events_of(h)[i].group = 0, h.group
