"""One index, one host tier, several workers in processes of their own: what travels is slots, and a worker may die."""

from __future__ import annotations

import json
import mmap
import os
import pickle
import re
from typing import Any

import numpy as np
import pytest

from kvpool import HostTier, PagedKV, PoolClosed
from kvpool.device.memory.attachments import SharedGroup, SharedPart, SharedTier
from kvpool.errors import ForkedProcess
from kvpool.hostcache import HostCopies, HostTierDescription
from kvpool.hostcache.tier import layout_of
from tests.hostcache import processes
from tests.hostcache.conftest import IDENTITY, Make, keys
from tests.share.spawned import Spawn
from tests.share.spawned import spawn as spawn
from tests.share.test_share import in_a_fork

SHARE = 64


def test_two_workers_fill_one_tier_and_read_it(make: Make, spawn: Spawn) -> None:
    cache = make(4, 2 * SHARE)
    with HostTier.of(cache) as tier:
        workers = [spawn(processes.work) for _ in range(2)]
        for rank, worker in enumerate(workers):
            worker.send((tier.share(), rank, SHARE))
            assert worker.recv() == (IDENTITY, cache.fingerprint)
        taken = cache.reserve(keys("a", "b"))
        for worker in workers:
            worker.send(("in", [3, 5], taken.slots))
        assert [worker.recv() for worker in workers] == [[3, 5], [103, 105]]
        cache.publish(taken.keys)
        for block, value in zip(taken.blocks.tolist(), (3, 5), strict=True):
            assert (tier.blocks[block, :SHARE] == value).all() and (tier.blocks[block, SHARE:] == 100 + value).all()
        with cache.pin(keys("b")) as lease:
            for worker in workers:
                worker.send(("out", [0], lease.slots))
            assert [worker.recv() for worker in workers] == [[5], [105]]
        for worker in workers:
            worker.send(("stop", None, None))
            worker.process.join(600)
            assert worker.process.exitcode == 0


def test_a_worker_that_dies_in_a_copy_leaves_the_index_whole(make: Make, spawn: Spawn) -> None:
    cache = make(4, SHARE)
    with HostTier.of(cache) as tier:
        kept = cache.reserve(keys("kept"))
        tier.blocks[kept.blocks] = 1
        cache.publish(kept.keys)
        taken = cache.reserve(keys("a", "b"))
        lease = cache.pin(keys("kept"), owner="worker 0")
        worker = spawn(processes.die_in_a_copy)
        worker.send((tier.share(), taken.slots))
        assert worker.recv() == "half"
        worker.kill()
        cache.verify()
        assert cache.lookup(keys("kept", "a", "b")).tolist() == [cache.HERE, cache.PENDING, cache.PENDING]
        assert cache.abort(taken.keys) == 2 and cache.revoke("worker 0") == 1 and lease.closed
        assert cache.lookup(keys("kept", "a", "b")).tolist() == [cache.HERE, cache.ABSENT, cache.ABSENT]
        assert (tier.blocks[kept.blocks] == 1).all()
        assert len(cache.reserve(keys("c", "d", "e")).keys) == 3
        cache.abort(keys("c", "d", "e"))


def test_a_description_travels_as_text_and_as_a_pickle() -> None:
    with HostTier(4, 64, identity=IDENTITY) as tier:
        tier.blocks[1] = 5
        description = tier.share()
        assert description.identity == IDENTITY and description.fingerprint == tier.fingerprint
        assert (description.host_blocks, description.block_bytes, description.pid) == (4, 64, os.getpid())
        for again in (description.to_json(), pickle.loads(pickle.dumps(description)), description):
            with HostTier.attach(again) as other:
                np.testing.assert_array_equal(other.blocks, tier.blocks)
                assert other.identity == IDENTITY and other.share() == description
    with pytest.raises(PoolClosed):
        HostTier.attach(description)
    with pytest.raises(PoolClosed):
        tier.share()


