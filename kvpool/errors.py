"""What a correct program can meet: every exception kvpool raises on purpose, apart from ValueError and TypeError for wrong arguments."""

from __future__ import annotations


class KVPoolError(Exception):
    """Base of all of them."""


class OutOfBlocks(KVPoolError):
    """A tier has fewer evictable blocks than the call needs; the pool is as it was before the call.

    Attributes: ``tier`` ("device" or "host"), ``needed`` and ``free`` in blocks, ``group`` of layers where the pool has several, else None.
    """

    def __init__(self, tier: str, needed: int, free: int, group: int | None = None) -> None:
        super().__init__(f"{tier} tier{'' if group is None else f' of group {group}'}: {needed} blocks needed, {free} free")
        self.tier, self.needed, self.free, self.group = tier, needed, free, group


class OutOfSequences(KVPoolError):
    """More sequences would live at once than ``max_sequences`` allows."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} sequences needed, {free} free: raise max_sequences")
        self.needed, self.free = needed, free


class UnknownSequence(KVPoolError, KeyError):
    """A sequence id that this pool never gave out, or that has been released."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class BlockNotFound(KVPoolError, KeyError):
    """No block holds this content, or the block holds none."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class LeaseExpired(KVPoolError):
    """The lease was closed or revoked before."""


class ReservationExpired(KVPoolError):
    """The reservation was committed, aborted or revoked before, or given back by a reset."""


class PoolClosed(KVPoolError):
    """The pool was closed, or a device error that will not go away has closed it."""


class PoolBusy(KVPoolError):
    """The call needs a pool without live sequences and open reservations, or one whose exported memory nobody holds."""


class InsufficientMemory(KVPoolError, MemoryError):
    """A tier does not fit into the memory that is there. ``requested`` and ``available`` are bytes; ``reason`` is what the system said."""

    def __init__(self, tier: str, requested: int, available: int, reason: str = "") -> None:
        gib = 1 << 30
        super().__init__(
            f"{tier} tier asks for {requested} bytes ({requested / gib:.2f} GiB), "
            f"{available} bytes ({available / gib:.2f} GiB) are available{reason and ': '}{reason}"
        )
        self.tier, self.requested, self.available = tier, requested, available


class IntegrityError(KVPoolError, AssertionError):
    """An invariant does not hold: a bug in kvpool, or memory that somebody else wrote. ``check`` names the invariant."""

    def __init__(self, check: str, detail: str) -> None:
        super().__init__(f"{check}: {detail}")
        self.check = check


class DeviceError(KVPoolError):
    """The device refused a copy.

    ``completed`` moves of the batch were enqueued before it; ``sticky`` says that every later call will fail too.
    """

    def __init__(self, message: str, *, completed: int = 0, sticky: bool = False) -> None:
        super().__init__(message)
        self.completed, self.sticky = completed, sticky
