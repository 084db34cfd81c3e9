"""A simulated clock: requests, a store with latency and bandwidth, an engine with a prefill speed, and policies that
choose what is loaded. No time passes, and nothing is loaded."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvpool.storage.choice import Load, LoadOrCompute

TOKENS, BLOCK_BYTES = 16, 2 << 20
"""Tokens and bytes of a block of an 8 billion parameter model with 8 KV heads, in bfloat16."""
PIECES = 16
"""Number of pieces of a load."""
POLICIES = ("none", "half", "all", "choice")


class Arrival(NamedTuple):
    """A request: its time in seconds, its tokens, and how many leading blocks the store has."""

    time: float
    tokens: int
    there: int


@dataclass(frozen=True)
class World:
    """What a simulation is of. Times in seconds, bandwidths in bytes per second."""

    latency: float
    bandwidth: float
    prefill: float = 12_000.0
    noise: float = 0.0
    """Sigma of the lognormal latencies and bandwidths of single loads. Their means stay."""
    collapse: float = 1.0
    """The bandwidth falls to this share in the middle of a load."""
    every: int = 0
    """Loads from one collapse to the next. 0: there is none."""
    lasts: int = 0
    """Requests with hits until the bandwidth is back."""
    alone: bool = True
    """Each request comes when the one before has its first token. Otherwise it comes at its time."""
    users: int = 1
    """If alone: that many such rows of requests at a time."""
    engine: bool = False
    """The engine computes one prompt after another. Otherwise each prompt is computed when it is loaded."""
    seed: int = 1


def made_arrivals(seed: int, count: int = 600) -> list[Arrival]:
    """Requests like those of chats: four of ten tokens are found again, and lengths differ widely."""
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(0.3, count)).tolist()
    lengths = np.clip(random.lognormal(8.9, 1.0, count), 64, 126_000).astype(int).tolist()
    shares = np.where(random.random(count) < 0.15, 0.0, random.beta(0.6, 0.8, count)).tolist()
    return [
        Arrival(time, length, int(share * (length - 1)) // TOKENS)
        for time, length, share in zip(times, lengths, shares, strict=True)
    ]


class _Transfer:
    """A load on its way. ``pieces``: blocks that have not left the store."""

    def __init__(self, blocks: int, latency: float, slower: float, came: Callable[[_Transfer], None]) -> None:
        self.blocks, self.latency, self.slower, self.notify = blocks, latency, slower, came
        self.left, self.came, self.piece, self.over = blocks, 0, max(1, -(-blocks // PIECES)), False


class Simulation:
    """One run of one policy. ``first_tokens``: what each request waited for its first token, in seconds."""

    def __init__(self, world: World, requests: list[Arrival], policy: str) -> None:
        self.world, self.requests, self.policy = world, requests, policy
        self.random = np.random.default_rng(world.seed)
        self.choice = LoadOrCompute(world.prefill, BLOCK_BYTES, TOKENS)
        self.now, self.events, self.number = 0.0, [], 0
        self.queue: deque[_Transfer] = deque()
        self.serving = False
        self.waiting: dict[_Transfer, float] = {}
        self.factor, self.loads, self.hits_to_recovery = 1.0, 0, 0
        self.engine_free = self.backlog = 0.0
        self.ready: list[tuple[float, int, float, Callable[[], None]]] = []
        self.first_tokens: list[float] = []

    def run(self) -> np.ndarray:
        if self.world.alone:
            self.rest = iter(self.requests)
            for _ in range(self.world.users):
                self._next()
        else:
            for request in self.requests:
                self._at(request.time, lambda request=request: self._arrive(request))
        while self.events:
            self.now, _, call = heapq.heappop(self.events)
            call()
        assert len(self.first_tokens) == len(self.requests)
        return np.array(self.first_tokens)

    def _at(self, time: float, call: Callable[[], None]) -> None:
        if time < math.inf:
            self.number += 1
            heapq.heappush(self.events, (time, self.number, call))

    def _next(self) -> None:
        request = next(self.rest, None)
        if request is not None:
            self._arrive(request)

    # -- a request -----------------------------------------------------------------------------------

    def _arrive(self, request: Arrival) -> None:
        arrived, there = self.now, request.there
        self._recover(there)
        load = self._choose(there)
        if not load.blocks:
            self._compute(arrived, request, 0)
            return

        def look(transfer: _Transfer) -> None:
            if transfer.over:
                return
            elapsed = self.now - arrived
            late = self.policy == "choice" and self.choice.late(load, transfer.came, elapsed)
            if late or transfer.came == load.blocks:
                transfer.over = True
                del self.waiting[transfer]
                if self.policy == "choice":
                    queued = transfer.began - arrived if transfer.began >= 0 else elapsed
                    self.choice.end(load, transfer.came, elapsed, queued)
                self._compute(arrived, request, transfer.came)
            elif self.policy == "choice":
                self._at(arrived + load.until + 1e-9, lambda: look(transfer))

        transfer = self._submit(load.blocks, look)
        look(transfer)

    def _choose(self, there: int) -> Load:
        if self.policy == "choice":
            ahead = BLOCK_BYTES * sum(transfer.left for transfer in self.queue if not transfer.over)
            spare = max(self.engine_free - self.now, 0.0) + max(self.backlog, 0.0)
            waited = self.now - min(self.waiting.values(), default=self.now) if self.world.engine else 0.0
            return self.choice.choose(there, ahead, spare, waited)
        return Load({"none": 0, "half": there // 2, "all": there}[self.policy])

    def _compute(self, arrived: float, request: Arrival, came: int) -> None:
        seconds = (request.tokens - came * TOKENS) / self.world.prefill

        def done() -> None:
            self.first_tokens.append(self.now - arrived)
            if self.world.alone:
                self._next()

        if not self.world.engine:
            self._at(self.now + seconds, done)
            return
        self.number += 1
        heapq.heappush(self.ready, (arrived, self.number, seconds, done))
        self.backlog += seconds
        self._engine()

    def _engine(self) -> None:
        """Begin the next prompt: of those that are ready, the one that arrived first."""
        if not self.ready or self.engine_free > self.now:
            return
        _, _, seconds, done = heapq.heappop(self.ready)
        self.backlog -= seconds
        self.engine_free = self.now + seconds

        def over() -> None:
            done()
            self._engine()

        self._at(self.engine_free, over)

    # -- the store -----------------------------------------------------------------------------------

    def _submit(self, blocks: int, came: Callable[[_Transfer], None]) -> _Transfer:
        sigma = self.world.noise
        latency, slower = np.exp(self.random.normal(-sigma * sigma / 2, sigma, 2)).tolist() if sigma else (1.0, 1.0)
        transfer = _Transfer(blocks, latency * self.world.latency, slower, came)
        transfer.began = -1.0
        self.waiting[transfer] = self.now
        self.loads += 1
        transfer.collapses = bool(self.world.every and self.loads % self.world.every == 0)
        self.queue.append(transfer)
        self._serve()
        return transfer

    def _serve(self) -> None:
        """Begin the next piece, first come, first served. Latencies overlap with other loads."""
        while self.queue and (self.queue[0].over or not self.queue[0].left):
            self.queue.popleft()
        if self.serving or not self.queue:
            return
        transfer = self.queue[0]
        if transfer.began < 0:
            transfer.began = self.now
        if transfer.collapses and 2 * transfer.left <= transfer.blocks:
            self.factor, self.hits_to_recovery, transfer.collapses = self.world.collapse, self.world.lasts, False
        if not self.factor:
            return
        piece = min(transfer.piece, transfer.left)
        self.serving = True
        seconds = piece * BLOCK_BYTES * transfer.slower / (self.world.bandwidth * self.factor)

        def left() -> None:
            self.serving = False
            if not transfer.over:
                transfer.left -= piece
                self._at(self.now + transfer.latency, arrived)
            self._serve()

        def arrived() -> None:
            transfer.came += piece
            transfer.notify(transfer)

        self._at(self.now + seconds, left)

    def _recover(self, there: int) -> None:
        if there and self.hits_to_recovery:
            self.hits_to_recovery -= 1
            if not self.hits_to_recovery:
                self.factor = 1.0
                self._serve()


def means(world: World, requests: list[Arrival]) -> dict[str, float]:
    """The mean time to first token of each policy, in seconds. Those that wait for whatever comes have none when the
    store comes to a stop."""
    policies = ("none", "choice") if world.collapse == 0 and world.every else POLICIES
    return {policy: float(Simulation(world, requests, policy).run().mean()) for policy in policies}


def grid(points: int = 5) -> list[World]:
    """Worlds with 10 MB/s to 100 GB/s and 10 µs to 100 ms, evenly spaced on logarithmic scales."""
    return [
        World(latency, bandwidth)
        for latency in np.geomspace(10e-6, 100e-3, points).tolist()
        for bandwidth in np.geomspace(10e6, 100e9, points).tolist()
    ]
