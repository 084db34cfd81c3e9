"""Admission over all groups of layers: one answer to what a prompt reuses, and a batch that every group has room for.

``heads`` int64[groups, HEADER] are the headers. What is found is decided before anything is claimed, so that no group holds more than is
used; what is claimed is undone in all groups where one is short.
"""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state import admission, grants, noted
from kvpool.state.admission import SHORT_OF_BLOCKS, SHORT_OF_SEQUENCES
from kvpool.state.atomics import address_of, array_at
from kvpool.state.blocks import (
    A_TABLE,
    ATTENTION,
    COLUMNS,
    CROSS,
    DETAIL,
    DETAIL2,
    DEVICE,
    DEVICE_BLOCKS,
    FREE_ROWS,
    KIND,
    NONE,
    RECURRENT,
    SEQUENCES,
    WIDTH,
    WINDOW,
    lists_of,
    rows_of,
    table_of,
)
from kvpool.state.live import refuse
from kvpool.state.lru import free_blocks
from kvpool.state.requests import (
    O_PARTIAL,
    O_SOURCE,
    columns_for,
    partial_match,
    reusable,
)
from kvpool.state.tiers import EXPIRIES_PER_CALL, begin, expire, let_go
from kvpool.state.windows import longest


@jit
def look(heads, request, limit, ids, step):
    """The most leading full blocks of a prompt, at most ``limit``, that every group can reuse; changes nothing.

    The blocks of group g go into the int32[limit] at the address ``ids + g * step``, NONE where one is not needed. Each answer of a group
    is a bound for the others, until they agree; those that need all blocks of a prefix are asked first, and once.
    """
    most = np.int64(limit)
    for g in range(heads.shape[0]):
        if heads[g, KIND] == ATTENTION and heads[g, WINDOW] == 0:
            most = longest(heads[g], request, most, array_at(ids + g * step, (limit,), np.int32))
    agreed = g = 0
    while agreed < heads.shape[0]:
        if heads[g, KIND] == RECURRENT or heads[g, WINDOW] != 0:
            found = longest(heads[g], request, most, array_at(ids + g * step, (limit,), np.int32))
            if found < most:
                most, agreed = found, 0
        agreed += 1
        g = (g + 1) % heads.shape[0]
    for g in range(heads.shape[0] if heads.shape[0] > 1 else 0):
        row = array_at(ids + g * step, (limit,), np.int32)
        for i in range(most, limit):
            row[i] = NONE
    return most


