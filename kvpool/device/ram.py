"""Main memory: taking it, and how much of it this process can still take."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from kvpool.device.base import ALIGNMENT
from kvpool.layout import integer_argument


def allocate_ram(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed uint8[nbytes] that starts at a multiple of ``ALIGNMENT``; its pages are not touched. Raises MemoryError, ValueError."""
    nbytes = integer_argument("nbytes", nbytes, 0, sys.maxsize - ALIGNMENT)
    try:
        raw = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
    except ValueError:  # more than an array may have
        raise MemoryError(f"{nbytes} bytes are more than this system can address") from None
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def available_ram(root: Path = Path("/")) -> int | None:
    """Bytes that can be allocated without swapping or being killed for it, or None where the system does not say.

    The smaller of ``MemAvailable`` and what every control group (v1 or v2) above this process leaves of its limit.
    Linux only; ``root`` is where ``proc`` and ``sys`` are found.
    """
    available = _meminfo(root / "proc/meminfo")
    if available is None:
        return None
    return min([available, *_control_group_rooms(root)])


def _meminfo(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _control_group_rooms(root: Path) -> Iterator[int]:
    """What each limited memory control group above this process has left, bytes."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if "memory" in controllers.split(","):
            yield from _rooms(mounts / "memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        elif hierarchy == "0":
            for mount in (mounts, mounts / "unified"):
                yield from _rooms(mount, group, "memory.max", "memory.current", "inactive_file")


def _rooms(mount: Path, group: str, limit_file: str, usage_file: str, cache_field: str) -> Iterator[int]:
    # A container may see its group by a name of the host that is not there; its own mount root then has the limit.
    path = PurePosixPath(group.lstrip("/"))
    for folder in (path, *path.parents):
        directory = mount / folder
        try:
            limit = (directory / limit_file).read_text().strip()
            if limit != "max":
                used = int((directory / usage_file).read_text()) - _reclaimable(directory / "memory.stat", cache_field)
                yield max(0, int(limit) - used)
        except (OSError, ValueError):
            continue


def _reclaimable(path: Path, field: str) -> int:
    """Bytes of file cache that the group can drop at once."""
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == field:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
