"""Admission: a batch is claimed in every group. Then all that fits gets blocks, or nothing has changed.

Phase 1 claims and counts, which can be undone. In phase 2 claimed blocks are reused, and blocks are taken for the rest.
Nothing there can fail.
"""

from __future__ import annotations

from kvpool.common.jit import inline, jit
from kvpool.common.jit.intrinsics import address_of, call, memcpy
from kvpool.state.index import device_copy, look, partial_match
from kvpool.state.policies.policy import foresee, free_blocks, on_admit, on_hit, overflow, stop_clock, stop_clocks
from kvpool.state.records import (
    DEFAULT_PRIORITY,
    DEVICE,
    EXTRA,
    KEYED,
    LIVE,
    NONE,
    ONBOARD,
    ONBOARDING,
    REFS,
    RESERVED,
    REUSE_GAP,
    SHORT_OF_BLOCKS,
    SHORT_OF_SEQUENCES,
    WITHIN,
    add_reference,
    blocks_of,
    counters_of,
    drop_reference,
    extra_of,
    group_at,
    outcome_at,
    request_at,
    sequences_of,
    table_of,
)
from kvpool.state.requests import (
    columns_for,
    findable,
    finds,
    fresh_blocks,
    has_block,
    has_states,
    kept_column,
    kept_from,
    request_extra,
    request_keys,
    request_tokens,
    retention_at,
    slot_for,
)
from kvpool.state.sequences import refuse
from kvpool.state.tiers import (
    EXPIRIES_PER_CALL,
    STORED,
    UPDATED,
    WILL_READ,
    WILL_WRITE,
    begin,
    copy_content,
    emit,
    emit_access,
    emit_copy,
    expire,
    forget,
    hold,
    let_go,
    record,
    take_device,
    take_for,
    unhold,
)

# -- phase 2: nothing here can fail ----------------------------------------------------------------------


@inline
def write_tokens(group, b, at, tokens, extra, start, count):
    """Note the ids of ``count`` tokens of block ``b``, from its position ``at`` on. The engine writes the bytes."""
    blocks = blocks_of(group)
    memcpy(group.tokens_at + 4 * (b * group.width + at), address_of(tokens) + 4 * start, 4 * count)
    if group.has_extra and (len(extra) > 0 or blocks[b].flags & EXTRA):
        mine, some = extra_of(group), False
        for i in range(at + count):
            if i >= at:
                mine[b, i] = extra[start + i - at] if len(extra) > 0 else 0
            elif not blocks[b].flags & EXTRA:
                mine[b, i] = 0
            some |= mine[b, i] != 0
        if some:
            blocks[b].flags |= EXTRA
    blocks[b].filled = at + count


@jit
def fill(group, requests, out, n, r):
    """Phase 2 of request ``r`` of ``n`` in one group. ``out`` is int64[n, OUTCOME]. Nothing here can fail."""
    request = request_at(requests, r)
    slot = slot_for(group, r)
    if not finds(group):
        call(group.fill_encoded, (group, request, slot, outcome_at(out, r)))
    else:
        _fill_prompt(group, request, slot, out, n, r)
        if has_states(group):
            call(group.note_prompt, (group, request, slot))
        on_admit(group, requests, r, slot)


@jit
def fill_encoded(group, request, slot, out):
    """Take blocks for the encoder's tokens. Nobody else has these blocks, and nothing changes them."""
    blocks, sequence, row = blocks_of(group), sequences_of(group)[slot], table_of(group)[slot]
    total = columns_for(group, request)
    for i in range(total):
        row[i] = take_for(group, request)
        blocks[row[i]].priority, blocks[row[i]].ttl = DEFAULT_PRIORITY, NONE
        emit_access(group, WILL_WRITE, group.stream, row[i])
    out.id = (sequence.generation << 32) | slot
    begin_row(group, sequence, request)
    sequence.length, sequence.blocks = request.encoder, total
    sequence.committed = sequence.cached = sequence.reused = sequence.first = 0


@inline
def _reuse(group, request, b, i):
    """Note a hit on block ``b`` at column ``i`` of the prompt: one use, unless it is for a loader, and the priority and
    ttl of a retention range of the request."""
    blocks = blocks_of(group)
    if not request.reserves:
        record(group, REUSE_GAP, blocks[b].used_at)
        on_hit(group, b)
    in_range, priority, ttl = retention_at(request, i * group.width)
    if in_range and (blocks[b].priority != priority or blocks[b].ttl != ttl):
        blocks[b].priority, blocks[b].ttl = priority, ttl
        emit(group, UPDATED, b)


