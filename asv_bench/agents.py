"""Plays real sessions of agents in a closed loop through a pool, and prints the hits of its policies in per cent.

A number of users each work on one session after the other. A request ends ``api`` seconds after it began, and the next
one of its session comes after its pause, at most ``--cap`` seconds. Requests are instantaneous for the pool: admitted,
committed and released at once. ``sessions`` is a trace of agents, as ``replay`` takes it::

    python asv_bench/agents.py sessions.jsonl.xz --blocks 25000 --cap 60 --policies lru agent adaptive
"""

from __future__ import annotations

import argparse
from random import Random

import numpy as np

from kvpool.planner import Use
from kvpool.planner.policies import through_pool
from kvpool.replay import Request
from kvpool.replay.sessions import AgentSession, play
from kvpool.replay.traces import read_sessions

VARIES = 0.5


def used(request: Request) -> Use:
    """The full blocks of a prompt. All may be found: the pool keeps one more token back."""
    assert request.hash_ids is not None
    count = request.input_length // request.tokens_per_id
    return Use(request, request.hash_ids[:count].astype(np.int32), count, count, 0)


def measure(
    sessions: list[AgentSession], policy: str, blocks: int, users: int, cap: float, varies: float, say: str, host: int
) -> dict[str, float]:
    """Play all sessions through a pool. Returns the per cent of blocks that were hits, and microseconds of CPU for each
    block."""
    uses = [used(request) for request in play(sessions, users, cap, varies)]
    longest, asked = max(use.prompt for use in uses), sum(use.prompt for use in uses)
    found, nanoseconds, evicted = through_pool(uses, longest, blocks, policy, say, host)
    spent = nanoseconds / 1e3
    return {"hits": 100 * found / asked, "us": spent / asked, "us_evicted": spent / max(evicted, 1)}


def main() -> None:
    """Print a line for each policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sessions", help="a file or a folder, as replay takes it")
    parser.add_argument("--blocks", type=int, nargs="+", default=[25_000])
    parser.add_argument("--host", type=int, default=0, help="blocks of the host tier")
    parser.add_argument("--cap", type=float, nargs="+", default=[60.0], help="longest pause, seconds")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--jitter", action="store_true", help="draw the longest pause anew each time, x 0.5 to 1.5")
    parser.add_argument("--half", type=int, choices=(0, 1), help="play a random half of the sessions")
    parser.add_argument("--policies", nargs="+", default=["lru", "agent", "adaptive"])
    parser.add_argument("--say", choices=("nothing", "stop", "future"), default="nothing", help="with each release")
    options = parser.parse_args()
    sessions, random = read_sessions(options.sessions), Random(5)
    varies = VARIES if options.jitter else 0.0
    if options.half is not None:
        sessions = [one for one in sessions if (random.random() < 0.5) == (options.half == 0)]
    for blocks in options.blocks:
        for cap in options.cap:
            for policy in options.policies:
                found = measure(sessions, policy, blocks, options.users, cap, varies, options.say, options.host)
                told = "  ".join(f"{name} {value:.3f}" for name, value in found.items())
                print(f"{blocks:>7} blocks  {cap:>6.0f} s  {policy:<9} {told}", flush=True)


if __name__ == "__main__":
    main()
