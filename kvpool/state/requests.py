"""A request as jitted code sees it, and simple questions about it."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.jit.intrinsics import address_of, array_at
from kvpool.state.hashing import key_in
from kvpool.state.records import DEFAULT_PRIORITY, NONE, head, request_at, rows_of


@jit(forceinline=True)
def request_tokens(request):
    return array_at(request.tokens_at, (request.length,), np.int32)


@jit(forceinline=True)
def request_keys(h, request):
    return array_at(request.keys_at, (request.length // h.width, 2), np.int64)


@jit(forceinline=True)
def request_extra(request):
    return array_at(request.extra_at, (request.length if request.extra_at else 0,), np.int64)


@jit
def reusable(request):
    """How many leading tokens may be matched. The engine computes the last one itself, since its KV does not say what
    comes next."""
    return request.length - (0 if request.reserves else 1)


@jit(forceinline=True)
def slot_for(h, r):
    """The row that request ``r`` of a batch gets: one of the free rows."""
    return rows_of(h)[h.free_rows - 1 - r]


@jit
def findable(request):
    """``reusable``, or 0 for a request that reuses nothing."""
    return 0 if request.fresh else reusable(request)


@jit
def describe(requests, tokens, keys, extra, namespace, root0, root1, fresh, private):
    """Fill int64[1, REQUEST] for a prompt. Its arrays must outlive it: int32[n], 64-bit [full blocks, 2], and int64[n]
    or int64[0]. ``fresh``: it reuses nothing. ``private``: it publishes nothing."""
    request = request_at(requests, 0)
    request.tokens_at, request.length, request.keys_at = address_of(tokens), tokens.shape[0], address_of(keys)
    request.extra_at = address_of(extra) if extra.shape[0] else 0
    request.namespace, request.root0, request.root1 = namespace, root0, root1
    request.fresh, request.private = fresh, private


@jit(forceinline=True)
def blocks_for(h, tokens):
    return (tokens + h.width - 1) // h.width


@jit
def parent_of(h, request, i):
    """Key of the block before block ``i`` of a prompt."""
    if i == 0:
        return request.root0, request.root1
    keys = request_keys(h, request)
    return keys[i - 1, 0], keys[i - 1, 1]


@jit
def hash_request(heads, requests, first):
    """Write the keys of a request's full blocks, from block ``first`` on, to the address in the request. The earlier
    keys are there already. Returns how many blocks it hashed. It reads only parts of the state that never change, so it
    needs no lock."""
    h, request = head(heads, 0), request_at(requests, 0)
    tokens, keys, extra, width = request_tokens(request), request_keys(h, request), request_extra(request), h.width
    parent0, parent1 = parent_of(h, request, first)
    for i in range(first, keys.shape[0]):
        own = extra[i * width : (i + 1) * width] if extra.shape[0] > 0 else extra
        parent0, parent1 = key_in(h, tokens[i * width : (i + 1) * width], own, parent0, parent1)
        keys[i, 0], keys[i, 1] = parent0, parent1
    return max(keys.shape[0] - first, 0)


@jit(forceinline=True)
def retention_at(request, position):
    """(given, priority, ttl) of the retention range that contains a token position."""
    ranges = array_at(request.ranges_at, (request.range_count, 4), np.int64)
    for i in range(ranges.shape[0]):
        if ranges[i, 0] <= position < ranges[i, 1]:
            return True, ranges[i, 2], ranges[i, 3]
    return False, np.int64(DEFAULT_PRIORITY), np.int64(NONE)
