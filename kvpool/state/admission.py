"""Admitting requests: match and claim for the whole batch, decide whether it fits, and only then take blocks.

Phase 1 (`_claim`) changes nothing but holds, and `_unclaim` undoes it to the byte; phase 2 (`_grant`) cannot fail.
"""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.accesses import WILL_READ, WILL_WRITE, emit_access
from kvpool.state.blocks import (
    ACCESSES_CAPACITY,
    C_COPIED,
    C_DEVICE_HITS,
    C_DEVICE_TOKENS,
    C_HOST_HITS,
    C_HOST_TOKENS,
    C_MISSED,
    C_ONBOARDED,
    C_PARTIAL,
    C_PARTIAL_TOKENS,
    C_PROMPT,
    COLUMNS,
    DETAIL,
    DETAIL2,
    DEVICE,
    DEVICE_BLOCKS,
    EXTRA,
    FREE_ROWS,
    HAS_EXTRA,
    HOST,
    KEYED,
    LISTS_PER_TIER,
    MOVES,
    NONE,
    NOW,
    ONBOARDING,
    REUSE_GAP,
    STREAM,
    WIDTH,
    add_reference,
    blocks_of,
    counters_of,
    drop_reference,
    extra_of,
    heap_of,
    lists_of,
    moves_of,
    rows_of,
    sequences_of,
    table_of,
    tokens_of,
)
from kvpool.state.lru import free_blocks, heap_remove, relink, unlink
from kvpool.state.prefix import device_copy
from kvpool.state.requests import (
    O_CACHED,
    O_DEVICE_TOKENS,
    O_HOST_TOKENS,
    O_ID,
    O_MATCHED,
    O_MISSED,
    O_ONBOARDS,
    O_PARTIAL,
    O_SOURCE,
    O_TAKES,
    R_LENGTH,
    R_NAMESPACE,
    R_PRIORITY,
    R_ROOT0,
    R_ROOT1,
    R_TTL,
    blocks_for,
    partial_match,
    request_extra,
    request_keys,
    request_tokens,
    retention_at,
    walk,
)
from kvpool.state.ring import STORED, UPDATED, emit
from kvpool.state.tiers import begin, copy_content, emit_move, expire, forget, record, shelve, take_device

SHORT_OF_BLOCKS, SHORT_OF_SEQUENCES = -1, -2
EXPIRIES_PER_CALL = 64


@jit(forceinline=True)
def hold(h, b):
    """Add a reference; a block that nobody held leaves its list."""
    blocks = blocks_of(h)
    if add_reference(blocks, b) == 1:
        unlink(blocks, lists_of(h), b)


@jit(forceinline=True)
def let_go(h, b):
    """Drop a reference; a block that nobody holds then is shelved."""
    if drop_reference(blocks_of(h), b) == 0:
        shelve(h, b, False)


