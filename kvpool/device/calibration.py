"""Calibration: which way of copying is the fastest for fragments of some size and number, as measured on a device or by rule."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

PLAIN, BATCHED, KERNEL = PATHS = ("plain", "batched", "kernel")
"""One copy of the copy engine for each fragment; all in one call of the driver; a kernel that reads and writes both memories."""
OFFLOAD, ONBOARD, WITHIN = DIRECTIONS = ("offload", "onboard", "within")

_VERSION = 1
# A kernel takes multiprocessors from the model, so it has to be worth it.
_KERNEL_HANDICAP = 1.1
_SMALL_BYTES, _MANY, _SOME = 28 << 10, 16, 4


class Measurement(NamedTuple):
    """How fast a batch of ``fragments`` of ``nbytes`` bytes each was copied in a direction, from the call until it was done."""

    direction: str
    nbytes: int
    fragments: int
    path: str
    gigabytes_per_second: float


@dataclass(frozen=True)
class Calibration:
    """What was measured on ``device`` with driver version ``driver``; without measurements, a rule of thumb. Immutable."""

    device: str
    driver: int
    measurements: tuple[Measurement, ...] = ()
    _chosen: dict[tuple[Any, ...], str] = field(default_factory=dict, compare=False, repr=False)

    def choose(self, direction: str, nbytes: int, count: int, paths: Collection[str] = PATHS) -> str:
        """The way, of ``paths``, to copy ``count`` fragments of about ``nbytes`` bytes each. ``"plain"`` is always a way.

        A measurement is taken for what is nearest to it in the logarithms of size and number.
        """
        key = (direction, nbytes.bit_length(), count.bit_length(), *sorted(paths))
        if key not in self._chosen:
            near = self._nearest(direction, nbytes, count)
            speed = {m.path: m.gigabytes_per_second / (_KERNEL_HANDICAP if m.path == KERNEL else 1) for m in near if m.path in paths}
            self._chosen[key] = max(speed, key=lambda path: speed[path]) if speed else _rule(direction, nbytes, count, paths)
        return self._chosen[key]

    def _nearest(self, direction: str, nbytes: int, count: int) -> list[Measurement]:
        def distance(m: Measurement) -> float:
            return abs(log2(m.nbytes) - log2(max(nbytes, 1))) + abs(log2(m.fragments) - log2(max(count, 1)))

        mine = [m for m in self.measurements if m.direction == direction]
        nearest = min(map(distance, mine), default=0)
        return [m for m in mine if distance(m) == nearest]

    def text(self) -> str:
        """JSON, which ``parse`` reads."""
        rows = [list(m) for m in self.measurements]
        return json.dumps({"version": _VERSION, "device": self.device, "driver": self.driver, "measurements": rows})

    @classmethod
    def parse(cls, text: str) -> Calibration:
        """What ``text`` gave. Raises ValueError."""
        try:
            found = json.loads(text)
            if found["version"] != _VERSION:
                raise ValueError(f"version {found['version']} is not {_VERSION}")
            return cls(str(found["device"]), int(found["driver"]), tuple(_measurement(*row) for row in found["measurements"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no calibration: {error}") from None


def _measurement(direction: str, nbytes: int, count: int, path: str, speed: float) -> Measurement:
    if direction not in DIRECTIONS or path not in PATHS or not (nbytes > 0 and count > 0 and speed > 0):
        raise ValueError(f"{[direction, nbytes, count, path, speed]} is no measurement")
    return Measurement(direction, int(nbytes), int(count), path, float(speed))


def _rule(direction: str, nbytes: int, count: int, paths: Collection[str]) -> str:
    """Copy engines cost time per fragment, kernels multiprocessors; a kernel that writes to the host disturbs others, so it is the last."""
    if KERNEL in paths and count >= _MANY and direction != OFFLOAD and (nbytes < _SMALL_BYTES or direction == WITHIN):
        return KERNEL
    if BATCHED in paths and count >= _SOME:
        return BATCHED
    return KERNEL if KERNEL in paths and count >= _MANY else PLAIN


def always(path: str) -> Calibration:
    """One that chooses a path wherever it is possible. Raises ValueError."""
    if path not in PATHS:
        raise ValueError(f"path={path!r}: must be one of {', '.join(PATHS)}")
    return Calibration("any", 0, tuple(Measurement(direction, 1, 1, path, 1.0) for direction in DIRECTIONS))


def place(device: str, driver: int, environment: Mapping[str, str] = os.environ) -> Path:
    """The file for the calibration of a device under a driver."""
    cache = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or "~").expanduser() / ".cache"
    name = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-")
    return Path(cache) / "kvpool" / f"calibration-{name}-{driver}.json"


def load(path: Path) -> Calibration | None:
    """What was stored there, or None. Raises ValueError for anything else that is there, and OSError where it cannot be read."""
    try:
        return Calibration.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def store(path: Path, calibration: Calibration) -> None:
    """Keep it for other processes, which see the old one or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(calibration.text(), encoding="utf-8")
    part.replace(path)
