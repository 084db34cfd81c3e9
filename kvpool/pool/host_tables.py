"""Tables that the host reads: block tables in place, the states of recurrent groups, the tables of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.copying.transfer import NO_IDS
from kvpool.entry.arguments import id_array
from kvpool.pool.core import Core
from kvpool.pool.refusals import refusal
from kvpool.state import recurrent
from kvpool.state.sequences import use
from kvpool.tables.block_table import BlockTable
from kvpool.tables.step_tables import HostStep, StepTables, step_argument

Ids = npt.NDArray[np.int64]


class HostTables:
    """Tables of one pool for readers on the host. Thread-safe."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def block_table(self, ids: Any, stream: Any, group: int | None) -> BlockTable:
        """What ``KVCacheManager.block_table`` does."""
        core, which, g = self._core, id_array("ids", ids), self._core.config.group(group)
        if stream is not None:
            core.decide(stream, use, which, ids=which)
        with core.lock:
            rows = core.rows(which)
            lengths = core.states[g].sequences["length"][rows].astype(np.int64)
            return BlockTable(core.tables[g], rows, lengths, core.config.tokens_per_block)

    def state_blocks(self, ids: Any, stream: Any, group: int | None) -> npt.NDArray[np.int32]:
        """What ``KVCacheManager.state_blocks`` does."""
        core, which, g = self._core, id_array("ids", ids), self._core.config.group(group)
        kind = core.config.groups[g].kind
        if kind != "recurrent":
            raise ValueError(f"group={g}: accepted are recurrent groups; this one is of kind {kind}")
        if stream is not None:
            core.decide(stream, use, which, ids=which)
        out = np.empty((len(which), 2), np.int32)
        with core.lock:
            recurrent.state_blocks(core.states.heads, g, core.rows(which), out)
        return out

    def step(self, ids: Any, first: Any, counts: Any, out: Any, stream: Any, group: int | None) -> StepTables:
        """What ``KVCacheManager.step_tables`` does."""
        core, (which, begins, each, g) = self._core, step_arguments(self._core, ids, first, counts, group)
        step = HostStep(None if out is None else step_argument("out", out), begins, each)
        if stream is not None:
            core.decide(stream, step.write, which, g, True, ids=which)
            return step.written
        with core.lock:
            core.check_open()
            error = step.write(core.states.heads, which, g, False)
            if error < 0:
                raise refusal(core.states.heads, error, which, core.tokens.sequences)
        return step.written


def step_arguments(core: Core, ids: Any, first: Any, counts: Any, group: int | None) -> tuple[Ids, Ids, Ids, int]:
    """Sequences, first tokens and counts of a step, each as private int64[n], and the group. None becomes int64[0]."""
    which, g = id_array("ids", ids), core.config.group(group)
    if core.config.groups[g].kind == "recurrent":
        raise ValueError(f"group={g}: accepted are groups for attention; states are where state_blocks says")
    return which, _each("first", first, which), _each("counts", counts, which), g


def _each(name: str, numbers: Any, which: Ids) -> Ids:
    """One number for each sequence, or none. The state checks their values."""
    if numbers is None:
        return NO_IDS
    found = id_array(name, numbers)
    if len(found) != len(which):
        raise ValueError(f"{name} has {len(found)} entries: accepted is one for each of the {len(which)} ids")
    return found