@jit
def _claim(h, request, row, out):
    """Phase 1 of one request: hold what matches; a host block stands in ``row`` for the device block that it will need."""
    blocks = blocks_of(h)
    matched = walk(h, request, (request[R_LENGTH] - 1) // h[WIDTH], row)
    onboards = 0
    for i in range(matched):
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


@jit(forceinline=True)
def write_tokens(h, b, at, tokens, extra, start, count):
    """Note the ids of ``count`` tokens of block ``b`` from its position ``at`` on; the engine writes the bytes."""
    blocks, own = blocks_of(h), tokens_of(h)
    for i in range(count):
        own[b, at + i] = tokens[start + i]
    if h[HAS_EXTRA] and (extra.shape[0] > 0 or blocks[b].flags & EXTRA):
        mine, some = extra_of(h), False
        for i in range(at + count):
            if i >= at:
                mine[b, i] = extra[start + i - at] if extra.shape[0] > 0 else 0
            elif not blocks[b].flags & EXTRA:
                mine[b, i] = 0
            some |= mine[b, i] != 0
        if some:
            blocks[b].flags |= EXTRA
    blocks[b].filled = at + count


@jit(forceinline=True)
def _reuse(h, request, b, i):
    """Account for a hit on block ``b`` at place ``i`` of the prompt; a retention range of the request applies to it."""
    blocks = blocks_of(h)
    record(h, REUSE_GAP, blocks[b].used_at)
    blocks[b].used_at = np.uint32(h[NOW])
    if blocks[b].uses < 65535:
        blocks[b].uses += 1
    given, priority, ttl = retention_at(request, i * h[WIDTH])
    if given and (blocks[b].priority != priority or blocks[b].ttl != ttl):
        blocks[b].priority, blocks[b].ttl = priority, ttl
        emit(h, UPDATED, b)


@jit
def onboard(h, host):
    """Copy a held host block's content to a device block, publish that, and return it with one reference."""
    blocks = blocks_of(h)
    b = take_device(h)
    copy_content(h, host, b)
    blocks[b].twin, blocks[host].twin = host, b
    add_reference(blocks, b)
    emit_move(h, host, b, h[WIDTH])
    emit(h, STORED, b)
    counters_of(h)[C_ONBOARDED] += 1
    return b


@jit(forceinline=True)
def _grant_hit(h, request, row, i, out):
    counters = counters_of(h)
    b = np.int64(row[i])
    if b < h[DEVICE_BLOCKS]:
        counters[C_DEVICE_HITS] += 1
        out[O_DEVICE_TOKENS] += h[WIDTH]
    else:
        counters[C_HOST_HITS] += 1
        out[O_HOST_TOKENS] += h[WIDTH]
        blocks_of(h)[b].flags &= ~ONBOARDING
        twin = np.int64(blocks_of(h)[b].twin)
        if twin != NONE:
            hold(h, twin)
            drop_reference(blocks_of(h), b)
            b = twin
        else:
            b = onboard(h, b)
        row[i] = b
    _reuse(h, request, b, i)


@jit(forceinline=True)
def _grant_new(h, request, tokens, keys, extra, width, i, out):
    """A block for place ``i`` that is not a full hit: fresh, a copy of the partial source, or the source itself."""
    blocks = blocks_of(h)
    partial = i == out[O_MATCHED] and out[O_SOURCE] != NONE
    if partial and out[O_TAKES]:
        b = out[O_SOURCE]
        forget(h, b, NONE)
        blocks[b].flags, blocks[b].uses = 0, 0
        out[O_SOURCE] = NONE
    else:
        b = take_device(h)
        add_reference(blocks, b)
        if partial:
            emit_move(h, out[O_SOURCE], b, out[O_PARTIAL])
            counters_of(h)[C_COPIED] += 1
    start = i * width
    count = min(width, tokens.shape[0] - start)
    write_tokens(h, b, 0, tokens, extra, start, count)
    if i > 0:
        blocks[b].parent0, blocks[b].parent1 = keys[i - 1, 0], keys[i - 1, 1]
    else:
        blocks[b].parent0, blocks[b].parent1 = request[R_ROOT0], request[R_ROOT1]
    blocks[b].namespace = request[R_NAMESPACE]
    if count == width:
        blocks[b].key0, blocks[b].key1 = keys[i, 0], keys[i, 1]
        blocks[b].flags |= KEYED
    _, blocks[b].priority, blocks[b].ttl = retention_at(request, start)
    return b


@jit
def _grant(h, request, slot, out):
    """Phase 2 of one request."""
    counters, sequence, row = counters_of(h), sequences_of(h)[slot], table_of(h)[slot]
    total = blocks_for(h, request[R_LENGTH])
    out[O_DEVICE_TOKENS] = out[O_HOST_TOKENS] = 0
    for i in range(out[O_MATCHED]):
        _grant_hit(h, request, row, i, out)
    tokens, keys, extra, width = request_tokens(request), request_keys(h, request), request_extra(request), h[WIDTH]
    for i in range(out[O_MATCHED], total):
        row[i] = _grant_new(h, request, tokens, keys, extra, width, i, out)
    for i in range(total if h[ACCESSES_CAPACITY] else 0):
        emit_access(h, WILL_READ if i < out[O_MATCHED] else WILL_WRITE, h[STREAM], row[i])
    out[O_CACHED] = out[O_MATCHED] * h[WIDTH] + out[O_PARTIAL]
    out[O_MISSED] = total - out[O_MATCHED]
    out[O_ID] = (np.int64(sequence.generation) << 32) | slot
    counters[C_PROMPT] += request[R_LENGTH]
    counters[C_DEVICE_TOKENS] += out[O_DEVICE_TOKENS]
    counters[C_HOST_TOKENS] += out[O_HOST_TOKENS]
    counters[C_PARTIAL_TOKENS] += out[O_PARTIAL]
    counters[C_PARTIAL] += 1 if out[O_PARTIAL] else 0
    counters[C_MISSED] += out[O_MISSED]
    sequence.live, sequence.failed, sequence.duplicates = 1, 0, NONE
    sequence.length, sequence.blocks = request[R_LENGTH], total
    sequence.committed = sequence.cached = out[O_CACHED]
    sequence.reused, sequence.stream = out[O_MATCHED], h[STREAM]
    sequence.namespace, sequence.root0, sequence.root1 = request[R_NAMESPACE], request[R_ROOT0], request[R_ROOT1]
    sequence.priority, sequence.ttl = request[R_PRIORITY], request[R_TTL]


@jit
def _untime(h, row, out):
    """Claimed blocks leave the expiries; deferred until the batch is known to fit, since a heap cannot be undone to the byte."""
    blocks, heap = blocks_of(h), heap_of(h)
    for i in range(out[O_MATCHED]):
        heap_remove(blocks, heap, row[i])
    if out[O_SOURCE] != NONE:
        heap_remove(blocks, heap, out[O_SOURCE])


@jit
def release_sources(h, first):
    """Let go of the host blocks that the call's onboards, from move ``first`` on, read."""
    moves = moves_of(h)
    for i in range(first, h[MOVES]):
        if moves[i, 0] >= h[DEVICE_BLOCKS] and moves[i, 2] == h[WIDTH]:
            let_go(h, moves[i, 0])


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
        _grant(h, requests[r], rows[top - 1 - r], out[r])
    h[FREE_ROWS] = top - n
    release_sources(h, 0)
    for r in range(n):
        if out[r, O_SOURCE] != NONE:
            let_go(h, out[r, O_SOURCE])
    return n
