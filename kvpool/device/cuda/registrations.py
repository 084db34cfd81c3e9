"""Registered main memory: its users, which parts of a range are already pinned, and where copies must be cut."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Protocol

import numpy as np

from kvpool.common.arrays import Int64s, Uint8s

Span = tuple[int, int]
"""The first address, and the one after the last."""


class Registrar(Protocol):
    """The part of CUDA that pins memory. It raises its own errors."""

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        """Pin whole pages."""

    def hostUnregister(self, address: int) -> None:
        """Unpin them."""

    def pinned_span(self, address: int) -> Span | None:
        """The one registration, or allocation of pinned memory, that has an address. None for any other memory."""


class Registration:
    """Chunks of one memory, ``array``, that this process has registered. The module refers to it until no chunk is
    registered: if the system reused memory that the driver still treats as pinned, copies would use the old pages.

    A user of it is added when it is made, or by ``share``. The last one that ``drop`` names unregisters the chunks.
    """

    def __init__(self, array: Uint8s, registrar: Registrar, user: object) -> None:
        self.array, self.chunks = array, dict[int, int]()
        self._registrar, self._users, self._ends = registrar, {user}, False
        _registered.add(self)

    def register(self, address: int, nbytes: int) -> None:
        self._registrar.hostRegister(address, nbytes, 0)
        self.chunks[address] = nbytes

    def has(self, address: int) -> bool:
        return any(start <= address < start + nbytes for start, nbytes in list(self.chunks.items()))

    def use(self, user: object) -> None:
        """Add a user. Raises MemoryError if another call is unregistering the chunks."""
        with _lock:
            self._users.add(user)
            if self._ends:
                self._users.discard(user)
                raise MemoryError("memory that another call is unregistering cannot be pinned; try again after it")

    def drop(self, user: object) -> None:
        """Remove a user. If no other is left, unregister all chunks. If the driver refuses some, the others are still
        tried, and one error is raised; a later call tries again."""
        with _lock:
            self._users.discard(user)
            self._ends = was_last = not self._users
        if was_last:
            with ExitStack() as chunks:
                for address in self.chunks:
                    chunks.callback(self._unregister, address)
            _registered.discard(self)

    def _unregister(self, address: int) -> None:
        self._registrar.hostUnregister(address)
        del self.chunks[address]


_registered: set[Registration] = set()
# Reentrant, because a finalizer may call ``drop`` on the thread that has it.
_lock = threading.RLock()


class Hold:
    """What one memory needs to stay pinned: registrations of this process, its own or shared with other memory."""

    def __init__(self, array: Uint8s) -> None:
        self.array, self.released = array, False
        self._registrations: list[Registration] = []

    def new(self, registrar: Registrar) -> Registration:
        """A registration of this memory, without chunks yet."""
        self._registrations.append(Registration(self.array, registrar, self))
        return self._registrations[-1]

    def share(self, address: int) -> None:
        """Keep the registration that has an address until ``release``, if this process made it here. Registrations of
        others are theirs. Raises MemoryError."""
        for registration in [candidate for candidate in list(_registered) if candidate.has(address)]:
            if registration not in self._registrations:
                registration.use(self)
                self._registrations.append(registration)

    def release(self) -> None:
        """Let go of all registrations. If the driver refuses, one error is raised, and a later call tries again."""
        with ExitStack() as registrations:
            for registration in self._registrations:
                registrations.callback(self._let_go, registration)
        self.released = True

    def _let_go(self, registration: Registration) -> None:
        registration.drop(self)
        self._registrations.remove(registration)


def pinned_ends(registrar: Registrar, begin: int, end: int, hold: Hold) -> tuple[list[Span], list[Span]]:
    """The registrations that follow each other from ``begin`` on, and those that do up to ``end``, clipped to that
    range. What lies between both, if anything, begins and ends with memory that is not pinned. ``hold`` shares those of
    this process."""
    first, last = list[Span](), list[Span]()
    while begin < end and (span := registrar.pinned_span(begin)):
        hold.share(begin)
        first.append((begin, min(span[1], end)))
        begin = first[-1][1]
    while begin < end and (span := registrar.pinned_span(end - 1)):
        hold.share(end - 1)
        last.insert(0, (max(span[0], begin), end))
        end = last[0][0]
    return first, last


def whole_pages(begin: int, end: int) -> Span:
    """The pages that have some of a range: none of an empty one."""
    if begin == end:
        return begin, end
    return begin - begin % mmap.PAGESIZE, end + -end % mmap.PAGESIZE


def chunk_rows(spans: Iterable[Span]) -> Int64s:
    """Ascending registrations as ``fragments.cut`` takes them: int64[n, 3] rows (start, end, bytes of a chunk). Those
    of one length that follow each other are one row, with a shorter one at its end."""
    rows: list[list[int]] = []
    for begin, end in spans:
        if rows and rows[-1][1] == begin and end - begin <= rows[-1][2] and not (begin - rows[-1][0]) % rows[-1][2]:
            rows[-1][1] = end
        else:
            rows.append([begin, end, end - begin])
    return np.array(rows, np.int64).reshape(-1, 3)
