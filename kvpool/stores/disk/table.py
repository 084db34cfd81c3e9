"""Table: what is in each slot, as one array. Pages of it are what the database keeps."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvpool.stores.store import KEY_BYTES, SEAL_BYTES, TAG_BYTES

ENTRY = np.dtype(
    [
        ("key", f"V{KEY_BYTES}"),
        ("seal", "u1", SEAL_BYTES),
        ("tag", f"V{TAG_BYTES}"),
        ("model", "V16"),  # the fingerprint of the identity
        ("used", "<i8"),  # when it was last used, as a number that grows; 0: the slot is empty
    ]
)
PER_PAGE = 46
"""A page of entries and what SQLite adds to it fit into one of SQLite's own pages, of 4,096 bytes."""
PAGE_BYTES = PER_PAGE * ENTRY.itemsize
USED_MAX = 1 << 62

Page = tuple[int, bytes]
"""The number of a page, and its content."""


class Table:
    """The entries of all slots. Nothing here is durable. The caller holds a lock.

    A page is *changed* when the database must get it with the next commit. It is *touched* when only the times of last
    use differ: such a page goes when the store is closed, or with a change.
    """

    def __init__(self, slots: int) -> None:
        pages = -(-slots // PER_PAGE)
        self._all = np.zeros(pages * PER_PAGE, ENTRY)
        self.entries = self._all[:slots]
        self.used: npt.NDArray[np.int64] = self.entries["used"]
        self._changed: set[int] = set()
        self._touched: set[int] = set()
        self._now = 0

    def fill(self, pages: list[Page]) -> None:
        """Take pages as the database has them."""
        content = np.frombuffer(b"".join(content for _, content in pages), np.uint8)
        rows = self._all.view(np.uint8).reshape(-1, PAGE_BYTES)
        rows[[number for number, _ in pages]] = content.reshape(-1, PAGE_BYTES)

    def check(self, slots: int) -> int:
        """Empty the entries that cannot be true, and those beyond this many slots. Returns how many."""
        beyond = int(np.count_nonzero(self._all["used"][len(self.entries) :]))
        if beyond:
            self._all[len(self.entries) :] = np.zeros(1, ENTRY)
            self._changed.add(len(self.entries) // PER_PAGE)
        wrong = (self.used < 0) | (self.used > USED_MAX)
        wrong[slots:] |= self.used[slots:] != 0
        for slot in np.flatnonzero(wrong).tolist():
            self.clear(slot)
        self._now = int(self.used.max(initial=0))
        return beyond + int(np.count_nonzero(wrong))

    def now(self) -> int:
        """The next number for a last use."""
        self._now += 1
        return self._now

    def set(self, slot: int, key: bytes, seal: bytes, tag: bytes, model: bytes) -> None:
        """Note what a slot has, once its bytes are written."""
        self.entries[slot] = (key, np.frombuffer(seal, np.uint8), tag, model, self.now())
        self._changed.add(slot // PER_PAGE)

    def clear(self, slot: int) -> None:
        """Empty an entry."""
        if self.used[slot]:
            self.entries[slot] = np.zeros((), ENTRY)
            self._changed.add(slot // PER_PAGE)

    def touch(self, slot: int) -> None:
        """Note that a slot is used now."""
        self.used[slot] = self.now()
        self._touched.add(slot // PER_PAGE)

    def take(self, everything: bool = False) -> list[Page]:
        """Copies of the pages that the database gets now. They count as unchanged from now on."""
        numbers, self._changed = self._changed, set()
        if everything:
            numbers |= self._touched
        self._touched -= numbers
        pages = self._all.reshape(-1, PER_PAGE)
        return [(number, pages[number].tobytes()) for number in sorted(numbers)]

    def give_back(self, pages: Iterable[Page]) -> None:
        """The database has not got these pages."""
        self._changed.update(number for number, _ in pages)
