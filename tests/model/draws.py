"""Pools and retention ranges for the state machine, drawn from a seeded generator."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

OTHERS = [["attention"], ["cross"], ["recurrent"]]
STEP_MS = 1 << 24
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"order": "block_first"},
    {"tokens": "HND", "dtype": "uint8"},
    {"planes": 1, "dtype": "float32", "order": "block_first", "tokens": "HND"},
)
SAID: tuple[dict[str, Any], ...] = (
    {},
    {"stop": "end_turn"},
    {"stop": "tool_use"},
    {"ends": True},
    {"returns_in_ms": 9},
)
Ranges = list[tuple[int, "int | None", int, "int | None"]]


def group_options(random: Random, width: int, kind: str, windows: Sequence[int] = ()) -> dict[str, Any]:
    window = random.choice((None, random.randint(1, 2 * width + 2), *windows)) if kind == "attention" else None
    options: dict[str, Any] = {
        "kind": kind,
        "window": window,
        "sinks": 0 if window is None else random.choice((0, 0, 1, width + 1)),
        "device_blocks": random.randint(4, 10),
        "host_blocks": random.choice((0, 1, 2, 3, 4, 5, 6)),
        "parts": [random.choice(LAYOUTS)],
    }
    if kind == "recurrent":
        options["snapshot_tokens"] = random.choice((None, width, 2 * width, 2 * width, 3 * width))
    return options


def pool_options(random: Random, several: bool) -> dict[str, Any]:
    """A pool of one plain group, or of one to three of any kinds."""
    width = random.choice((1, 2, 3, 4, 4))
    kinds = ["attention"]
    if several and random.random() < 0.15:
        kinds = ["recurrent"]
        kinds += random.choice(([], *OTHERS))
    elif several:
        kinds += random.choice((["attention"], *OTHERS))
        kinds += random.choice(([], ["attention"], *OTHERS))
        random.shuffle(kinds)
    groups = [group_options(random, width, kind, (1, width, width + 2) if several else ()) for kind in kinds]
    for group in groups:
        if len(groups) > 1 and random.random() < 0.2:
            group["parts"].append({"kv_heads": 1, **random.choice(LAYOUTS)})
    chained = () if "recurrent" in kinds else ("reuse", "agent")
    return {
        "groups": groups,
        "tokens_per_block": width,
        "max_sequences": random.randint(2, 8),
        "partial_reuse": random.random() < 0.8,
        "offload_min_priority": random.choice((30, 30, 30, 0, 36)),
        "offload_min_reuse": random.choice((1, 1, 2)),
        "policy": random.choice(("lru", "lru", *chained, "adaptive")),
    }


def some_ranges(random: Random, length: int, width: int) -> Ranges | None:
    """Retention ranges of one prompt, in any order; now and then overlapping ones, which must be refused.

    Those with a ttl cover one block, and no two ttls are equal: the order of blocks that expire at the same moment is
    not defined.
    """
    if random.random() < 0.6:
        return None
    cuts = sorted(random.sample(range(length + 3), random.randint(1, min(4, length + 3))))
    ranges: Ranges = []
    for start, end in zip(cuts[::2], [*cuts[1::2], None], strict=False):
        blocks = sum(start <= first and (end is None or first < end) for first in range(0, length, width))
        ttl = random.randrange(30 * STEP_MS) if blocks < 2 and random.random() < 0.5 else None
        ranges.append((start, end, random.choice((0, 10, 29, 30, 35, 50, 80, 100)), ttl))
    if random.random() < 0.03:
        ranges.append((ranges[0][0], ranges[0][0] + 1, 50, None))
    random.shuffle(ranges)
    return ranges
