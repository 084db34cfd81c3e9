"""What a scheduler does in every step: how many blocks are free, one token more for one sequence, and the
tables of a step."""

from __future__ import annotations

import ctypes
from statistics import median
from time import perf_counter

import numpy as np

import kvpool

from .pools import TOKENS_PER_BLOCK, Pooled, make_pool, make_prompts

SEQUENCES = 256
ROUNDS, CALLS = 15, 40


class FreeBlocks(Pooled):
    """Free blocks of a pool in use. ``stats`` counts them too, beside all else."""

    params = [1, 4]
    param_names = ["groups"]

    def setup(self, groups: int) -> None:
        layout = kvpool.BlockLayout(1, 1, 1, TOKENS_PER_BLOCK, dtype="uint8", planes=1)
        self.cache = kvpool.KVCacheManager(
            groups=[kvpool.LayerGroup(layout)] * groups, device_blocks=[1000] * groups, device="cpu"
        )
        self.cache.add_sequence_batch(make_prompts(16, 256))

    def time_free_blocks(self, groups: int) -> None:
        if groups == 1:
            self.cache.free_blocks  # noqa: B018
        else:
            self.cache.free_blocks_per_group  # noqa: B018

    def time_stats(self, groups: int) -> None:
        self.cache.stats()


class Verbs(Pooled):
    """Verbs of engines with an interface for each sequence: beside those for many, what a further sequence costs."""

    params = [1, 2, SEQUENCES]
    param_names = ["sequences"]

    def setup(self, sequences: int) -> None:
        self.cache = make_pool(SEQUENCES * 16)
        ids = self.cache.add_sequence_batch(make_prompts(sequences, 64)).ids
        self.cache.commit(ids)
        self.ids = int(ids[0]) if sequences == 1 else ids
        self.tokens = [7] if sequences == 1 else np.arange(sequences, dtype=np.int32)
        self.counts = None if sequences == 1 else np.ones(sequences, np.int64)
        self.many = np.full(sequences, CALLS)

    def track_append_token(self, sequences: int) -> float:
        """One token for each: a block for every sixteenth."""
        taken = []
        for _ in range(ROUNDS):
            begun = perf_counter()
            for _ in range(CALLS):
                self.cache.append_tokens(self.ids, self.tokens, self.counts)
            taken.append(perf_counter() - begun)
            self.cache.rewind(self.ids, self.many[0] if sequences == 1 else self.many)
        return 1e6 * median(taken) / CALLS

    track_append_token.unit = "µs"  # type: ignore[attr-defined]

    def time_commit(self, sequences: int) -> None:
        self.cache.commit(self.ids)


class StepTables(Pooled):
    """256 decoding sequences, with ready arrays: the dense table, or CSR. The memcpy copies as many block ids."""

    params = [16, 64, 220, 1_024]
    param_names = ["blocks"]

    def setup(self, blocks: int) -> None:
        self.cache = make_pool(SEQUENCES * (blocks + 1))
        ids = self.cache.add_sequence_batch(make_prompts(SEQUENCES, blocks * TOKENS_PER_BLOCK - 1)).ids
        self.step = ids, self.cache.sequence_length(ids).astype(np.int64) - 1, np.ones(SEQUENCES, np.int64)
        numbers = {"slot_mapping": np.zeros(SEQUENCES, np.int64), "query_start_loc": np.zeros(SEQUENCES + 1, np.int32)}
        numbers |= {name: np.zeros(SEQUENCES, np.int32) for name in ("seq_lens", "last_page_len")}
        self.source, self.indices = np.zeros((2, SEQUENCES * blocks), np.int32)
        self.dense = kvpool.pool.StepTables(**numbers, table=np.zeros((SEQUENCES, blocks), np.int32))
        self.csr = kvpool.pool.StepTables(**numbers, indptr=np.zeros(SEQUENCES + 1, np.int32), indices=self.indices)

    def time_dense(self, blocks: int) -> None:
        self.cache.tables.step_tables(*self.step, out=self.dense)

    def time_csr(self, blocks: int) -> None:
        self.cache.tables.step_tables(*self.step, out=self.csr)

    def time_handed_over(self, blocks: int) -> None:
        self.cache.tables.copy_step_tables(self.csr, *self.step)

    def time_memcpy(self, blocks: int) -> None:
        ctypes.memmove(self.indices.ctypes.data, self.source.ctypes.data, self.source.nbytes)


class Chunks(Pooled):
    """Slots of 8,192 tokens that are prefilled, with ready arrays. The memcpy copies as many slots."""

    def setup(self) -> None:
        self.cache = make_pool(1_024)
        self.sequence = self.cache.add_sequence(make_prompts(1, 8_191)[0])
        self.source, slots = np.zeros((2, 8_192), np.int64)
        self.out = kvpool.pool.StepTables(slot_mapping=slots, seq_lens=np.zeros(1, np.int32))

    def time_slots(self) -> None:
        self.cache.tables.step_tables(self.sequence, 0, 8_192, out=self.out)

    def time_memcpy(self) -> None:
        ctypes.memmove(self.out.slot_mapping.ctypes.data, self.source.ctypes.data, self.source.nbytes)
