"""Chains: the records of the policies that look at conversations instead of blocks.

A *chain* is a cached prefix that requests extend: the next turn of a conversation comes back to it. A record is kept
for each. Its blocks lie side by side in the list of their priority, the deepest first, since one release has put them
there. So a record names the deepest one, and the list needs no change: whoever evicts from the front of the list is
LRU, whoever takes the deepest block of some chain follows a policy of chains.

A prompt finds its chain by *names*: keys of some of its blocks, in a small hash table. So a chain is
known for a while after its blocks are gone, and pauses are seen that no cache has survived. A prompt that leaves the
chain early begins a *fork*, whose first blocks are its *stem*. The forks of one stem are in a ring.
"""

from __future__ import annotations

import numpy as np

from kvpool.common.arguments import ENDS
from kvpool.common.jit import jit
from kvpool.common.jit.intrinsics import array_at, prefetch, record_at
from kvpool.state.policies.pauses import PAUSE_BINS, ROWS, TABLES, learn, octaves, worth
from kvpool.state.records import NONE, blocks_of, lists_of

EXPERTS = 3
LRU, REUSE, AGENT = range(EXPERTS)
_OWN = 3
"""So many pauses of a chain are as good as the last ones."""
_DOUBT, _HEARD = 8.0, 512.0
"""Of so many words any may be wrong, of all others a half. After so many words the old ones count half."""


@jit(forceinline=True)
def rates_of(book, expert):
    """What an expert has learnt from pauses, float64[TABLES, ROWS, PAUSE_BINS]. LRU learns nothing."""
    return array_at(book.rates_at, (EXPERTS - REUSE, TABLES, ROWS, PAUSE_BINS), np.float64)[expert - REUSE]


@jit(forceinline=True)
def age_of(h, chain):
    """The ms since the last turn of a chain ended."""
    return (h.now - np.int64(chain.released)) & 0xFFFFFFFF


@jit
def _learn(h, book, chain, came):
    """Count the pause of a chain, which ends now or is seen for so long only."""
    learn(rates_of(book, REUSE), np.int64(chain.alike), age_of(h, chain), came)
    learn(rates_of(book, AGENT), np.int64(chain.row), age_of(h, chain), came)


@jit(forceinline=True)
def worth_of(book, expert, chain, ms):
    return worth(rates_of(book, expert), np.int64(chain.row if expert == AGENT else chain.alike), ms)


_LISTED = [
    ("first", "i4"),  # the deepest listed block of its last turn; NONE = none is left
    ("rest", "i4"),  # the same of what its last turn has left over
    ("place", "i4"),  # its place in ``order``
    ("size", "u2"),  # blocks from ``first`` on; this and the next three count up to BLOCKS_MAX
]
SHELF = np.dtype([*_LISTED, ("last", "i4")], align=True)
"""What a chain has in the list of a book. ``last``: the last block that the host has got of it."""
CHAIN = np.dtype(
    [
        *_LISTED,  # in the list of the first book
        ("length", "u2"),  # blocks of its last prompt
        ("released", "u4"),  # ms, the end of its last turn; its lower half, as in a block
        ("returns", "i4"),  # as the header's, of its last turn
        ("after", "i4"),  # the next chain of its ring, and the one before
        ("before", "i4"),
        ("stem", "u2"),  # how many of them it shares with another chain
        ("base", "u2"),  # how many of them it has begun with, as a fork
        ("mean", "i2"),  # of the logarithms of its pauses
        ("pauses", "u1"),  # how many it has made, at most PAUSES_MAX
        ("turns", "u1"),  # requests that run: 1 or none
        ("row", "u1"),  # its class, as ``agent`` sees it, and as ``reuse`` does
        ("alike", "u1"),
        ("age", "u1"),  # how often the record was used anew
    ],
    align=True,
)
PAUSES_MAX, BLOCKS_MAX = 255, 65535
BOOK = np.dtype(
    [
        (name, "i8")
        for name in (
            "head_at on_admit on_begin_release on_end_release on_touch on_touched on_join choose list"
            " chains_at order_at names_at turns_at rates_at ghosts_at scores_at chains names rows cached"
            " known draws pick left last listed capacity follows depth shift shelves_at shelf_bytes"
        ).split()
    ]
)
"""The address of the group's header, and the hooks that ``policy`` calls. ``list``: whose blocks chains are about, that
of the default priority: the device's, or in a HostCache the host's. Addresses and lengths of arrays. ``cached`` chains,
the first ones in ``order``, have blocks there; those up to ``known`` are remembered. The chain that loses blocks now,
and how many more; the end and the length of the list before a release. Then which expert is followed; how many blocks
of its chain the last prompt has found; how many chains one stands for. Where its shelves are, one behind the other."""
BOOK_SIZE = BOOK.itemsize
CHAINS_MAX = 1 << 24
"""So many chains can be named."""
SAMPLE = 16
_WAYS, _LOOK = 4, 8


