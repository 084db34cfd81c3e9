"""The memory of the policies that keep records of chains."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.jit.intrinsics import entry_of
from kvpool.state import adaptive, agent
from kvpool.state.chains import BOOK, CHAIN, CHAINS_MAX
from kvpool.state.pauses import BINS, ROWS, TABLES
from kvpool.state.records import NONE

LRU = "lru"
_GHOST_BLOCKS = 1 << 15
"""So many blocks, or up to twice as many, are enough to compare policies by."""
POLICIES = (LRU, "agent", "adaptive")
BOOK_BYTES = 16
"""Bytes for each block, at most; a pool of few blocks has some more."""
_BLOCKS_PER_CHAIN, _BLOCKS_PER_NAME, _LEAST = 12, 2, 16
"""A chain for so many blocks of the device, and a name for so many. With the owners that is 15 bytes a block."""


class ChainBook:
    """The records of one group. ``arrays`` are all of them, ``address`` is that of the BOOK. The state lock guards
    it."""

    def __init__(self, policy: str, head_at: int, device_blocks: int, blocks: int, rows: int) -> None:
        chains = min(max(device_blocks // _BLOCKS_PER_CHAIN, _LEAST), CHAINS_MAX)
        names = 1 << max(device_blocks // _BLOCKS_PER_NAME, _LEAST).bit_length() - 1
        self.book = np.zeros(1, BOOK)
        self.owners, self.turns = np.full(blocks, NONE, np.int32), np.full(rows, NONE, np.int32)
        self.chains, self.names = np.zeros(chains, CHAIN), np.full(names, NONE, np.int64)
        self.order, self.rates = np.arange(chains, dtype=np.int32), np.zeros((TABLES, ROWS, BINS))
        self.chains["first"] = self.chains["rest"] = NONE
        self.chains["place"] = self.chains["after"] = self.chains["before"] = self.order
        book: Any = self.book.view(np.recarray)[0]
        for name in ("owners", "chains", "order", "names", "turns", "rates"):
            book[f"{name}_at"] = getattr(self, name).ctypes.data
        admit = adaptive.on_admit if policy == "adaptive" else agent.on_admit
        for hook in (admit, agent.on_begin_release, agent.on_end_release, agent.choose):
            book[hook.__name__] = entry_of(hook)
        book.head_at, book.chains, book.names, book.rows = head_at, chains, names, rows
        book.capacity, book.pick = device_blocks, NONE
        book.shift = max((device_blocks // _GHOST_BLOCKS).bit_length() - 1, 0)
        book.waits = policy == "adaptive"

    @property
    def address(self) -> int:
        return int(self.book.ctypes.data)

    @property
    def arrays(self) -> list[npt.NDArray[Any]]:
        return [self.book, self.owners, self.turns, self.chains, self.names, self.order, self.rates]

    @property
    def nbytes(self) -> int:
        """The bytes that grow with the number of blocks."""
        return sum(one.nbytes for one in (self.owners, self.chains, self.names, self.order))
