"""Calibration: which way of copying is the fastest for a size and number of fragments, measured on a device or by
rule."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import log2
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.arrays.layout import BlockLayout
from kvpool.device.base import Device, Region, Stream

PLAIN, BATCHED, KERNEL = PATHS = ("plain", "batched", "kernel")
"""Plain: one copy of the copy engine for each fragment. Batched: all fragments in one call of the driver. Kernel: a
kernel that reads and writes both memories."""
OFFLOAD, ONBOARD, WITHIN = DIRECTIONS = ("offload", "onboard", "within")

FRAGMENT_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
FRAGMENTS = (4, 64, 1024)
BATCH_BYTES_MAX = 256 << 20
_SECONDS, _REPEATS_MIN = 0.01, 3
_VERSION = 2
# A kernel takes multiprocessors from the model, so it is chosen only if it is this much faster.
_KERNEL_HANDICAP = 1.1
_SMALL_BYTES, _MANY, _SOME = 28 << 10, 16, 4


class Measurement(NamedTuple):
    """The speed of a batch of ``fragments`` of ``nbytes`` bytes each in one direction. Its time is that until it was
    done, and the processor's time to enqueue it."""

    direction: str
    nbytes: int
    fragments: int
    path: str
    gigabytes_per_second: float


@dataclass(frozen=True)
class Calibration:
    """What was measured on ``device`` with driver version ``driver``. Without measurements, a rule of thumb.
    Immutable."""

    device: str
    driver: int
    measurements: tuple[Measurement, ...] = ()
    _chosen: dict[tuple[Any, ...], str] = field(default_factory=dict, compare=False, repr=False)

    def choose(self, direction: str, nbytes: int, count: int, paths: Collection[str] = PATHS) -> str:
        """Choose one of ``paths`` to copy ``count`` fragments of about ``nbytes`` bytes each. ``"plain"`` is always
        possible.

        The choice follows the measurement that is nearest in the logarithms of size and number.
        """
        key = (direction, nbytes.bit_length(), count.bit_length(), *sorted(paths))
        if key not in self._chosen:
            near = self._nearest(direction, nbytes, count)
            speed = {
                m.path: m.gigabytes_per_second / (_KERNEL_HANDICAP if m.path == KERNEL else 1)
                for m in near
                if m.path in paths
            }
            self._chosen[key] = (
                max(speed, key=lambda path: speed[path]) if speed else _rule(direction, nbytes, count, paths)
            )
        return self._chosen[key]

    def _nearest(self, direction: str, nbytes: int, count: int) -> list[Measurement]:
        def distance(m: Measurement) -> float:
            return abs(log2(m.nbytes) - log2(max(nbytes, 1))) + abs(log2(m.fragments) - log2(max(count, 1)))

        mine = [m for m in self.measurements if m.direction == direction]
        nearest = min(map(distance, mine), default=0)
        return [m for m in mine if distance(m) == nearest]

    def text(self) -> str:
        """The calibration as JSON, which ``parse`` reads."""
        rows = [list(m) for m in self.measurements]
        return json.dumps({"version": _VERSION, "device": self.device, "driver": self.driver, "measurements": rows})

    @classmethod
    def parse(cls, text: str) -> Calibration:
        """Read the result of ``text``. Raises ValueError."""
        try:
            found = json.loads(text)
            if found["version"] != _VERSION:
                raise ValueError(f"version {found['version']} is not {_VERSION}")
            return cls(
                str(found["device"]), int(found["driver"]), tuple(_measurement(*row) for row in found["measurements"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no calibration: {error}") from None


def _measurement(direction: str, nbytes: int, count: int, path: str, speed: float) -> Measurement:
    if direction not in DIRECTIONS or path not in PATHS or not (nbytes > 0 and count > 0 and speed > 0):
        raise ValueError(f"{[direction, nbytes, count, path, speed]} is no measurement")
    return Measurement(direction, int(nbytes), int(count), path, float(speed))


def _rule(direction: str, nbytes: int, count: int, paths: Collection[str]) -> str:
    """The choice without measurements. Copy engines cost time for each fragment, kernels cost multiprocessors. A kernel
    that writes to the host disturbs other work, so it is the last choice."""
    if KERNEL in paths and count >= _MANY and direction != OFFLOAD and (nbytes < _SMALL_BYTES or direction == WITHIN):
        return KERNEL
    if BATCHED in paths and count >= _SOME:
        return BATCHED
    return KERNEL if KERNEL in paths and count >= _MANY else PLAIN


def always(path: str) -> Calibration:
    """A calibration that chooses one path wherever it is possible. Raises ValueError."""
    if path not in PATHS:
        raise ValueError(f"path={path!r}: must be one of {', '.join(PATHS)}")
    return Calibration("any", 0, tuple(Measurement(direction, 1, 1, path, 1.0) for direction in DIRECTIONS))


def place(device: str, driver: int, environment: Mapping[str, str] = os.environ) -> Path:
    """The file for the calibration of a device under a driver."""
    cache = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or "~").expanduser() / ".cache"
    name = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-")
    return Path(cache) / "kvpool" / f"calibration-{name}-{driver}.json"


def load(path: Path) -> Calibration | None:
    """Read a stored calibration, or None if there is none. Raises ValueError for a file with other content, and OSError
    for a file that cannot be read."""
    try:
        return Calibration.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def chosen(given: Calibration | str | None, device: str, driver: int) -> Calibration:
    """The calibration that a device uses. It is ``given`` (a calibration, or the name of a path); without that the
    stored one; without that one that leaves every choice to the rule."""
    if given is not None:
        return always(given) if isinstance(given, str) else given
    path = place(device, driver)
    try:
        stored = load(path)
    except (OSError, ValueError) as error:
        warnings.warn(f"{path}: {error}; copies are chosen by rule until calibrate() is called", stacklevel=4)
        stored = None
    return stored or Calibration(device, driver)


def keep(calibration: Calibration) -> None:
    """Store the calibration under its device and driver. If that fails, warn that only this device has it."""
    path = place(calibration.device, calibration.driver)
    try:
        store(path, calibration)
    except OSError as error:
        warnings.warn(f"{path}: {error}; the calibration is used by this device only", stacklevel=3)


def store(path: Path, calibration: Calibration) -> None:
    """Write a calibration for other processes. They see the old file or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(calibration.text(), encoding="utf-8")
    part.replace(path)


def measure(
    make: Callable[[str], Device],
    paths: Iterable[str],
    sizes: Iterable[int] = FRAGMENT_BYTES,
    counts: Iterable[int] = FRAGMENTS,
    batch_bytes_max: int = BATCH_BYTES_MAX,
) -> list[Measurement]:
    """Measure copies between blocks of ``sizes`` bytes, no two of which are neighbours, in every direction.

    ``make(path)`` returns a device that copies by one path; this function closes it. Batches of more than
    ``batch_bytes_max`` are left out. A tier takes twice as much memory as the largest batch. Raises DeviceError,
    MemoryError.
    """
    found = []
    for path in paths:
        device = make(path)
        try:
            stream = device.create_stream("measured")
            for nbytes in sizes:
                fitting = [count for count in counts if count * nbytes <= batch_bytes_max]
                found += [m._replace(path=path) for m in _measure_size(device, stream, nbytes, fitting)]
        finally:
            device.close()
    return found


def _measure_size(device: Device, stream: Stream, nbytes: int, counts: list[int]) -> Iterator[Measurement]:
    blocks = 2 * max(counts, default=0)
    if not blocks:
        return
    layout = BlockLayout(1, 1, nbytes, 1, "uint8", planes=1, order="block_first")
    pools = [device.allocate(blocks * nbytes, tier) for tier in ("device", "host")]
    try:
        device.bind([Region.of(layout, pools[0], pools[1], blocks, blocks)])
        for count in counts:
            # Every other block, in random order, so that nothing can be merged.
            even = 2 * np.random.default_rng(count).permutation(blocks // 2)[:count]
            for direction, source, target in ((OFFLOAD, 0, blocks), (ONBOARD, blocks, 0), (WITHIN, 0, 1)):
                moves = np.stack([even + source, even + target, np.ones_like(even), np.arange(count)], axis=1)
                yield Measurement(direction, nbytes, count, "", count * nbytes / _seconds(device, stream, moves) / 1e9)
    finally:
        for pool in pools:
            device.free(pool)


def _seconds(device: Device, stream: Stream, moves: NDArray[np.int64]) -> float:
    """The median time of a batch, from the call until it is done, and again the time of the call: meanwhile the thread
    of the scheduler does nothing else. The first run warms up."""
    times: list[float] = []
    while len(times) <= _REPEATS_MIN or sum(times) < _SECONDS:
        begin = perf_counter()
        device.copy_blocks(moves, stream)
        enqueued = perf_counter()
        device.synchronize(device.record(stream))
        times.append(perf_counter() - begin + enqueued - begin)
    return float(np.median(times[1:]))
