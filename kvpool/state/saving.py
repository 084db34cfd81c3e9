"""What a keeper of stores asks of the state: how often content was used, and that what it has copied keeps its place
among the victims."""

from __future__ import annotations

from kvpool.jit import jit
from kvpool.state.index import find_key, host_copy
from kvpool.state.policy import evict_next
from kvpool.state.records import NONE, blocks_of, head
from kvpool.state.tiers import begin


@jit
def uses(heads, g, keys, out):
    """How often the content of each key (int64[n, 2]) was used in a group, into ``out`` int64[n]. 0 for what is not
    cached. Changes nothing."""
    h = head(heads, g)
    for i in range(keys.shape[0]):
        b = find_key(h, keys[i, 0], keys[i, 1])
        out[i] = 0 if b == NONE else blocks_of(h)[b].uses


@jit
def evict_first(heads, g, keys, alone, now):
    """Put the host copies of keys (int64[n, 2]) in front of the lists that they are in, the first key first: they are
    the next victims there. Clean copies only, or with ``alone`` also those that are the only ones. Held blocks stay
    as they are. Returns how many were put in front."""
    h = head(heads, g)
    begin(h, now)
    moved = 0
    for i in range(keys.shape[0] - 1, -1, -1):
        b = find_key(h, keys[i, 0], keys[i, 1])
        b = NONE if b == NONE else host_copy(h, b)
        if b != NONE and (alone or blocks_of(h)[b].other_copy != NONE) and evict_next(h, b):
            moved += 1
    return moved
