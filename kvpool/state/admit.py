"""Admission: a batch is claimed in every group. Then all that fits gets blocks, or nothing has changed.

Phase 1 claims and counts, which can be undone. In phase 2 claimed blocks are reused, and blocks are taken for the rest.
Nothing there can fail.
"""

from __future__ import annotations

import numpy as np

from kvpool.common.jit import jit
from kvpool.common.jit.intrinsics import address_of, call, memcpy
from kvpool.state.index import agree, device_copy, look, partial_match, same_tokens
from kvpool.state.policies.policy import foresee, free_blocks, on_admit, on_hit, overflow, stop_clock
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
    head,
    outcome_at,
    request_at,
    row_extra_of,
    row_tokens_of,
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
    keeps_state,
    kept_column,
    kept_from,
    parent_of,
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
    emit_move,
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


@jit(forceinline=True)
def write_tokens(h, b, at, tokens, extra, start, count):
    """Note the ids of ``count`` tokens of block ``b``, from its position ``at`` on. The engine writes the bytes."""
    blocks = blocks_of(h)
    memcpy(h.tokens_at + 4 * (b * h.width + at), address_of(tokens) + 4 * start, 4 * count)
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
    request = request_at(requests, r)
    slot = np.int64(slot_for(h, r))
    if not finds(h):
        call(h.fill_encoded, (h, request, slot, outcome_at(out, r)))
    else:
        _fill_prompt(h, request, slot, out, n, r)
        if has_states(h):
            call(h.note_prompt, (h, request, slot))
        on_admit(h, requests, r, slot)


@jit
def fill_encoded(h, request, slot, out):
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
    in_range, priority, ttl = retention_at(request, i * h.width)
    if in_range and (blocks[b].priority != priority or blocks[b].ttl != ttl):
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
            foresee(h, row, i)
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


# -- phase 1, and the whole ------------------------------------------------------------------------------


@jit
def _hold_matches(h, row, out, matched, source, n):
    """Phase 1 of one request: hold the ``matched`` blocks of its row, and the partial source, of which ``n`` tokens
    will be copied.

    A host block stands in ``row`` for the device block that it will need.
    """
    blocks = blocks_of(h)
    onboards = host = 0
    for i in range(matched):
        if row[i] == NONE:
            continue
        b = device_copy(h, np.int64(row[i]))
        if b == NONE:
            b = np.int64(row[i])
            host += 1
            if not blocks[b].flags & ONBOARDING:
                blocks[b].flags |= ONBOARDING
                onboards += 1
        row[i] = b
        hold(h, b)
    if source != NONE:
        hold(h, source)
    out.matched, out.onboards, out.source, out.partial, out.takes = matched, onboards, source, n, 0
    out.host_tokens = host * h.width


@jit
def _unhold_matches(h, row, out):
    if out.source != NONE:
        unhold(h, out.source)
    for i in range(out.matched - 1, -1, -1):
        if row[i] == NONE:
            continue
        blocks_of(h)[row[i]].flags &= ~ONBOARDING
        unhold(h, np.int64(row[i]))
        row[i] = NONE


@jit
def _sole_claims(h, out, n, r):
    """How many of the first ``n`` requests hold the partial source of request r, if that is a device block which nobody
    else holds. Else 0."""
    source = outcome_at(out, r).source
    if source == NONE or source >= h.device_blocks:
        return 0
    claims = 0
    for i in range(n):
        if outcome_at(out, i).source == source:
            claims += 1
    return claims if blocks_of(h)[source].word == claims else 0


@jit
def _needed(h, requests, out, n):
    need = 0
    for r in range(n):
        request = request_at(requests, r)
        need += (
            fresh_blocks(h, request, outcome_at(out, r).matched, columns_for(h, request)) + outcome_at(out, r).onboards
        )
    return need