@jit(forceinline=True)
def book_of(h):
    return record_at(h.book_at, BOOK)


@jit(forceinline=True)
def host_book_of(h):
    """The second book of a group: that of its host tier, about the same chains. Its ``list`` is NONE if there is none.
    The first one has all that is not about a list."""
    return record_at(h.book_at + BOOK_SIZE, BOOK)


@jit(forceinline=True)
def shelf_of(book, c):
    return record_at(book.shelves_at + c * book.shelf_bytes, SHELF)


@jit(forceinline=True)
def owners_of(h):
    """The chain of each block, int32[blocks], or NONE."""
    return blocks_of(h)["owner"]


@jit(forceinline=True)
def chains_of(book):
    return array_at(book.chains_at, (book.chains,), CHAIN)


@jit(forceinline=True)
def order_of(book):
    """All chains: those with blocks, then those that are remembered, then unused records."""
    return array_at(book.order_at, (book.chains,), np.int32)


@jit(forceinline=True)
def names_of(book):
    """A hash table of names, int64: the upper half of a key, a chain, and the chain's age."""
    return array_at(book.names_at, (book.names,), np.int64)


@jit(forceinline=True)
def ghosts_of(book):
    """Of each chain, the own blocks that each expert would have kept: uint16[chains, EXPERTS]."""
    return array_at(book.ghosts_at, (book.chains, EXPERTS), np.uint16)


@jit(forceinline=True)
def scores_of(book):
    """Of each expert: the blocks in its ghost, how many hits more than LRU it would have had lately, and the squares of
    these numbers. And the chain that its ghost loses next, and its worth. Then ``_hear``'s. float64[7, EXPERTS]."""
    return array_at(book.scores_at, (7, EXPERTS), np.float64)


@jit(forceinline=True)
def turns_of(book):
    """The chain of each row, or NONE."""
    return array_at(book.turns_at, (book.rows,), np.int32)


# -- records ---------------------------------------------------------------------------------------------


@jit
def move(book, c, place):
    """Exchange a chain with the one at a place of ``order``."""
    order, shelf = order_of(book), shelf_of(book, c)
    before, other = shelf.place, np.int64(order[place])
    order[place], order[before] = c, other
    shelf.place, shelf_of(book, other).place = place, before


@jit
def draw(book, count):
    """A number below ``count``, the same ones in each run."""
    book.draws = (book.draws * 1103515245 + 12345) & 0x7FFFFFFF
    return np.int64((book.draws * count) >> 31)


@jit(forceinline=True)
def is_listed(h, book, c, b):
    """Whether a block, or NONE, lies in the list as a block of a chain."""
    return b != NONE and owners_of(h)[b] == c and blocks_of(h)[b].list == book.list


@jit
def find_first(h, book, c):
    """Have a chain name its deepest listed block. Returns whether it has one.

    LRU takes blocks and tells no chain. What it has left of one is in front of the list.
    """
    chain, front = shelf_of(book, c), np.int64(lists_of(h)[book.list, 0])
    chain.rest = chain.rest if is_listed(h, book, c, np.int64(chain.rest)) else NONE
    if not is_listed(h, book, c, np.int64(chain.first)):
        chain.first, chain.size = NONE, 0
        if chain.rest == NONE and is_listed(h, book, c, front):
            chain.first, chain.size = front, _count(h, book, c, front)
    return chain.rest != NONE or chain.first != NONE


@jit
def _count(h, book, c, b):
    """How many blocks of a chain lie side by side in the list, from block ``b`` on."""
    count = 0
    while b != NONE and count < BLOCKS_MAX:
        count += 1
        b = _next(h, book, c, b)
    return count


@jit
def take_first(h, book, c):
    """The deepest block that a chain has listed, which is evicted now, or NONE. What a turn has left over, because the
    prompt went on elsewhere, comes first."""
    if not find_first(h, book, c):
        return np.int64(NONE)
    chain = shelf_of(book, c)
    b = np.int64(chain.first if chain.rest == NONE else chain.rest)
    if chain.rest != NONE:
        chain.rest = _next(h, book, c, b)
    else:
        chain.first, chain.size = _next(h, book, c, b), max(np.int64(chain.size) - 1, 0)
    return b


