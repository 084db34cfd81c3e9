"""Phase 2 of an admission: what was claimed is reused, blocks are taken for the rest. Nothing here can fail."""

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
    DEFAULT_PRIORITY,
    DEVICE_BLOCKS,
    EXTRA,
    HAS_EXTRA,
    KEYED,
    LIVE,
    MOVES,
    NONE,
    NOW,
    ONBOARDING,
    RESERVED,
    REUSE_GAP,
    STREAM,
    WIDTH,
    WINDOW,
    add_reference,
    blocks_of,
    counters_of,
    drop_reference,
    extra_of,
    moves_of,
    sequences_of,
    table_of,
    tokens_of,
)
from kvpool.state.requests import (
    O_CACHED,
    O_DEVICE_TOKENS,
    O_HOST_TOKENS,
    O_ID,
    O_MATCHED,
    O_MISSED,
    O_PARTIAL,
    O_SOURCE,
    O_TAKES,
    R_ENCODER,
    R_LENGTH,
    R_NAMESPACE,
    R_PRIORITY,
    R_RESERVES,
    R_ROOT0,
    R_ROOT1,
    R_TTL,
    columns_for,
    has_block,
    kept_column,
    request_extra,
    request_keys,
    request_tokens,
    retention_at,
)
from kvpool.state.ring import STORED, UPDATED, emit
from kvpool.state.tiers import copy_content, emit_move, forget, hold, let_go, record, take_device
from kvpool.state.windows import kept_from


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


@jit
def grant_cross(h, request, slot, out):
    """Blocks for what an encoder gives, which nobody else has and nothing changes. Nothing here can fail."""
    blocks, sequence, row = blocks_of(h), sequences_of(h)[slot], table_of(h)[slot]
    total = columns_for(h, request)
    for i in range(total):
        row[i] = take_device(h)
        add_reference(blocks, row[i])
        blocks[row[i]].namespace, blocks[row[i]].priority, blocks[row[i]].ttl = request[R_NAMESPACE], DEFAULT_PRIORITY, NONE
        emit_access(h, WILL_WRITE, h[STREAM], row[i])
    out[:] = 0
    out[O_SOURCE] = NONE
    out[O_ID] = (np.int64(sequence.generation) << 32) | slot
    begin_row(h, sequence, request)
    sequence.length, sequence.blocks = request[R_ENCODER], total
    sequence.committed = sequence.cached = sequence.reused = sequence.first = 0


@jit(forceinline=True)
def _reuse(h, request, b, i):
    """A hit on block ``b`` at place ``i`` of the prompt: a use, unless a loader's, and a retention range of the request applies to it."""
    blocks = blocks_of(h)
    if not request[R_RESERVES]:
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
    b = np.int64(row[i])
    if b < h[DEVICE_BLOCKS]:
        out[O_DEVICE_TOKENS] += h[WIDTH]
    else:
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
        if partial and out[O_PARTIAL]:  # none where another group has dropped its part
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
def _count(h, request, out):
    counters = counters_of(h)
    counters[C_PROMPT] += request[R_LENGTH]
    counters[C_DEVICE_TOKENS] += out[O_DEVICE_TOKENS]
    counters[C_HOST_TOKENS] += out[O_HOST_TOKENS]
    counters[C_DEVICE_HITS] += out[O_DEVICE_TOKENS] // h[WIDTH]
    counters[C_HOST_HITS] += out[O_HOST_TOKENS] // h[WIDTH]
    counters[C_PARTIAL_TOKENS] += out[O_PARTIAL]
    counters[C_PARTIAL] += 1 if out[O_PARTIAL] else 0
    counters[C_MISSED] += out[O_MISSED]


@jit
def grant(h, request, slot, out):
    """Phase 2 of one request."""
    sequence, row = sequences_of(h)[slot], table_of(h)[slot]
    total = columns_for(h, request)
    out[O_DEVICE_TOKENS] = out[O_HOST_TOKENS] = 0
    for i in range(out[O_MATCHED]):
        if row[i] != NONE:
            _grant_hit(h, request, row, i, out)
        else:
            out[O_DEVICE_TOKENS] += h[WIDTH]
    tokens, keys, extra, width = request_tokens(request), request_keys(h, request), request_extra(request), h[WIDTH]
    for i in range(out[O_MATCHED], total):
        if has_block(h, request, i, total):
            row[i] = _grant_new(h, request, tokens, keys, extra, width, i, out)
    for i in range(total if h[ACCESSES_CAPACITY] else 0):
        if row[i] != NONE:
            emit_access(h, WILL_READ if i < out[O_MATCHED] else WILL_WRITE, h[STREAM], row[i])
    out[O_CACHED] = out[O_MATCHED] * h[WIDTH] + out[O_PARTIAL]
    out[O_MISSED] = total - out[O_MATCHED]
    out[O_ID] = (np.int64(sequence.generation) << 32) | slot
    if not request[R_RESERVES]:
        _count(h, request, out)
    begin_row(h, sequence, request)
    sequence.length, sequence.blocks = request[R_LENGTH], total
    sequence.committed = sequence.cached = out[O_CACHED]
    sequence.reused = out[O_MATCHED]
    sequence.first = kept_from(h, out[O_MATCHED] * h[WIDTH]) if h[WINDOW] else 0


@jit(forceinline=True)
def begin_row(h, sequence, request):
    """What a new sequence has of its request alone."""
    sequence.live, sequence.failed, sequence.duplicates = RESERVED if request[R_RESERVES] else LIVE, 0, NONE
    sequence.stream, sequence.forked, sequence.kept = h[STREAM], 0, kept_column(h, request)
    sequence.namespace, sequence.root0, sequence.root1 = request[R_NAMESPACE], request[R_ROOT0], request[R_ROOT1]
    sequence.priority, sequence.ttl = request[R_PRIORITY], request[R_TTL]


@jit
def release_sources(h, first):
    """Let go of the host blocks that the call's onboards, from move ``first`` on, read."""
    moves = moves_of(h)
    for i in range(first, h[MOVES]):
        if moves[i, 0] >= h[DEVICE_BLOCKS] and moves[i, 2] == h[WIDTH]:
            let_go(h, moves[i, 0])
