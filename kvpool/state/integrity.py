"""Every invariant of all groups of layers. Reads the arrays; the caller holds the state lock."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpool.errors import IntegrityError
from kvpool.state.blocks import GROUP
from kvpool.state.states import States
from kvpool.state.verify import findings


def verify_states(states: States, leased: npt.NDArray[np.int64]) -> None:
    """Raise IntegrityError for the first invariant that does not hold; where there are several groups, its message names the group.

    ``leased`` are the blocks of live leases, one entry per pin, by the ids that all behind the state knows them by.
    """
    pins = {int(state.header[GROUP]): ids for state, _, ids in states.split(leased)}
    for g, state in enumerate(states):
        for check, detail in findings(state, pins.get(g, leased[:0])):
            raise IntegrityError(check, f"group {g}: {detail}" if len(states) > 1 else detail)
