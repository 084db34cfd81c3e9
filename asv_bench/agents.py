"""Plays real sessions of agents in a closed loop through a pool, and prints the hits of its policies in per cent.

A number of users each work on one session after the other. A request ends ``api`` seconds after it began, and the next
one of its session comes after its pause, at most ``--cap`` seconds. Requests are instantaneous for the pool: admitted,
committed and released at once. ``sessions`` is a file of JSON lines, a session each, perhaps compressed by xz::

    python asv_bench/agents.py sessions.jsonl.xz --blocks 25000 --cap 60 --policies lru agent adaptive
"""

from __future__ import annotations

import argparse
import heapq
import json
import lzma
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

import kvpool

API_SECONDS, API_MOST = 6.5, 300.0
Session = tuple[list[Any], list[np.ndarray]]
"""The requests of a session, and the blocks of each prompt."""


def read(path: Path) -> list[Session]:
    """All sessions of a file. No two of them share a block."""
    text = lzma.open(path, "rt") if path.suffix == ".xz" else path.open()
    found, start = list[Session](), 1
    with text:
        for line in text:
            requests, prompts = json.loads(line)["requests"], list[np.ndarray]()
            for *_, origin, keep, runs in requests:
                parts = [prompts[origin][:keep]] if origin >= 0 else []
                parts += [np.arange(start + first, start + first + count, dtype=np.int32) for first, count in runs]
                prompts.append(np.concatenate(parts))
            start = max(int(prompt.max()) for prompt in prompts) + 1
            found.append((requests, prompts))
    return found


class Arrival(NamedTuple):
    """A request: when it comes, in seconds; its blocks; why it stops; and the seconds until the next one, or None."""

    at: float
    prompt: np.ndarray
    stop: str
    returns: float | None


def arrivals(sessions: list[Session], users: int, cap: float, jitter: bool, seed: int = 7) -> Iterator[Arrival]:
    """The requests in the order in which they come."""
    random, varied, left = Random(seed), Random(99), list(sessions)
    random.shuffle(left)
    waiting = list[tuple[float, int, Session, int]]()
    left.reverse()
    for user in range(min(users, len(left))):
        heapq.heappush(waiting, (random.random() * 60, user, left.pop(), 0))
    while waiting:
        now, user, session, place = heapq.heappop(waiting)
        requests, prompts = session
        api, following = requests[place][4], None
        end = now + min(API_SECONDS if api is None else api, API_MOST)
        if place + 1 < len(requests):
            most = cap * varied.uniform(0.5, 1.5) if jitter else cap
            following = end + min(requests[place + 1][5] or 0, most)
            heapq.heappush(waiting, (following, user, session, place + 1))
        elif left:
            heapq.heappush(waiting, (end + random.random() * cap, user, left.pop(), 0))
        yield Arrival(now, prompts[place], requests[place][3], None if following is None else following - now)


def hints(arrival: Arrival, say: str) -> dict[str, Any]:
    """What an engine says when it releases a request: nothing, why it stopped, or when the next one comes."""
    if say == "stop":
        return {"stop": arrival.stop if arrival.stop in ("tool_use", "end_turn") else None}
    if say == "future":
        following = arrival.returns
        return {"ends": True} if following is None else {"returns_in_ms": int(following * 1000)}
    return {}


def play(
    sessions: list[Session], policy: str, blocks: int, users: int, cap: float, jitter: bool, say: str, host: int = 0
) -> dict[str, float]:
    """Play all sessions through a pool. Returns the per cent of blocks that were hits, and microseconds of CPU for each
    block."""
    layout = kvpool.BlockLayout(layers=1, kv_heads=1, head_dim=8, tokens_per_block=1, dtype="uint8", planes=1)
    now, hits, asked, spent = [0], 0, 0, 0.0
    longest = max(len(prompt) for _, prompts in sessions for prompt in prompts) + 1
    with kvpool.KVCacheManager(
        layout, device_blocks=blocks + 1, host_blocks=host, device="cpu", max_sequences=4, max_sequence_tokens=longest,
        policy=policy, partial_reuse=False, clock=lambda: now[0], secret=bytes(32),
    ) as cache:  # fmt: skip
        end = np.zeros(1, np.int32)  # the last token of a prompt is never reused
        for arrival in arrivals(sessions, users, cap, jitter):
            prompt, now[0] = arrival.prompt, int(arrival.at * 1000)
            keys = cache.block_keys(np.concatenate((prompt, end)))
            begin = time.process_time()
            admitted = cache.add_sequence_batch([keys])
            cache.commit(admitted.ids, np.array([len(prompt)]))
            cache.rewind(admitted.ids, np.array([1]))
            cache.release(admitted.ids, **hints(arrival, say))
            spent += time.process_time() - begin
            hits += int(admitted.cached_tokens[0])
            asked += len(prompt)
        evicted = cache.stats().forgotten_device_blocks
    return {"hits": 100 * hits / asked, "us": 1e6 * spent / asked, "us_evicted": 1e6 * spent / max(evicted, 1)}


def main() -> None:
    """Print a line for each policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sessions", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", default=[25_000])
    parser.add_argument("--host", type=int, default=0, help="blocks of the host tier")
    parser.add_argument("--cap", type=float, nargs="+", default=[60.0], help="longest pause, seconds")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--jitter", action="store_true", help="draw the longest pause anew each time, x 0.5 to 1.5")
    parser.add_argument("--half", type=int, choices=(0, 1), help="play a random half of the sessions")
    parser.add_argument("--policies", nargs="+", default=["lru", "agent", "adaptive"])
    parser.add_argument("--say", choices=("nothing", "stop", "future"), default="nothing", help="with each release")
    options = parser.parse_args()
    sessions, random = read(options.sessions), Random(5)
    if options.half is not None:
        sessions = [one for one in sessions if (random.random() < 0.5) == (options.half == 0)]
    for blocks in options.blocks:
        for cap in options.cap:
            for policy in options.policies:
                found = play(sessions, policy, blocks, options.users, cap, options.jitter, options.say, options.host)
                told = "  ".join(f"{name} {value:.3f}" for name, value in found.items())
                print(f"{blocks:>7} blocks  {cap:>6.0f} s  {policy:<9} {told}", flush=True)


if __name__ == "__main__":
    main()
