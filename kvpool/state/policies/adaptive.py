"""The policy ``adaptive``: LRU, ``reuse`` or ``agent``, whichever would have hit more lately.

There is no second cache. For each chain it counts how many blocks each of these experts would have kept: its *ghost*.
In a large pool it samples one chain in ``2**shift``. All experts use the same list, so a switch moves no block.
"""

from __future__ import annotations

import math

import numpy as np

from kvpool.common.jit import jit
from kvpool.state.policies import agent
from kvpool.state.policies.agent import ALL, SOME, worth_now
from kvpool.state.policies.chains import (
    EXPERTS,
    LRU,
    age_of,
    chains_of,
    draw,
    ghosts_of,
    host_policy_of,
    order_of,
    policy_of,
    scores_of,
)
from kvpool.state.records import NONE

_MEMORY, _SURE = 2048.0, 1.5
"""A hit counts half after some 0.7 * 2048 requests. Another expert than LRU is followed once its lead is 1.5 standard
deviations of the sum of hits."""
_TRIES, _DRAWS = 2 * ALL, 8 * SOME


@jit
def on_admit(group, request, slot):
    """What ``agent`` does. Then compare all ghosts on the prompt."""
    return _compared(group, agent.on_admit(group, request, slot))


@jit
def on_touch(group, matches, turn):
    return _compared(group, agent.on_touch(group, matches, turn))


@jit
def _compared(group, c):
    """Compare the ghosts on a prompt of a chain, or of none. Returns the chain."""
    policy = policy_of(group)
    if c != NONE and c & ((1 << policy.shift) - 1) == 0:
        _compare(group, policy, c)
    return c


@jit
def _compare(group, policy, c):
    """Count what each ghost would have hit of the last prompt. All get its blocks."""
    chain, ghost = chains_of(policy)[c], ghosts_of(policy)[c]
    ghost_blocks, lead, noise = scores_of(policy)[0], scores_of(policy)[1], scores_of(policy)[2]
    held, length = max(policy.depth - chain.base, 0), max(np.int64(chain.length) - chain.base, 0)
    of_lru = min(held, np.int64(ghost[LRU]))
    for expert in range(EXPERTS):
        more = np.float64(min(held, np.int64(ghost[expert])) - of_lru)
        lead[expert] += more - lead[expert] / _MEMORY
        noise[expert] += more * more - noise[expert] / _MEMORY
        ghost_blocks[expert] += np.float64(length - np.int64(ghost[expert]))
        ghost[expert] = length
    for expert in range(EXPERTS):
        ahead = lead[expert] - lead[policy.follows] - _SURE * math.sqrt(noise[expert])
        if ahead > 0.0 or (expert == LRU and ahead == 0.0):
            policy.follows = host_policy_of(group).follows = expert
    _evict(group, policy, c)


@jit
def _evict(group, policy, running):
    """Have the ghosts lose blocks of other chains until they fit: each those of the chain that its expert finds worth
    least, of some that have blocks in a ghost. Most chains may have none."""
    ghosts, room = ghosts_of(policy), policy.capacity >> policy.shift
    ghost_blocks, least = scores_of(policy)[0], scores_of(policy)[3]
    for _ in range(_TRIES):
        if max(ghost_blocks[0], ghost_blocks[1], ghost_blocks[2]) <= room:
            return
        _find_least(group, policy, running)
        for expert in range(EXPERTS):
            if ghost_blocks[expert] > room and least[expert] != NONE:
                c = np.int64(least[expert])
                gone = min(np.int64(ghost_blocks[expert]) - room, np.int64(ghosts[c, expert]))
                ghosts[c, expert] -= gone
                ghost_blocks[expert] -= gone


@jit
def _find_least(group, policy, running):
    """Note for each expert which chain is worth least to it, or NONE."""
    chains, ghosts, least, low = chains_of(policy), ghosts_of(policy), scores_of(policy)[3], scores_of(policy)[4]
    some = 0
    least[:] = NONE
    for at in range(policy.known if policy.known <= ALL else _DRAWS):
        if policy.shift:
            c = draw(policy, policy.chains >> policy.shift) << policy.shift
        else:
            c = order_of(policy)[at if policy.known <= ALL else draw(policy, policy.known)]
        if max(ghosts[c, 0], ghosts[c, 1], ghosts[c, 2]) == 0 or c == running or chains[c].turns > 0:
            continue
        for expert in range(EXPERTS):
            if ghosts[c, expert] > 0:
                worth = np.float64(-age_of(group, chains[c])) if expert == LRU else worth_now(group, policy, c, expert)
                if least[expert] == NONE or worth < low[expert]:
                    least[expert], low[expert] = c, worth
        some += 1
        if some == SOME and policy.known > ALL:
            return
