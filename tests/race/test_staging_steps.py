"""Hand-overs of step tables on streams that run late: what was staged is what arrives, and no buffer is taken before
it was read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpool import StepTables
from steps import NAMES, arrays, check, expected
from tests.race.lab import Lab

RUNS = [(seed, progress) for progress in (0.0, 0.3, 0.9, 1.0) for seed in range(3)]


def out() -> StepTables:
    return arrays(1, 6, 5, 5)


def all_of(found: StepTables) -> list[np.ndarray]:
    return [getattr(found, name) for name in NAMES]


@pytest.mark.parametrize("staged", [True, False])
def test_the_stream_that_is_named_follows_the_one_that_the_sequences_were_used_on(staged: bool) -> None:
    for seed, progress in RUNS:
        lab = Lab(8, 0, seed=seed, progress=progress)
        a, given = lab.add([1, 2, 3]), out()
        both = [a.id, lab.add([4], stream=lab.b).id]
        with pytest.raises(ValueError, match="stream=None"):
            lab.cache.copy_step_tables(arrays(2, 9, 9, 9), both)
        with pytest.raises(ValueError, match="which has 3"):
            step(lab, given, staged, a.id, first=4)  # and nothing has changed
        lab.write(a, 0)
        step(lab, given, staged, a.id)
        lab._streams[a.id] = lab.b
        lab.check(a)  # reads on b what was written on a
        lab.sim.launch(lab.b, lambda given=given: None, loads=all_of(given) if staged else [])
        assert not lab.findings(), f"seed {seed}, progress {progress}"


def step(lab: Lab, given: StepTables, staged: bool, *args: Any, **more: Any) -> None:
    if staged:
        lab.cache.copy_step_tables(given, *args, stream=lab.b, **more)
    else:
        lab.cache.step_tables(*args, stream=lab.b, **more)


def test_step_tables_on_the_host_read_what_no_stream_writes() -> None:
    """They are there at once, whatever is still to be done on the streams."""
    for seed, progress in RUNS:
        lab = Lab(8, 4, seed=seed, progress=progress)
        gate = lab.sim.stall(lab.a)
        a, given = lab.add([1, 2, 3]), out()
        lab.cache.step_tables(a.id, out=given)
        check(given, expected(lab.cache, a.id, [0], [3]))
        gate.open()
        assert not lab.findings(), f"seed {seed}, progress {progress}"
