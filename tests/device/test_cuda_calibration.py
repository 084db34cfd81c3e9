"""Which way of copying is chosen, from measurements and by rule, and how measurements are kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.device import CpuDevice
from kvpool.device.base import NULL_STREAM, DeviceEvent, Stream, WrappedDevice
from kvpool.device.cuda import calibration, trials
from kvpool.device.cuda.calibration import (
    BATCHED,
    BULK,
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
    chosen,
    load,
    place,
    store,
)
from kvpool.device.cuda.runtime import Gpu, link_of
from kvpool.device.cuda.trials import measure
from kvpool.device.work import Fragments
from kvpool.errors import DeviceError
from tests.seeds import some_of

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
            assert measured().choose(ONBOARD, near_bytes, near_count, (PLAIN,)) == PLAIN, "no other can be taken"


def test_the_multiprocessors_that_a_kernel_takes_are_part_of_its_price() -> None:
    def faster_by(factor: float, share: float) -> str:
        rows = (
            Measurement(OFFLOAD, 1, 1, BATCHED, 10.0),
            Measurement(OFFLOAD, 1, 1, KERNEL, 10.0 * factor, multiprocessors=share),
        )
        return Calibration("gpu", 1, rows).choose(OFFLOAD, 1, 1)

    assert faster_by(1.05, 8 / 132) == BATCHED
    assert faster_by(1.1, 8 / 132) == KERNEL
    assert faster_by(1.9, 1.0) == BATCHED
    assert faster_by(2.1, 1.0) == KERNEL


def test_the_rule_makes_few_copies_plainly_and_keeps_kernels_from_writing_to_the_host() -> None:
    rule, large = Calibration("gpu", 1), 1 << 20
    before = (PLAIN, BATCHED, KERNEL)
    for direction, nbytes, count, paths, path in (
        *((direction, large, 1, PATHS, PLAIN) for direction in DIRECTIONS),
        (OFFLOAD, 4096, 1000, before, BATCHED),
        (ONBOARD, large, 1000, PATHS, BATCHED),
        (ONBOARD, 4096, 1000, before, KERNEL),
        (WITHIN, large, 1000, PATHS, KERNEL),
        # Copy units slow down nobody.
        (OFFLOAD, 4096, 1000, PATHS, BULK),
        (ONBOARD, 4096, 1000, PATHS, KERNEL),
        # Without batches, a thousand calls cost more than a kernel.
        (OFFLOAD, 4096, 1000, (PLAIN, KERNEL), KERNEL),
        (OFFLOAD, 4096, 1000, (PLAIN,), PLAIN),
    ):
        assert rule.choose(direction, nbytes, count, paths) == path, (direction, nbytes, count, paths)


def test_always_means_wherever_it_can_be_taken() -> None:
    for path in PATHS:
        assert {always(path).choose(direction, 1 << 30, 9) for direction in DIRECTIONS} == {path}
        assert always(path).choose(OFFLOAD, 1, 1, (PLAIN,)) == PLAIN
    with pytest.raises(ValueError, match="path: .*'warp'"):
        always("warp")


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = place("NVIDIA H200 (a/b)", 13010, {"XDG_CACHE_HOME": str(tmp_path)})
    assert path == tmp_path / "kvpool" / "calibration-NVIDIA-H200-a-b-13010.json"
    assert place("a", 1, {"HOME": "/somewhere"}) == Path("/somewhere/.cache/kvpool/calibration-a-1.json")
    assert place("a", 1, {}) == Path.home() / ".cache/kvpool/calibration-a-1.json"
    assert load(path) is None
    store(path, measured())
    assert load(path) == measured()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "change",
    [
        {"version": 3},
        {"driver": "new"},
        {"measurements": 5},
        *(
            {"measurements": [row]}
            for row in (
                [],
                [OFFLOAD, 1, 1, PLAIN, 1.0],
                ["sideways", 1, 1, PLAIN, 1.0, 1.0, 0.0],
                [OFFLOAD, 1, 1, "warp", 1.0, 1.0, 0.0],
                [OFFLOAD, 0, 1, PLAIN, 1.0, 1.0, 0.0],
                [OFFLOAD, 1, 1, PLAIN, -1.0, 1.0, 0.0],
                [OFFLOAD, 1, 1, PLAIN, 1.0, 1.0, 1.5],
            )
        ),
    ],
)
def test_what_is_not_a_calibration_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "file"
    for text in (json.dumps(json.loads(measured().text()) | change), "[]"):
        path.write_text(text)
        with pytest.raises(ValueError, match="no calibration"):
            load(path)


def test_what_was_measured_under_other_conditions_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another part of the GPU, another slot, other kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpu = Gpu(0, "gpu", 1 << 30, 1, "9.0", 132, "x16", "13.0")
    made = calibration.made(gpu, measured().measurements)
    store(place("gpu", 1), made)
    assert chosen(None, gpu) == made

    def is_refused(gpu: Gpu) -> str:
        with pytest.warns(UserWarning, match="measured with 132 .*by rule until calibrate"):
            assert chosen(None, gpu) == calibration.made(gpu)
        return calibration.conditions(gpu)

    changes: list[dict[str, Any]] = [{"multiprocessors": 16}, {"link": "x8"}, {"compiler": "13.1"}]
    others = {is_refused(gpu._replace(**change)) for change in changes}
    monkeypatch.setitem(calibration.KERNELS, KERNEL, ("kv_copy.cu", "any"))
    assert len({made.conditions, is_refused(gpu), *others}) == 5


def test_the_link_is_what_both_ends_can_do(tmp_path: Path) -> None:
    port = tmp_path / "devices/pci0000:00/0000:00:01.0"
    gpu = port / "0000:3b:00.0"
    gpu.mkdir(parents=True)
    names = tmp_path / "bus/pci/devices"
    names.mkdir(parents=True)
    (names / gpu.name).symlink_to(gpu)
    assert link_of("0000:3B:00.0", tmp_path) == link_of("0000:00:00.0", tmp_path) == "unknown"
    (gpu / "current_link_width").write_text("16\n")
    for end, speed in ((gpu, "32.0 GT/s PCIe"), (port, "16.0 GT/s PCIe")):
        (end / "max_link_speed").write_text(f"{speed}\n")
    assert link_of("0000:3B:00.0", tmp_path) == "x16 16.0 GT/s PCIe and 32.0 GT/s PCIe"


def test_measuring_covers_every_size_number_direction_and_path() -> None:
    device, shares = CpuDevice(), {BATCHED: 0.0, KERNEL: 0.25}
    measurements = measure(
        device,
        shares,
        sizes=(64, 4096),
        counts=(2, 16),
        batch_bytes_max=4096 * 15,
        share=lambda path, direction: shares[path],
    )
    sizes = [(64, 2), (64, 16), (4096, 2)]
    assert [m[:4] for m in measurements] == [(d, *size, path) for path in shares for size in sizes for d in DIRECTIONS]
    assert all(m.gigabytes_per_second > 0 and m.multiprocessors == shares[m.path] for m in measurements)
    assert device._bound is None
    device.close()


class Wrong(WrappedDevice):
    """A device that makes what a test says of fragments and of moves, where it goes by a path."""

    def __init__(self, path: str, direction: str, fault: Callable[[np.ndarray, str], np.ndarray]) -> None:
        super().__init__(CpuDevice())
        self.path, self.direction, self.fault = path, direction, fault
        self.calibration = Calibration("none", 0)

    def bind(self, regions: Any) -> None:
        self.inner.bind(regions)
        part = regions[0].parts[0]
        self.host, self.blocks = part.host_pool, regions[0].device_blocks

    def is_wrong(self, source_is_host: bool, target_is_host: bool) -> bool:
        directions = {(False, True): OFFLOAD, (True, False): ONBOARD, (False, False): WITHIN}
        mine = self.calibration.choose(OFFLOAD, 1, 1) == self.path
        return mine and directions.get((source_is_host, target_is_host)) == self.direction

    def copy_blocks(self, moves: Any, stream: Stream = NULL_STREAM) -> None:
        if self.is_wrong(*(moves[0, :2] >= self.blocks)):
            moves = self.fault(moves, "blocks")
        self.inner.copy_blocks(moves, stream)

    def enqueue(self, work: Any, stream: Stream = NULL_STREAM) -> None:
        start = self.host.ctypes.data
        ends = [start <= int(work.rows[0, end]) < start + self.host.nbytes for end in (0, 1)]
        if self.is_wrong(*ends):
            work = Fragments(self.fault(work.rows, "fragments"))
        self.inner.enqueue(work, stream)


# Each changes the rows (source, target, bytes) of fragments, or the moves (source, target, tokens, ticket) of blocks.
FAULTS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "without tails": ("fragments", lambda rows: np.stack([*rows[:, :2].T, rows[:, 2] // 16 * 16], axis=1)),
    "without crooked ends": ("fragments", lambda rows: rows[(rows[:, :2] % 16 == 0).all(axis=1)]),
    "too long": ("fragments", lambda rows: rows + np.array([0, 0, 1])),
    "whole": ("blocks", lambda rows: np.where([False, False, True, False], rows[:, 2].max(), rows)),
}


@pytest.mark.parametrize("fault", [*FAULTS, "failing"])
@pytest.mark.parametrize("direction", some_of(1, DIRECTIONS))
def test_a_path_that_copies_other_bytes_is_left_out_with_a_warning(direction: str, fault: str) -> None:
    def wrong(rows: np.ndarray, what: str) -> np.ndarray:
        if fault not in FAULTS:
            raise DeviceError("no such thing")
        faulty, change = FAULTS[fault]
        return change(rows) if what == faulty else rows

    device = Wrong(KERNEL, direction, wrong)
    with pytest.warns(UserWarning, match="no copy is made by the path 'kernel': (no such thing|.*other bytes)"):
        measurements = measure(device, [PLAIN, KERNEL, BATCHED], sizes=[64], counts=[2])
    assert {m.path for m in measurements} == {PLAIN, BATCHED}
    device.close()


def test_a_device_that_failed_for_good_is_measured_no_more() -> None:
    def broken(rows: np.ndarray, what: str) -> np.ndarray:
        raise DeviceError("gone", sticky=True)

    with pytest.raises(DeviceError, match="gone"):
        measure(Wrong(KERNEL, OFFLOAD, broken), [KERNEL], sizes=[64], counts=[2])


def test_the_time_of_the_call_counts_as_much_as_that_of_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that holds up the scheduler's thread is worse than one that takes a little longer by itself. The clock is
    the test's: enqueueing and copying take that many seconds. Comparing a path's bytes takes plain copies, which must
    not be what is measured afterwards."""
    clock = [0.0]
    monkeypatch.setattr(trials, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(trials, "difference", lambda device, path: setattr(device, "calibration", always(PLAIN)))
    seconds = {BATCHED: (4.0, 4.0), KERNEL: (1.0, 8.0)}

    class Slow(WrappedDevice):
        calibration = Calibration("none", 0)

        def way(self) -> tuple[float, float]:
            return seconds[self.calibration.choose(ONBOARD, 4096, 16, tuple(seconds))]

        def copy_blocks(self, moves: Any, stream: Stream = NULL_STREAM) -> None:
            clock[0] += self.way()[0]

        def synchronize(self, event: DeviceEvent | None = None) -> None:
            clock[0] += self.way()[1]

    measurements = measure(Slow(CpuDevice()), seconds, sizes=[4096], counts=[16])
    assert Calibration("gpu", 1, tuple(measurements)).choose(ONBOARD, 4096, 16) == KERNEL
    assert {(m.path, round(m.cost)) for m in measurements} == {(BATCHED, 12), (KERNEL, 10)}
