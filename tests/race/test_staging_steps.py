"""Hand-overs of step tables on streams that run late: what was staged is what arrives, and no buffer is taken before
it was read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import small_layout
from kvpool import KVCacheManager, StepTables
from kvpool.device.sim import ScheduleFailed, SimDevice, explore
from steps import GARBAGE, NAMES, arrays, check, expected
from tests.race.lab import Lab

GUARD = "staged_buffers_retire_by_event"
RUNS = [(seed, progress) for progress in (0.0, 0.3, 0.9, 1.0) for seed in range(3)]


def out() -> StepTables:
    return arrays(1, 6, 5, 5)


def all_of(found: StepTables) -> list[np.ndarray]:
    return [getattr(found, name) for name in NAMES]


def is_right(found: StepTables, wanted: dict[str, np.ndarray]) -> bool:
    try:
        check(found, wanted)
    except AssertionError:
        return False
    return True


def stalled(seed: int, progress: float, guard: str | None) -> tuple[list[int], list[str]]:
    """Stage A, release it, give its blocks to B, stage B, all behind a closed gate: whose tables are wrong, and what
    else is."""
    lab = Lab(3, 0, seed=seed, progress=progress, guard=guard)
    cache, first, second = lab.cache, out(), out()
    a = lab.add([1, 2, 3, 4, 5])
    wanted = [expected(cache, a.id, [1], [3])]
    gate = lab.sim.stall(lab.a)
    cache.copy_step_tables(first, a.id, 1, 3)
    cache.release(lab.live.pop(a.id).id, store=False)
    b = cache.add_sequence([11, 12, 13, 14, 15, 16], stream=lab.a)
    wanted.append(expected(cache, b, [0], [6]))
    cache.copy_step_tables(second, b)
    assert all((one == GARBAGE).all() for one in all_of(first) + all_of(second))
    gate.open()
    lab.sim.run()
    wrong = [i for i, found in enumerate((first, second)) if not is_right(found, wanted[i])]
    return wrong, lab.findings()


def test_what_was_staged_arrives_whatever_happens_to_the_sequences_meanwhile() -> None:
    for seed, progress in RUNS:
        assert stalled(seed, progress, None) == ([], []), f"seed {seed}, progress {progress}"


def test_a_buffer_that_is_taken_at_once_has_a_sequence_write_over_another() -> None:
    """The proof bites: without the rule both the tables and the order of accesses are wrong, in every run."""
    for seed, progress in RUNS:
        wrong, found = stalled(seed, progress, GUARD)
        assert wrong, f"seed {seed}, progress {progress}"
        assert any("RaceError" in one and "stage_step" in one for one in found), f"seed {seed}: {found}"


def small_case(guard: str | None) -> Callable[[SimDevice], None]:
    """Two hand-overs with a release between; a kernel behind them reads the tables."""

    def body(device: SimDevice) -> None:
        cache = KVCacheManager(
            small_layout(1), device_blocks=2, host_blocks=0, device=device, max_sequences=1, secret=bytes(32)
        )
        engine, first, second, seen = device.create_stream("engine"), out(), out(), list[bool]()
        try:
            if guard is not None:
                cache.core.disable_guard(guard)
            a = cache.add_sequence([1, 2], stream=engine)
            cache.copy_step_tables(first, a, 1, 1)
            wanted = [expected(cache, a, [1], [1])]
            cache.release(a, store=False)
            b = cache.add_sequence([3], stream=engine)
            cache.copy_step_tables(second, b)
            wanted.append(expected(cache, b, [0], [1]))
            device.launch(
                engine,
                lambda: seen.extend([is_right(first, wanted[0]), is_right(second, wanted[1])]),
                loads=all_of(first) + all_of(second),
            )
            device.synchronize()
            assert seen == [True, True]
            cache.verify()
        finally:
            cache.close()

    return body


def test_a_small_case_is_right_in_every_schedule() -> None:
    count = explore(small_case(None), limit=20_000)
    print(f"{count} schedules")
    assert count > 50


def test_a_small_case_is_wrong_in_some_schedule_without_the_guard() -> None:
    with pytest.raises(ScheduleFailed):
        explore(small_case(GUARD), limit=20_000)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ordered", [True, False])
def test_an_array_that_others_use_without_an_order_is_a_race(name: str, ordered: bool) -> None:
    lab, given = Lab(8, 0), out()
    lab.cache.copy_step_tables(given, lab.add([1]).id)
    if ordered:
        lab.sim.wait(lab.b, lab.sim.record(lab.a))
    lab.sim.launch(lab.b, lambda: None, loads=[getattr(given, name)])
    found = lab.findings()
    assert not found if ordered else any("RaceError" in one and "array" in one for one in found), found


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
