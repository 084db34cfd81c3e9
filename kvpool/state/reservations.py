"""Blocks reserved for a loader: a row that is a sequence only while it is published or given back."""

from __future__ import annotations

from kvpool.jit import jit
from kvpool.state.blocks import LIVE, RESERVED, WIDTH, sequences_of
from kvpool.state.growth import commit, release, rewind


@jit
def publish(h, ids, counts, now):
    """Publish the first ``counts`` int64[1] tokens of the open reservation ``ids`` int64[1], and give all its blocks back.

    Returns 0 or an error with nothing changed.
    """
    sequence = sequences_of(h)[ids[0] & 0xFFFFFFFF]
    sequence.live = LIVE
    error = commit(h, ids, counts, now)
    if error:
        sequence.live = RESERVED
        return error
    return release(h, ids, True, now)


@jit
def abort(h, ids, counts, now):
    """Give the blocks of the open reservation ``ids`` int64[1] back: its own empty, to the front, then what matched.

    ``counts`` int64[1] is scratch.
    """
    sequence = sequences_of(h)[ids[0] & 0xFFFFFFFF]
    sequence.live = LIVE
    sequence.failed = 0  # nobody uses it any more
    counts[0] = sequence.length - sequence.reused * h[WIDTH]
    rewind(h, ids, counts, now)
    return release(h, ids, False, now)
