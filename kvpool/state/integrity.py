"""Every invariant of all groups of layers. Reads the arrays; the caller holds the state lock."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpool.errors import IntegrityError
from kvpool.state.blocks import CROSS, FREE_ROWS, GROUP, KIND
from kvpool.state.states import States
from kvpool.state.verify import Finding, findings


def together(states: States) -> list[Finding]:
    """What the groups of a pool disagree about: a sequence has the same row in all of them, and but for cross attention the same tokens."""
    first, found = next(state for state in states if state.header[KIND] != CROSS), []
    for g, state in enumerate(states):
        same = ("live", "generation", "failed", "stream") + (() if state.header[KIND] == CROSS else ("length", "committed", "cached"))
        live = first.sequences["live"] != 0
        wrong = [name for name in same if not np.array_equal(first.sequences[name][live], state.sequences[name][live])]
        rows = state.header[FREE_ROWS] == first.header[FREE_ROWS] and np.array_equal(state.rows, first.rows)
        idle = (state.sequences["live"][~live] != 0).any()
        if wrong or idle or not rows:
            found.append(("groups", f"group {g} has other sequences than the first: {', '.join(wrong) or 'rows'}"))
    return found


def verify_states(states: States, leased: npt.NDArray[np.int64]) -> None:
    """Raise IntegrityError for the first invariant that does not hold; where there are several groups, its message names the group.

    ``leased`` are the blocks of live leases, one entry per pin, by the ids that all behind the state knows them by.
    """
    pins = {int(state.header[GROUP]): ids for state, _, ids in states.split(leased)}
    for g, state in enumerate(states):
        for check, detail in findings(state, pins.get(g, leased[:0])):
            raise IntegrityError(check, f"group {g}: {detail}" if len(states) > 1 else detail)
    for check, detail in together(states):
        raise IntegrityError(check, detail)
