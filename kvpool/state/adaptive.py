"""The policy ``adaptive``: LRU, ``reuse`` or ``agent``, whichever would have hit more lately.

It keeps no second cache. For each chain it counts how many blocks each of these experts would have kept: its *ghost*.
In a large pool some chains stand for all, one in ``2**shift``. All experts see the same list, so a switch moves no
block.
"""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.jit.intrinsics import record_at
from kvpool.state import agent
from kvpool.state.agent import ALL, SOME, worth_now
from kvpool.state.chains import EXPERTS, LRU, book_of, chains_of, draw, ghosts_of, order_of, scores_of
from kvpool.state.records import HEAD, NONE

_MEMORY, _MARGIN = 9, 5
"""Hits count half after some 2**9 * 0.7 requests. Another expert than LRU is followed once it would have 1/32 hits
more than the one that is followed now."""
_TRIES = 2 * ALL


@jit
def on_admit(at, asked, slot):
    """What ``agent`` does; and all ghosts see the prompt."""
    c = np.int64(agent.on_admit(at, asked, slot))
    if c != NONE and c & ((1 << book_of(record_at(at, HEAD)).shift) - 1) == 0:
        h = record_at(at, HEAD)
        _compare(h, book_of(h), c)
    return c


@jit
def _compare(h, book, c):
    """Count what each ghost would have hit of the last prompt. All get its blocks."""
    chain, ghost, used, hits = chains_of(book)[c], ghosts_of(book)[c], scores_of(book)[0], scores_of(book)[1]
    shared, own, length = (
        min(chain.base, book.depth),
        max(book.depth - chain.base, 0),
        max(chain.length - chain.base, 0),
    )
    for expert in range(EXPERTS):
        hits[expert] += ((shared + min(own, ghost[expert])) << _MEMORY) - (hits[expert] >> _MEMORY)
        used[expert] += length - ghost[expert]
        ghost[expert] = length
    for expert in range(EXPERTS):
        most = hits[book.follows]
        if hits[expert] >= most + (0 if expert == LRU else 1 + (most >> _MARGIN)):
            book.follows = expert
    for expert in range(EXPERTS):
        _evict(h, book, c, expert)


@jit
def _evict(h, book, running, expert):
    """Have the ghost of an expert lose blocks of other chains until it fits."""
    chains, ghosts, used, room = chains_of(book), ghosts_of(book), scores_of(book)[0], book.capacity >> book.shift
    for _ in range(_TRIES):
        if used[expert] <= room:
            return
        least, low = np.int64(NONE), 0.0
        for at in range(book.known if book.known <= ALL else SOME):
            if book.shift:
                c = draw(book, book.chains >> book.shift) << book.shift
            else:
                c = np.int64(order_of(book)[at if book.known <= ALL else draw(book, book.known)])
            if c == running or chains[c].turns > 0 or ghosts[c, expert] == 0:
                continue
            worth = np.float64(chains[c].released) if expert == LRU else worth_now(h, book, c, expert)
            if least == NONE or worth < low:
                least, low = c, worth
        if least != NONE:
            gone = min(used[expert] - room, ghosts[least, expert])
            ghosts[least, expert] -= gone
            used[expert] -= gone
