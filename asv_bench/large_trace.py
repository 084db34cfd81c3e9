"""Writes a trace too large for memory to standard output: chats that repeat and extend their prompts, 16 tokens an id.

How fast and how small the planner is on 100 M blocks, 30 M of them distinct::

    python asv_bench/large_trace.py | /usr/bin/time -v python -m kvpool plan - --model llama-3-8b
"""

from __future__ import annotations

import argparse
import sys
from random import Random

TOKENS_PER_ID = 16
_OPEN_CHATS = 4_096
_TURN_BLOCKS = 300


def main() -> None:
    """Write lines until there are as many accesses as requested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accesses", type=int, default=100_000_000, help="prompt blocks in all (default: 100000000)")
    parser.add_argument("--distinct", type=int, default=30_000_000, help="distinct blocks (default: 30000000)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random = Random(options.seed)
    chats: list[list[int]] = [[] for _ in range(_OPEN_CHATS)]
    distinct = accesses = request = 0
    while accesses < options.accesses:
        # Whole chats are repeated while there are more distinct blocks than their share of the accesses so far.
        chat = int(random.random() ** 2 * _OPEN_CHATS)
        ids = chats[chat]
        if len(ids) > 5 * _TURN_BLOCKS:
            ids = chats[chat] = []
        if not ids or distinct * options.accesses < options.distinct * accesses:
            new = min(1 + int(random.expovariate(1 / _TURN_BLOCKS)), max(options.distinct - distinct, 1))
            ids.extend(range(distinct, distinct + new))
            distinct += new
        accesses += len(ids)
        sys.stdout.write(
            f'{{"chat_id": {chat}, "timestamp": {request * 0.1:.1f}, "input_length": {len(ids) * TOKENS_PER_ID}, '
            f'"output_length": 200, "hash_ids": {ids}}}\n'
        )
        request += 1
    print(f"{request} requests, {accesses} blocks, {distinct} distinct", file=sys.stderr)


if __name__ == "__main__":
    main()
