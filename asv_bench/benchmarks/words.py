"""The reference word of a block: what a change by compare-exchange costs beside a plain load and store."""

from __future__ import annotations

import numpy as np

from kvpool.common.jit import jit
from kvpool.state.records import BLOCK, REFS, change_word

BLOCKS = 1_024


@jit
def exchange(blocks, changes):  # type: ignore[no-untyped-def]
    for i in range(changes):
        change_word(blocks, np.int64(i % BLOCKS), np.int64(1), np.int64(0))


@jit
def store_plainly(blocks, changes):  # type: ignore[no-untyped-def]
    words = blocks["ref_word"]
    for i in range(changes):
        refs, pins = (words[i % BLOCKS] & REFS) + 1, words[i % BLOCKS] >> 32
        if refs >= 0 and pins >= 0:
            words[i % BLOCKS] = pins << 32 | refs


class Words:
    """References taken one after the other, on words that no other thread touches: by compare-exchange, as a pool does
    it, and by a plain load and store."""

    params = [10_000]
    param_names = ["changes"]

    def setup(self, changes: int) -> None:
        self.blocks = np.zeros(BLOCKS, BLOCK)
        self.time_compare_exchange(changes)
        self.time_plain_store(changes)

    def time_compare_exchange(self, changes: int) -> None:
        exchange(self.blocks, changes)

    def time_plain_store(self, changes: int) -> None:
        store_plainly(self.blocks, changes)
