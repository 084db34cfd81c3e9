"""What the tests of the keeper share: engines whose pools have keepers, and the same stores under other pools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvpool import ModelIdentity
from kvpool.stores import MemoryStore
from kvpool.stores.base import Store
from kvpool.stores.keeper import Keeper
from tests.engine import Engine, open_engine

IDENTITY = ModelIdentity("tiny", "rev 1", "uint16", "2 layers", "test 1")
T = 4
"""tokens per block"""


def room(blocks: int) -> int:
    """Bytes of so many blocks of a store: each takes a page here."""
    return blocks * 4096


def engine(P: int = 32, S: int = 32, **options: Any) -> Engine:
    """An engine on a small pool whose secret is random."""
    return open_engine(T, P, S, **({"event_capacity": 4096} | options))


def keeper(of: Engine, stores: Store | Sequence[Store], **options: Any) -> Keeper:
    chosen = list(stores) if isinstance(stores, (list, tuple)) else [stores]
    return Keeper(of.cache, chosen, **({"identity": IDENTITY, "deadline_ms": 30_000} | options))


def store(blocks: int = 256) -> MemoryStore:
    return MemoryStore(room(blocks))


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def seed(of: Engine, kept: Keeper, prompts: Iterable[Sequence[int]], **names: Any) -> None:
    """Compute prompts, and see them saved."""
    for prompt in prompts:
        of.seed(prompt, len(prompt), **names)
        assert kept.drain(60)


def fetch(of: Engine, kept: Keeper, prompt: Sequence[int], **names: Any) -> int:
    """Prefetch a prompt. Returns the blocks that came."""
    handle = kept.prefetch(of.prompt(prompt, **names), deadline=60.0)
    assert handle.wait(60), kept.stats()
    return handle.blocks
