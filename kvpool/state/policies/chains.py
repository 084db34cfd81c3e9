"""Chains: the records of the policies that look at conversations instead of blocks.

A *chain* is a cached prefix that requests extend: the next turn of a conversation comes back to it. A record is kept
for each. Its blocks lie side by side in the list of their priority, the deepest first, since one release has put them
there. So a record names the deepest one, and the list needs no change: to evict from the front of the list is LRU, and
to evict the deepest block of some chain is a policy of chains.

A prompt finds its chain by the *chain index*: a small hash table of the keys of some of its blocks, its *names*. So a
chain is known for a while after its blocks are gone, and pauses are counted that are longer than a cache keeps content.
A prompt that leaves the chain early begins a *fork*, whose first blocks are its *stem*. The forks of one stem are
siblings, in a ring.
"""

from __future__ import annotations

import numpy as np

from kvpool.common.arguments import ENDS
from kvpool.common.jit import inline, jit
from kvpool.common.jit.intrinsics import array_at, prefetch, record_at
from kvpool.state.policies.pauses import PAUSE_BINS, ROWS, TABLES, learn, octaves, worth
from kvpool.state.records import NONE, blocks_of, lists_of

EXPERTS = 3
LRU, REUSE, AGENT = range(EXPERTS)
_OWN = 3
"""The mean of a chain's pauses is over this many of the last ones."""
_DOUBT, _RECENT = 8.0, 512.0
"""The first 8 hints may be wrong; after them, hints are trusted while at most half of them are wrong. After 512 hints,
the old ones count half."""


@inline
def rates_of(policy, expert):
    """The table of pauses of an expert, float64[TABLES, ROWS, PAUSE_BINS]. LRU has none."""
    return array_at(policy.rates_at, (EXPERTS - REUSE, TABLES, ROWS, PAUSE_BINS), np.float64)[expert - REUSE]


@inline
def age_of(group, chain):
    """The ms since the last turn of a chain ended."""
    return (group.now - np.int64(chain.released)) & 0xFFFFFFFF


@jit
def _learn(group, policy, chain, came):
    """Count the pause of a chain, which ends now, or was observed until now."""
    learn(rates_of(policy, REUSE), chain.alike, age_of(group, chain), came)
    learn(rates_of(policy, AGENT), chain.row, age_of(group, chain), came)


@inline
def worth_of(policy, expert, chain, ms):
    return worth(rates_of(policy, expert), chain.row if expert == AGENT else chain.alike, ms)


