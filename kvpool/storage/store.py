"""Store: the interface of what keeps blocks behind the host tier, by key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvpool.common.arrays import Int64s, Uint8s

KEY_BYTES, MAC_BYTES, TAG_BYTES, EPOCH_BYTES = 32, 16, 16, 16
EPOCHS_MAX = 4096
"""Models whose epochs a store remembers: the last ones that were reset."""
MODEL_BYTES = 8
"""So many first bytes of a tag name the model. The others name a namespace of it."""

ABSENT = 0
"""The store does not have the block."""
OK = 1
"""The block is there, was saved, or was loaded."""
FAILED = 2
"""The store gave an error."""
DAMAGED = 3
"""The store gave other bytes than were saved."""
LATE = 4
"""The deadline came first."""
CANCELLED = 5
"""The caller gave up, the worker was closed, or the block is to be dropped."""
REFUSED = 6
"""The store is full, or the namespace of the block has all that it may have."""

CODES = ("absent", "ok", "failed", "damaged", "late", "cancelled", "refused")
"""The names of the codes, in the order of their numbers."""

NO_LIMIT = (1 << 63) - 1
"""The limit of a save that has none."""
Bytes = Uint8s
Rows = Int64s
Stop = Callable[[], bool]


@dataclass(frozen=True)
class Space:
    """What a store keeps blocks of.

    ``fingerprint``: 16 bytes, of the ModelIdentity. ``rows`` uint8[slots, block_bytes + row_padding], C-contiguous:
    what blocks are saved from and loaded into. They stay where they are until ``close`` has returned. The last
    ``row_padding`` bytes of a row are the store's own while a call has the row; no other call has it then."""

    fingerprint: bytes
    rows: Bytes
    row_padding: int = 0

    @property
    def memory(self) -> Bytes:
        """The blocks: uint8[slots, block_bytes]. The rows lie apart where there is spare room."""
        return self.rows[:, : self.block_bytes]

    @property
    def block_bytes(self) -> int:
        return int(self.rows.shape[1]) - self.row_padding


class Store(Protocol):
    """Keeps blocks by key. Implement this to keep blocks in one more place; ``StoreWorker`` does the rest.

    Calls may block and may raise OSError, which fails all blocks of the call. They come on the worker's threads,
    ``threads`` of them at a time; ``open``, ``stats``, and ``find`` if it is ``indexed``, on any thread. ``close``
    comes once, when no other call is under way. A store with files, sockets or threads raises ForkedProcess in a child
    of ``os.fork()``. What a store answers is not trusted: a block counts only if its bytes have the MAC that was made
    for its key. ``name`` and ``threads`` are asked for once, before ``open``.

    ``keys`` uint8[n, KEY_BYTES] say nothing about the content. ``rows`` int64[n] index ``Space.memory``. ``macs``
    uint8[n, MAC_BYTES] are kept with the blocks, and given back. All three are copies of the call's own. ``stop()``
    turns true when nobody waits for the call any more. A long call asks it between blocks, and gives CANCELLED for the
    rest.
    """

    name: str
    """for metrics and logs: 1 to 64 of the characters a-z, 0-9, _ and -"""
    threads: int
    """how many calls it can use at a time, 1 to 256"""
    clears_prefix: int
    """by how many first bytes of their tags ``clear`` can drop blocks: TAG_BYTES (or fewer); MODEL_BYTES, for a store
    that does not know namespaces; 0, as for a store without this attribute, if it has no ``clear``: then it cannot be
    reset, and ``tests/stores/contract.py`` refuses it"""
    persistent: bool
    """whether what it keeps can outlive the process; a store without this attribute counts as one that does"""
    indexed: bool
    """whether ``find`` asks an index in memory, so that it can be called where nothing may wait; a store without this
    attribute counts as one whose ``find`` may wait"""
    row_padding: int
    """how many bytes behind each row it can use, see ``Space``: who makes rows for it alone gives it so many. A store
    without this attribute uses none"""

    @property
    def secret(self) -> bytes:
        """What ``open`` returns, also before that: for a pool whose keys shall last as long as the store. Raises
        OSError. A store without it can only be behind a pool that was given the secret by other ways."""

    def epoch(self, model: bytes, new: bool) -> bytes | None:
        """Since when blocks of a model (MODEL_BYTES of a tag) count: b"" until it was ``new`` for the first time, and
        EPOCH_BYTES random bytes from then on, others each time. Kept as durably as a block, and never evicted. A block
        has another key in each epoch: nobody asks for it here. None where this cannot be kept: then, and with a store
        without it, a reset is forgotten with the process. Raises OSError."""

    def open(self, space: Space) -> bytes:
        """Begin. Returns the store's secret, 32 bytes: the same for all who share its content, and known to nobody
        else. Raises ValueError for content that cannot be used with this space, and OSError."""

    def find(self, keys: Bytes) -> Bytes:
        """OK or ABSENT for each key: uint8[n]. Other codes mean that it is not known."""

    def save(self, keys: Bytes, rows: Rows, macs: Bytes, tag: bytes, limit: int, stop: Stop) -> Bytes:
        """Keep the blocks. Returns the codes: uint8[n]. OK means that the block is kept as firmly as this store ever
        does, or was there before.

        ``tag``: TAG_BYTES bytes that name the namespace. ``limit``: how many blocks with this tag the store may have;
        beyond it the store drops older blocks of the tag, or gives REFUSED.
        """

    def load(self, keys: Bytes, rows: Rows, stop: Stop) -> tuple[Bytes, Bytes]:
        """Write blocks into the rows. Returns the codes uint8[n], and the MACs uint8[n, MAC_BYTES] kept with them. A
        row whose code is not OK may have any content. Nothing is written after the call has returned."""

    def forget(self, keys: Bytes) -> int:
        """Drop blocks. Returns how many were there.

        When it returns, none of them is found or loaded any more, also after a crash of a store that outlives its
        process. If that is not so for all, it raises, and is called again. No save that began before may come into
        effect later, such as a request that has timed out and still arrives at a server. No save of these blocks by the
        same worker is under way meanwhile, unless they were damaged.
        """

    def clear(self, tag: bytes) -> int:
        """Drop all blocks that were saved with a tag that begins with these bytes: MODEL_BYTES name a model, TAG_BYTES
        a namespace. Otherwise as ``forget``."""

    def stats(self) -> dict[str, int]:
        """Figures of its own, such as ``capacity``, ``blocks`` and ``evicted``. Fast; on any thread."""

    def close(self) -> None:
        """End. Content that outlives the process stays."""


def parts(count: int, most: int) -> list[slice]:
    """0 to ``count``, in parts of up to ``most``."""
    return [slice(first, min(first + most, count)) for first in range(0, count, most)]
