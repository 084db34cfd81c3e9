"""Admitting requests: match and claim for the whole batch, decide whether it fits, and only then take blocks.

Phase 1 (`_claim`) changes nothing but holds, and `_unclaim` undoes it to the byte; phase 2 (`grants`) cannot fail.
"""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.blocks import (
    COLUMNS,
    DETAIL,
    DETAIL2,
    DEVICE,
    DEVICE_BLOCKS,
    FREE_ROWS,
    HOST,
    LISTS_PER_TIER,
    NONE,
    ONBOARDING,
    WIDTH,
    blocks_of,
    drop_reference,
    heap_of,
    lists_of,
    rows_of,
    table_of,
)
from kvpool.state.grants import grant, release_sources
from kvpool.state.lru import free_blocks, heap_remove, relink
from kvpool.state.prefix import device_copy
from kvpool.state.requests import (
    O_MATCHED,
    O_ONBOARDS,
    O_PARTIAL,
    O_SOURCE,
    O_TAKES,
    R_LENGTH,
    blocks_for,
    partial_match,
    reusable,
)
from kvpool.state.tiers import EXPIRIES_PER_CALL, begin, expire, hold, let_go
from kvpool.state.windows import longest

SHORT_OF_BLOCKS, SHORT_OF_SEQUENCES = -1, -2


@jit
def match(h, request, ids, out):
    """What ``admit`` would reuse now, into ``out`` int64[6]; changes nothing.

    Tokens on the device (or passed by the window), on the host, in part; blocks; full ones that cost no free block; the partial source.
    """
    blocks = blocks_of(h)
    matched = longest(h, request, reusable(request) // h[WIDTH], ids)
    device = costless = 0
    for i in range(matched):
        b = device_copy(h, ids[i]) if ids[i] != NONE else np.int64(NONE)
        if b != NONE or ids[i] == NONE:
            device += 1
            costless += 1 if b == NONE or blocks[b].word != 0 else 0
    source, n = partial_match(h, request, matched)
    out[0], out[1], out[2] = device * h[WIDTH], (matched - device) * h[WIDTH], n
    out[3], out[4], out[5] = blocks_for(h, request[R_LENGTH]), costless, source


@jit
def _claim(h, request, row, out):
    """Phase 1 of one request: hold what matches; a host block stands in ``row`` for the device block that it will need."""
    blocks = blocks_of(h)
    matched = longest(h, request, reusable(request) // h[WIDTH], row)
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
    source, n = partial_match(h, request, matched)
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
def _unclaim(h, row, out):
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
        need += blocks_for(h, requests[r, R_LENGTH]) - out[r, O_MATCHED] + out[r, O_ONBOARDS]
    return need


@jit
def _fits(h, requests, out, n):
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
def _give_up_partials(h, requests, out, n):
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
def _untime(h, row, out):
    """Claimed blocks leave the expiries; deferred until the batch is known to fit, since a heap cannot be undone to the byte."""
    blocks, heap = blocks_of(h), heap_of(h)
    for i in range(out[O_MATCHED]):
        if row[i] != NONE:
            heap_remove(blocks, heap, row[i])
    if out[O_SOURCE] != NONE:
        heap_remove(blocks, heap, out[O_SOURCE])


@jit
def admit(h, requests, out, now, allow_partial):
    """Admit a batch. ``requests`` int64[n, REQUEST], ``out`` int64[n, OUTCOME].

    Returns how many requests were admitted, or SHORT_OF_BLOCKS / SHORT_OF_SEQUENCES with needed and free in DETAIL and nothing
    changed. With ``allow_partial`` the longest head of the batch that fits is admitted.
    """
    n = requests.shape[0]
    table, rows, top = table_of(h), rows_of(h), h[FREE_ROWS]
    reason = SHORT_OF_BLOCKS
    if n > top:
        h[DETAIL], h[DETAIL2] = n, top
        if not allow_partial:
            return SHORT_OF_SEQUENCES
        n, reason = top, SHORT_OF_SEQUENCES
    for r in range(n):
        if blocks_for(h, requests[r, R_LENGTH]) > h[COLUMNS]:
            h[DETAIL], h[DETAIL2] = blocks_for(h, requests[r, R_LENGTH]), free_blocks(lists_of(h), DEVICE)
            if not allow_partial:
                return SHORT_OF_BLOCKS
            n = r
            break
    for r in range(n):
        _claim(h, requests[r], table[rows[top - 1 - r]], out[r])
    while n > 0 and not _fits(h, requests, out, n):
        reason = SHORT_OF_BLOCKS
        last = n if allow_partial else 1
        for r in range(n - 1, last - 2, -1):
            _unclaim(h, table[rows[top - 1 - r]], out[r])
        n = last - 1
    if n == 0:
        return 0 if allow_partial or requests.shape[0] == 0 else reason
    _give_up_partials(h, requests, out, n)
    for r in range(n):
        _untime(h, table[rows[top - 1 - r]], out[r])
    begin(h, now)
    expire(h, EXPIRIES_PER_CALL)
    for r in range(n):
        grant(h, requests[r], rows[top - 1 - r], out[r])
    h[FREE_ROWS] = top - n
    release_sources(h, 0)
    for r in range(n):
        if out[r, O_SOURCE] != NONE:
            let_go(h, out[r, O_SOURCE])
    return n
