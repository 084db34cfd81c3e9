"""Hand-overs as CSR on streams that run late: what was staged is what arrives, and no buffer is taken before it was
read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import small_layout
from kvpool import KVCacheManager
from kvpool.device.sim import ScheduleFailed, SimDevice, explore
from tests.race.lab import Lab

GUARD = "staged_buffers_retire_by_event"
RUNS = [(seed, progress) for progress in (0.0, 0.3, 0.9, 1.0) for seed in range(3)]
GARBAGE = 1234567


def vectors() -> list[np.ndarray]:
    return [np.full(size, GARBAGE, np.int32) for size in (2, 5, 1)]


def of(cache: KVCacheManager, sequence: int) -> list[list[int]]:
    """What the vectors should be."""
    return [part.tolist() for part in cache.block_table(sequence).csr()]


def in_use(given: list[np.ndarray]) -> list[list[int]]:
    return [one[one != GARBAGE].tolist() for one in given]


def stalled(seed: int, progress: float, guard: str | None) -> tuple[list[Any], list[str]]:
    """Stage A, release it, give its blocks to B, stage B, all behind a closed gate: what is wrong in the vectors, and
    elsewhere."""
    lab = Lab(3, 0, seed=seed, progress=progress, guard=guard)
    cache, first, second = lab.cache, vectors(), vectors()
    a = lab.add([1, 2, 3, 4, 5])
    expected = of(cache, a.id)
    gate = lab.sim.stall(lab.a)
    cache.copy_batch_block_csr(*first, a.id)
    cache.release(lab.live.pop(a.id).id, store=False)
    b = cache.add_sequence([11, 12, 13, 14, 15, 16], stream=lab.a)
    cache.copy_batch_block_csr(*second, b)
    assert all((one == GARBAGE).all() for one in [*first, *second])
    gate.open()
    lab.sim.run()
    wrong = [found for found, wanted in ((in_use(first), expected), (in_use(second), of(cache, b))) if found != wanted]
    return wrong, lab.findings()


def test_what_was_staged_arrives_whatever_happens_to_the_sequences_meanwhile() -> None:
    for seed, progress in RUNS:
        assert stalled(seed, progress, None) == ([], []), f"seed {seed}, progress {progress}"


def test_a_buffer_that_is_taken_at_once_gives_a_sequence_the_pages_of_another() -> None:
    """The proof bites: without the rule both the vectors and the order of accesses are wrong, in every run."""
    for seed, progress in RUNS:
        wrong, found = stalled(seed, progress, GUARD)
        assert wrong, f"seed {seed}, progress {progress}"
        assert any("RaceError" in one and "stage_vectors" in one for one in found), (
            f"seed {seed}, progress {progress}: {found}"
        )


def small_case(guard: str | None) -> Callable[[SimDevice], None]:
    """Two hand-overs with a release between; a kernel behind them reads the vectors."""

    def body(device: SimDevice) -> None:
        cache = KVCacheManager(
            small_layout(1), device_blocks=2, host_blocks=0, device=device, max_sequences=1, secret=bytes(32)
        )
        engine, first, second, seen = device.create_stream("engine"), vectors(), vectors(), list[Any]()
        try:
            if guard is not None:
                cache.core.disable_guard(guard)
            a = cache.add_sequence([1, 2], stream=engine)
            cache.copy_batch_block_csr(*first, a)
            expected = [of(cache, a)]
            cache.release(a, store=False)
            b = cache.add_sequence([3], stream=engine)
            cache.copy_batch_block_csr(*second, b)
            expected.append(of(cache, b))
            device.launch(engine, lambda: seen.extend([in_use(first), in_use(second)]), loads=[*first, *second])
            device.synchronize()
            assert seen == expected
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


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("ordered", [True, False])
def test_a_vector_that_others_use_without_an_order_is_a_race(number: int, ordered: bool) -> None:
    lab = Lab(8, 0)
    given = vectors()
    lab.cache.copy_batch_block_csr(*given, lab.add([1]).id)
    if ordered:
        lab.sim.wait(lab.b, lab.sim.record(lab.a))
    lab.sim.launch(lab.b, lambda: None, loads=[given[number]])
    found = lab.findings()
    assert not found if ordered else any("RaceError" in one and "array" in one for one in found), found


def test_the_stream_that_is_named_follows_the_one_that_the_sequences_were_used_on() -> None:
    for seed, progress in RUNS:
        lab = Lab(8, 0, seed=seed, progress=progress)
        a, given = lab.add([1, 2, 3]), vectors()
        with pytest.raises(ValueError, match="stream=None"):
            lab.cache.copy_batch_block_csr(
                *[np.zeros(9, np.int32) for _ in range(3)], [a.id, lab.add([4], stream=lab.b).id]
            )
        lab.cache.copy_batch_block_csr(*given, a.id, stream=lab.b)
        lab._streams[a.id] = lab.b
        lab.check(a)  # reads on b what was written on a
        lab.sim.launch(lab.b, lambda: None, loads=given)
        assert not lab.findings(), f"seed {seed}, progress {progress}"
