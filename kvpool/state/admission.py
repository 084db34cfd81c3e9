"""Phase 1 of an admission, in one group: hold what matches, decide whether the batch fits, or undo it.

`claim` changes nothing but holds, and `unclaim` undoes it to the byte; phase 2 (`grants`) cannot fail.
"""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.blocks import (
    DETAIL,
    DETAIL2,
    DEVICE,
    DEVICE_BLOCKS,
    HOST,
    LISTS_PER_TIER,
    NONE,
    ONBOARDING,
    WIDTH,
    blocks_of,
    drop_reference,
    heap_of,
    lists_of,
)
from kvpool.state.lru import free_blocks, heap_remove, relink
from kvpool.state.prefix import device_copy
from kvpool.state.requests import (
    O_MATCHED,
    O_ONBOARDS,
    O_PARTIAL,
    O_SOURCE,
    O_TAKES,
    columns_for,
    fresh_blocks,
    partial_match,
)
from kvpool.state.tiers import hold

SHORT_OF_BLOCKS, SHORT_OF_SEQUENCES = -1, -2


@jit
def matched(h, request, count, ids, out):
    """What an admission would reuse of ``count`` full blocks that were found, ``ids``, into ``out`` int64[6]; changes nothing.

    Tokens on the device (or not needed), on the host, in part; the count; full blocks that cost no free block; the partial source.
    """
    blocks = blocks_of(h)
    device = costless = 0
    for i in range(count):
        b = device_copy(h, ids[i]) if ids[i] != NONE else np.int64(NONE)
        if b != NONE or ids[i] == NONE:
            device += 1
            costless += 1 if b == NONE or blocks[b].word != 0 else 0
    source, n = partial_match(h, request, count)
    out[0], out[1], out[2] = device * h[WIDTH], (count - device) * h[WIDTH], n
    out[3], out[4], out[5] = count, costless, source


@jit
def claim(h, request, row, out, matched, source, n):
    """Phase 1 of one request: hold the ``matched`` blocks of its row, and the partial source, of which ``n`` tokens will be copied.

    A host block stands in ``row`` for the device block that it will need.
    """
    blocks = blocks_of(h)
    onboards = 0
    for i in range(matched):
        if row[i] == NONE:
            continue
        b = device_copy(h, row[i])
        if b == NONE:
            b = np.int64(row[i])
            if not blocks[b].flags & ONBOARDING:
                blocks[b].flags |= ONBOARDING
                onboards += 1
        row[i] = b
        hold(h, b)
    if source != NONE:
        hold(h, source)
    out[O_MATCHED], out[O_ONBOARDS], out[O_SOURCE], out[O_PARTIAL], out[O_TAKES] = matched, onboards, source, n, 0


@jit
def _unhold(h, b):
    """Undo ``hold``; to be called in the reverse order."""
    blocks = blocks_of(h)
    if drop_reference(blocks, b) == 0:
        tier = DEVICE if b < h[DEVICE_BLOCKS] else HOST
        relink(blocks, lists_of(h), b, tier * LISTS_PER_TIER + blocks[b].priority)


@jit
def unclaim(h, row, out):
    if out[O_SOURCE] != NONE:
        _unhold(h, out[O_SOURCE])
    for i in range(out[O_MATCHED] - 1, -1, -1):
        if row[i] == NONE:
            continue
        blocks_of(h)[row[i]].flags &= ~ONBOARDING
        _unhold(h, np.int64(row[i]))
        row[i] = NONE


@jit
def _sole_claims(h, out, n, r):
    """How many of the first ``n`` requests hold request r's partial source, if it is a device block that nobody holds otherwise, else 0."""
    source = out[r, O_SOURCE]
    if source == NONE or source >= h[DEVICE_BLOCKS]:
        return 0
    claims = 0
    for i in range(n):
        if out[i, O_SOURCE] == source:
            claims += 1
    return claims if blocks_of(h)[source].word == claims else 0


@jit
def _needed(h, requests, out, n):
    need = 0
    for r in range(n):
        need += fresh_blocks(h, requests[r], out[r, O_MATCHED], columns_for(h, requests[r])) + out[r, O_ONBOARDS]
    return need


@jit
def fits(h, requests, out, n):
    """Whether the first ``n`` requests fit, at the cost of partial matches if need be. Changes nothing."""
    need, free = _needed(h, requests, out, n), free_blocks(lists_of(h), DEVICE)
    if need <= free:
        return True
    sources = 0
    for r in range(n):
        first = True
        for i in range(r):
            first &= out[i, O_SOURCE] != out[r, O_SOURCE]
        if first and _sole_claims(h, out, n, r) > 0:
            sources += 1
    h[DETAIL], h[DETAIL2] = need, free + sources
    return need <= free + sources


@jit
def give_up_partials(h, requests, out, n):
    """Short of blocks: the last requests use their partial source as their own block, or drop it where a request before wants it too."""
    short = _needed(h, requests, out, n) - free_blocks(lists_of(h), DEVICE)
    for r in range(n - 1, -1, -1):
        if short <= 0:
            return
        claims = _sole_claims(h, out, n, r)
        if claims == 1:
            out[r, O_TAKES] = 1
            short -= 1
        elif claims > 1:
            drop_reference(blocks_of(h), out[r, O_SOURCE])
            out[r, O_SOURCE], out[r, O_PARTIAL] = NONE, 0


@jit
def untime(h, row, out):
    """Claimed blocks leave the expiries; deferred until the batch is known to fit, since a heap cannot be undone to the byte."""
    blocks, heap = blocks_of(h), heap_of(h)
    for i in range(out[O_MATCHED]):
        if row[i] != NONE:
            heap_remove(blocks, heap, row[i])
    if out[O_SOURCE] != NONE:
        heap_remove(blocks, heap, out[O_SOURCE])
