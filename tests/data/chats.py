"""Chats of several turns that begin with a few shared system prompts, as requests in the Mooncake format.

Every draw comes from ``Random.random``, whose sequence no version of Python changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import NamedTuple

SEED, REQUESTS, TOKENS_PER_ID = 1, 600, 512
SYSTEM_TOKENS = (700, 1_536, 2_300, 5_000)
"""Weight of each system prompt. Later ones are rarer."""


class Turn(NamedTuple):
    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: list[int]


def between(random: Random, low: int, doublings: int) -> int:
    """A number from ``low`` up to ``low * 2**doublings``: as often between any number and its double."""
    start = low << int(random.random() * doublings)
    return start + int(random.random() * start)


def chat(random: Random, start_ms: int, system_ids: list[int], system_tokens: int, fresh: Iterator[int]) -> list[Turn]:
    """One chat. A turn has the full blocks of the turn before it, its answer and what the user writes next."""
    turns, ids, length, now_ms = list[Turn](), list(system_ids), system_tokens, start_ms
    while not turns or random.random() < 0.7:
        length += between(random, 20, 9)
        ids = ids[: length // TOKENS_PER_ID]
        ids += [next(fresh) for _ in range(-(-length // TOKENS_PER_ID) - len(ids))]
        output_length = between(random, 8, 7)
        turns.append(Turn(now_ms, length, output_length, ids))
        ids, length = ids[: length // TOKENS_PER_ID], length + output_length
        now_ms += 30 * output_length + between(random, 2_000, 6)
    return turns


def lines() -> Iterator[str]:
    """The requests of the trace in order of their times, one JSON object each."""
    random, fresh, turns, now_ms = Random(SEED), count(), list[Turn](), 0
    systems = [(tokens, [next(fresh) for _ in range(tokens // TOKENS_PER_ID)]) for tokens in SYSTEM_TOKENS]
    while len(turns) < REQUESTS:
        now_ms += between(random, 100, 7)
        tokens, ids = systems[int(random.random() * random.random() * len(systems))]
        turns += chat(random, now_ms, ids, tokens, fresh)
    for turn in sorted(turns)[:REQUESTS]:
        yield json.dumps(
            {
                "timestamp": turn.timestamp_ms,
                "input_length": turn.input_length,
                "output_length": turn.output_length,
                "hash_ids": turn.hash_ids,
            }
        )
