"""The calls of the operating system that a DiskStore makes for its content. Tests replace them by ones that fail."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class System:
    """Each is the function of that name in ``os``, or in ``sqlite3``."""

    preadv: Callable[[int, list[memoryview], int], int] = os.preadv
    pwritev: Callable[[int, list[memoryview], int], int] = os.pwritev
    fdatasync: Callable[[int], None] = os.fdatasync
    posix_fallocate: Callable[[int, int, int], None] = os.posix_fallocate
    statvfs: Callable[[str], os.statvfs_result] = os.statvfs
    connect: Callable[..., Any] = sqlite3.connect