@jit
def onboard(group, host):
    """Copy the content of a held host block to a device block, publish that, and return it with one reference."""
    blocks = blocks_of(group)
    b = take_device(group)
    copy_content(group, host, b)
    blocks[b].other_copy, blocks[host].other_copy = host, b
    add_reference(blocks, b)
    emit_copy(group, host, b, group.width, ONBOARD)
    emit(group, STORED, b)
    counters_of(group).onboarded_blocks += 1
    return b


@jit
def _onboard_for_all(group, out, n, r, i):
    """Onboard the host block that request ``r`` hits in column ``i``. All requests of the batch that hold it hold the
    device block from now on. So later evictions can use the host block: their copies come after the onboard."""
    blocks, host = blocks_of(group), table_of(group)[slot_for(group, r), i]
    blocks[host].flags &= ~ONBOARDING
    b = onboard(group, host)
    table_of(group)[slot_for(group, r), i] = b
    let_go(group, host)
    other = 0
    while other < n and blocks[host].ref_word & REFS:
        theirs, row = outcome_at(out, other), table_of(group)[slot_for(group, other)]
        if i < theirs.matched and row[i] == host:
            row[i] = b
            add_reference(blocks, b)
            let_go(group, host)
        if theirs.source == host:
            theirs.source = b
            add_reference(blocks, b)
            let_go(group, host)
        other += 1


@inline
def _fill_new(group, request, tokens, keys, extra, width, i, out):
    """Give column ``i``, which is not a full hit, a block: a fresh one, a copy of the partial source, or the source
    itself."""
    blocks = blocks_of(group)
    partial = i == out.matched and out.source != NONE
    if partial and out.takes:
        b = out.source
        forget(group, b)
        blocks[b].flags, blocks[b].uses = 0, 0
        out.source = NONE
    else:
        b = take_device(group)
        add_reference(blocks, b)
        if partial and out.partial:  # no partial match if another group has given its own up
            emit_copy(group, out.source, b, out.partial, WITHIN if out.source < group.device_blocks else ONBOARD)
            counters_of(group).copied_blocks += 1
    start = i * width
    count = min(width, len(tokens) - start)
    write_tokens(group, b, 0, tokens, extra, start, count)
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
def _count(group, request, out):
    counters = counters_of(group)
    if request.fresh:  # a request that may not reuse does not count as a miss
        counters.bypassed_tokens += request.length
        return
    counters.prompt_tokens += request.length
    counters.reused_device_tokens += out.device_tokens
    counters.reused_host_tokens += out.host_tokens
    counters.reused_device_blocks += out.device_tokens // group.width
    counters.reused_host_blocks += out.host_tokens // group.width
    counters.partial_tokens += out.partial
    counters.partial_blocks += 1 if out.partial else 0
    counters.missed_blocks += out.missed


@jit
def _fill_prompt(group, request, slot, batch, n, r):
    sequence, row, out = sequences_of(group)[slot], table_of(group)[slot], outcome_at(batch, r)
    total = columns_for(group, request)
    for i in range(out.matched):
        if row[i] >= group.device_blocks:
            _onboard_for_all(group, batch, n, r, i)
        if row[i] != NONE:
            _reuse(group, request, row[i], i)
    tokens, keys, extra, width = (
        request_tokens(request),
        request_keys(group, request),
        request_extra(request),
        group.width,
    )
    for i in range(out.matched, total):
        if has_block(group, request, i, total):
            row[i] = _fill_new(group, request, tokens, keys, extra, width, i, out)
            foresee(group, row, i)
    for i in range(total if group.accesses_capacity else 0):
        if row[i] != NONE:
            emit_access(group, WILL_READ if i < out.matched else WILL_WRITE, group.stream, row[i])
    out.id = (sequence.generation << 32) | slot
    if not request.reserves:
        _count(group, request, out)
    begin_row(group, sequence, request)
    sequence.length, sequence.blocks = request.length, total
    sequence.committed = sequence.cached = out.cached
    sequence.reused, sequence.from_host = out.matched, out.host_tokens
    sequence.first = kept_from(group, out.matched * group.width) if group.window else 0


@inline
def begin_row(group, sequence, request):
    """Set the fields of a new sequence that depend on its request alone."""
    sequence.live, sequence.failed, sequence.duplicates = RESERVED if request.reserves else LIVE, 0, NONE
    sequence.stream, sequence.forked, sequence.kept = group.stream, 0, kept_column(group, request)
    sequence.namespace, sequence.root0, sequence.root1 = request.namespace, request.root0, request.root1
    sequence.priority, sequence.ttl = request.priority, request.ttl
    sequence.private, sequence.prompt = request.private, request.length
    sequence.from_host = sequence.dropped = sequence.recomputed = 0


