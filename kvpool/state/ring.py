"""The ring of KV events: what was stored, removed, updated or cleared, numbered in the order of the decisions."""

from __future__ import annotations

from kvpool.jit import jit
from kvpool.state.blocks import (
    C_DROPPED,
    CALL_EVENT,
    DEVICE,
    DEVICE_BLOCKS,
    EVENT_NEXT,
    EVENT_READ,
    EVENTS,
    EXTRA,
    GROUP,
    HOST,
    WIDTH,
    blocks_of,
    counters_of,
    event_extra_of,
    event_tokens_of,
    events_of,
    extra_of,
    ring_of,
    tokens_of,
)

CREATED, STORED, REMOVED, UPDATED, CLEARED = range(5)


@jit
def _slot(h):
    """Number the next event and return its place; a full ring loses its oldest event, which is counted."""
    ring = ring_of(h)
    if ring[EVENT_NEXT] - ring[EVENT_READ] == h[EVENTS]:
        ring[EVENT_READ] += 1
        counters_of(h)[C_DROPPED] += 1
    ring[EVENT_NEXT] += 1
    return (ring[EVENT_NEXT] - 1) % h[EVENTS]


@jit(forceinline=True)
def emit(h, kind, b):
    """Record an event about block ``b`` as it is now. Costs one comparison where nobody asked for events."""
    if h[EVENTS] != 0:
        _record(h, kind, b)


@jit
def _record(h, kind, b):
    blocks, events = blocks_of(h), events_of(h)
    ring = ring_of(h)
    before = (ring[EVENT_NEXT] - 1) % h[EVENTS]
    first = ring[EVENT_NEXT] == max(ring[CALL_EVENT], ring[EVENT_READ])
    i = _slot(h)
    tier = DEVICE if b < h[DEVICE_BLOCKS] else HOST
    joins = (
        kind == STORED
        and not first
        and events[before].kind == STORED
        and events[before].group == h[GROUP]
        and events[before].tier == tier
        and events[before].priority == blocks[b].priority
        and events[before].key0 == blocks[b].parent0
        and events[before].key1 == blocks[b].parent1
    )
    events[i].kind, events[i].tier, events[i].priority, events[i].joined = kind, tier, blocks[b].priority, 1 if joins else 0
    events[i].group = h[GROUP]
    events[i].key0, events[i].key1 = blocks[b].key0, blocks[b].key1
    events[i].parent0, events[i].parent1 = blocks[b].parent0, blocks[b].parent1
    events[i].namespace = blocks[b].namespace
    events[i].extra = 1 if kind == STORED and blocks[b].flags & EXTRA else 0
    if kind == STORED:
        copied, tokens = event_tokens_of(h), tokens_of(h)
        for t in range(h[WIDTH]):
            copied[i, t] = tokens[b, t]
    if events[i].extra:
        told, own = event_extra_of(h), extra_of(h)
        for t in range(h[WIDTH]):
            told[i, t] = own[b, t]


@jit
def emit_cleared(h):
    if h[EVENTS] == 0:
        return
    i = _slot(h)
    events_of(h)[i].kind = CLEARED
    events_of(h)[i].joined, events_of(h)[i].group = 0, h[GROUP]