@jit
def _spare(h, out, n):
    """Device blocks that only the first ``n`` requests hold, as partial sources."""
    count = 0
    for r in range(n):
        first = outcome_at(out, r).source != NONE
        for i in range(r if first else 0):
            first &= outcome_at(out, i).source != outcome_at(out, r).source
        if first and _sole_claims(h, out, n, r) > 0:
            count += 1
    return count


@jit
def _fits(h, requests, out, n):
    """Whether the first ``n`` requests fit, perhaps without their partial matches. Changes nothing."""
    need, free = _needed(h, requests, out, n), free_blocks(h, DEVICE)
    if need <= free:
        return True
    h.detail, h.bound = need, free + _spare(h, out, n)
    return need <= h.bound


@jit
def blocks_taken(h, requests, out, n, free):
    """How many device blocks ``n`` claimed requests take of those that were free before the claims, which were
    ``free``. Changes nothing."""
    return _needed(h, requests, out, n) + free - free_blocks(h, DEVICE) - _spare(h, out, n)


@jit
def _give_up(h, requests, out, n):
    """When blocks are short, the last requests use their partial source as their own block. If an earlier request needs
    the source too, they drop it."""
    short = _needed(h, requests, out, n) - free_blocks(h, DEVICE)
    for r in range(n - 1, -1, -1):
        if short <= 0:
            return
        claims = _sole_claims(h, out, n, r)
        if claims == 1:
            outcome_at(out, r).takes = 1
            short -= 1
        elif claims > 1:
            drop_reference(blocks_of(h), outcome_at(out, r).source)
            outcome_at(out, r).source, outcome_at(out, r).partial = NONE, 0


@jit
def _tell(h, request, out):
    """Write the results of a claimed request in one group."""
    if finds(h):
        out.cached = out.matched * h.width + out.partial
        out.device_tokens = out.matched * h.width - out.host_tokens
        out.missed = columns_for(h, request) - out.matched
    else:
        out.cached = out.device_tokens = out.partial = out.missed = 0


@jit
def _untime(h, row, out):
    """Remove claimed blocks from the expiries. This waits until the batch is known to fit, since a heap cannot be
    undone to the byte."""
    for i in range(out.matched):
        if row[i] != NONE:
            stop_clock(h, np.int64(row[i]))
    if out.source != NONE:
        stop_clock(h, out.source)


@jit
def _claim(heads, request, slot, out, r):
    """Phase 1 of one request in all groups: hold in each group what all groups can reuse."""
    h = head(heads, 0)
    limit = findable(request) // h.width
    most = look(heads, request, limit, h.table_at + 4 * slot * h.columns, 4 * h.sequences * h.columns)
    least = h.width
    for g in range(heads.shape[0]):
        h = head(heads, g)
        if finds(h):
            source, n = partial_match(h, request, most)
            outcome_at(out[g], r).source, least = source, min(least, n)
    for g in range(heads.shape[0]):
        h, reusable, source = head(heads, g), np.int64(0), np.int64(NONE)
        if finds(h):
            reusable, source = most, outcome_at(out[g], r).source if least > 0 else source
        _hold_matches(h, table_of(h)[slot], outcome_at(out[g], r), reusable, source, least)


@jit
def _short(heads, requests, out, n):
    """A group without room for the first ``n`` claimed requests, or NONE."""
    for g in range(heads.shape[0]):
        if not _fits(head(heads, g), requests, out[g], n):
            return g
    return NONE


@jit
def _give_up_partials(heads, requests, out, n):
    """When blocks are short, a partial match that one group gives up is given up in the others too."""
    for g in range(heads.shape[0]):
        _give_up(head(heads, g), requests, out[g], n)
    for r in range(n if heads.shape[0] > 1 else 0):
        least = np.int64(head(heads, 0).width)
        for g in range(heads.shape[0]):
            if finds(head(heads, g)):
                least = min(least, outcome_at(out[g], r).partial)
        for g in range(heads.shape[0]):
            outcome_at(out[g], r).partial = least