@jit
def has_blocks(h, book, c):
    """Whether a chain has listed blocks. If not, it is no longer one of those that have."""
    if shelf_of(book, c).place >= book.cached:
        return False
    if find_first(h, book, c):
        return True
    empty_shelf(book, c)
    return False


@jit
def empty_shelf(book, c):
    """A chain has no blocks in a list any more."""
    shelf = shelf_of(book, c)
    shelf.first = shelf.rest = NONE
    shelf.size = 0
    if shelf.place < book.cached:
        book.cached -= 1
        move(book, c, book.cached)


@jit
def put_last(h, c, b):
    """A host block of a chain is listed now. Returns the one behind which it has to be, so that the blocks of a chain
    lie side by side, or NONE."""
    book = host_book_of(h)
    shelf, before = shelf_of(book, c), np.int64(NONE)
    if shelf.place < book.cached and find_first(h, book, c) and is_listed(h, book, c, np.int64(shelf.last)):
        before = np.int64(shelf.last)
    if shelf.first == NONE:
        shelf.first, shelf.size, before = b, 0, np.int64(NONE)
    shelf.last, shelf.size = b, min(np.int64(shelf.size) + 1, BLOCKS_MAX)
    if shelf.place >= book.cached:
        move(book, c, book.cached)
        book.cached += 1
    return before


@jit(forceinline=True)
def _next(h, book, c, b):
    after = np.int64(blocks_of(h)[b].next)
    return after if is_listed(h, book, c, after) else np.int64(NONE)


@jit
def _forget(book, c):
    """Make the record of a remembered chain, which leaves its ring, free for another one."""
    chains = chains_of(book)
    chain = chains[c]
    chains[chain.before].after, chains[chain.after].before = chain.after, chain.before
    for expert in range(EXPERTS):
        scores_of(book)[0, expert] -= ghosts_of(book)[c, expert]
        ghosts_of(book)[c, expert] = 0
    chain.age = (chain.age + 1) & 0xFF


@jit
def new_chain(h, book):
    """A record for a new chain. If all are in use, some chain that was away for long is forgotten."""
    chains, order, c = chains_of(book), order_of(book), np.int64(NONE)
    if book.known < book.chains:
        c = np.int64(order[book.known])
        book.known += 1
    else:
        emptied = False
        for _ in range(_LOOK):
            other = np.int64(order[draw(book, book.chains)])
            host = host_book_of(h)
            empty = not has_blocks(h, book, other) and (host.list == NONE or not has_blocks(h, host, other))
            older = c == NONE or age_of(h, chains[other]) > age_of(h, chains[c])
            if chains[other].turns == 0 and (empty > emptied or (empty == emptied and older)):
                c, emptied = other, empty
        if c == NONE:
            return c
        _learn(h, book, chains[c], False)
        _forget(book, c)
        empty_shelf(book, c)
        if host_book_of(h).list != NONE:
            empty_shelf(host_book_of(h), c)
    chain = chains[c]
    chain.released, chain.returns, chain.row, chain.alike = np.uint32(h.now & 0xFFFFFFFF), 0, 0, 0
    chain.length = chain.stem = chain.base = chain.turns = chain.pauses = chain.mean = 0
    chain.after = chain.before = c
    return c


# -- names -----------------------------------------------------------------------------------------------


@jit(forceinline=True)
def is_name(key, from_end):
    """Whether the key of a block names its chain: the last two do, and some of all."""
    return key & (SAMPLE - 1) == 0 or from_end <= 2


