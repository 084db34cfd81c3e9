"""Calibration: which way of copying is the fastest for a size and number of fragments, measured on a device or by
rule."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import product
from math import log2
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arrays import Int64s
from kvpool.common.arrays.layout import BlockLayout
from kvpool.common.arrays.strided import as_strided
from kvpool.common.errors import DeviceError
from kvpool.device.base import Device, Stream
from kvpool.device.cpu import CpuDevice
from kvpool.device.fragments import OFFLOAD, ONBOARD, WITHIN
from kvpool.device.launches import BULK_FRAGMENTS, COPY_FRAGMENTS, cuda_source
from kvpool.device.regions import BYTES, FROM, TO, Region
from kvpool.device.work import Fragments

PLAIN, BATCHED, KERNEL, BULK = PATHS = ("plain", "batched", "kernel", "bulk")
"""Plain: one copy of the copy engine for each fragment. Batched: all fragments in one call of the driver. Kernel: a
kernel that reads and writes both memories. Bulk: a kernel that has copy units of multiprocessors do it."""
KERNELS = {KERNEL: COPY_FRAGMENTS, BULK: BULK_FRAGMENTS}
"""The paths that are kernels: source and name. One that is not requested has to pass a test on the GPU first."""
DIRECTIONS = (OFFLOAD, ONBOARD, WITHIN)

FRAGMENT_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
FRAGMENTS = (4, 64, 1024)
BATCH_BYTES_MAX = 256 << 20
_SECONDS, _REPEATS_MIN = 0.01, 3
_VERSION = 4
_SMALL_BYTES, _MANY, _SOME = 128 << 10, 16, 4


class Measurement(NamedTuple):
    """The speed of a batch of ``fragments`` of ``nbytes`` bytes each in one direction, from the call until it was done.

    ``call_microseconds`` is the time of the call itself, for which the thread of the scheduler does nothing else.
    ``multiprocessors`` is the share of them, 0 to 1, that the copy keeps from the model.
    """

    direction: str
    nbytes: int
    fragments: int
    path: str
    gigabytes_per_second: float
    call_microseconds: float = 0.0
    multiprocessors: float = 0.0

    @property
    def cost(self) -> float:
        """What is judged, in seconds: the time of the copies, more for each multiprocessor, and again that of the
        call."""
        seconds = self.nbytes * self.fragments / self.gigabytes_per_second / 1e9
        return seconds * (1 + self.multiprocessors) + self.call_microseconds / 1e6


@dataclass(frozen=True)
class Calibration:
    """What was measured on ``device`` with driver version ``driver``, under other ``conditions`` that change the
    figures. Without measurements, a rule of thumb. Immutable."""

    device: str
    driver: int
    measurements: tuple[Measurement, ...] = ()
    conditions: str = ""
    _chosen: dict[tuple[Any, ...], str] = field(default_factory=dict, compare=False, repr=False)

    def choose(self, direction: str, nbytes: int, count: int, paths: tuple[str, ...] = PATHS) -> str:
        """Choose one of ``paths`` to copy ``count`` fragments of about ``nbytes`` bytes each. ``"plain"`` is always
        possible.

        The choice follows the measurement that is nearest in the logarithms of size and number.
        """
        key = direction, nbytes.bit_length(), count.bit_length(), paths
        if key not in self._chosen:
            costs = {m.path: m.cost for m in self._nearest(direction, nbytes, count) if m.path in paths}
            rule = _rule(direction, nbytes, count, paths)
            self._chosen[key] = min(costs, key=lambda path: costs[path]) if costs else rule
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
        fields = {"version": _VERSION, "device": self.device, "driver": self.driver, "conditions": self.conditions}
        return json.dumps({**fields, "measurements": rows})

    @classmethod
    def parse(cls, text: str) -> Calibration:
        """Read the result of ``text``. Raises ValueError."""
        try:
            fields = json.loads(text)
            if fields["version"] != _VERSION:
                raise ValueError(f"version {fields['version']} is not {_VERSION}")
            rows = tuple(_measurement(row) for row in fields["measurements"])
            return cls(str(fields["device"]), int(fields["driver"]), rows, str(fields["conditions"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no calibration: {error}") from None


def _measurement(row: list[Any]) -> Measurement:
    parsed = Measurement(*row)
    known = len(row) == len(parsed) and parsed.direction in DIRECTIONS and parsed.path in PATHS
    positive = min(parsed.nbytes, parsed.fragments, parsed.gigabytes_per_second) > 0 <= parsed.call_microseconds
    if not (known and positive and 0 <= parsed.multiprocessors <= 1):
        raise ValueError(f"{list(parsed)} is no measurement")
    return parsed


def _rule(direction: str, nbytes: int, count: int, paths: Collection[str]) -> str:
    """The choice without measurements. Copy engines cost time for each fragment, on an H200 one to four microseconds of
    the call; kernels cost multiprocessors. A kernel that writes to the host slows down other work, so it is the last
    choice. One that has copy units write did so in two cases of eighteen."""
    kernel = BULK if BULK in paths and direction == OFFLOAD else KERNEL
    slows = direction == OFFLOAD and kernel == KERNEL
    if kernel in paths and count >= _MANY and not slows and (nbytes < _SMALL_BYTES or direction == WITHIN):
        return kernel
    if BATCHED in paths and count >= _SOME:
        return BATCHED
    return kernel if kernel in paths and count >= _MANY else PLAIN


def always(path: str) -> Calibration:
    """A calibration that chooses one path wherever it is possible. Raises ValueError."""
    if path not in PATHS:
        raise ValueError(f"path: expected one of {', '.join(PATHS)}, got {path!r:.80}")
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


def conditions(multiprocessors: int, link: str) -> str:
    """What changes the figures of a GPU and is in neither its name nor the driver's version: the multiprocessors of a
    part of it, the link, and the kernels."""
    kernels = sha256("".join(cuda_source(source) for source, _ in KERNELS.values()).encode()).hexdigest()[:16]
    return f"{multiprocessors} multiprocessors, link {link}, kernels {kernels}"


def chosen(choice: Calibration | str | None, device: str, driver: int, now: str = "") -> Calibration:
    """The calibration that a device uses. It is ``choice`` (a calibration, or the name of a path); without that the
    stored one, if it was measured under the conditions that there are ``now``; without that one that leaves every
    choice to the rule."""
    if choice is not None:
        return always(choice) if isinstance(choice, str) else choice
    path = place(device, driver)
    try:
        stored = load(path)
        if stored is not None and stored.conditions != now:
            raise ValueError(f"measured with {stored.conditions}, and there are {now}")
    except (OSError, ValueError) as error:
        warnings.warn(f"{path}: {error}; copies are chosen by rule until calibrate() is called", stacklevel=4)
        stored = None
    return stored or Calibration(device, driver, conditions=now)


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
    device: Device,
    paths: Iterable[str],
    sizes: Iterable[int] = FRAGMENT_BYTES,
    counts: Iterable[int] = FRAGMENTS,
    batch_bytes_max: int = BATCH_BYTES_MAX,
    share: Callable[[str, str], float] = lambda path, direction: 0.0,
) -> list[Measurement]:
    """Measure copies between blocks of ``sizes`` bytes, no two of which are neighbours, in every direction.

    ``device`` is bound to nothing, and goes by its attribute ``calibration``, which this sets. Before a path is
    measured, its bytes are compared with those of plain copies on the CPU. A path that differs or fails is left out,
    with a warning. ``share(path, direction)`` is the share of the multiprocessors that it takes. Batches of more than
    ``batch_bytes_max`` are left out. A tier takes twice as much memory as the largest batch. Raises MemoryError, and
    DeviceError for a device that has failed for good.
    """
    measurements, stream, fitting = [], device.create_stream("measured"), {}
    for nbytes in sizes:
        fitting[nbytes] = [count for count in counts if count * nbytes <= batch_bytes_max]
    for path in paths:
        try:
            wrong = difference(device, stream, path)
            device.calibration = always(path)  # type: ignore[attr-defined]
            of_path = (
                []
                if wrong
                else [
                    m._replace(path=path, multiprocessors=share(path, m.direction))
                    for nbytes, some in fitting.items()
                    for m in _measure_size(device, stream, nbytes, some)
                ]
            )
        except DeviceError as error:
            if error.sticky:
                raise
            wrong, of_path = str(error), []
        if wrong:
            warnings.warn(f"no copy is made by the path {path!r}: {wrong}", stacklevel=3)
        measurements += of_path
    return measurements


_LAYOUTS = BlockLayout(3, 1, 40, 8, "uint8"), BlockLayout(3, 1, 48, 8, "uint8")
"""Of tokens that are whole words of 8 bytes, and of 16: only those go by ``BULK``."""
_BLOCKS = 192
_CHECKED_BYTES = (1, 15, 16, 17, 48, 250, 4096, 4099, 9001)
_CROOKED = ((0, 0), (1, 1), (4, 0), (3, 10))


def difference(device: Device, stream: Stream, path: str) -> str | None:
    """What is wrong with copies by a path, if anything: blocks, parts of blocks, fragments in whole words, and
    fragments of odd sizes at odd places, in every direction. ``device`` as in ``measure``. Raises DeviceError,
    MemoryError."""
    return next(filter(None, (_difference(device, stream, path, layout) for layout in _LAYOUTS)), None)


def _difference(device: Device, stream: Stream, path: str, layout: BlockLayout) -> str | None:
    nbytes, random = _BLOCKS * layout.block_bytes, np.random.default_rng(0)
    pools = [device.allocate(nbytes, "device"), device.allocate(2 * nbytes, "host")]
    expected, twin = [np.zeros(nbytes, np.uint8), np.zeros(2 * nbytes, np.uint8)], CpuDevice()
    try:
        for copier, memory in ((device, pools), (twin, expected)):
            copier.bind([Region.of(layout, memory[0], memory[1], _BLOCKS, 2 * _BLOCKS)])
        bases = [[as_strided("pool", pool).address for pool in memory] for memory in (pools, expected)]
        # The device tier is written from the second half of the host tier, and read to there, by plain copies.
        whole_tier = np.array([[bases[0][1] + nbytes, bases[0][0], nbytes]])
        for direction, (source, target) in {OFFLOAD: (0, 1), ONBOARD: (1, 0), WITHIN: (0, 0)}.items():
            for what in ("blocks", "fragments"):
                expected[0][:] = random.integers(0, 256, nbytes)
                expected[1][:nbytes] = pools[1][:nbytes] = random.integers(0, 256, nbytes)
                pools[1][nbytes:] = expected[0]
                _by(PLAIN, device, stream, whole_tier)
                if what == "blocks":
                    copy_ops = _copy_ops(random, source, target, layout)
                    _by(path, device, stream, copy_ops)
                    twin.copy_blocks(copy_ops)
                else:
                    rows = _fragments(nbytes, layout is _LAYOUTS[1])
                    for copier, addresses in ((device, bases[0]), (twin, bases[1])):
                        _by(path, copier, stream, rows + np.array([addresses[source], addresses[target], 0]))
                _by(PLAIN, device, stream, whole_tier[:, [TO, FROM, BYTES]])
                read_back, wanted = np.roll(pools[1], nbytes), np.concatenate([expected[0], expected[1][:nbytes]])
                if not np.array_equal(read_back, wanted):
                    return f"{direction} of {what} gave other bytes"
    finally:
        for pool in pools:
            device.free(pool)
    return None


def _by(path: str, device: Device, stream: Stream, rows: Int64s) -> None:
    """Make copy ops, or copy fragments, by a path, and wait until they are done."""
    device.calibration = always(path)  # type: ignore[attr-defined]
    if rows.shape[1] == 4:
        device.copy_blocks(rows, stream)
    else:
        device.enqueue(Fragments(rows), stream)
    device.synchronize(device.record(stream))


def _copy_ops(random: np.random.Generator, source: int, target: int, layout: BlockLayout) -> Int64s:
    """From a half of the blocks of a tier to the other half of one, every third of a few tokens only."""
    ids, half = np.arange(_BLOCKS // 2), _BLOCKS // 2
    tokens = np.where(ids % 3, layout.tokens_per_block, 3)
    return np.stack([source * _BLOCKS + random.permutation(ids), target * _BLOCKS + half + ids, tokens, ids], axis=1)


def _fragments(nbytes: int, in_words: bool) -> Int64s:
    """Fragments of each size at each pair of odd places, from the first half of ``nbytes`` to the second, or whole
    words instead."""
    rows, at = [], 64
    for size, (source, target) in product(_CHECKED_BYTES, _CROOKED):
        rows.append((at + source, nbytes // 2 + at + target, size))
        at += -(-size // 16) * 16 + 32
    return np.maximum(np.array(rows, np.int64) // 16 * 16, 16) if in_words else np.array(rows, np.int64)


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
                copy_ops = np.stack([even + source, even + target, np.ones_like(even), np.arange(count)], axis=1)
                seconds, call = _seconds(device, stream, copy_ops)
                yield Measurement(direction, nbytes, count, "", count * nbytes / seconds / 1e9, call * 1e6)
    finally:
        for pool in pools:
            device.free(pool)


def _seconds(device: Device, stream: Stream, copy_ops: Int64s) -> tuple[float, float]:
    """The median times of a batch: from the call until it is done, and of the call. The first run warms up."""
    times: list[tuple[float, float]] = []
    while len(times) <= _REPEATS_MIN or sum(seconds for seconds, _ in times) < _SECONDS:
        begin = perf_counter()
        device.copy_blocks(copy_ops, stream)
        enqueued = perf_counter()
        device.synchronize(device.record(stream))
        times.append((perf_counter() - begin, enqueued - begin))
    seconds, call = np.median(times[1:], axis=0).tolist()
    return seconds, call
