"""Pauses: how long a chain that has paused for some time will still pause, learnt from the pauses of its class.

A *chain* is a cached prefix that requests extend. Its pauses are counted in bins of half an octave. For each bin the
tables have how many chains were still away when it began, and how many came back in it. So a chain whose end nobody
saw counts as far as it was seen. A class with few pauses leans on the pauses of all classes with its stop reason, and
these on all pauses.

The *worth* of keeping a chain is the best ratio of the chance that it comes back to the time until then, over all
times to wait for it (an index of Gittins). A short pause that is almost over is worth much, a chain that is mostly
gone by now is worth nothing.
"""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.jit.intrinsics import array_at, bit_length

BINS = 30
STOPS, LEVELS, LENGTHS = 3, 7, 4
CLASSES = STOPS * (LEVELS + LENGTHS)
"""A class: why the last request stopped, and the level of the chain's own pauses; before its first pause, its
length."""
ROWS = CLASSES + STOPS + 1
"""Rows of a table: the classes, then the stop reasons, then all together."""
AWAY, BACK, WORTH, CHANCE = range(TABLES := 4)
"""The tables: chains that were still away when a bin began, and that came back in it; what follows from them."""

_FIRST = 9 << 8
"""The logarithm at which the second bin begins: 512 ms, in 256ths of an octave."""
_LEVEL, _LEVEL_FIRST = 307, 11 << 8
_LEAN, _PRIOR, _MOST, _REFRESH, _REFRESH_ALL = 8.0, 0.05, 512.0, 4, 256
"""How many pauses the wider class counts for; the chance to come back in a bin that nobody has seen; at how many
pauses the old ones begin to count half; after how many pauses the worth of a class
is computed anew, and that of all."""


@jit(forceinline=True)
def rates_of(book):
    return array_at(book.rates_at, (TABLES, ROWS, BINS), np.float64)


@jit
def octaves(ms):
    """The logarithm of a time, in 256ths of an octave."""
    value = max(np.int64(ms), np.int64(1))
    whole = bit_length(value) - 1
    return np.int64((whole << 8) + ((value << 8) >> whole) - 256)


@jit
def bin_of(ms):
    return min(max((octaves(ms) - _FIRST) >> 7, -1) + 1, BINS - 1)


@jit
def width_of(at):
    """The seconds of a bin."""
    if at == 0:
        return 0.512
    return 0.256 * np.float64(np.int64(1) << ((at - 1) >> 1))


@jit
def class_of(stop, count, mean, length):
    """The class of a chain: a stop reason, the pauses that it has made, the mean of their logarithms, its blocks."""
    own = min(max((mean - _LEVEL_FIRST) // _LEVEL, 0), LEVELS - 1)
    if count == 0:
        own = LEVELS + min(bit_length(np.int64(length)) // 3, LENGTHS - 1)
    return np.int64(stop * (LEVELS + LENGTHS) + own)


@jit
def _wider(row):
    """The row that a row leans on; the last row leans on none."""
    return CLASSES + row // (LEVELS + LENGTHS) if row < CLASSES else ROWS - 1


@jit
def learn(book, row, ms, came):
    """Count a pause of a class that ended, or that was seen for so long only."""
    rates, last, learnt = rates_of(book), bin_of(ms), row
    while True:
        if rates[AWAY, row, 0] > _MOST:
            for at in range(BINS):
                rates[AWAY, row, at] *= 0.5
                rates[BACK, row, at] *= 0.5
        for at in range(last):
            rates[AWAY, row, at] += 1.0
        rates[AWAY, row, last] += 1.0 if came else 0.5
        rates[BACK, row, last] += 1.0 if came else 0.0
        if row == ROWS - 1:
            break
        row = _wider(row)
    book.learnt += 1
    if book.learnt % _REFRESH_ALL == 1:
        for other in range(CLASSES):
            _refresh(rates, other)
    elif book.learnt % _REFRESH == 0 and learnt < CLASSES:
        _refresh(rates, learnt)


@jit
def _chance(rates, row, at):
    """The chance that a chain that is away when a bin begins comes back in it."""
    chance = (rates[BACK, ROWS - 1, at] + _PRIOR) / (rates[AWAY, ROWS - 1, at] + 1.0)
    if row < ROWS - 1:
        wider = row if row >= CLASSES else _wider(row)
        chance = (rates[BACK, wider, at] + _LEAN * chance) / (rates[AWAY, wider, at] + _LEAN)
    if row < CLASSES:
        chance = (rates[BACK, row, at] + _LEAN * chance) / (rates[AWAY, row, at] + _LEAN)
    return chance


@jit
def _refresh(rates, row):
    """Compute the worth of a class in all bins anew."""
    for at in range(BINS):
        rates[CHANCE, row, at] = min(_chance(rates, row, at), 1.0)
    for begin in range(BINS):
        away, back, time, best = 1.0, 0.0, 0.0, 0.0
        for at in range(begin, BINS):
            # A chain is in the middle of its first bin on average.
            part = 0.5 if at == begin else 1.0
            chance, width = rates[CHANCE, row, at] * part, width_of(at) * part
            back += away * chance
            time += away * width * (1.0 - 0.5 * chance)
            away *= 1.0 - chance
            best = max(best, back / time)
        rates[WORTH, row, begin] = best


@jit(forceinline=True)
def worth_of(book, row, ms):
    return rates_of(book)[WORTH, row, bin_of(ms)]