# -- phase 1, and the whole ------------------------------------------------------------------------------


@jit
def _hold_matches(group, row, out, matched, source, n):
    """Phase 1 of one request: hold the ``matched`` blocks of its row, and the partial source, of which ``n`` tokens
    will be copied.

    A host block stands in ``row`` for the device block that it will need.
    """
    blocks = blocks_of(group)
    onboards = host = 0
    for i in range(matched):
        if row[i] == NONE:
            continue
        b = device_copy(group, row[i])
        if b == NONE:
            b = row[i]
            host += 1
            if not blocks[b].flags & ONBOARDING:
                blocks[b].flags |= ONBOARDING
                onboards += 1
        row[i] = b
        hold(group, b)
    if source != NONE:
        hold(group, source)
    out.matched, out.onboards, out.host_tokens = matched, onboards, host * group.width
    out.source, out.partial, out.takes = source, n, 0


@jit
def _unhold_matches(group, row, out):
    if out.source != NONE:
        unhold(group, out.source)
    for i in range(out.matched - 1, -1, -1):
        if row[i] == NONE:
            continue
        blocks_of(group)[row[i]].flags &= ~ONBOARDING
        unhold(group, row[i])
        row[i] = NONE


@jit
def _sole_claims(group, out, n, r):
    """How many of the first ``n`` requests hold the partial source of request r, if that is a device block which nobody
    else holds. Else 0."""
    source = outcome_at(out, r).source
    if source == NONE or source >= group.device_blocks:
        return 0
    claims = 0
    for i in range(n):
        if outcome_at(out, i).source == source:
            claims += 1
    return claims if blocks_of(group)[source].ref_word == claims else 0


@jit
def _needed(group, requests, out, n):
    need = 0
    for r in range(n):
        request = request_at(requests, r)
        need += (
            fresh_blocks(group, request, outcome_at(out, r).matched, columns_for(group, request))
            + outcome_at(out, r).onboards
        )
    return need


@jit
def _spare(group, out, n):
    """Device blocks that only the first ``n`` requests hold, as partial sources."""
    count = 0
    for r in range(n):
        first = outcome_at(out, r).source != NONE
        for i in range(r if first else 0):
            first &= outcome_at(out, i).source != outcome_at(out, r).source
        if first and _sole_claims(group, out, n, r) > 0:
            count += 1
    return count


@jit
def _fits(group, requests, out, n):
    """Whether the first ``n`` requests fit, perhaps without their partial matches. Changes nothing."""
    need, free = _needed(group, requests, out, n), free_blocks(group, DEVICE)
    if need <= free:
        return True
    group.detail, group.bound = need, free + _spare(group, out, n)
    return need <= group.bound


@jit
def blocks_taken(group, requests, out, n, free):
    """How many device blocks ``n`` claimed requests take of those that were free before the claims, which were
    ``free``. Changes nothing."""
    return _needed(group, requests, out, n) + free - free_blocks(group, DEVICE) - _spare(group, out, n)


@jit
def _give_up(group, requests, out, n):
    """When blocks are short, the last requests use their partial source as their own block. If an earlier request needs
    the source too, they drop it."""
    short = _needed(group, requests, out, n) - free_blocks(group, DEVICE)
    for r in range(n - 1, -1, -1):
        if short <= 0:
            return
        claims = _sole_claims(group, out, n, r)
        if claims == 1:
            outcome_at(out, r).takes = 1
            short -= 1
        elif claims > 1:
            drop_reference(blocks_of(group), outcome_at(out, r).source)
            outcome_at(out, r).source, outcome_at(out, r).partial = NONE, 0


@jit
def _write_results(group, request, out):
    """Write the results of a claimed request in one group."""
    if finds(group):
        out.cached = out.matched * group.width + out.partial
        out.device_tokens = out.matched * group.width - out.host_tokens
        out.missed = columns_for(group, request) - out.matched
    else:
        out.cached = out.device_tokens = out.partial = out.missed = 0


@jit
def _untime(group, row, out):
    """Remove claimed blocks from the expiries. This waits until the batch is known to fit, since a heap cannot be
    undone to the byte."""
    stop_clocks(group, row, out.matched)
    if out.source != NONE:
        stop_clock(group, out.source)


