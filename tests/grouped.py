"""Pools of several groups of layers, prompts for them, and what they have cached by group and tier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

from kvpool import BlockLayout, KVCacheManager, LayerGroup
from kvpool.pool import Event
from tests import debug
from tests.engine import EventReplay

T = 4
TIERS = ("device", "host")
MIXES = (
    "full window",
    "window full",
    "full full",
    "recurrent full",
    "full window recurrent cross",
    "cross window full",
)

Known = dict[tuple[int, str], set[bytes]]


def group_of(kind: str) -> LayerGroup:
    """A group by a word; blocks of every kind have other sizes."""
    if kind == "recurrent":
        return LayerGroup(
            BlockLayout(layers=1, kv_heads=5, head_dim=2, tokens_per_block=1), kind="recurrent", snapshot_tokens=2 * T
        )
    layers, rule = {"full": (2, {}), "window": (3, {"window": 6, "sinks": 3}), "cross": (1, {"kind": "cross"})}[kind]
    return LayerGroup(BlockLayout(layers=layers, kv_heads=1, head_dim=2, tokens_per_block=T), **rule)  # type: ignore[arg-type]


@contextmanager
def pool_of(kinds: str, device: int = 14, host: int = 10, on: Any = "cpu", **options: Any) -> Iterator[KVCacheManager]:
    """A pool of groups by their words, each with that many blocks and one more than the group before; verified at the
    end."""
    words = kinds.split()
    sizes = {
        "device_blocks": [device + g for g in range(len(words))],
        "host_blocks": [host + g if host else 0 for g in range(len(words))],
    }
    with KVCacheManager(groups=[group_of(word) for word in words], **sizes, device=on, **options) as cache:
        yield cache
        cache.verify()


def encoded(cache: KVCacheManager, tokens: int = 5) -> dict[str, int]:
    """What admissions need where a group is for cross attention."""
    return {"encoder_tokens": tokens} if any(group.kind == "cross" for group in cache.groups) else {}


def seed(cache: KVCacheManager, prompt: Sequence[int], **names: Any) -> int:
    """Add, commit, release with storing; how many tokens were reused. Salt, adapter and extra ids name the content."""
    sequence = cache.add_sequence(cache.block_keys(list(prompt), **names), **encoded(cache))
    reused = int(cache.cached_tokens(sequence))
    cache.commit(sequence)
    cache.release(sequence)
    return reused


def churn(cache: KVCacheManager, random: Random, rounds: int) -> Iterator[None]:
    """Prompts that share beginnings, through pools that are too small for them; some go to the host early, and some
    have priorities."""
    for _ in range(rounds):
        prompt = [random.randrange(2) for _ in range(random.randrange(1, 6)) for _ in range(T)]
        retention = random.choice([None, [(0, 8, 50, None)], [(0, None, 20, None)]])
        sequence = cache.add_sequence([*prompt, 9], **encoded(cache), retention=retention)
        cache.commit(sequence)
        for token in range(random.randrange(6)):
            cache.append_tokens(sequence, [token])
            cache.commit(sequence)
        if random.random() < 0.3:
            cache.content.offload(prompt)
        cache.release(sequence, store=random.random() < 0.9)
        if random.random() < 0.03:
            cache.clear()
        yield


def cached(cache: KVCacheManager) -> Known:
    """Keys by group and tier, as the state has them."""
    return {
        (g, tier): set(keys) for g, state in enumerate(cache.core.states) for tier, keys in debug.cached(state).items()
    }


class Replay(EventReplay):
    """Keys by group and tier, rebuilt from events alone."""

    def __init__(self, groups: int) -> None:
        super().__init__({(g, tier): set() for g in range(groups) for tier in TIERS})

    def place(self, event: Event) -> tuple[int, str | None]:
        return event.group, event.tier