@jit
def _overflow(h, requests, out, n):
    """How many contents the host forgets for a claimed batch. Changes nothing."""
    onboards, takes = np.int64(0), _needed(h, requests, out, n)
    for r in range(n):
        onboards += outcome_at(out, r).onboards
        takes -= outcome_at(out, r).takes
    return overflow(h, takes, onboards)


@jit
def _fill(heads, requests, out, n, now_ms):
    """Phase 2: take blocks for claimed requests that fit. Nothing here can fail."""
    for g in range(heads.shape[0]):
        h = head(heads, g)
        for r in range(n):
            _untime(h, table_of(h)[slot_for(h, r)], outcome_at(out[g], r))
        begin(h, now_ms)
        expire(h, EXPIRIES_PER_CALL)
        h.overflow = _overflow(h, requests, out[g], n)
        for r in range(n):
            fill(h, requests, out[g], n, r)
        h.free_rows -= n
        h.overflow = 0
        for r in range(n):
            if outcome_at(out[g], r).source != NONE:
                let_go(h, outcome_at(out[g], r).source)


@jit
def unclaim(heads, out, first, last):
    """Undo phase 1 of the requests [first, last), which are the last of a batch, to the byte."""
    for r in range(last - 1, first - 1, -1):
        for g in range(heads.shape[0]):
            h = head(heads, g)
            _unhold_matches(h, table_of(h)[slot_for(h, r)], outcome_at(out[g], r))


@jit
def claim(heads, requests, out, allow_partial):
    """Phase 1 of a batch, or with ``allow_partial`` of the largest number of its first requests that fits. Writes the
    results of each request to ``out``, except its id. Returns and refuses as ``admit`` does."""
    n = requests.shape[0]
    first = head(heads, 0)
    reason, group = SHORT_OF_BLOCKS, 0
    if n > first.free_rows:
        first.detail, first.bound = n, first.free_rows
        if not allow_partial:
            return refuse(heads, 0, SHORT_OF_SEQUENCES)
        n, reason = first.free_rows, SHORT_OF_SEQUENCES
    for r in range(n):
        _claim(heads, request_at(requests, r), slot_for(first, r), out, r)
    while n > 0:
        short = _short(heads, requests, out, n)
        if short == NONE:
            break
        reason, group = SHORT_OF_BLOCKS, short
        last = n if allow_partial else 1
        unclaim(heads, out, last - 1, n)
        n = last - 1
    if n == 0:
        return np.int64(0) if allow_partial or requests.shape[0] == 0 else refuse(heads, group, reason)
    _give_up_partials(heads, requests, out, n)
    for g in range(heads.shape[0]):
        for r in range(n):
            _tell(head(heads, g), request_at(requests, r), outcome_at(out[g], r))
    return np.int64(n)


@jit
def admit(heads, requests, out, now_ms, allow_partial):
    """Admit a batch. ``requests`` int64[n, REQUEST], none longer than a row, ``out`` int64[groups, n, OUTCOME].

    Returns how many requests were admitted. Or returns SHORT_OF_BLOCKS or SHORT_OF_SEQUENCES; then ``detail`` has how
    many are needed, ``bound`` how many are free, and nothing has changed. With ``allow_partial``, admits the largest
    number of first requests that fits.
    """
    n = claim(heads, requests, out, allow_partial)
    if n > 0:
        _fill(heads, requests, out, n, now_ms)
    return n


# -- what an admission would do now --------------------------------------------------------------------


