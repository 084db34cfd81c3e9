"""Plays real sessions of agents in a closed loop through a pool, and prints the hits of its policies in per cent.

A number of users each work on one session after the other. A request ends ``api`` seconds after it began, and the next
one of its session comes after its pause, at most ``--cap`` seconds. Requests are instantaneous for the pool: admitted,
committed and released at once. ``sessions`` is a trace of agents, as ``replay`` takes it::

    python asv_bench/agents.py sessions.jsonl.xz --blocks 25000 --cap 60 --policies lru agent adaptive
"""

from __future__ import annotations

import argparse
import time
from random import Random

import numpy as np

import kvpool
from kvpool.planner.policies import hints
from kvpool.replay.sessions import AgentSession, play
from kvpool.replay.traces import read_sessions

VARIES = 0.5


def measure(
    sessions: list[AgentSession], policy: str, blocks: int, users: int, cap: float, varies: float, say: str, host: int
) -> dict[str, float]:
    """Play all sessions through a pool. Returns the per cent of blocks that were hits, and microseconds of CPU for each
    block."""
    layout = kvpool.BlockLayout(layers=1, kv_heads=1, head_dim=8, tokens_per_block=1, dtype="uint8", planes=1)
    now, hits, asked, spent = [0], 0, 0, 0.0
    longest = max(turn.input_length // session.tokens_per_id for session in sessions for turn in session.turns) + 1
    with kvpool.KVCacheManager(
        layout, device_blocks=blocks + 1, host_blocks=host, device="cpu", max_sequences=4, max_sequence_tokens=longest,
        policy=policy, partial_reuse=False, clock=lambda: now[0], secret=bytes(32),
    ) as cache:  # fmt: skip
        for request in play(sessions, users, cap, varies):
            assert request.hash_ids is not None and request.timestamp is not None
            count, now[0] = request.input_length // request.tokens_per_id, int(request.timestamp * 1000)
            # A full block is one token here, and the last token of a prompt is never reused.
            keys = cache.block_keys(np.append(request.hash_ids[:count].astype(np.int32) + 1, np.int32(0)))
            begin = time.process_time()
            admitted = cache.add_sequence_batch([keys])
            cache.commit(admitted.ids, np.array([count]))
            cache.rewind(admitted.ids, np.array([1]))
            cache.release(admitted.ids, **hints(request, say))
            spent += time.process_time() - begin
            hits += int(admitted.cached_tokens[0])
            asked += count
        evicted = cache.stats().forgotten_device_blocks
    return {"hits": 100 * hits / asked, "us": 1e6 * spent / asked, "us_evicted": 1e6 * spent / max(evicted, 1)}


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
