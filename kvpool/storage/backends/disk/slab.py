"""Slab: one preallocated file of equal slots, read and written past the page cache where the file system allows it; and
the calls of the operating system that a DiskStore makes, which tests replace by ones that fail."""

from __future__ import annotations

import errno
import mmap
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.storage.backends.disk.folder import SLAB, Folder
from kvpool.storage.store import Bytes

ALIGNMENT = 4096
"""of places, sizes and memory in direct I/O"""
_RUN_BYTES, _RUN_BLOCKS = 4 << 20, 64


class Slab:
    """Slots of ``stride`` bytes each: a block, and what rounds it up to the alignment. Thread-safe.

    ``had``: how many whole slots the file had before it was opened. ``memory``: the rows that blocks are copied from
    and to. Raises OSError, such as ENOSPC where the file system has no room for all slots.
    """

    def __init__(self, folder: Folder, slots: int, memory: Bytes, system: System) -> None:
        self._memory, self._system, self._path = memory, system, folder.join(SLAB)
        self.block_bytes, self.stride = int(memory.shape[1]), stride_of(int(memory.shape[1]))
        try:
            self._fd = folder.open(SLAB, os.O_DIRECT)
            self.direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd, self.direct = folder.open(SLAB), False
        self._own = threading.local()
        aligned = not (memory.ctypes.data | memory.strides[0]) % ALIGNMENT and self.stride == self.block_bytes
        self._in_place = aligned or not self.direct
        try:
            self.had = self._allocate(slots * self.stride)
        except BaseException:
            self.close()
            raise

    def _allocate(self, nbytes: int) -> int:
        """Give the file its size. Returns how many slots it had."""
        status = os.fstat(self._fd)
        if status.st_size > nbytes:
            os.ftruncate(self._fd, nbytes)
        if status.st_size < nbytes or status.st_blocks * 512 < nbytes:
            try:
                self._system.posix_fallocate(self._fd, 0, nbytes)
            except OSError as error:
                raise OSError(error.errno, f"{error.strerror}: the slab takes {nbytes} bytes", self._path) from None
        return status.st_size // self.stride

    def runs(self, slots: list[int]) -> Iterator[slice]:
        """Parts of the list whose slots follow one another in the file, so that one call reads or writes them."""
        most = max(1, min(_RUN_BLOCKS, _RUN_BYTES // self.stride)) if self._in_place else 1
        most = most if self.stride == self.block_bytes else 1
        start = 0
        for place in range(1, len(slots) + 1):
            if place == len(slots) or slots[place] != slots[place - 1] + 1 or place - start == most:
                yield slice(start, place)
                start = place

    def read(self, slots: list[int], rows: list[int]) -> None:
        """Copy a run of slots into rows of the memory. Raises OSError."""
        if self._in_place:
            return self._all(self._system.preadv, [memoryview(self._memory[row]) for row in rows], slots[0])
        for slot, row in zip(slots, rows, strict=True):
            self._memory[row] = self._content(slot)

    def write(self, slots: list[int], rows: list[int]) -> None:
        """Copy rows of the memory into a run of slots. Raises OSError."""
        if self._in_place:
            return self._all(self._system.pwritev, [memoryview(self._memory[row]) for row in rows], slots[0])
        for slot, row in zip(slots, rows, strict=True):
            buffer = self._buffer()
            buffer[: self.block_bytes] = self._memory[row].data
            self._all(self._system.pwritev, [memoryview(buffer)], slot)

    def has(self, slot: int, row: int) -> bool:
        """Whether the device has the bytes of a row in this slot. False if it cannot be asked: after a sync that
        failed, the page cache may have what the device has not."""
        if not self.direct:
            return False
        try:
            return np.array_equal(self._content(slot), self._memory[row])
        except OSError:
            return False

    def sync(self) -> None:
        """Make all that was written durable. Raises OSError."""
        self._system.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _content(self, slot: int) -> Bytes:
        """What a slot has, until the next call of this thread."""
        buffer = self._buffer()
        self._all(self._system.preadv, [memoryview(buffer)], slot)
        return np.frombuffer(buffer, np.uint8, self.block_bytes)

    def _buffer(self) -> mmap.mmap:
        """Aligned memory of this thread, for rows that direct I/O does not take."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = mmap.mmap(-1, self.stride)
        buffer: mmap.mmap = self._own.buffer
        return buffer

    def _all(self, call: object, views: list[memoryview], slot: int) -> None:
        """Call until all bytes are read or written. One call may do a part."""
        place = slot * self.stride
        while views:
            done = call(self._fd, views, place)  # type: ignore[operator]
            if done <= 0:
                raise OSError(errno.EIO, "the slab ends early", self._path)
            place += done
            while views and done >= len(views[0]):
                done -= len(views.pop(0))
            if views:
                views[0] = views[0][done:]


def stride_of(block_bytes: int) -> int:
    return -(-block_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class System:
    """Each is the function of that name in ``os``, or in ``sqlite3``."""

    preadv: Callable[[int, list[memoryview], int], int] = os.preadv
    pwritev: Callable[[int, list[memoryview], int], int] = os.pwritev
    fdatasync: Callable[[int], None] = os.fdatasync
    posix_fallocate: Callable[[int, int, int], None] = os.posix_fallocate
    statvfs: Callable[[str], os.statvfs_result] = os.statvfs
    connect: Callable[..., Any] = sqlite3.connect