@jit
def plan(heads, requests, out, blocks, computing):
    """Plan the admission of as many of the first requests as fit. Returns how many.

    ``out`` int64[groups, n, OUTCOME] is as after an admission, without ids. ``blocks`` int64[groups] gets the free
    device blocks that these requests take. ``computing`` int64[n, 2] gets two numbers for each request. The first is
    the live sequence that is computing the most tokens with which the prompt begins and which it lacks, or NONE. The
    second is how many tokens the prompt could reuse after that sequence's commit.
    """
    for g in range(heads.shape[0]):
        blocks[g] = free_blocks(head(heads, g), DEVICE)
    n = claim(heads, requests, out, True)
    for g in range(heads.shape[0]):
        blocks[g] = blocks_taken(head(heads, g), requests, out[g], n, blocks[g])
    unclaim(heads, out, 0, n)
    told = 0
    while not finds(head(heads, told)):
        told += 1
    for r in range(n):
        _find_computing(heads, told, request_at(requests, r), outcome_at(out[told], r).matched, computing[r])
    return n


@jit
def _found_in(h, g, most, slot):
    """The largest number of leading columns, at most ``most``, that one group finds. In a group with states, a state
    must be kept after the last of them."""
    kept, row = sequences_of(h)[slot].kept, table_of(h)[slot]
    while has_states(h) and most > 0 and not (row[most - 1] != NONE and keeps_state(h, most - 1, kept)):
        most -= 1
    return most


_shared_columns = agree(_found_in)
"""(heads, most, slot): the largest number of leading columns that every group finds once a sequence has committed
them."""


@jit
def _find_computing(heads, told, request, matched, out):
    """The numbers of ``computing`` for one request, of which all groups can reuse ``matched`` blocks, into ``out``
    int64[2]. Group ``told`` knows the tokens of sequences."""
    h = head(heads, told)
    sequences = sequences_of(h)
    out[0], out[1] = NONE, 0
    least = matched + 1
    for slot in range(h.sequences):
        sequence = sequences[slot]
        # Fields that every step reads rule out most sequences.
        if sequence.live != LIVE or sequence.failed or sequence.private or sequence.committed >= sequence.length:
            continue
        if sequence.length < least * h.width or sequence.namespace != request.namespace:
            continue
        columns = _shared_columns(heads, _shared_tokens(h, request, slot) // h.width, slot)
        if columns >= least and columns * h.width > sequence.committed:
            out[0], out[1] = (np.int64(sequence.generation) << 32) | slot, columns * h.width
            least = columns + 1


@jit
def _shared_tokens(h, request, slot):
    """How many leading tokens a prompt could reuse that a live sequence has too. 0 if they differ within the committed
    tokens."""
    sequence, row = sequences_of(h)[slot], table_of(h)[slot]
    full = sequence.committed // h.width
    end = min(findable(request), np.int64(sequence.length))
    if full * h.width >= end or not _begins_with(h, request, slot, full):
        return np.int64(0)
    tokens, extra = request_tokens(request), request_extra(request)
    if has_states(h):
        return _same_noted(h, slot, tokens, extra, full * h.width, end)
    same, more = full * h.width, h.width
    while same < end and more == h.width:
        more = same_tokens(h, np.int64(row[same // h.width]), tokens, extra, same, min(h.width, end - same))
        same += more
    return same


@jit
def _begins_with(h, request, slot, full):
    """Whether the first ``full`` blocks of a prompt are the blocks that a sequence has committed."""
    sequence = sequences_of(h)[slot]
    if has_states(h):
        key0, key1 = sequence.chain0, sequence.chain1
    elif full == 0:
        key0, key1 = sequence.root0, sequence.root1
    else:
        last = blocks_of(h)[table_of(h)[slot, full - 1]]
        key0, key1 = last.key0, last.key1
    wanted0, wanted1 = parent_of(h, request, full)
    return key0 == wanted0 and key1 == wanted1


@jit
def _same_noted(h, slot, tokens, extra, start, end):
    """The first position in [start, end) at which a prompt differs from the tokens that are noted beside a row, or
    ``end``."""
    noted, has = row_tokens_of(h)[slot], extra.shape[0] > 0
    for i in range(start, end):
        if noted[i] != tokens[i]:
            return i
        if has or h.has_extra:
            mine = row_extra_of(h)[slot, i] if h.has_extra else 0
            if mine != (extra[i] if has else 0):
                return i
    return end
