"""Calibration: which way of copying is the fastest for a size and number of fragments, measured on a device or by
rule."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

from kvpool.common.jit.cache import content_of, digest
from kvpool.device.cuda import native
from kvpool.device.cuda.runtime import Gpu
from kvpool.device.fragments import OFFLOAD, ONBOARD, WITHIN, table_size
from kvpool.device.launches import BULK_FRAGMENTS, COPY_FRAGMENTS, cuda_source

PLAIN, BATCHED, KERNEL, BULK = PATHS = ("plain", "batched", "kernel", "bulk")
"""Plain: one copy of the copy engine for each fragment. Batched: all fragments in one call of the driver. Kernel: a
kernel that reads and writes both memories. Bulk: a kernel that has copy units of multiprocessors do it."""
KERNELS = {KERNEL: COPY_FRAGMENTS, BULK: BULK_FRAGMENTS}
"""The paths that are kernels: source and name. They have to pass a test on the GPU first."""
_ROW_BUILDERS = native.copy_blocks, native.copy_fragments, table_size
"""The code that writes the rows which these kernels read. ``content_of`` looks at what it calls, too."""
DIRECTIONS = (OFFLOAD, ONBOARD, WITHIN)

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


def conditions(gpu: Gpu) -> str:
    """What changes the figures of a GPU, and what its kernels do, and is in neither its name nor the driver's version:
    the multiprocessors of a part of it, the link, the compiler, and a digest of the kernels and of the code that writes
    their rows."""
    text = [*(cuda_source(source) for source, _ in KERNELS.values()), *map(content_of, _ROW_BUILDERS)]
    kernels = digest("".join(text).encode())[:16]
    return f"{gpu.multiprocessors} multiprocessors, link {gpu.link}, NVRTC {gpu.compiler}, kernels {kernels}"


def made(gpu: Gpu, measurements: Iterable[Measurement] = ()) -> Calibration:
    """A calibration of a GPU under the conditions that there are now."""
    return Calibration(gpu.name, gpu.driver, tuple(measurements), conditions(gpu))


def stored(gpu: Gpu) -> Calibration | None:
    """The stored calibration of a GPU, if there is one. Raises ValueError for one that was measured under other
    conditions, and what ``load`` raises."""
    calibration, now = load(place(gpu.name, gpu.driver)), conditions(gpu)
    if calibration is not None and calibration.conditions != now:
        raise ValueError(f"measured with {calibration.conditions}, and there are {now}")
    return calibration


def chosen(choice: Calibration | str | None, gpu: Gpu) -> Calibration:
    """The calibration that a device uses. It is ``choice`` (a calibration, or the name of a path); without that the
    stored one; without that one that leaves every choice to the rule."""
    if choice is not None:
        return always(choice) if isinstance(choice, str) else choice
    try:
        return stored(gpu) or made(gpu)
    except (OSError, ValueError) as error:
        path = place(gpu.name, gpu.driver)
        warnings.warn(f"{path}: {error}; copies are chosen by rule until calibrate() is called", stacklevel=4)
        return made(gpu)


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
