"""Blocks that a window has passed while the kernel of the step is still queued: nobody overwrites what it reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.race.lab import Lab
from tests.race.test_races import RUNS, Unasked

PROMPT = [1, 2, 3, 4, 5, 6, 7]


def step(lab: Lab) -> None:
    """A step of decoding: the kernel that reads a block written long ago is queued on stream a when the commit gives
    that block back.

    It is the next victim, and not worth a copy to the host, which would be in order behind the kernel.
    """
    sequence = lab.commit(lab.add(PROMPT, retention=[(4, 6, 10, None)]))
    lab.sim.synchronize()
    lab.append(sequence, [8])
    lab.cache.commit(sequence.id, stream=lab.a)
    assert lab.cache.stats().passed_blocks == 3


def another_sequence_writes(lab: Lab) -> None:
    step(lab)
    lab.add([11, 12], stream=lab.b)


def an_onboard_writes(lab: Lab) -> None:
    lab.seed([21, 22, 23], committed=2)
    lab.cache.offload([21, 22, 23])
    lab.sim.synchronize()
    step(lab)
    assert lab.cache.prefetch([21, 22, 23]) == 1


def the_sequence_itself_writes_on_another_stream(lab: Lab) -> None:
    step(lab)
    (sequence,) = lab.live.values()
    lab.use(sequence, lab.b)
    lab.append(sequence, [9, 10, 11, 12, 13])


def reuse_on_another_stream_of_what_is_still_being_written(lab: Lab) -> None:
    lab.cache.commit(lab.add(PROMPT).id, stream=lab.a)
    assert lab.add([*PROMPT[:6], 8], stream=lab.b).cached == 6


RACES: dict[Callable[[Lab], None], tuple[str, int, int]] = {
    another_sequence_writes: ("engine_writes_after_engine", 4, 0),
    an_onboard_writes: ("copy_writes_after_engine", 4, 1),
    reuse_on_another_stream_of_what_is_still_being_written: ("engine_reads_after_engine", 5, 0),
}
"""With the guard that keeps each from happening, and the blocks of both tiers."""


def run(scene: Callable[[Lab], None], seed: int, progress: float, guard: str | None = None) -> list[str]:
    _, device, host = RACES.get(scene, ("", 4, 0))
    lab = Lab(
        device,
        host,
        seed=seed,
        progress=progress,
        guard=guard,
        wrap=Unasked if guard else None,
        window=2,
        max_sequence_tokens=20,
    )
    try:
        scene(lab)
    except AssertionError:
        if guard is None:
            raise
    return lab.findings()


@pytest.mark.parametrize(
    "scene", [*RACES, the_sequence_itself_writes_on_another_stream], ids=lambda scene: scene.__name__
)
def test_nothing_races(scene: Callable[[Lab], None]) -> None:
    for seed, progress in RUNS:
        found = run(scene, seed, progress)
        assert not found, f"seed {seed}, progress {progress}: {found}"


@pytest.mark.parametrize("scene", RACES, ids=lambda scene: scene.__name__)
def test_the_race_is_found_without_its_guard(scene: Callable[[Lab], None]) -> None:
    for seed, progress in RUNS:
        assert run(scene, seed, progress, RACES[scene][0]), f"seed {seed}, progress {progress}: nothing was found"


def test_one_commit_may_both_write_and_give_back_every_block() -> None:
    for length in range(10, 80, 7):
        lab = Lab(40, 0, window=2)
        sequence = lab.add([1])
        for token in range(length):
            lab.append(sequence, [token])
        lab.commit(sequence)
        assert lab.cache.stats().passed_blocks >= length // 2 - 1
        assert not lab.findings()
