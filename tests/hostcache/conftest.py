"""Caches that are verified and closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from kvpool import HostCache, ModelIdentity

IDENTITY = ModelIdentity("toy", "r1", "uint8", "2 layers, 1 head of 8, 4 tokens", "tests 1")


Make = Callable[..., HostCache]
ABSENT, HERE, PENDING = HostCache.ABSENT, HostCache.HERE, HostCache.PENDING


@pytest.fixture
def make() -> Iterator[Callable[..., HostCache]]:
    """Opens caches; what they say of themselves must hold in the end."""
    opened: list[HostCache] = []

    def build(host_blocks: int = 4, block_bytes: int = 64, **options: Any) -> HostCache:
        opened.append(HostCache(host_blocks, block_bytes, **{"identity": IDENTITY} | options))
        return opened[-1]

    yield build
    for cache in opened:
        if not cache.closed:
            cache.verify()
            cache.close()


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def store(cache: HostCache, *names: str, **options: Any) -> list[int]:
    """Reserve and publish; the blocks."""
    taken = cache.reserve(keys(*names), **options)
    cache.publish(taken.keys)
    return taken.blocks.tolist()


def look(cache: HostCache, *names: str) -> list[int]:
    """The answers of both ways to ask, which agree."""
    states = cache.lookup(keys(*names)).tolist()
    assert states == [cache.find(key) for key in keys(*names)]
    return states


def calls(cache: HostCache) -> list[Callable[[], object]]:
    """Calls that a closed cache refuses, with and without keys."""
    verbs = [cache.lookup, cache.reserve, cache.pin, cache.touch, cache.publish, cache.abort, cache.forget]
    return [
        *(partial(verb, argument) for verb in verbs for argument in (keys("a"), [])),
        *(partial(cache.find, b"a"), partial(cache.revoke, ""), partial(cache.clear, force=True), cache.events),
    ]
