"""``python -m tests.stores.choice_grid``: loading against computing over a grid of stores, on a simulated clock: the
ratio of mean times to first token for each point, and the worst. The requests are made, or those of the recorded trace
in the folder that ``KVPOOL_TRACES`` names."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from tests.data import recorded
from tests.stores.clock import World, arrivals, grid, means

SCENARIOS: dict[str, tuple[World, float]] = {
    "one after another": (World(0, 1), 1.0),
    "prefill 1,500/s": (World(0, 1, prefill=1_500.0), 1.0),
    "prefill 100,000/s": (World(0, 1, prefill=100_000.0), 1.0),
    "noise": (World(0, 1, noise=1.0), 1.0),
    "collapse to 0.001": (World(0, 1, collapse=1e-3, every=100, lasts=100), 1.0),
    "collapse to 0": (World(0, 1, collapse=0.0, every=100, lasts=100), 1.0),
    "shared, as it came": (World(0, 1, alone=False), 1.0),
    "shared, 10 x as fast": (World(0, 1, alone=False), 10.0),
    "shared, 100 x as fast": (World(0, 1, alone=False), 100.0),
    "shared, 10 x, noise": (World(0, 1, alone=False, noise=1.0), 10.0),
    "shared, 10 x, collapse": (World(0, 1, alone=False, collapse=1e-3, every=100, lasts=100), 10.0),
    "one engine at 63 %": (World(0, 1, alone=False, engine=True, prefill=40_000.0), 0.63),
}
"""Worlds without their latency and bandwidth, and how much faster the requests of the trace come."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=9, help="of latencies, and of bandwidths")
    parser.add_argument("--limit", type=int, help="requests (default: all)")
    parser.add_argument("--scenario", choices=SCENARIOS, help="default: all")
    options = parser.parse_args()
    requests = arrivals(options.limit)
    print(f"{len(requests):,} requests, {'of the trace' if recorded() else 'made'}")
    for name in [options.scenario] if options.scenario else SCENARIOS:
        show(name, *SCENARIOS[name], requests, options.points)


def show(name: str, model: World, faster: float, requests: list, points: int) -> None:
    """Run one scenario over the grid, and print it."""
    began, worst = time.perf_counter(), (0.0, 0.0)
    timed = [request._replace(time=request.time / faster) for request in requests]
    print(f"\n{name}\n{'latency':>10} {'GB/s':>8}  mean seconds to the first token{'':23} / none  / best")
    for point in grid(points):
        mean_seconds = means(replace(model, latency=point.latency, bandwidth=point.bandwidth), timed)
        ratios = mean_seconds["choice"] / mean_seconds["none"], mean_seconds["choice"] / min(mean_seconds.values())
        worst = max(worst[0], ratios[0]), max(worst[1], ratios[1])
        each = "  ".join(f"{policy} {seconds:8.3f}" for policy, seconds in mean_seconds.items())
        print(
            f"{1e3 * point.latency:7.2f} ms {point.bandwidth / 1e9:8.2f}  {each:<60}  {ratios[0]:.4f}  {ratios[1]:.4f}"
        )
    print(f"worst: {worst[0]:.4f} of none, {worst[1]:.4f} of the best; {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
