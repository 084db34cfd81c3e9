"""Which way of copying is chosen, from measurements and by rule, and how measurements are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpool.device import CpuDevice
from kvpool.device.base import NULL_STREAM, Event, Stream
from kvpool.device.cuda import calibration
from kvpool.device.cuda.calibration import (
    BATCHED,
    DIRECTIONS,
    KERNEL,
    OFFLOAD,
    ONBOARD,
    PATHS,
    PLAIN,
    WITHIN,
    Calibration,
    Measurement,
    always,
    load,
    measure,
    place,
    store,
)
from kvpool.device.wrapper import WrappedDevice

FASTEST = {(4096, 64): KERNEL, (4096, 4): PLAIN, (1 << 20, 64): BATCHED, (1 << 20, 4): PLAIN}


def measured() -> Calibration:
    """Onboards: of each size and number, one path is twice as fast as the others."""
    rows = [
        Measurement(ONBOARD, *size, path, 20.0 if path == best else 10.0)
        for size, best in FASTEST.items()
        for path in PATHS
    ]
    return Calibration("gpu", 1, tuple(rows))


@pytest.mark.parametrize(("size", "best"), FASTEST.items())
def test_what_was_the_fastest_nearby_is_chosen(size: tuple[int, int], best: str) -> None:
    nbytes, count = size
    for near_bytes in (nbytes // 3, nbytes, nbytes * 3):
        for near_count in (max(1, count // 2), count, count + count // 2):
            assert measured().choose(ONBOARD, near_bytes, near_count) == best


def test_what_cannot_be_taken_is_not_chosen() -> None:
    rows = [
        Measurement(ONBOARD, 4096, 64, path, speed) for path, speed in ((KERNEL, 30.0), (BATCHED, 20.0), (PLAIN, 10.0))
    ]
    calibration = Calibration("gpu", 1, tuple(rows))
    assert calibration.choose(ONBOARD, 4096, 64) == KERNEL
    assert calibration.choose(ONBOARD, 4096, 64, (PLAIN, BATCHED)) == BATCHED
    assert calibration.choose(ONBOARD, 4096, 64, (PLAIN,)) == PLAIN


def test_a_kernel_that_is_hardly_faster_is_left_to_the_model() -> None:
    def faster_by(factor: float) -> Calibration:
        return Calibration(
            "gpu", 1, (Measurement(OFFLOAD, 1, 1, BATCHED, 10.0), Measurement(OFFLOAD, 1, 1, KERNEL, 10.0 * factor))
        )

    assert faster_by(1.05).choose(OFFLOAD, 1, 1) == BATCHED
    assert faster_by(1.2).choose(OFFLOAD, 1, 1) == KERNEL


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("paths", [PATHS, (PLAIN, BATCHED), (PLAIN, KERNEL), (PLAIN,)])
def test_without_measurements_a_rule_chooses_what_can_be_taken(direction: str, paths: tuple[str, ...]) -> None:
    for nbytes in (1, 4096, 65536, 1 << 24):
        for count in (1, 4, 16, 4096):
            assert Calibration("gpu", 1).choose(direction, nbytes, count, paths) in paths


def test_the_rule_makes_few_copies_plainly_and_keeps_kernels_from_writing_to_the_host() -> None:
    rule = Calibration("gpu", 1)
    assert {rule.choose(direction, 1 << 20, 1) for direction in DIRECTIONS} == {PLAIN}
    assert rule.choose(OFFLOAD, 4096, 1000) == rule.choose(ONBOARD, 1 << 20, 1000) == BATCHED
    assert rule.choose(ONBOARD, 4096, 1000) == rule.choose(WITHIN, 1 << 20, 1000) == KERNEL
    # Without batches, a thousand calls cost more than a kernel.
    assert rule.choose(OFFLOAD, 4096, 1000, (PLAIN, KERNEL)) == KERNEL


@pytest.mark.parametrize("path", PATHS)
def test_always_means_wherever_it_can_be_taken(path: str) -> None:
    assert {always(path).choose(direction, nbytes, 9) for direction in DIRECTIONS for nbytes in (1, 1 << 30)} == {path}
    assert always(path).choose(OFFLOAD, 1, 1, (PLAIN,)) == PLAIN
    with pytest.raises(ValueError, match="path='warp'"):
        always("warp")


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = place("NVIDIA H200 (a/b)", 13010, {"XDG_CACHE_HOME": str(tmp_path)})
    assert path == tmp_path / "kvpool" / "calibration-NVIDIA-H200-a-b-13010.json"
    assert load(path) is None
    store(path, measured())
    assert load(path) == measured()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_the_place_is_below_the_home_where_nothing_else_is_said() -> None:
    assert place("a", 1, {"HOME": "/somewhere"}) == Path("/somewhere/.cache/kvpool/calibration-a-1.json")
    assert place("a", 1, {}) == Path.home() / ".cache/kvpool/calibration-a-1.json"


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"driver": "new"},
        {"measurements": 5},
        {"measurements": [[]]},
        {"measurements": [["sideways", 1, 1, PLAIN, 1.0]]},
        {"measurements": [[OFFLOAD, 1, 1, "warp", 1.0]]},
        {"measurements": [[OFFLOAD, 0, 1, PLAIN, 1.0]]},
        {"measurements": [[OFFLOAD, 1, 1, PLAIN, -1.0]]},
    ],
)
def test_what_is_no_calibration_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "file"
    path.write_text(json.dumps(json.loads(measured().text()) | change))
    with pytest.raises(ValueError, match="no calibration"):
        load(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="no calibration"):
        load(path)


def test_measuring_covers_every_size_number_direction_and_path_and_closes_what_it_made() -> None:
    made: list[CpuDevice] = []

    def make(path: str) -> CpuDevice:
        made.append(CpuDevice())
        return made[-1]

    found = measure(make, ["a", "b"], sizes=(64, 4096), counts=(2, 16), batch_bytes_max=4096 * 15)
    sizes = [(64, 2), (64, 16), (4096, 2)]
    assert [m[:4] for m in found] == [(d, *size, path) for path in "ab" for size in sizes for d in DIRECTIONS]
    assert all(m.gigabytes_per_second > 0 for m in found)
    assert len(made) == 2 and all(device._closed for device in made)


def test_the_time_of_the_call_counts_as_much_as_that_of_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that holds up the scheduler's thread is worse than one that takes a little longer by itself. The clock is
    the test's: enqueueing and copying take so many seconds."""
    clock = [0.0]
    monkeypatch.setattr(calibration, "perf_counter", lambda: clock[0])

    class Slow(WrappedDevice):
        def __init__(self, enqueueing: float, copying: float) -> None:
            super().__init__(CpuDevice())
            self.enqueueing, self.copying = enqueueing, copying

        def copy_blocks(self, moves: Any, stream: Stream = NULL_STREAM) -> None:
            clock[0] += self.enqueueing

        def synchronize(self, event: Event | None = None) -> None:
            clock[0] += self.copying

    seconds = {BATCHED: (4.0, 4.0), KERNEL: (1.0, 8.0)}
    found = measure(lambda path: Slow(*seconds[path]), (BATCHED, KERNEL), sizes=[4096], counts=[16])
    assert Calibration("gpu", 1, tuple(found)).choose(ONBOARD, 4096, 16) == KERNEL
    assert {round(16 * 4096 / m.gigabytes_per_second / 1e9) for m in found if m.path == BATCHED} == {12}
