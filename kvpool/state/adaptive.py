"""The policy ``adaptive``: LRU or ``agent``, whichever would have hit more lately.

It keeps no second cache. For each chain it counts how many blocks LRU would have kept, and how many ``agent`` would
have kept: the *ghosts*. In a large pool some chains stand for all, one in ``2**shift``. Both policies see the same
list, so a switch moves no block.
"""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.jit.intrinsics import record_at
from kvpool.state import agent
from kvpool.state.agent import ALL, SOME, worth_now
from kvpool.state.chains import book_of, chains_of, draw, order_of
from kvpool.state.records import HEAD, NONE

_MEMORY, _MARGIN = 9, 5
"""Hits count half after some 2**9 * 0.7 requests. ``agent`` is followed once it would have 1/32 hits more."""
_TRIES = 2 * ALL


@jit
def on_admit(at, asked, slot):
    """What ``agent`` does; and both ghosts see the prompt."""
    c = np.int64(agent.on_admit(at, asked, slot))
    if c != NONE and c & ((1 << book_of(record_at(at, HEAD)).shift) - 1) == 0:
        h = record_at(at, HEAD)
        _compare(h, book_of(h), c)
    return c


@jit
def _compare(h, book, c):
    """Count what each ghost would have hit of the last prompt. Both get its blocks."""
    chain = chains_of(book)[c]
    shared, own = min(chain.base, book.depth), max(book.depth - chain.base, 0)
    lru, worth = shared + min(own, chain.by_lru), shared + min(own, chain.by_worth)
    book.lru_hits += (lru << _MEMORY) - (book.lru_hits >> _MEMORY)
    book.worth_hits += (worth << _MEMORY) - (book.worth_hits >> _MEMORY)
    most = book.lru_hits + (book.lru_hits >> _MARGIN if book.waits else 0)
    book.waits = book.worth_hits <= most
    length = max(chain.length - chain.base, 0)
    book.lru_used += length - chain.by_lru
    book.worth_used += length - chain.by_worth
    chain.by_lru = chain.by_worth = length
    _evict(h, book, c)


@jit
def _evict(h, book, running):
    """Have both ghosts lose blocks of other chains until they fit."""
    chains, order, room = chains_of(book), order_of(book), book.capacity >> book.shift
    for _ in range(_TRIES):
        full, over = book.lru_used - room, book.worth_used - room
        if full <= 0 and over <= 0:
            return
        oldest, least, low = np.int64(NONE), np.int64(NONE), 0.0
        for at in range(book.known if book.known <= ALL else SOME):
            if book.shift:
                c = draw(book, book.chains >> book.shift) << book.shift
            else:
                c = np.int64(order[at if book.known <= ALL else draw(book, book.known)])
            chain = chains[c]
            if c == running or chain.turns > 0:
                continue
            if chain.by_lru and (oldest == NONE or chain.released < chains[oldest].released):
                oldest = c
            if over > 0 and chain.by_worth:
                worth = worth_now(h, book, c)
                if least == NONE or worth < low:
                    least, low = c, worth
        if full > 0 and oldest != NONE:
            gone = min(full, chains[oldest].by_lru)
            chains[oldest].by_lru -= gone
            book.lru_used -= gone
        if over > 0 and least != NONE:
            gone = min(over, chains[least].by_worth)
            chains[least].by_worth -= gone
            book.worth_used -= gone