def _owner(description: HostTierDescription) -> tuple[Any, ...]:
    return description.pid, description.tier.sign, description.tier.machine, description.tier.namespace


def test_what_comes_in_is_checked() -> None:
    with HostTier(4, 64, identity=IDENTITY) as tier:
        description = tier.share()
        text = json.loads(description.to_json())
        device, gpu = text["tier"] | {"tier": "device"}, json.loads(description.to_json())["tier"]
        gpu["groups"][0]["parts"][0]["memory"] = {"gpu": "00" * 16, "handle": "00" * 64, "offset": 0}
        nothing = SharedTier("host", "cpu", (SharedGroup(0, (SharedPart(layout_of(64), None),)),), *_owner(description))
        for fields, message in (
            ({"kvpool host tier": 2}, "expected version 1, got 2"),
            ({"identity": {}}, "missing"),
            ({"identity": text["identity"] | {"model": ""}}, "model"),
            ({"tier": {}}, "description: "),
            ({"tier": device}, "fingerprint"),
            ({"tier": gpu}, "expected main memory"),
            ({"tier": json.loads(nothing.to_json())}, "expected one block of bytes or more"),
        ):
            with pytest.raises(ValueError, match=re.escape(message)):
                HostTier.attach(json.dumps(text | fields))
        for wrong in ("{", "[]", "x" * (1 << 21)):
            with pytest.raises(ValueError, match="description: "):
                HostTier.attach(wrong)
        with pytest.raises(TypeError, match="description: .*7"):
            HostTier.attach(7)  # type: ignore[arg-type]


def test_memory_of_the_callers_is_used_in_place_and_not_shared() -> None:
    memory = np.zeros((4, 32), np.uint16)
    with HostTier(4, 64, identity=IDENTITY, memory=memory) as tier:
        tier.blocks[1] = 1
        assert (memory[1] == 0x0101).all()
        with pytest.raises(ValueError, match="memory: expected None for a tier that is shared, got "):
            tier.share()
    frozen = np.zeros((4, 64), np.uint8)
    frozen.flags.writeable = False
    for bad, message in (
        (np.zeros((4, 63), np.uint8), "expected exactly the 256 bytes of its blocks, got 252"),
        (np.zeros((4, 128), np.uint8)[:, ::2], "C order"),
        (frozen, "writable"),
    ):
        with pytest.raises(ValueError, match=message):
            HostTier(4, 64, identity=IDENTITY, memory=bad)
    with pytest.raises(TypeError, match="memory"):
        HostTier(4, 64, identity=IDENTITY, memory=b"x" * 256)


def test_a_tier_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.hostcache.tier.available_ram", lambda: 255)
    with pytest.raises(MemoryError, match="256 bytes"):
        HostTier(4, 64, identity=IDENTITY)


def test_a_forked_child_must_attach() -> None:
    array = np.zeros((2, 64), np.uint8)
    with HostTier(2, 64, identity=IDENTITY) as tier, HostCopies(tier, PagedKV.of([array], "L | B D")) as copies:
        description = tier.share()

        def child() -> None:
            for use in (lambda: tier.blocks.fill(1), lambda: copies.copy_in([0], [0]), tier.share):
                with pytest.raises(ForkedProcess, match="HostTier"):
                    use()
            HostTier.attach(description).blocks[1] = 7

        assert in_a_fork(child) == 0
        assert tier.blocks[:, 0].tolist() == [0, 7]


def test_a_forked_child_uses_memory_that_it_shares_as_its_parent_does() -> None:
    memory = np.frombuffer(mmap.mmap(-1, 128), np.uint8)
    with HostTier(2, 64, identity=IDENTITY, memory=memory) as tier:
        assert in_a_fork(lambda: tier.blocks[1].fill(7)) == 0
        assert tier.blocks[:, 0].tolist() == [0, 7]


def test_a_tier_itself_is_not_pickled() -> None:
    with HostTier(4, 64, identity=IDENTITY) as tier, pytest.raises(TypeError, match="share"):
        pickle.dumps(tier)
