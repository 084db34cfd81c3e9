"""Main memory: how it is allocated, and how much of it this process can still have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from kvpool.device.base import ALIGNMENT


def allocate_ram(nbytes: int) -> NDArray[np.uint8]:
    """Allocate zeroed uint8[nbytes] that starts at a multiple of ``ALIGNMENT``. Its pages are not touched. Raises
    MemoryError."""
    try:
        raw = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
    except ValueError:  # more than an array may have
        raise MemoryError(f"{nbytes} bytes are more than this system can address") from None
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def available_ram(root: Path = Path("/")) -> int | None:
    """Bytes that can be allocated before the system swaps or kills this process, or None where the system does not say.

    This is the smaller of ``MemAvailable`` and what the limits of all control groups (v1 or v2) above this process
    leave. Linux only. ``root`` is where ``proc`` and ``sys`` are found.
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
    """The bytes that each limited control group above this process has left."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if "memory" in controllers.split(","):
            yield from _rooms(
                mounts / "memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )
        elif hierarchy == "0":
            for mount in (mounts, mounts / "unified"):
                yield from _rooms(mount, group, "memory.max", "memory.current", "inactive_file")


def _rooms(mount: Path, group: str, limit_file: str, usage_file: str, cache_field: str) -> Iterator[int]:
    # A container may see its group under a path of the host that does not exist in it. Then the limit is at the root of
    # its own mount.
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
