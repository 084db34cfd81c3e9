"""Every exception that kvpool raises on purpose, except ValueError and TypeError for wrong arguments. A correct
program can meet each of them. And the suggestion that ends a message about an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal

__all__ = [
    "BlockNotFound",
    "DeviceError",
    "ForkedProcess",
    "InsufficientMemory",
    "IntegrityError",
    "KVPoolError",
    "LeaseExpired",
    "OutOfBlocks",
    "OutOfSequences",
    "PoolBusy",
    "PoolClosed",
    "ReservationExpired",
    "StoreBusy",
    "UnknownSequence",
]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message that suggests the known name closest to ``name``, or "" if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def counted(number: int, noun: str) -> str:
    """Return a number of things, such as "1 block" or "2 blocks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class KVPoolError(Exception):
    """The base class of all exceptions of kvpool."""


class OutOfBlocks(KVPoolError):
    """A tier has fewer evictable blocks than the call needs. The pool is as it was before the call.

    Attributes
    ----------
    tier : {"device", "host"}
        The tier.
    needed, free : int
        Blocks that the call needs, and blocks that can be evicted.
    group : int or None
        The group of layers, if the pool has several.
    """

    def __init__(self, tier: Literal["device", "host"], needed: int, free: int, group: int | None = None) -> None:
        where = f"{tier} tier" if group is None else f"{tier} tier of group {group}"
        super().__init__(f"{where}: {counted(needed, 'block')} needed, {free} free")
        self.tier, self.needed, self.free, self.group = tier, needed, free, group


class OutOfSequences(KVPoolError):
    """More sequences would live at once than ``max_sequences`` allows.

    Attributes
    ----------
    needed, free : int
        Sequences that the call would add, and that can be added.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{counted(needed, 'sequence')} needed, {free} free: raise max_sequences")
        self.needed, self.free = needed, free


class UnknownSequence(KVPoolError, KeyError):
    """A sequence id that this pool never gave out, or that has been released."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class BlockNotFound(KVPoolError, KeyError):
    """No block has this content, or the block has none."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class LeaseExpired(KVPoolError):
    """The lease has already been closed or revoked."""


class ReservationExpired(KVPoolError):
    """The reservation has been committed, aborted, revoked or cleared, or its deadline has passed."""


class PoolClosed(KVPoolError):
    """The pool was closed, or a permanent device error has closed it."""


class PoolBusy(KVPoolError):
    """The call needs a pool that has no live sequences and no open reservations, or no exported memory in use."""


class StoreBusy(KVPoolError):
    """More blocks wait for a store than its queue takes.

    Attributes
    ----------
    store : str
        Name of the store.
    kind : str
        Kind of the request.
    queued, accepted : int
        Blocks in the queue, and blocks that it takes.
    """

    def __init__(self, store: str, kind: str, queued: int, accepted: int) -> None:
        super().__init__(f"store {store!r}: {queued} blocks wait for a {kind}, {accepted} are accepted")
        self.store, self.kind, self.queued, self.accepted = store, kind, queued, accepted


class ForkedProcess(KVPoolError, RuntimeError):
    """The object belongs to the process that made it.

    A child of ``os.fork()`` has neither its threads nor its sockets.
    """


class InsufficientMemory(KVPoolError, MemoryError):
    """A tier does not fit into the memory that is available.

    Attributes
    ----------
    tier : str
        "device", "host", or "device and host" where both are one memory.
    requested, available : int
        Bytes.
    """

    def __init__(self, tier: str, requested: int, available: int, reason: str = "") -> None:
        gib = 1 << 30
        super().__init__(
            f"{tier} tier asks for {requested} bytes ({requested / gib:.2f} GiB), "
            f"{available} bytes ({available / gib:.2f} GiB) are available{reason and ': '}{reason}"
        )
        self.tier, self.requested, self.available = tier, requested, available


class IntegrityError(KVPoolError, AssertionError):
    """An invariant does not hold. Either kvpool has a bug, or other code has written to its memory.

    Attributes
    ----------
    check : str
        Name of the invariant.
    """

    def __init__(self, check: str, detail: str) -> None:
        super().__init__(f"{check}: {detail}")
        self.check = check


class DeviceError(KVPoolError):
    """The device refused work.

    If the device refuses a copy, a sequence can lose a block. A later call for that sequence raises this error: release
    the sequence. An upload of a block table raises it for its own work.

    Attributes
    ----------
    completed : int
        Copy ops of the batch that were enqueued before the error.
    sticky : bool
        Whether every later call will fail too.
    """

    def __init__(self, message: str, *, completed: int = 0, sticky: bool = False) -> None:
        super().__init__(message)
        self.completed, self.sticky = completed, sticky
