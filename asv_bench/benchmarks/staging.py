"""Block tables of 256 sequences on their way to a reader: dense and CSR on the host, and staged into a target of 1,024
columns."""

from __future__ import annotations

import ctypes

import numpy as np

from .pools import TOKENS_PER_BLOCK, Pooled, make_pool, make_prompts

SEQUENCES, COLUMNS = 256, 1_024


class BlockTables(Pooled):
    """On the cpu device, where a target is written when the call returns; the memcpy copies as many bytes as the target
    has."""

    params = [64, COLUMNS]
    param_names = ["used_columns"]

    def setup(self, used_columns: int) -> None:
        self.cache = make_pool(SEQUENCES * used_columns)
        prompts = make_prompts(SEQUENCES, (used_columns - 1) * TOKENS_PER_BLOCK)
        self.ids = self.cache.add_sequence_batch(prompts).ids
        self.target, self.source = np.zeros((2, SEQUENCES, COLUMNS), np.int32)
        self.table = self.cache.block_table(self.ids)

    def time_staged(self, used_columns: int) -> None:
        self.cache.tables.copy_batch_block_offsets(self.target, self.ids)

    def time_staged_used_columns_only(self, used_columns: int) -> None:
        self.cache.tables.copy_batch_block_offsets(self.target, self.ids, max_blocks=used_columns)

    def time_memcpy(self, used_columns: int) -> None:
        ctypes.memmove(self.target.ctypes.data, self.source.ctypes.data, self.target.nbytes)

    def time_in_place(self, used_columns: int) -> None:
        self.cache.block_table(self.ids)

    def time_dense(self, used_columns: int) -> None:
        self.table.dense(COLUMNS)

    def time_csr(self, used_columns: int) -> None:
        self.table.csr()


class OneTable(Pooled):
    """The block table of one sequence, into a target of 64 columns."""

    def setup(self) -> None:
        self.cache = make_pool(64)
        self.ids = self.cache.add_sequence_batch(make_prompts(1, 63 * TOKENS_PER_BLOCK)).ids
        self.target = np.zeros((1, 64), np.int32)

    def time_staged(self) -> None:
        self.cache.tables.copy_batch_block_offsets(self.target, self.ids)
