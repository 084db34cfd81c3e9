"""Pauses: how long conversations of a class stay away before they come back, and the worth of one that has been away
for a while.

A *table* is float64[TABLES, ROWS, PAUSE_BINS], all zeros at first. Conversations have *classes*, which are rows, in a
few kinds. A class with few pauses is estimated with its kind, and a kind with all together. The functions change the
table and nothing else.
"""

from __future__ import annotations

import numpy as np

from kvpool.common.jit import jit
from kvpool.common.jit.intrinsics import bit_length

PAUSE_BINS = 30
KINDS, MEMBERS = 3, 11
CLASSES = KINDS * MEMBERS
ROWS = CLASSES + KINDS + 1
"""The classes, then their kinds, then all together."""
AWAY, BACK, WORTH, CHANCE, LEARNT = range(TABLES := 5)
"""How many were still away when a bin began, and how many came back in it; what follows from them. The first bin of
LEARNT has the number of pauses when the worth of a class was computed, and in the last row the number of all."""
_FIRST = 9 << 8
"""The logarithm at which the second bin begins: 512 ms, in 256ths of an octave."""
_LEAN, _PRIOR, _MOST, _REFRESH = 16.0, 0.05, 512.0, 8.0
"""The weight of the wider class, in pauses; the prior chance to come back in a bin; from how many pauses on the old
ones count half; after how many pauses a worth is computed anew."""


@jit
def octaves(ms):
    """The logarithm of a time, in 256ths of an octave."""
    value = max(ms, 1)
    whole = bit_length(value) - 1
    return (whole << 8) + ((value << 8) >> whole) - 256


@jit
def bin_of(ms):
    return min(max((octaves(ms) - _FIRST) >> 7, -1) + 1, PAUSE_BINS - 1)


@jit
def width_of(at):
    """The seconds of a bin."""
    if at == 0:
        return 0.512
    return 0.256 * np.float64(1 << ((at - 1) >> 1))


@jit
def _wider(row):
    """The wider class of a row; the last row has none."""
    return CLASSES + row // MEMBERS if row < CLASSES else ROWS - 1


@jit
def learn(rates, row, ms, came):
    """Count a pause that has ended after ``ms``, or that was observed for ``ms`` and has not ended."""
    last = bin_of(ms)
    rates[LEARNT, ROWS - 1, 0] += 1.0
    while True:
        if rates[AWAY, row, 0] > _MOST:
            for at in range(PAUSE_BINS):
                rates[AWAY, row, at] *= 0.5
                rates[BACK, row, at] *= 0.5
        for at in range(last):
            rates[AWAY, row, at] += 1.0
        rates[AWAY, row, last] += 1.0 if came else 0.5
        rates[BACK, row, last] += 1.0 if came else 0.0
        if row == ROWS - 1:
            break
        row = _wider(row)


@jit
def worth(rates, row, ms):
    """The worth of a conversation of a class that has been away for ``ms``: the chance to come back within some time,
    per second of that time, for the best time."""
    begin = bin_of(ms)
    if rates[LEARNT, row, 0] == 0.0 or rates[LEARNT, ROWS - 1, 0] >= rates[LEARNT, row, 0] + _REFRESH:
        for at in range(PAUSE_BINS):
            rates[CHANCE, row, at] = min(_chance(rates, row, at), 1.0)
            rates[WORTH, row, at] = -1.0  # computed when needed
        rates[LEARNT, row, 0] = max(rates[LEARNT, ROWS - 1, 0], 1.0)
    if rates[WORTH, row, begin] < 0.0:
        rates[WORTH, row, begin] = _worth_from(rates, row, begin)
    return rates[WORTH, row, begin]


@jit
def _chance(rates, row, at):
    """The chance that a conversation that is away when a bin begins comes back in it."""
    chance = (rates[BACK, ROWS - 1, at] + _PRIOR) / (rates[AWAY, ROWS - 1, at] + 1.0)
    if row < ROWS - 1:
        wider = row if row >= CLASSES else _wider(row)
        chance = (rates[BACK, wider, at] + _LEAN * chance) / (rates[AWAY, wider, at] + _LEAN)
    if row < CLASSES:
        chance = (rates[BACK, row, at] + _LEAN * chance) / (rates[AWAY, row, at] + _LEAN)
    return chance


@jit
def _worth_from(rates, row, begin):
    """The worth of a conversation of a class that has been away until some time in the bin ``begin``."""
    away, back, time, best = 1.0, 0.0, 0.0, 0.0
    for at in range(begin, PAUSE_BINS):
        # It is in the middle of its first bin on average.
        part = 0.5 if at == begin else 1.0
        chance, width = rates[CHANCE, row, at] * part, width_of(at) * part
        back += away * chance
        time += away * width * (1.0 - 0.5 * chance)
        away *= 1.0 - chance
        best = max(best, back / time)
    return best
