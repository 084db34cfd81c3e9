"""Phase 2 of an admission: claimed blocks are reused, and blocks are taken for the rest. Nothing here can fail."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.accesses import WILL_READ, WILL_WRITE, emit_access
from kvpool.state.kinds import columns_for, finds, has_block, has_states, kept_column, kept_from
from kvpool.state.policy import on_admit, on_hit
from kvpool.state.records import (
    DEFAULT_PRIORITY,
    EXTRA,
    KEYED,
    LIVE,
    NONE,
    ONBOARD,
    ONBOARDING,
    REFS,
    RESERVED,
    REUSE_GAP,
    WITHIN,
    add_reference,
    blocks_of,
    counters_of,
    extra_of,
    outcome_at,
    request_at,
    sequences_of,
    table_of,
    tokens_of,
)
from kvpool.state.requests import request_extra, request_keys, request_tokens, retention_at, slot_for
from kvpool.state.ring import STORED, UPDATED, emit
from kvpool.state.row_tokens import note_prompt
from kvpool.state.tiers import copy_content, emit_move, forget, let_go, record, take_device, take_for


@jit(forceinline=True)
def write_tokens(h, b, at, tokens, extra, start, count):
    """Note the ids of ``count`` tokens of block ``b``, from its position ``at`` on. The engine writes the bytes."""
    blocks, own = blocks_of(h), tokens_of(h)
    for i in range(count):
        own[b, at + i] = tokens[start + i]
    if h.has_extra and (extra.shape[0] > 0 or blocks[b].flags & EXTRA):
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
def fill(h, requests, out, n, r):
    """Phase 2 of request ``r`` of ``n`` in one group. ``out`` is int64[n, OUTCOME]. Nothing here can fail."""
    request, slot = request_at(requests, r), slot_for(h, r)
    if not finds(h):
        _fill_encoded(h, request, slot, outcome_at(out, r))
    else:
        _fill_prompt(h, request, slot, out, n, r)
        if has_states(h):
            note_prompt(h, request, slot)
        on_admit(h, requests, r, slot)


@jit
def _fill_encoded(h, request, slot, out):
    """Take blocks for the encoder's tokens. Nobody else has these blocks, and nothing changes them."""
    blocks, sequence, row = blocks_of(h), sequences_of(h)[slot], table_of(h)[slot]
    total = columns_for(h, request)
    for i in range(total):
        row[i] = take_for(h, request)
        blocks[row[i]].priority, blocks[row[i]].ttl = DEFAULT_PRIORITY, NONE
        emit_access(h, WILL_WRITE, h.stream, np.int64(row[i]))
    out.id = (np.int64(sequence.generation) << 32) | slot
    begin_row(h, sequence, request)
    sequence.length, sequence.blocks = request.encoder, total
    sequence.committed = sequence.cached = sequence.reused = sequence.first = 0


@jit(forceinline=True)
def _reuse(h, request, b, i):
    """Note a hit on block ``b`` at column ``i`` of the prompt: one use, unless a loader asks, and the priority and ttl
    of a retention range of the request."""
    blocks = blocks_of(h)
    if not request.reserves:
        record(h, REUSE_GAP, blocks[b].used_at)
        on_hit(h, b)
    given, priority, ttl = retention_at(request, i * h.width)
    if given and (blocks[b].priority != priority or blocks[b].ttl != ttl):
        blocks[b].priority, blocks[b].ttl = priority, ttl
        emit(h, UPDATED, b)


@jit
def onboard(h, host):
    """Copy the content of a held host block to a device block, publish that, and return it with one reference."""
    blocks = blocks_of(h)
    b = take_device(h)
    copy_content(h, host, b)
    blocks[b].other_copy, blocks[host].other_copy = host, b
    add_reference(blocks, b)
    emit_move(h, host, b, h.width, ONBOARD)
    emit(h, STORED, b)
    counters_of(h).onboarded_blocks += 1
    return b


@jit
def _onboard_for_all(h, out, n, r, i):
    """Onboard the host block that request ``r`` hits in column ``i``. All requests of the batch that hold it hold the
    device block from now on. So later evictions can use the host block: their copies come after the onboard."""
    blocks, host = blocks_of(h), np.int64(table_of(h)[slot_for(h, r), i])
    blocks[host].flags &= ~ONBOARDING
    b = onboard(h, host)
    table_of(h)[slot_for(h, r), i] = b
    let_go(h, host)
    other = 0
    while other < n and blocks[host].word & REFS:
        theirs, row = outcome_at(out, other), table_of(h)[slot_for(h, other)]
        if i < theirs.matched and row[i] == host:
            row[i] = b
            add_reference(blocks, b)
            let_go(h, host)
        if theirs.source == host:
            theirs.source = b
            add_reference(blocks, b)
            let_go(h, host)
        other += 1


