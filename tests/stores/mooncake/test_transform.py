"""Blocks can be changed on their way out and back, as by encryption; what comes back changed is damaged."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool.storage import ABSENT, DAMAGED, FAILED, OK, StoreWorker
from kvpool.storage.backends.mooncake.mooncake_store import Transform
from tests.stores.lab import BLOCK_BYTES, begin_load, codes_of, content, keys_of, returned, right, saved
from tests.stores.mooncake.cluster import ROOT, Cluster, object_prefix

EXTRA = 28
OpenAt = Callable[..., StoreWorker]


def documented() -> Transform:
    """The class ``Encrypted`` of the documentation, with a random key."""
    pytest.importorskip("cryptography")
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    block = next(code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Encrypted" in code)
    module: dict[str, Any] = {}
    exec(block, module)
    made: Transform = module["Encrypted"](os.urandom(32))
    return made


class Counted:
    """Notes what goes through, and does what a test wants."""

    extra = 3

    def __init__(self, long: int = 3, raises: bool = False) -> None:
        self.long, self.raises = long, raises

    def outgoing(self, key: bytes, block: memoryview) -> bytes:
        return bytes(255 - byte for byte in bytes(block)) + b"x" * self.long

    def incoming(self, key: bytes, kept: memoryview) -> bytes:
        if self.raises:
            raise KeyError("no")
        return bytes(255 - byte for byte in bytes(kept[:-3]))


def load(queue: StoreWorker, count: int) -> list[int]:
    return right(queue, begin_load(queue, keys_of(queue, count), 30)).codes.tolist()


def test_the_documented_encryption_keeps_blocks_and_hides_them(
    cluster: Cluster, open_at: OpenAt, secret: bytes
) -> None:
    queue = open_at(cluster.address, transform=documented())
    key = saved(queue, 20)[0].tobytes().hex()
    assert load(queue, 20) == [OK] * 20

    from mooncake.store import MooncakeDistributedStore

    library = MooncakeDistributedStore()
    assert library.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", cluster.address) == 0
    name = object_prefix(secret, kind="kvpool4t") + key
    kept = library.get(name)
    assert len(kept) == BLOCK_BYTES + EXTRA + 16 and content(0).tobytes()[:64] not in kept

    changed = bytearray(kept)
    changed[100] ^= 1
    assert library.upsert(name, bytes(changed)) == 0
    assert load(queue, 2) == [DAMAGED, OK] and load(queue, 2) == [ABSENT, OK]
    assert queue.stats().store["not_decoded"] == 1
    library.close()


def test_the_bytes_of_another_key_are_not_decoded() -> None:
    made = documented()
    kept = memoryview(made.outgoing(b"a" * 32, memoryview(b"block")))
    assert made.incoming(b"a" * 32, kept) == b"block" and len(kept) == 5 + made.extra
    with pytest.raises(Exception):  # noqa: B017  the library's own kind
        made.incoming(b"b" * 32, kept)


def test_who_transforms_and_who_does_not_find_nothing_of_each_other(cluster: Cluster, open_at: OpenAt) -> None:
    saved(open_at(cluster.address, transform=Counted()), 2)
    assert load(open_at(cluster.address), 2) == [ABSENT, ABSENT]


def test_a_transform_that_gives_another_size_fails_the_save(cluster: Cluster, open_at: OpenAt) -> None:
    queue = open_at(cluster.address, transform=Counted(long=4))
    job = queue.save(keys_of(queue, 1), np.arange(1))
    assert codes_of(job) == [FAILED]
    assert f"expected {BLOCK_BYTES + 3}" in job.error


def test_a_transform_that_raises_gives_damaged_blocks(cluster: Cluster, open_at: OpenAt) -> None:
    made = Counted()
    queue = open_at(cluster.address, transform=made)
    saved(queue, 2)
    made.raises = True
    assert load(queue, 2) == [DAMAGED, DAMAGED]


def test_the_memory_for_copies_is_bounded(cluster: Cluster, open_at: OpenAt) -> None:
    queue = open_at(cluster.address, transform=Counted(), slots=40, block_bytes=1 << 10)
    job = queue.save(keys_of(queue, 40), np.arange(40))
    assert returned(job).ok == 40