@jit
def match(heads, request, ids, out):
    """What ``admit`` would reuse now, into ``out`` int64[groups + 1, 6] as ``admission.matched`` says; changes nothing.

    The last row is the one answer: tokens of full blocks, how many of them have to come from the host in the group that has most there, and
    tokens in part. ``ids`` int32[groups, full blocks] is scratch.
    """
    most = look(heads, request, reusable(request) // heads[0, WIDTH], address_of(ids), 4 * ids.shape[1])
    least = NONE
    for g in range(heads.shape[0]):
        out[g] = 0
        if heads[g, KIND] != CROSS:
            admission.matched(heads[g], request, most, ids[g], out[g])
            least = out[g, 2] if least == NONE else min(least, out[g, 2])
    for g in range(heads.shape[0]):
        out[g, 2] = least
    out[heads.shape[0], 0], out[heads.shape[0], 1], out[heads.shape[0], 2] = most * heads[0, WIDTH], 0, least
    for g in range(heads.shape[0]):
        out[heads.shape[0], 1] = max(out[heads.shape[0], 1], out[g, 1])


@jit
def _claim(heads, request, slot, out, r):
    """Phase 1 of one request in all groups: what all can reuse is held in each."""
    columns = heads[0, COLUMNS]
    limit = reusable(request) // heads[0, WIDTH]
    most = look(heads, request, limit, heads[0, A_TABLE] + 4 * slot * columns, 4 * heads[0, SEQUENCES] * columns)
    least = np.int64(heads[0, WIDTH])
    for g in range(heads.shape[0]):
        if heads[g, KIND] != CROSS:
            source, n = partial_match(heads[g], request, most)
            out[g, r, O_SOURCE], least = source, min(least, n)
    for g in range(heads.shape[0]):
        source = out[g, r, O_SOURCE] if least > 0 and heads[g, KIND] != CROSS else np.int64(NONE)
        found = 0 if heads[g, KIND] == CROSS else most
        admission.claim(heads[g], request, table_of(heads[g])[slot], out[g, r], found, source, least)


@jit
def _short(heads, requests, out, n):
    """A group that the first ``n`` claimed requests do not fit into, or NONE."""
    for g in range(heads.shape[0]):
        if not admission.fits(heads[g], requests, out[g], n):
            return g
    return NONE


@jit
def _too_wide(heads, request):
    """A group in which a prompt has more blocks than a row, one that could not have them if there is one; or NONE."""
    found, short = NONE, False
    for g in range(heads.shape[0]):
        columns = columns_for(heads[g], request)
        never = heads[g, KIND] != RECURRENT and columns > heads[g, DEVICE_BLOCKS]
        if columns > heads[g, COLUMNS] and (found == NONE or (never and not short)):
            found, short = g, never
            heads[g, DETAIL], heads[g, DETAIL2] = columns, free_blocks(lists_of(heads[g]), DEVICE)
    return found


@jit
def _give_up_partials(heads, requests, out, n):
    """Short of blocks: a partial match that one group gives up is none in the others either."""
    for g in range(heads.shape[0]):
        admission.give_up_partials(heads[g], requests, out[g], n)
    for r in range(n if heads.shape[0] > 1 else 0):
        least = np.int64(heads[0, WIDTH])
        for g in range(heads.shape[0]):
            if heads[g, KIND] != CROSS:
                least = min(least, out[g, r, O_PARTIAL])
        for g in range(heads.shape[0]):
            out[g, r, O_PARTIAL] = least


@jit
def _grant(heads, requests, out, n, now):
    """Phase 2: blocks for claimed requests that fit. Nothing here can fail."""
    top = heads[0, FREE_ROWS]
    for g in range(heads.shape[0]):
        h = heads[g]
        table, rows = table_of(h), rows_of(h)
        for r in range(n):
            admission.untime(h, table[rows[top - 1 - r]], out[g, r])
        begin(h, now)
        expire(h, EXPIRIES_PER_CALL)
        for r in range(n):
            if h[KIND] == CROSS:
                grants.grant_cross(h, requests[r], rows[top - 1 - r], out[g, r])
            else:
                grants.grant(h, requests[r], rows[top - 1 - r], out[g, r])
                if h[KIND] == RECURRENT:
                    noted.begin_row(h, requests[r], rows[top - 1 - r])
        h[FREE_ROWS] = top - n
        grants.release_sources(h, 0)
        for r in range(n):
            if out[g, r, O_SOURCE] != NONE:
                let_go(h, out[g, r, O_SOURCE])


@jit
def admit(heads, requests, out, now, allow_partial):
    """Admit a batch. ``requests`` int64[n, REQUEST], ``out`` int64[groups, n, OUTCOME].

    Returns how many requests were admitted, or SHORT_OF_BLOCKS / SHORT_OF_SEQUENCES with needed and free in DETAIL and nothing
    changed. With ``allow_partial`` the longest head of the batch that fits is admitted.
    """
    n = requests.shape[0]
    rows, top = rows_of(heads[0]), heads[0, FREE_ROWS]
    reason, group = SHORT_OF_BLOCKS, 0
    if n > top:
        heads[0, DETAIL], heads[0, DETAIL2] = n, top
        if not allow_partial:
            return refuse(heads, 0, SHORT_OF_SEQUENCES)
        n, reason = top, SHORT_OF_SEQUENCES
    for r in range(n):
        wide = _too_wide(heads, requests[r])
        if wide != NONE:
            if not allow_partial:
                return refuse(heads, wide, SHORT_OF_BLOCKS)
            n = r
            break
    for r in range(n):
        _claim(heads, requests[r], rows[top - 1 - r], out, r)
    while n > 0:
        short = _short(heads, requests, out, n)
        if short == NONE:
            break
        reason, group = SHORT_OF_BLOCKS, short
        last = n if allow_partial else 1
        for r in range(n - 1, last - 2, -1):
            for g in range(heads.shape[0]):
                admission.unclaim(heads[g], table_of(heads[g])[rows[top - 1 - r]], out[g, r])
        n = last - 1
    if n == 0:
        return np.int64(0) if allow_partial or requests.shape[0] == 0 else refuse(heads, group, reason)
    _give_up_partials(heads, requests, out, n)
    _grant(heads, requests, out, n, now)
    return np.int64(n)