@jit(forceinline=True)
def _fill_new(h, request, tokens, keys, extra, width, i, out):
    """Give column ``i``, which is no full hit, a block: a fresh one, a copy of the partial source, or the source
    itself."""
    blocks = blocks_of(h)
    partial = i == out.matched and out.source != NONE
    if partial and out.takes:
        b = out.source
        forget(h, b, NONE)
        blocks[b].flags, blocks[b].uses = 0, 0
        out.source = NONE
    else:
        b = take_device(h)
        add_reference(blocks, b)
        if partial and out.partial:  # no partial match if another group has given its own up
            emit_move(h, out.source, b, out.partial, WITHIN if out.source < h.device_blocks else ONBOARD)
            counters_of(h).copied_blocks += 1
    start = i * width
    count = min(width, tokens.shape[0] - start)
    write_tokens(h, b, 0, tokens, extra, start, count)
    if i > 0:
        blocks[b].parent0, blocks[b].parent1 = keys[i - 1, 0], keys[i - 1, 1]
    else:
        blocks[b].parent0, blocks[b].parent1 = request.root0, request.root1
    blocks[b].namespace = request.namespace
    if count == width:
        blocks[b].key0, blocks[b].key1 = keys[i, 0], keys[i, 1]
        blocks[b].flags |= KEYED
    _, blocks[b].priority, blocks[b].ttl = retention_at(request, start)
    return b


@jit
def _count(h, request, out):
    counters = counters_of(h)
    if request.fresh:  # a request that reuses nothing says nothing about the cache
        counters.bypassed_tokens += request.length
        return
    counters.prompt_tokens += request.length
    counters.reused_device_tokens += out.device_tokens
    counters.reused_host_tokens += out.host_tokens
    counters.reused_device_blocks += out.device_tokens // h.width
    counters.reused_host_blocks += out.host_tokens // h.width
    counters.partial_tokens += out.partial
    counters.partial_blocks += 1 if out.partial else 0
    counters.missed_blocks += out.missed


@jit
def _fill_prompt(h, request, slot, batch, n, r):
    sequence, row, out = sequences_of(h)[slot], table_of(h)[slot], outcome_at(batch, r)
    total = columns_for(h, request)
    for i in range(out.matched):
        if row[i] >= h.device_blocks:
            _onboard_for_all(h, batch, n, r, i)
        if row[i] != NONE:
            _reuse(h, request, np.int64(row[i]), i)
    tokens, keys, extra, width = request_tokens(request), request_keys(h, request), request_extra(request), h.width
    for i in range(out.matched, total):
        if has_block(h, request, i, total):
            row[i] = _fill_new(h, request, tokens, keys, extra, width, i, out)
    for i in range(total if h.accesses_capacity else 0):
        if row[i] != NONE:
            emit_access(h, WILL_READ if i < out.matched else WILL_WRITE, h.stream, np.int64(row[i]))
    out.id = (np.int64(sequence.generation) << 32) | slot
    if not request.reserves:
        _count(h, request, out)
    begin_row(h, sequence, request)
    sequence.length, sequence.blocks = request.length, total
    sequence.committed = sequence.cached = out.cached
    sequence.reused, sequence.from_host = out.matched, out.host_tokens
    sequence.first = kept_from(h, out.matched * h.width) if h.window else 0


@jit(forceinline=True)
def begin_row(h, sequence, request):
    """Set the fields of a new sequence that depend on its request alone."""
    sequence.live, sequence.failed, sequence.duplicates = RESERVED if request.reserves else LIVE, 0, NONE
    sequence.stream, sequence.forked, sequence.kept = h.stream, 0, kept_column(h, request)
    sequence.namespace, sequence.root0, sequence.root1 = request.namespace, request.root0, request.root1
    sequence.priority, sequence.ttl = request.priority, request.ttl
    sequence.private, sequence.prompt = request.private, request.length
    sequence.from_host = sequence.dropped = sequence.recomputed = 0
