"""A worker that fetches random prompts of a trace from another worker. It computes the expected bytes from the tokens
alone, and compares every byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.arrays.layout import BlockLayout
from kvpool.errors import BlockNotFound
from kvpool.pool.keys import BlockKeys
from kvpool.pool.manager import KVCacheManager
from kvpool.remote import BlockClient
from kvpool.replay.content import KVBytes, States, token_states
from kvpool.replay.stress_run import Figure
from kvpool.replay.traces import Trace

_PREFIX_EVERY = 8
"""Of this many calls, one fetches a prefix into the pool as an engine would. The others fetch any blocks of a prompt
that the server still has."""
_STALL_AFTER = 5_000
"""The run ends after so many calls in a row that fetch nothing."""


@dataclass(frozen=True)
class FetchConfig:
    """What is fetched: ``blocks`` blocks of ``layout``, into a pool of ``host_blocks``, with keys under ``secret``."""

    layout: BlockLayout
    blocks: int
    host_blocks: int
    secret: bytes = field(repr=False)
    seed: int = 0
    blocks_per_message: int = 64
    messages_in_flight: int = 4
    timeout_ms: int = 30_000


class Fetching:
    """One run against one server. A context manager: leaving it closes client and pool. Errors of the pool and the
    client propagate."""

    def __init__(
        self, trace: Trace, config: FetchConfig, endpoint: str, *, progress: Callable[[int], Any] | None = None
    ) -> None:
        self._trace, self._config, self._random = trace, config, Random(config.seed)
        self._progress = progress or (lambda count: None)
        self._width, self._size = config.layout.tokens_per_block, config.layout.block_bytes
        self.cache = KVCacheManager(
            config.layout, device_blocks=1, host_blocks=config.host_blocks, device="cpu", secret=config.secret
        )
        self._client = BlockClient(
            endpoint,
            self.cache,
            name="fetch",
            timeout_ms=config.timeout_ms,
            blocks_per_message=config.blocks_per_message,
            messages_in_flight=config.messages_in_flight,
        )
        self._host = self._reader(self.cache.host_pool, config.host_blocks)
        self._prompt = lru_cache(maxsize=1024)(self._read_prompt)
        self.calls = self.fetched = self.entered = self.compared = self.missing = self.wrong = 0
        self.first_wrong = ""
        self.seconds = 0.0

    def __enter__(self) -> Fetching:
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.close()
        self.cache.close()

    def run(self) -> list[Figure]:
        """Fetch until there are enough blocks, and return the figures. Raises RemoteError."""
        begin, last = perf_counter(), 0
        while self.fetched < self._config.blocks and self.calls - last < _STALL_AFTER:
            before = self.fetched
            index = self._random.randrange(len(self._trace.requests))
            prompt, grid = self._prompt(index)
            if len(prompt.keys):
                (self._fetch_prefix if self.calls % _PREFIX_EVERY == 0 else self._fetch_any)(index, prompt, grid)
            self.calls += 1
            if self.fetched > before:
                last = self.calls
                self._progress(min(self.fetched, self._config.blocks) - min(before, self._config.blocks))
        self.seconds = perf_counter() - begin
        self.cache.verify()
        stats = self.cache.stats()
        goal = self._config.blocks
        return [
            Figure("blocks fetched", self.fetched, f">= {goal:,}", self.fetched >= goal),
            Figure("blocks with wrong bytes", self.wrong, "= 0", self.wrong == 0),
            Figure("blocks that entered the pool", self.entered, ">= 1", self.entered >= 1),
            Figure("... compared there again", self.compared, ">= 1", self.compared >= 1),
            Figure("blocks that were not there", self.missing, "", True),
            Figure("calls", self.calls, "", True),
            Figure("leases left", stats.leases, "= 0", stats.leases == 0),
            Figure("blocks left pinned", stats.host.pinned, "= 0", stats.host.pinned == 0),
        ]

    def _read_prompt(self, index: int) -> tuple[BlockKeys, States]:
        """A request's keys, and the token states of its full blocks, uint64[blocks, tokens_per_block]."""
        request = self._trace.requests[index]
        tokens = request.prompt()
        keys = self.cache.block_keys(tokens, salt=request.salt, adapter_id=request.adapter_id)
        states = token_states(tokens, self._width, salt=request.salt, adapter_id=request.adapter_id)
        return keys, states[: len(keys.keys) * self._width].reshape(-1, self._width)

    def _fetch_prefix(self, index: int, prompt: BlockKeys, grid: States) -> None:
        entered = self._client.fetch(prompt)
        self.fetched += entered
        self.entered += entered
        self._compare_pool(index, prompt, grid, np.arange(self.cache.match_prefix(prompt).full_tokens // self._width))

    def _fetch_any(self, index: int, prompt: BlockKeys, grid: States) -> None:
        found = self._client.fetch_blocks(prompt)
        there = np.flatnonzero([block is not None for block in found])
        self.missing += len(found) - len(there)
        if len(there) == 0:
            return
        self.fetched += len(there)
        buffers = [block for block in found if block is not None]
        page = np.stack([np.frombuffer(buffer, np.uint8) for buffer in buffers])
        self._note(
            self._reader(page, len(there)).check_blocks(np.arange(len(there)), grid[there]),
            f"request {index}, as it came",
        )
        for run in np.split(np.arange(len(there)), np.flatnonzero(np.diff(there) != 1) + 1):
            first = int(there[run[0]])
            self.entered += self.cache.import_blocks(prompt, buffers[run[0] : run[-1] + 1], first=first)
        self._compare_pool(index, prompt, grid, there)

    def _compare_pool(self, index: int, prompt: BlockKeys, grid: States, places: npt.NDArray[np.int64]) -> None:
        """Compare the bytes of some blocks of a prompt in this pool, if it still has all of them."""
        try:
            lease = self.cache.pin(prompt.keys[places], owner="fetch", tier="host")
        except BlockNotFound:
            return
        with lease:
            self._note(
                self._host.check_blocks(lease.blocks - self.cache.device_blocks, grid[places]),
                f"request {index}, in the pool",
            )
            self.compared += len(places)

    def _note(self, difference: Any, where: str) -> None:
        if difference is not None:
            self.wrong += 1
            self.first_wrong = self.first_wrong or f"{where}: {difference}"

    def _reader(self, pool: npt.NDArray[Any], blocks: int) -> KVBytes:
        return KVBytes(self._config.layout, pool, self._config.layout.host_strides(blocks), blocks)