@jit
def _claim(groups, request, slot, out, r):
    """Phase 1 of one request in all groups: hold in each group what all groups can reuse."""
    group = group_at(groups, 0)
    limit = findable(request) // group.width
    most = look(groups, request, limit, group.table_at + 4 * slot * group.columns, 4 * group.sequences * group.columns)
    least = group.width
    for g in range(len(groups)):
        group = group_at(groups, g)
        if finds(group):
            source, n = partial_match(group, request, most)
            outcome_at(out[g], r).source, least = source, min(least, n)
    for g in range(len(groups)):
        group, reusable, source = group_at(groups, g), 0, NONE
        if finds(group):
            reusable, source = most, outcome_at(out[g], r).source if least > 0 else source
        _hold_matches(group, table_of(group)[slot], outcome_at(out[g], r), reusable, source, least)


@jit
def _short(groups, requests, out, n):
    """A group without room for the first ``n`` claimed requests, or NONE."""
    for g in range(len(groups)):
        if not _fits(group_at(groups, g), requests, out[g], n):
            return g
    return NONE


@jit
def _give_up_partials(groups, requests, out, n):
    """When blocks are short, a partial match that one group gives up is given up in the others too."""
    for g in range(len(groups)):
        _give_up(group_at(groups, g), requests, out[g], n)
    for r in range(n if len(groups) > 1 else 0):
        least = group_at(groups, 0).width
        for g in range(len(groups)):
            if finds(group_at(groups, g)):
                least = min(least, outcome_at(out[g], r).partial)
        for g in range(len(groups)):
            outcome_at(out[g], r).partial = least


@jit
def _overflow(group, requests, out, n):
    """How many contents the host forgets for a claimed batch. Changes nothing."""
    onboards, takes = 0, _needed(group, requests, out, n)
    for r in range(n):
        onboards += outcome_at(out, r).onboards
        takes -= outcome_at(out, r).takes
    return overflow(group, takes, onboards)


@jit
def _fill(groups, requests, out, n, now_ms):
    """Phase 2: take blocks for claimed requests that fit. Nothing here can fail."""
    for g in range(len(groups)):
        group = group_at(groups, g)
        for r in range(n):
            _untime(group, table_of(group)[slot_for(group, r)], outcome_at(out[g], r))
        begin(group, now_ms)
        expire(group, EXPIRIES_PER_CALL)
        group.overflow = _overflow(group, requests, out[g], n)
        for r in range(n):
            fill(group, requests, out[g], n, r)
        group.free_rows -= n
        group.overflow = 0
        for r in range(n):
            if outcome_at(out[g], r).source != NONE:
                let_go(group, outcome_at(out[g], r).source)


@jit
def unclaim(groups, out, first, last):
    """Undo phase 1 of the requests [first, last), which are the last of a batch, to the byte."""
    for r in range(last - 1, first - 1, -1):
        for g in range(len(groups)):
            group = group_at(groups, g)
            _unhold_matches(group, table_of(group)[slot_for(group, r)], outcome_at(out[g], r))


@jit
def claim(groups, requests, out, allow_partial):
    """Phase 1 of a batch, or with ``allow_partial`` of the largest number of its first requests that fits. Writes the
    results of each request to ``out``, except its id. Returns and refuses as ``admit`` does."""
    n = len(requests)
    first = group_at(groups, 0)
    reason, group = SHORT_OF_BLOCKS, 0
    if n > first.free_rows:
        first.detail, first.bound = n, first.free_rows
        if not allow_partial:
            return refuse(groups, 0, SHORT_OF_SEQUENCES)
        n, reason = first.free_rows, SHORT_OF_SEQUENCES
    for r in range(n):
        _claim(groups, request_at(requests, r), slot_for(first, r), out, r)
    while n > 0:
        short = _short(groups, requests, out, n)
        if short == NONE:
            break
        reason, group = SHORT_OF_BLOCKS, short
        last = n if allow_partial else 1
        unclaim(groups, out, last - 1, n)
        n = last - 1
    if n == 0:
        return 0 if allow_partial or len(requests) == 0 else refuse(groups, group, reason)
    _give_up_partials(groups, requests, out, n)
    for g in range(len(groups)):
        for r in range(n):
            _write_results(group_at(groups, g), request_at(requests, r), outcome_at(out[g], r))
    return n


@jit
def admit(groups, requests, out, now_ms, allow_partial):
    """Admit a batch. ``requests`` int64[n, REQUEST], none longer than a row, ``out`` int64[groups, n, OUTCOME].

    Returns how many requests were admitted. Or returns SHORT_OF_BLOCKS or SHORT_OF_SEQUENCES; then ``detail`` has how
    many are needed, ``bound`` how many are free, and nothing has changed. With ``allow_partial``, admits the largest
    number of first requests that fits.
    """
    n = claim(groups, requests, out, allow_partial)
    if n > 0:
        _fill(groups, requests, out, n, now_ms)
    return n
