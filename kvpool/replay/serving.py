"""Workers that give each other blocks: one serves its host tier while it replays, one fetches from it and compares
every byte with what the tokens alone say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from time import perf_counter
from typing import Any

import numpy as np

from kvpool.arrays import Array, Int64s
from kvpool.arrays.layout import BlockLayout
from kvpool.entry.process import Closing
from kvpool.errors import BlockNotFound
from kvpool.pool.keys import BlockKeys
from kvpool.pool.manager import KVCacheManager
from kvpool.remote import BlockClient, BlockServer, Limits
from kvpool.replay.content import KVBytes, Request, States, token_states
from kvpool.replay.engine import Figure, ReplayConfig, Report, Rounds, at_least, equal
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


class Fetching(Closing):
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
        self._client = BlockClient(endpoint, self.cache, name="fetch", timeout_ms=30_000, blocks_per_message=64)
        self._host = self._reader(self.cache.host_pool, config.host_blocks)
        self._prompt = lru_cache(maxsize=1024)(self._read_prompt)
        self.calls = self.fetched = self.entered = self.compared = self.missing = self.wrong = 0
        self.first_wrong = ""
        self.seconds = 0.0

    def close(self) -> None:
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
        return [
            at_least("blocks fetched", self.fetched, self._config.blocks),
            equal("blocks with wrong bytes", self.wrong),
            at_least("blocks that entered the pool", self.entered, 1),
            at_least("... compared there again", self.compared, 1),
            Figure("blocks that were not there", self.missing),
            Figure("calls", self.calls),
            equal("leases left", stats.leases),
            equal("blocks left pinned", stats.host.pinned),
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
            self._reader(page, len(there)).check(grid[there], np.arange(len(there))),
            f"request {index}, as it came",
        )
        for run in np.split(np.arange(len(there)), np.flatnonzero(np.diff(there) != 1) + 1):
            first = int(there[run[0]])
            self.entered += self.cache.import_blocks(prompt, buffers[run[0] : run[-1] + 1], first=first)
        self._compare_pool(index, prompt, grid, there)

    def _compare_pool(self, index: int, prompt: BlockKeys, grid: States, places: Int64s) -> None:
        """Compare the bytes of some blocks of a prompt in this pool, if it still has all of them."""
        try:
            lease = self.cache.pin(prompt.keys[places], owner="fetch", tier="host")
        except BlockNotFound:
            return
        with lease:
            self._note(
                self._host.check(grid[places], lease.blocks - self.cache.device_blocks),
                f"request {index}, in the pool",
            )
            self.compared += len(places)

    def _note(self, difference: Any, where: str) -> None:
        if difference is not None:
            self.wrong += 1
            self.first_wrong = self.first_wrong or f"{where}: {difference}"

    def _reader(self, pool: Array, blocks: int) -> KVBytes:
        return KVBytes(self._config.layout, pool, self._config.layout.host_strides(blocks), blocks)


class Serving(Closing):
    """Replays a trace again and again until it is stopped, and serves meanwhile. A context manager: leaving it closes
    server and pool.

    After each request its prompt is offloaded, so that other workers find it on the host until it is evicted.
    ``config`` needs ``secret``. It needs ``verify`` too if the bytes are to be compared, since only then are they
    written. Errors of ``Replay`` and ``BlockServer`` propagate.
    """

    def __init__(self, trace: Trace, config: ReplayConfig, endpoint: str) -> None:
        self._rounds = Rounds(trace, config, self._admitted)
        self.replay = self._rounds.replay
        try:
            self.server = BlockServer(self.replay.cache, endpoint, limits=Limits(requests_per_client=16))
        except BaseException:
            self.replay.close()
            raise

    def close(self) -> None:
        self.server.close()
        self.replay.close()

    def stop(self) -> None:
        """Have ``run`` end after the current request. Thread-safe."""
        self._rounds.stop.set()

    def run(self) -> Report:
        """Replay until ``stop`` or KeyboardInterrupt, close the server, and return the figures."""
        try:
            failure = self._rounds.run()
        finally:
            self.server.close()
        failure = failure or self._rounds.verify()
        stats, served = self.replay.cache.stats(), self.server.stats()
        evicted = stats.forgotten_host_blocks + stats.redundant_dropped
        figures = [
            at_least("requests that the scheduler admitted meanwhile", self._rounds.done, 1),
            Figure("host blocks evicted meanwhile", evicted),
            Figure("blocks served", served.blocks),
            Figure("blocks asked for that were not there", served.missing_blocks),
            Figure("requests refused", served.refused),
            equal("answers dropped", served.dropped),
            equal("transfers left", served.transfers),
            equal("leases left", stats.leases),
            equal("blocks left pinned", stats.device.pinned + stats.host.pinned),
            equal("blocks lost", stats.lost_blocks),
        ]
        return Report("serve", figures, failure, self._rounds.interrupted)

    def _admitted(self, request: Request | None) -> None:
        """Called after every request, on the scheduler's thread."""
        if request is not None:
            cache = self.replay.cache
            cache.offload(cache.block_keys(request.prompt(), salt=request.salt, adapter_id=request.adapter_id))
