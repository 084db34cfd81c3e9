"""How ``reuse``, ``agent`` and ``adaptive`` choose: they evict from the chain whose blocks are worth least, its deepest
block first. And the classes of chains of ``agent``.

``choose`` looks at chains with blocks on the device (all, or a sample), and evicts from the one that is worth least
(see ``chains``), even if that has just run: where contexts do not fit, a conversation that just ran must not push out
one that comes back sooner. An *orphan* is a block that no chain with blocks has listed at its last turn. It is evicted
before all others, once it is the oldest block of the list.

The hooks that ``policy`` calls are ``on_admit``, ``on_begin_release``, ``on_end_release`` and ``choose``; those of a
HostCache ``on_touch``, ``on_touched`` and ``choose``. They change only the records of chains.
"""

from __future__ import annotations

import numpy as np

from kvpool.common.arguments import ENDS
from kvpool.common.jit import jit
from kvpool.common.jit.intrinsics import bit_length, prefetch, record_at
from kvpool.state.policies import reuse
from kvpool.state.policies.chains import (
    POLICY,
    POLICY_SIZE,
    age_of,
    begin_release,
    begin_turn,
    chains_of,
    draw,
    end_turn,
    expect_name,
    find_first,
    find_name,
    has_blocks,
    host_policy_of,
    is_listed,
    is_name,
    is_trusted,
    order_of,
    owners_of,
    policy_of,
    put_name,
    take_first,
    tier_list_of,
    turns_of,
    worth_of,
)
from kvpool.state.policies.pauses import MEMBERS
from kvpool.state.records import (
    DEFAULT_PRIORITY,
    GROUP,
    KEYED,
    NONE,
    blocks_of,
    lists_of,
    sequences_of,
    table_of,
)
from kvpool.state.requests import request_keys, retention_at

ALL, SOME, _RING = 48, 24, 16
"""Compare all chains up to ``ALL``; beyond it, a random sample of ``SOME``. At most ``_RING`` siblings are compared for
a stem."""
RUN = 32
"""The number of blocks of a chain that are evicted before chains are compared again."""
_HUGE, _FEW = 1e30, 64
_FAR, _NEAR = 24, 12
"""How many blocks ahead a block is loaded, and then the names that its key may be among."""


_LEVELS, _LEVEL, _LEVEL_FIRST = 7, 307, 11 << 8