@jit
def _bucket(book, key):
    return ((key >> 4) & (book.names // _WAYS - 1)) * _WAYS


@jit(forceinline=True)
def expect_name(book, key):
    """Begin to load what a key names."""
    prefetch(names_of(book), _bucket(book, key))


@jit
def find_name(book, key):
    """The chain that a key names, or NONE."""
    names, first = names_of(book), _bucket(book, key)
    for at in range(first, first + _WAYS):
        if names[at] >> 32 == key >> 32 and names[at] != NONE:
            c = (names[at] >> 8) & (CHAINS_MAX - 1)
            return c if chains_of(book)[c].age == names[at] & 0xFF else np.int64(NONE)
    return np.int64(NONE)


@jit
def put_name(book, key, c):
    """Have a key name a chain, in the place of an older name."""
    names, first = names_of(book), _bucket(book, key)
    place = first + ((key >> 20) & (_WAYS - 1))
    for at in range(first, first + _WAYS):
        if names[at] >> 32 == key >> 32:
            place = at
            break
        if names[at] == NONE:
            place = at
    names[place] = (key >> 32 << 32) | (c << 8) | chains_of(book)[c].age


# -- turns -----------------------------------------------------------------------------------------------


@jit
def _hear(book, returns, words, wrong):
    """Count so many words of the engine, that a conversation has ended or when it comes back, and so many wrong ones.
    The former are counted when they are said, since who has ended is not seen again."""
    heard = scores_of(book)
    kind = np.int64(returns == ENDS)
    if heard[5, kind] > _HEARD:
        heard[5, kind] *= 0.5
        heard[6, kind] *= 0.5
    heard[5, kind] += words
    heard[6, kind] += wrong


@jit(forceinline=True)
def is_believed(book, returns):
    """Whether the engine is believed when it says this. Of what it said so, at least half was true."""
    kind = np.int64(returns == ENDS)
    return 2.0 * scores_of(book)[6, kind] <= scores_of(book)[5, kind] + _DOUBT


@jit
def begin_turn(h, book, c, depth, length):
    """A prompt of ``length`` full blocks begins with ``depth`` blocks of chain ``c`` (NONE: of no chain). Returns the
    chain that it continues, a new one if it leaves that chain early, or NONE."""
    chains, parent = chains_of(book), np.int64(NONE)
    if c != NONE and (chains[c].turns > 0 or 2 * depth < chains[c].length):
        c, parent = np.int64(NONE), c
    if c != NONE:
        chain = chains[c]
        if chain.returns != 0:
            wrong = abs(age_of(h, chain) - chain.returns) > chain.returns // 2 + 1000
            _hear(book, chain.returns, chain.returns > 0, chain.returns == ENDS or wrong)
        _learn(h, book, chain, True)
        chain.pauses = min(chain.pauses + 1, PAUSES_MAX)
        chain.mean += (octaves(age_of(h, chain)) - chain.mean) // min(chain.pauses, _OWN)
    else:
        age = chains[parent].age if parent != NONE else 0
        c = new_chain(h, book)
        if c == NONE:
            return c
        if parent != NONE and parent != c and chains[parent].age == age:
            _join(chains, c, parent, depth)
    chains[c].turns += 1
    chains[c].length = min(length, BLOCKS_MAX)
    return c


@jit
def _join(chains, c, parent, depth):
    """A new chain is a fork of another one: it needs the same first blocks."""
    chain, other = chains[c], chains[parent]
    depth = min(depth, BLOCKS_MAX)
    chain.base, chain.stem, other.stem = depth, depth, max(other.stem, depth)
    after = other.after
    chain.after, chain.before = after, parent
    chains[parent].after = chains[after].before = c


@jit
def begin_release(h, book, c, shared):
    """A turn of a chain is over, and its blocks are listed next, but for the ``shared`` first ones, which others hold.
    What the chain has listed now is left over."""
    _leave_over(h, book, c)
    if host_book_of(h).list != NONE:
        _leave_over(h, host_book_of(h), c)
    book.last, book.listed = lists_of(h)[book.list, 1], lists_of(h)[book.list, 2] - shared


@jit
def _leave_over(h, book, c):
    shelf = shelf_of(book, c)
    find_first(h, book, c)
    shelf.rest, shelf.first, shelf.size = shelf.first, NONE, 0


@jit
def end_turn(h, book, c):
    """What is behind the former end of the list is what the turn has left in the cache."""
    chain, first = chains_of(book)[c], np.int64(lists_of(h)[book.list, 0])
    if book.last != NONE:
        behind = np.int64(blocks_of(h)[book.last].next)
        first = behind if blocks_of(h)[book.last].list == book.list else np.int64(NONE)
    chain.first = first
    chain.size = min(max(np.int64(lists_of(h)[book.list, 2]) - book.listed, 0), BLOCKS_MAX)
    chain.released, chain.returns = np.uint32(h.now & 0xFFFFFFFF), h.returns
    if h.returns == ENDS:
        _hear(book, h.returns, np.bool_(True), np.bool_(False))
    chain.turns -= 1
    if chain.place >= book.cached and first != NONE:
        move(book, c, book.cached)
        book.cached += 1
