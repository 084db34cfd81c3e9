"""A request as jitted code sees it, and what of it is cached, looked up without a change."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.atomics import address_of, array_at
from kvpool.state.blocks import (
    ATTENTION,
    CHILD_BUCKETS,
    CROSS,
    DEFAULT_PRIORITY,
    GUARD,
    KIND,
    NONE,
    RECURRENT,
    SECRET0,
    SECRET1,
    SNAPSHOT,
    WIDTH,
)
from kvpool.state.hashing import block_key
from kvpool.state.prefix import best_child, device_copy, find

# One request: addresses of its tokens (int32), keys (int64[full blocks, 2]), extra ids (int64, 0 = none) and retention ranges
# (int64[n, 4]: start, end, priority, ttl); ids and digests; the priority and ttl of what it decodes; whether it is a loader's; the length
# of the encoder's input, for cross attention.
(
    R_TOKENS, R_LENGTH, R_KEYS, R_EXTRA, R_NAMESPACE, R_ROOT0, R_ROOT1, R_RANGES, R_RANGE_COUNT, R_PRIORITY, R_TTL,
    R_RESERVES, R_ENCODER, REQUEST,
) = range(14)  # fmt: skip
# What the call says of each request. The last ones are the call's own notes between its phases.
(
    O_ID, O_CACHED, O_DEVICE_TOKENS, O_HOST_TOKENS, O_PARTIAL, O_MISSED, O_MATCHED, O_ONBOARDS, O_SOURCE, O_TAKES, OUTCOME,
) = range(11)  # fmt: skip


@jit(inline="always")
def request_tokens(request):
    return array_at(request[R_TOKENS], (request[R_LENGTH],), np.int32)


@jit(inline="always")
def request_keys(h, request):
    return array_at(request[R_KEYS], (request[R_LENGTH] // h[WIDTH], 2), np.int64)


@jit(inline="always")
def request_extra(request):
    return array_at(request[R_EXTRA], (request[R_LENGTH] if request[R_EXTRA] else 0,), np.int64)


@jit
def reusable(request):
    """Leading tokens that may be matched. An engine computes the last one itself, as its KV does not say what comes next."""
    return request[R_LENGTH] - (0 if request[R_RESERVES] else 1)


@jit
def describe(request, tokens, keys, extra, namespace, root0, root1):
    """Fill int64[1, REQUEST] for a prompt whose arrays outlive it: int32[n], 64-bit [full blocks, 2], and int64[n] or int64[0]."""
    request[0, R_TOKENS], request[0, R_LENGTH], request[0, R_KEYS] = address_of(tokens), tokens.shape[0], address_of(keys)
    request[0, R_EXTRA] = address_of(extra) if extra.shape[0] else 0
    request[0, R_NAMESPACE], request[0, R_ROOT0], request[0, R_ROOT1] = namespace, root0, root1


@jit(forceinline=True)
def blocks_for(h, tokens):
    return (tokens + h[WIDTH] - 1) // h[WIDTH]


@jit(forceinline=True)
def columns_for(h, request):
    """Columns of a row that a prompt takes in this group."""
    return blocks_for(h, request[R_ENCODER] if h[KIND] == CROSS else request[R_LENGTH])


@jit(forceinline=True)
def has_block(h, request, i, columns):
    """Whether column ``i`` of ``columns`` that begin with a prompt has a block, where it is not reused.

    In a recurrent group, those have one whose state is kept, and the last.
    """
    if h[KIND] != RECURRENT:
        return True
    return i == columns - 1 or keeps_state(h, i, kept_column(h, request))


@jit(forceinline=True)
def kept_column(h, request):
    """The last column of a prompt that it can reuse itself."""
    return reusable(request) // h[WIDTH] - 1


@jit(forceinline=True)
def keeps_state(h, i, kept):
    """Whether the state behind column ``i`` of a sequence is kept, to be found by others; ``kept`` is that of its prompt."""
    return i == kept or (h[SNAPSHOT] != 0 and (i + 1) % h[SNAPSHOT] == 0)


@jit
def fresh_blocks(h, request, matched, columns):
    """Blocks that a prompt takes behind ``matched`` columns, and that growing it to ``columns`` takes."""
    if h[KIND] != RECURRENT:
        return columns - matched
    count = 0
    for i in range(matched, columns):
        count += 1 if has_block(h, request, i, columns) else 0
    return count


@jit
def parent_of(h, request, i):
    """Key of the block before block ``i`` of a prompt."""
    if i == 0:
        return request[R_ROOT0], request[R_ROOT1]
    keys = request_keys(h, request)
    return keys[i - 1, 0], keys[i - 1, 1]


@jit
def hash_request(h, request):
    """Write the keys of a request's full blocks where it says. Of the state it reads what never changes, so that it needs no lock."""
    tokens, keys, extra, width = request_tokens(request), request_keys(h, request), request_extra(request), h[WIDTH]
    parent0, parent1 = request[R_ROOT0], request[R_ROOT1]
    for i in range(keys.shape[0]):
        own = extra[i * width : (i + 1) * width] if extra.shape[0] > 0 else extra
        parent0, parent1 = block_key(tokens[i * width : (i + 1) * width], own, h[SECRET0], h[SECRET1], parent0, parent1, h[GUARD])
        keys[i, 0], keys[i, 1] = parent0, parent1


@jit
def walk(h, request, limit, ids):
    """Representatives of the leading full blocks that are cached, at most ``limit``, into ``ids``; returns how many. Changes nothing."""
    tokens, keys, extra = request_tokens(request), request_keys(h, request), request_extra(request)
    i = 0
    while i < limit:
        b = find(h, keys[i, 0], keys[i, 1], request[R_NAMESPACE], tokens, extra, i * h[WIDTH])
        if b == NONE:
            break
        ids[i] = b
        i += 1
    return i


@jit
def partial_match(h, request, matched):
    """(block, tokens) of the best partial match behind ``matched`` full blocks; prefers the device copy. Changes nothing."""
    start = matched * h[WIDTH]
    limit = min(h[WIDTH], reusable(request) - start)
    if h[CHILD_BUCKETS] == 0 or limit <= 0 or h[KIND] != ATTENTION:
        return NONE, 0
    parent0, parent1 = parent_of(h, request, matched)
    b, n = best_child(h, parent0, parent1, request[R_NAMESPACE], request_tokens(request), request_extra(request), start, limit)
    if b != NONE and device_copy(h, b) != NONE:
        b = device_copy(h, b)
    return b, n


@jit(forceinline=True)
def retention_at(request, position):
    """(given, priority, ttl) of the retention range that holds a token position."""
    ranges = array_at(request[R_RANGES], (request[R_RANGE_COUNT], 4), np.int64)
    for i in range(ranges.shape[0]):
        if ranges[i, 0] <= position < ranges[i, 1]:
            return True, ranges[i, 2], ranges[i, 3]
    return False, np.int64(DEFAULT_PRIORITY), np.int64(NONE)