@jit
def class_of(stop, count, mean, length):
    """The class of a chain: why its last request stopped, and the level of the chain's own pauses, which are ``count``
    with such a mean of their logarithms; before its first pause, its length."""
    level = min(max((mean - _LEVEL_FIRST) // _LEVEL, 0), _LEVELS - 1)
    if count == 0:
        level = _LEVELS + min(bit_length(length) // 3, MEMBERS - _LEVELS - 1)
    return stop * MEMBERS + level


@jit
def on_admit(group, request, slot):
    """A prompt has got the row ``slot``: find its chain, by the last block that it has reused, or by a deeper one that
    is gone and still names it. Returns it, or NONE, as for a prompt whose end has another priority than the default."""
    policy = policy_of(group)
    turns_of(policy)[slot] = NONE
    keys, reused = request_keys(group, request), sequences_of(group)[slot].reused
    _, priority, _ = retention_at(request, len(keys) * group.width - 1)
    if request.reserves or request.private or request.fresh or priority != DEFAULT_PRIORITY:
        return NONE
    c, depth = _named(policy, keys, len(keys), reused)
    if c == NONE and reused > 0 and table_of(group)[slot, reused - 1] != NONE:
        c = owners_of(group)[table_of(group)[slot, reused - 1]]
    if c == NONE:  # content that came from the host, or that a running request holds, belongs to no chain
        c, depth = _named(policy, keys, reused, 0)
    c = begin_turn(group, policy, c, depth, len(keys))
    turns_of(policy)[slot] = c
    policy.depth = depth
    return c


@jit
def _named(policy, keys, depth, least):
    """The chain that the deepest of the keys in [least, depth) names, and how deep that is. NONE and ``least`` if none
    does. If there are many keys, only those are looked up that are names wherever their chain ended."""
    few = depth - least <= _FEW
    while depth > least:
        c, ahead = NONE, keys[max(depth - (_NEAR if few else _FEW), 0), 0]
        if few or is_name(ahead, _FEW):
            expect_name(policy, ahead)
        if few or is_name(keys[depth - 1, 0], _FEW):
            c = find_name(policy, keys[depth - 1, 0])
        if c != NONE:
            return c, depth
        depth -= 1
    return NONE, depth


@jit
def on_begin_release(group, slot):
    """A row is released next: its blocks name its chain from now on."""
    policy, blocks, row = policy_of(group), blocks_of(group), table_of(group)[slot]
    c = turns_of(policy)[slot]
    if c == NONE:
        return
    sequence, owners = sequences_of(group)[slot], owners_of(group)
    full = sequence.committed // group.width
    shared = 0
    for i in range(sequence.blocks):
        prefetch(blocks, row[min(i + _FAR, sequence.blocks - 1)])
        ahead = blocks[max(row[min(i + _NEAR, sequence.blocks - 1)], 0)].key0
        if is_name(ahead, _FEW):
            expect_name(policy, ahead)
        if row[i] == NONE:
            continue
        owners[row[i]] = c
        shared += 1 if blocks[row[i]].ref_word != 1 else 0
        if i < full and is_name(blocks[row[i]].key0, full - i) and blocks[row[i]].flags & KEYED:
            put_name(policy, blocks[row[i]].key0, c)
    begin_release(group, policy, c, shared)


@jit
def on_end_release(group, slot, stop):
    """The blocks of a row are listed, after all that was listed before."""
    policy = policy_of(group)
    c = turns_of(policy)[slot]
    if c == NONE:
        return
    turns_of(policy)[slot] = NONE
    end_turn(group, policy, c)
    chain = chains_of(policy)[c]
    chain.row = class_of(stop, chain.pauses, chain.mean, chain.length)
    chain.alike = reuse.class_of(chain.pauses, chain.length)
    policy.left = 0 if policy.pick == c else policy.left


@jit
def on_touch(group, keys, turn):
    """Keys of a HostCache are used, whose blocks nobody lists now: rows (hash, block) of ``keys`` int64[n, 3].

    With ``turn``, they are all keys of a request that has ended. That is a turn of the chain that it continues, which
    is returned. Without, they are used and no turn, and NONE is returned: their chain is as its last turn has left it,
    though others have held its blocks meanwhile.
    """
    policy, count, c = policy_of(group), len(keys), NONE
    owners, chains = owners_of(group), chains_of(policy)
    if turn:
        c, depth = _named(policy, keys, count, 0)
        before = 0
        if c != NONE and chains[c].first != NONE and blocks_of(group)[chains[c].first].list < 0:
            # Its end is used, so it goes on, though its beginning may not be named.
            before = max(np.int64(chains[c].length) - depth, 0)
        policy.depth = depth + before
        c = begin_turn(group, policy, c, policy.depth, count + before)
    else:
        last = keys[count - 1, 2]
        c = owners[last] if last != NONE else c
        if c == NONE or find_first(group, policy, c):
            return NONE
        chains[c].turns += 1
    turns_of(policy)[0] = c
    if c == NONE:
        return c
    shared = 0
    for i in range(count):
        b = keys[i, 2]
        if b != NONE:
            shared += 1 if blocks_of(group)[b].ref_word >> 32 != 1 else 0
        if b != NONE and turn:
            owners[b] = c
            if is_name(keys[i, 0], count - i):
                put_name(policy, keys[i, 0], c)
    begin_release(group, policy, c, shared)
    return c if turn else NONE


@jit
def on_touched(group, keys, turn):
    """They are listed, after all that was listed before."""
    policy = policy_of(group)
    c = turns_of(policy)[0]
    if c == NONE:
        return
    chain = chains_of(policy)[c]
    since, returns = chain.released, chain.returns
    on_end_release(group, 0, 0)
    if not turn:
        chain.released, chain.returns = since, returns
        for i in range(len(keys)):
            if is_listed(group, policy, c, keys[i, 2]):
                blocks_of(group)[keys[i, 2]].used_at = since


@jit
def choose(at, second, nothing):
    """The next victim in the list of the first or the ``second`` policy state, which is not empty. Not called while LRU
    is followed. The first of these that there is:

    1. the oldest block, if it is an orphan, as blocks of ``expect_victims`` are;
    2. the next block of the chain that was picked last, of which up to ``RUN`` go in a row;
    3. the deepest block of the chain that is worth least, which is picked now. Blocks that a turn has left over are
       worth least of all;
    4. the oldest block.
    """
    group = record_at(at, GROUP)
    policy = record_at(group.policy_at + second * POLICY_SIZE, POLICY)
    oldest = lists_of(group)[policy.list, 0]
    if _is_orphan(group, policy, oldest):
        return oldest
    b = NONE
    if policy.left > 0:
        policy.left -= 1
        b = take_first(group, policy, policy.pick)
    while b == NONE and policy.cached > 0:
        c = _least(group, policy)
        if c == NONE:
            break
        # Only the blocks that a chain has left over go, whatever its other blocks are worth.
        policy.pick, policy.left = c, min(RUN, max(_own_size(group, policy, c), 1)) - 1
        if tier_list_of(policy, c).rest != NONE or chains_of(policy)[c].turns > 0:
            policy.left = 0
        b = take_first(group, policy, c)
    return b if b != NONE else oldest


@jit
def _is_orphan(group, policy, b):
    """Whether no chain with blocks has listed a block at its last turn. ``choose`` finds it through no chain."""
    c = owners_of(group)[b]
    old = c == NONE or blocks_of(group)[b].used_at != chains_of(policy)[c].released
    return old or tier_list_of(policy, c).place >= policy.cached


@jit
def _own_size(group, policy, c):
    """How many blocks a chain has that it does not share: on the device and in the host's list."""
    size = np.int64(tier_list_of(policy, c).size)
    if policy.list == host_policy_of(group).list:
        size += np.int64(chains_of(policy)[c].size)
    return size - chains_of(policy)[c].stem


@jit
def worth_now(group, policy, c, expert):
    """The worth of the blocks of a chain: by a trusted hint of the engine until it proves wrong, else by its pauses."""
    chain = chains_of(policy)[c]
    age = age_of(group, chain)
    if chain.returns != 0 and is_trusted(policy, chain.returns):
        if chain.returns == ENDS:
            return -0.5
        if chain.returns >= age:
            return 1000.0 / (chain.returns - age + 1)
    return worth_of(policy, expert, chain, age)


@jit
def _first_worth(group, policy, c, enough):
    """The worth of the deepest listed block of a chain, or anything above ``enough``."""
    chain = chains_of(policy)[c]
    if chain.turns > 0 or tier_list_of(policy, c).rest != NONE:
        return -1.0  # left over
    worth = worth_now(group, policy, c, policy.follows)
    return worth if _own_size(group, policy, c) > 0 else _stem_worth(group, policy, c, worth, enough)


@jit
def _stem_worth(group, policy, c, worth, enough):
    """The worth of a stem of which nothing else is left: the highest of the chains that begin with it, or anything
    above ``enough``."""
    chains, other = chains_of(policy), chains_of(policy)[c].after
    for _ in range(_RING):
        if other == c or worth > enough:
            break
        if chains[other].turns > 0:
            return _HUGE
        worth = max(worth, worth_now(group, policy, other, policy.follows))
        other = chains[other].after
    return worth


@jit
def _least(group, policy):
    """The chain whose first block is worth least, of all, or of some and the last one. NONE if no chain has blocks."""
    chains, order = chains_of(policy), order_of(policy)
    chosen, least = NONE, 0.0
    at = tries = 0
    if policy.pick != NONE and has_blocks(group, policy, policy.pick):
        chosen, least = policy.pick, _first_worth(group, policy, policy.pick, _HUGE)
    while at < policy.cached and tries < ALL and least >= 0.0:
        place = at if policy.cached <= ALL else draw(policy, policy.cached)
        c = order[place]
        tries += 1
        if not has_blocks(group, policy, c):
            continue
        worth = _first_worth(group, policy, c, least if chosen != NONE else _HUGE)
        if (
            chosen == NONE
            or worth < least
            or (worth == least and age_of(group, chains[c]) > age_of(group, chains[chosen]))
        ):
            chosen, least = c, worth
        at += 1 if policy.cached <= ALL else ALL // SOME
    return chosen