_LISTED = [
    ("first", "i4"),  # the deepest listed block of its last turn; NONE = none is left
    ("rest", "i4"),  # the same of what its last turn has left over
    ("place", "i4"),  # its place in ``order``
    ("size", "u2"),  # blocks from ``first`` on; this and the next three count up to BLOCKS_MAX
]
TIER_LIST = np.dtype([*_LISTED, ("last", "i4")], align=True)
"""The blocks of a chain in the list of a tier. ``last``: its last block that was listed on the host."""
CHAIN = np.dtype(
    [
        *_LISTED,  # in the list of the first policy state
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
POLICY = np.dtype(
    [
        (name, "i8")
        for name in (
            "header_at on_admit on_begin_release on_end_release on_touch on_touched on_join choose list"
            " chains_at order_at names_at turns_at rates_at ghosts_at scores_at chains names rows cached"
            " known draws pick left last listed capacity follows depth shift tier_lists_at tier_list_bytes"
        ).split()
    ]
)
"""The address of the group's header, and the hooks that ``policy`` calls. ``list``: whose blocks chains are about, that
of the default priority: the device's, or in a HostCache the host's. Addresses and lengths of arrays. ``cached`` chains,
the first ones in ``order``, have blocks there; those up to ``known`` are remembered. The chain that loses blocks now,
and how many more; the end and the length of the list before a release. Then which expert is followed; how many blocks
of its chain the last prompt has found; the sampling of chains, as a shift. The address of its per-tier lists, one after
the other."""
POLICY_SIZE = POLICY.itemsize
CHAINS_MAX = 1 << 24
"""How many chains can be named."""
SAMPLE = 16
_WAYS, _LOOK = 4, 8


@inline
def policy_of(group):
    return record_at(group.policy_at, POLICY)


@inline
def host_policy_of(group):
    """The policy state of a group's host tier, for the same chains. Its ``list`` is NONE if there is none. The first
    policy state has everything that does not depend on a list."""
    return record_at(group.policy_at + POLICY_SIZE, POLICY)


@inline
def tier_list_of(policy, c):
    return record_at(policy.tier_lists_at + c * policy.tier_list_bytes, TIER_LIST)


@inline
def owners_of(group):
    """The chain of each block, int32[blocks], or NONE."""
    return blocks_of(group)["owner"]


@inline
def chains_of(policy):
    return array_at(policy.chains_at, (policy.chains,), CHAIN)


@inline
def order_of(policy):
    """All chains: those with blocks, then those that are remembered, then unused records."""
    return array_at(policy.order_at, (policy.chains,), np.int32)


@inline
def names_of(policy):
    """A hash table of names, int64: the upper half of a key, a chain, and the chain's age."""
    return array_at(policy.names_at, (policy.names,), np.int64)


@inline
def ghosts_of(policy):
    """How many own blocks of each chain each expert would have kept: uint16[chains, EXPERTS]."""
    return array_at(policy.ghosts_at, (policy.chains, EXPERTS), np.uint16)


@inline
def scores_of(policy):
    """float64[7, EXPERTS]: for each expert the blocks in its ghost, how many more hits than LRU it would have had
    lately, the squares of these numbers, the chain that its ghost loses next, and its worth. Then the counts of
    hints."""
    return array_at(policy.scores_at, (7, EXPERTS), np.float64)


@inline
def turns_of(policy):
    """The chain of each row, or NONE."""
    return array_at(policy.turns_at, (policy.rows,), np.int32)


# -- records ---------------------------------------------------------------------------------------------


@jit
def move(policy, c, place):
    """Exchange a chain with the one at a place of ``order``."""
    order, tier_list = order_of(policy), tier_list_of(policy, c)
    before, other = tier_list.place, order[place]
    order[place], order[before] = c, other
    tier_list.place, tier_list_of(policy, other).place = place, before


@jit
def draw(policy, count):
    """A number below ``count``, the same ones in each run."""
    policy.draws = (policy.draws * 1103515245 + 12345) & 0x7FFFFFFF
    return (policy.draws * count) >> 31


@inline
def is_listed(group, policy, c, b):
    """Whether a block, or NONE, is in the list as a block of a chain."""
    return b != NONE and owners_of(group)[b] == c and blocks_of(group)[b].list == policy.list


@jit
def find_first(group, policy, c):
    """Update the deepest listed block of a chain. Returns whether it has one.

    LRU takes blocks without a change of their chains. The blocks that it has left of a chain are in front of the list.
    """
    chain, front = tier_list_of(policy, c), lists_of(group)[policy.list, 0]
    chain.rest = chain.rest if is_listed(group, policy, c, chain.rest) else NONE
    if not is_listed(group, policy, c, chain.first):
        chain.first, chain.size = NONE, 0
        if chain.rest == NONE and is_listed(group, policy, c, front):
            chain.first, chain.size = front, _count(group, policy, c, front)
    return chain.rest != NONE or chain.first != NONE


@jit
def _count(group, policy, c, b):
    """How many blocks of a chain lie side by side in the list, from block ``b`` on."""
    count = 0
    while b != NONE and count < BLOCKS_MAX:
        count += 1
        b = _next(group, policy, c, b)
    return count


@jit
def take_first(group, policy, c):
    """The deepest listed block of a chain, which is evicted now, or NONE. Blocks that a turn has left over, because the
    prompt continued elsewhere, come first."""
    if not find_first(group, policy, c):
        return NONE
    chain = tier_list_of(policy, c)
    b = chain.first if chain.rest == NONE else chain.rest
    if chain.rest != NONE:
        chain.rest = _next(group, policy, c, b)
    else:
        chain.first, chain.size = _next(group, policy, c, b), max(np.int64(chain.size) - 1, 0)
    return b


@jit
def has_blocks(group, policy, c):
    """Whether a chain has listed blocks. If not, it is no longer one of those that have."""
    if tier_list_of(policy, c).place >= policy.cached:
        return False
    if find_first(group, policy, c):
        return True
    empty_tier_list(policy, c)
    return False


@jit
def empty_tier_list(policy, c):
    """A chain has no blocks in a list any more."""
    tier_list = tier_list_of(policy, c)
    tier_list.first = tier_list.rest = NONE
    tier_list.size = 0
    if tier_list.place < policy.cached:
        policy.cached -= 1
        move(policy, c, policy.cached)


@jit
def put_last(group, c, b):
    """Note that a host block of a chain is listed now. Returns the block after which it belongs, so that the blocks of
    a chain are side by side, or NONE."""
    policy = host_policy_of(group)
    tier_list, before = tier_list_of(policy, c), NONE
    if tier_list.place < policy.cached and find_first(group, policy, c) and is_listed(group, policy, c, tier_list.last):
        before = tier_list.last
    if tier_list.first == NONE:
        tier_list.first, tier_list.size, before = b, 0, NONE
    tier_list.last, tier_list.size = b, min(np.int64(tier_list.size) + 1, BLOCKS_MAX)
    if tier_list.place >= policy.cached:
        move(policy, c, policy.cached)
        policy.cached += 1
    return before


@inline
def _next(group, policy, c, b):
    after = blocks_of(group)[b].next
    return after if is_listed(group, policy, c, after) else NONE


@jit
def _forget(policy, c):
    """Make the record of a remembered chain, which leaves its ring, free for another one."""
    chains = chains_of(policy)
    chain = chains[c]
    chains[chain.before].after, chains[chain.after].before = chain.after, chain.before
    for expert in range(EXPERTS):
        scores_of(policy)[0, expert] -= ghosts_of(policy)[c, expert]
        ghosts_of(policy)[c, expert] = 0
    chain.age = (chain.age + 1) & 0xFF


@jit
def new_chain(group, policy):
    """A record for a new chain. If all are in use, some chain that was away for long is forgotten."""
    chains, order, c = chains_of(policy), order_of(policy), NONE
    if policy.known < policy.chains:
        c = order[policy.known]
        policy.known += 1
    else:
        emptied = False
        for _ in range(_LOOK):
            other = order[draw(policy, policy.chains)]
            host = host_policy_of(group)
            empty = not has_blocks(group, policy, other) and (host.list == NONE or not has_blocks(group, host, other))
            older = c == NONE or age_of(group, chains[other]) > age_of(group, chains[c])
            if chains[other].turns == 0 and (empty > emptied or (empty == emptied and older)):
                c, emptied = other, empty
        if c == NONE:
            return c
        _learn(group, policy, chains[c], False)
        _forget(policy, c)
        empty_tier_list(policy, c)
        if host_policy_of(group).list != NONE:
            empty_tier_list(host_policy_of(group), c)
    chain = chains[c]
    chain.released, chain.returns, chain.row, chain.alike = np.uint32(group.now & 0xFFFFFFFF), 0, 0, 0
    chain.length = chain.stem = chain.base = chain.turns = chain.pauses = chain.mean = 0
    chain.after = chain.before = c
    return c


# -- names -----------------------------------------------------------------------------------------------


@inline
def is_name(key, from_end):
    """Whether the key of a block names its chain: the last two do, and some of all."""
    return key & (SAMPLE - 1) == 0 or from_end <= 2


@jit
def _bucket(policy, key):
    return ((key >> 4) & (policy.names // _WAYS - 1)) * _WAYS


@inline
def expect_name(policy, key):
    """Begin to load what a key names."""
    prefetch(names_of(policy), _bucket(policy, key))


@jit
def find_name(policy, key):
    """The chain that a key names, or NONE."""
    names, first = names_of(policy), _bucket(policy, key)
    for at in range(first, first + _WAYS):
        if names[at] >> 32 == key >> 32 and names[at] != NONE:
            c = (names[at] >> 8) & (CHAINS_MAX - 1)
            return c if chains_of(policy)[c].age == names[at] & 0xFF else NONE
    return NONE


@jit
def put_name(policy, key, c):
    """Enter a key of a chain into the chain index, in the place of an older one."""
    names, first = names_of(policy), _bucket(policy, key)
    place = first + ((key >> 20) & (_WAYS - 1))
    for at in range(first, first + _WAYS):
        if names[at] >> 32 == key >> 32:
            place = at
            break
        if names[at] == NONE:
            place = at
    names[place] = (key >> 32 << 32) | (c << 8) | chains_of(policy)[c].age


# -- turns -----------------------------------------------------------------------------------------------


@jit
def _count_hints(policy, returns, hints, wrong):
    """Count hints of the engine that a conversation has ended, or when it comes back, and wrong ones. Hints of an end
    are counted when they come, since a conversation that has ended does not come back."""
    counts = scores_of(policy)
    kind = np.int64(returns == ENDS)
    if counts[5, kind] > _RECENT:
        counts[5, kind] *= 0.5
        counts[6, kind] *= 0.5
    counts[5, kind] += hints
    counts[6, kind] += wrong


@inline
def is_trusted(policy, returns):
    """Whether a hint of this kind is trusted: at most half of those before were wrong."""
    kind = np.int64(returns == ENDS)
    return 2.0 * scores_of(policy)[6, kind] <= scores_of(policy)[5, kind] + _DOUBT


@jit
def begin_turn(group, policy, c, depth, length):
    """A prompt of ``length`` full blocks begins with ``depth`` blocks of chain ``c`` (NONE: of no chain). Returns the
    chain that it continues, a new one if it leaves that chain early, or NONE."""
    chains, parent = chains_of(policy), NONE
    if c != NONE and (chains[c].turns > 0 or 2 * depth < chains[c].length):
        c, parent = NONE, c
    if c != NONE:
        chain = chains[c]
        if chain.returns != 0:
            wrong = abs(age_of(group, chain) - chain.returns) > chain.returns // 2 + 1000
            _count_hints(policy, chain.returns, chain.returns > 0, chain.returns == ENDS or wrong)
        _learn(group, policy, chain, True)
        chain.pauses = min(chain.pauses + 1, PAUSES_MAX)
        chain.mean += (octaves(age_of(group, chain)) - chain.mean) // min(chain.pauses, _OWN)
    else:
        age = chains[parent].age if parent != NONE else 0
        c = new_chain(group, policy)
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
def begin_release(group, policy, c, shared):
    """Note that a turn of a chain is over. Its blocks are listed next, except the ``shared`` first ones, which others
    hold. The blocks that the chain has listed now are left over."""
    _leave_over(group, policy, c)
    if host_policy_of(group).list != NONE:
        _leave_over(group, host_policy_of(group), c)
    policy.last, policy.listed = lists_of(group)[policy.list, 1], lists_of(group)[policy.list, 2] - shared


@jit
def _leave_over(group, policy, c):
    tier_list = tier_list_of(policy, c)
    find_first(group, policy, c)
    tier_list.rest, tier_list.first, tier_list.size = tier_list.first, NONE, 0


@jit
def end_turn(group, policy, c):
    """Note what a turn has left in the cache: the blocks after the former end of the list."""
    chain, first = chains_of(policy)[c], lists_of(group)[policy.list, 0]
    if policy.last != NONE:
        after = blocks_of(group)[policy.last].next
        first = after if blocks_of(group)[policy.last].list == policy.list else NONE
    chain.first = first
    chain.size = min(max(np.int64(lists_of(group)[policy.list, 2]) - policy.listed, 0), BLOCKS_MAX)
    chain.released, chain.returns = np.uint32(group.now & 0xFFFFFFFF), group.returns
    if group.returns == ENDS:
        _count_hints(policy, group.returns, True, False)
    chain.turns -= 1
    if chain.place >= policy.cached and first != NONE:
        move(policy, c, policy.cached)
        policy.cached += 1
