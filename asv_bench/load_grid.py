"""Loading against computing: ``python -m asv_bench.load_grid``. A throttled store on a simulated clock.

The grid is prompt length x concurrency x bandwidth of the store. In each cell some users request whole hits, one after
the other, and one engine computes them in the order in which they came. For each cell: the mean and the 99th percentile
of the time to the first token under ``LoadOrCompute``, as a share of the better of "always load" and "never load",
after a warm-up of ``--warm-up`` requests; and what the warm-up has lost against that, in hits that are computed. It is
bounded: at the worst all users but one wait for an engine that computes what a store would have loaded, which is
users x (users - 1) / 2 hits. The worst cells come last, each with what the two fixed ways take. Those of one user and a
slow store are the worst: a probe takes 0.09 of a hit, and one hit in a hundred is one.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any, NamedTuple

import numpy as np

from kvpool.storage import MemoryStore
from tests.stores.clock import BLOCK_BYTES, TOKENS, Arrival, Simulation, World

LENGTHS, USERS = (512, 2_048, 8_192, 32_768), (1, 4, 16)
BANDWIDTHS = (0.1e9, 0.5e9, 1e9, 1.5e9, 2e9, 4e9, 20e9)
LATENCY, WARM_UP, REQUESTS = 1e-3, 64, 1_000
MEAN_MOST, TAIL_MOST = 1.02, 1.10


class Cell(NamedTuple):
    """One cell of the grid. Times in seconds."""

    tokens: int
    users: int
    bandwidth: float
    mean: float
    """of ``LoadOrCompute``, as a share of the better fixed way"""
    tail: float
    """the 99th percentile, likewise"""
    lost: float
    """by the warm-up, in hits that are computed; the better way loses nothing"""
    never: float
    always: float
    """mean times to the first token of the fixed ways"""

    def __str__(self) -> str:
        return (
            f"{self.tokens:7,} tokens {self.users:3} users {self.bandwidth / 1e9:5.1f} GB/s  mean {self.mean:.3f}  "
            f"p99 {self.tail:.3f}  warm-up {self.lost:6.2f}  never {self.never:.3f} s  always {self.always:.3f} s"
        )


class Throttled(MemoryStore):
    """A store in memory with a limited bandwidth. ``vllm_host_tier`` uses it with a real vLLM."""

    def __init__(self, bytes_per_s: str, *, capacity: int) -> None:
        super().__init__(capacity)
        self._bytes_per_s = float(bytes_per_s)

    def load(self, keys: Any, rows: Any, stop: Any) -> Any:
        end = time.monotonic() + len(keys) * self._memory.shape[1] / self._bytes_per_s
        while time.monotonic() < end and not stop():
            time.sleep(0.001)
        return super().load(keys, rows, stop)


def lost_most(users: int) -> float:
    """What a warm-up may lose, in hits that are computed."""
    return 0.5 + users * (users - 1) / 2


def cell(tokens: int, users: int, bandwidth: float, warm_up: int = WARM_UP, requests: int = REQUESTS) -> Cell:
    """Run the three ways."""
    world = World(LATENCY, bandwidth, engine=True, users=users)
    asked = [Arrival(0.0, tokens, (tokens - 1) // TOKENS)] * (warm_up + requests)
    by_way = {way: Simulation(world, asked, way).run() for way in ("none", "all", "choice")}
    means = {way: float(times[warm_up:].mean()) for way, times in by_way.items()}
    tails = {way: float(np.quantile(times[warm_up:], 0.99)) for way, times in by_way.items()}
    best = min(means["none"], means["all"])
    lost = max(0.0, float(by_way["choice"][:warm_up].sum() - warm_up * best) / (tokens / world.prefill))
    tail = tails["choice"] / min(tails["none"], tails["all"])
    return Cell(tokens, users, bandwidth, means["choice"] / best, tail, lost, means["none"], means["all"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="requests of a cell that are not counted")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="requests of a cell that are counted")
    parser.add_argument("--worst", type=int, default=10, help="cells that are listed again")
    options = parser.parse_args()
    print(f"break-even at {12_000 / TOKENS * BLOCK_BYTES / 1e9:.2f} GB/s, latency {LATENCY * 1e3:.0f} ms")
    cells = []
    for parameters in itertools.product(LENGTHS, USERS, BANDWIDTHS):
        cells.append(cell(*parameters, options.warm_up, options.requests))
        print(cells[-1], flush=True)
    kept = [row for row in cells if row.mean <= MEAN_MOST and row.tail <= TAIL_MOST]
    print(f"{len(kept)} of {len(cells)} cells within {MEAN_MOST} and {TAIL_MOST}; the worst:")
    for row in sorted(cells, key=lambda row: -max(row.mean / MEAN_MOST, row.tail / TAIL_MOST))[: options.worst]:
        print(row)
    for users in USERS:
        lost = max(row.lost for row in cells if row.users == users)
        print(f"{users} users: the warm-up lost at most {lost:.2f} computed hits; its bound is {lost_most(users):.1f}")


if __name__ == "__main__":
    main()
