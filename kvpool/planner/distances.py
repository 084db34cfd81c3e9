"""StackDistances: the tables of a survey. They grow before each request."""

from __future__ import annotations

from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.planner.stack import (
    BLOCKS,
    HITS,
    INSERTED,
    LIVE,
    LOOKUPS,
    NOW,
    RUNS,
    STEPS,
    USED,
    StackTables,
    UsedBlocks,
    compact,
    fill_slots,
    record,
)
from kvpool.replay.content import namespace_digest
from kvpool.replay.tokens import Request

BUCKETS = STEPS * 36
GROUPS = 32
"""The sample has so many parts. Their differences give its error."""
_START = 1 << 12
_BLOCKS_MAX = 2**31 - 1


class StackDistances:
    """For each block of each request, its place in an LRU list of all blocks.

    Parameters
    ----------
    tokens_per_block
        At least 1.
    sample
        Share of the blocks in the sample, chosen by key. With 1.0 everything is exact.

    Memory grows by about 60 bytes for each distinct block in the sample, by 8 bytes for each request, and by 24 for
    each run of blocks that it finds. Contents are
    distinguished by 64-bit keys. Not thread-safe.
    """

    def __init__(self, tokens_per_block: int, sample: float = 1.0) -> None:
        self.tokens_per_block, self.sample, self.requests = tokens_per_block, sample, 0
        self._threshold = np.uint64(round(sample * 2**32))
        groups = 1 if sample == 1 else GROUPS
        self.tables = StackTables(
            slots=np.full(2 * _START, -1, np.int32),
            keys=np.empty(_START, np.uint64),
            last=np.empty(_START, np.int64),
            seen=np.empty(_START, np.int32),
            hits=np.empty(_START, np.int32),
            parent=np.empty(_START, np.int32),
            bits=np.zeros(_START, np.uint64),
            tree=np.zeros(_START + 1, np.int32),
            distances=np.zeros(_START, np.int64),
            again=np.zeros(_START, np.int64),
            runs=np.empty((_START, 3), np.int64),
            groups=np.zeros((groups, BUCKETS), np.int64),
            cold=np.zeros(groups, np.int64),
            coarse=np.zeros((1, BUCKETS), np.int64),
            gaps=np.zeros((2, 16), np.int64),
            times=np.empty(_START, np.float64),
            found=np.empty(_START, np.int32),
            counts=np.zeros(8, np.int64),
        )
        self._seeds: dict[tuple[str | bytes | None, int | str | None], np.uint64] = {}

    @property
    def blocks(self) -> int:
        """Distinct blocks with a key in the sample."""
        return int(self.tables.counts[BLOCKS])

    @property
    def live(self) -> int:
        """All distinct blocks in the sample."""
        return int(self.tables.counts[LIVE])

    @property
    def used(self) -> int:
        """Sampled blocks used by all requests."""
        return int(self.tables.counts[USED])

    def record(self, request: Request, tenant: int = 0) -> tuple[int, int, int]:
        """Look up, count and then touch the blocks of a request. ``tenant`` counts from 0.

        Returns how many sampled blocks were looked up, found, and new. Raises OverflowError beyond 2**31 - 1 blocks,
        and ValueError for a request with fewer ids than tokens.
        """
        ids, tokens_per_id, keyed_tokens = _content(request)
        if request.output_length < 0 or len(ids) * tokens_per_id < keyed_tokens or tenant < 0:
            covered = f"{len(ids)} ids of {tokens_per_id} tokens for {keyed_tokens} and {request.output_length} tokens"
            raise ValueError(
                f"{request.name} of tenant {tenant} has {covered}: accepted are ids for all, and numbers from 0 on"
            )
        full = request.length // self.tokens_per_block
        self._make_room(full, tenant)
        self.tables.times[self.requests] = nan if request.timestamp is None else request.timestamp
        access = UsedBlocks(
            tokens_per_id,
            self.tokens_per_block,
            lookups=(request.input_length - 1) // self.tokens_per_block,
            keyed=keyed_tokens // self.tokens_per_block,
            full=full,
            seed=self._seed(request),
            threshold=self._threshold,
            request=self.requests,
            tenant=tenant,
        )
        record(self.tables, access, ids)
        self.requests += 1
        counts = self.tables.counts
        return int(counts[LOOKUPS]), int(counts[HITS]), int(counts[INSERTED])

    def _seed(self, request: Request) -> np.uint64:
        namespace = request.salt, request.adapter_id
        if namespace not in self._seeds:
            self._seeds[namespace] = np.frombuffer(namespace_digest(*namespace)[:8], np.uint64)[0]
        return self._seeds[namespace]

    def _make_room(self, full: int, tenant: int) -> None:
        tables, counts = self.tables, self.tables.counts
        blocks, live = int(counts[BLOCKS]) + full, int(counts[LIVE]) + full
        if live > _BLOCKS_MAX:
            raise OverflowError(f"more than {_BLOCKS_MAX} distinct blocks: follow a smaller share of them")
        needed = {
            **dict.fromkeys(("keys", "last", "seen", "hits", "parent"), blocks),
            **dict.fromkeys(("distances", "again"), live + 1),
            "runs": int(counts[RUNS]) + full,
            "coarse": tenant + 1,
            "times": self.requests + 1,
            "found": full,
        }
        short = {name: length for name, length in needed.items() if length > len(getattr(tables, name))}
        if short:
            grown = {name: _longer(getattr(tables, name), length) for name, length in short.items()}
            self.tables = tables = tables._replace(**grown)
        if 2 * blocks > len(tables.slots):
            slots = np.full(_power_of_two(4 * blocks), -1, np.int32)
            fill_slots(slots, tables.keys, counts[BLOCKS])
            self.tables = tables = tables._replace(slots=slots)
        if int(counts[NOW]) + full > 64 * len(tables.bits):
            words = max(len(tables.bits), _power_of_two(2 * live) // 64)
            bits, tree = np.zeros(words, np.uint64), np.zeros(words + 1, np.int32)
            compact(tables, bits, tree)
            self.tables = tables._replace(bits=bits, tree=tree)


def _content(request: Request) -> tuple[npt.NDArray[np.uint64], int, int]:
    """The ids of a request's content, the tokens that each id covers, and the number of tokens that another request can
    repeat."""
    if request.hash_ids is not None:
        try:
            ids = np.array(request.hash_ids, np.uint64)
        except OverflowError:
            raise ValueError(f"hash_ids={request.hash_ids!r:.80}: accepted are numbers from 0 to 2**64 - 1") from None
        if ids.ndim != 1:
            raise ValueError(f"hash_ids has shape {ids.shape}: accepted is one dimension")
        return ids, request.tokens_per_id, request.input_length
    assert request.tokens is not None
    if request.outputs is None:
        return request.tokens.astype(np.uint64), 1, request.input_length
    return np.concatenate([request.tokens, request.outputs]).astype(np.uint64), 1, request.length


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _longer(array: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    result = np.zeros((max(length, 2 * len(array)), *array.shape[1:]), array.dtype)
    result[: len(array)] = array
    return result
