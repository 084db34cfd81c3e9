"""Leases over groups of layers: a key is pinned in all groups that have it, and what was pinned is unpinned, whatever
happens between."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from groups_lab import GroupEngine, Make, T, pins
from groups_lab import make as make
from kvpool import Lease, PoolClosed
from kvpool.device.cpu import CpuDevice
from kvpool.errors import BlockNotFound, LeaseExpired
from kvpool.pool.leases import Leases
from tests import debug
from tests.device.faults import FaultyDevice
from tests.race.lab import Lab

A = list(range(100, 140))


def keys_of(engine: GroupEngine, tokens: list[int]) -> Any:
    return engine.cache.block_keys(tokens).keys


# -- what a lease says
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_lease_has_the_blocks_of_all_groups_where_their_bytes_are(make: Make, tier: str) -> None:
    engine = make([8, 8], [8, 8])
    engine.seed(A[:16])
    engine.cache.content.offload(engine.cache.block_keys(A[:16]))
    with engine.cache.pin(keys_of(engine, A[:16]), tier=tier) as lease:
        assert lease.groups.tolist() == [0] * 4 + [1] * 4
        assert (lease.addresses_of(0) == lease.addresses).all()
        assert (lease.addresses_of(1) != 0).tolist() == [True] * 4 + [False] * 4
        for place, (g, b) in enumerate(zip(lease.groups.tolist(), lease.blocks.tolist(), strict=True)):
            group = engine.cache.groups[g]
            index = b - (group.first_device_block if tier == "device" else group.first_host_block - group.device_blocks)
            assert (0 <= index < group.device_blocks) == (tier == "device")
            for part in range(len(group.layouts)):
                block = engine.block(g, part, index)
                assert lease.addresses_of(part)[place] == block.ctypes.data
                for slot, token_bytes in enumerate(engine.bytes_of(g, part, A[:16])[place % 4 * T : place % 4 * T + T]):
                    np.testing.assert_array_equal(block[:, :, slot], token_bytes)
        for wrong in (2, -1, "x"):
            with pytest.raises((TypeError, ValueError), match=f"part: .*{wrong!r}"):
                lease.addresses_of(wrong)  # type: ignore[arg-type]
    engine.cache.close()
    with pytest.raises(PoolClosed):
        lease.addresses_of(0)


def test_blocks_of_a_table_are_pinned_by_the_ids_that_leases_have(make: Make) -> None:
    engine = make([8, 8])
    sequence = engine.add(A[:8])
    for group in engine.cache.groups:
        ids = engine.cache.block_table(sequence, group=group.index).dense()[0] + group.first_device_block
        with engine.cache.pin_blocks(ids) as lease:
            assert (lease.groups == group.index).all() and (lease.blocks == ids).all()
            counted = [int((state.blocks["ref_word"] >> 32).sum()) for state in engine.cache.core.states]
            assert counted == [2 * (group.index == g) for g in (0, 1)]
            engine.cache.verify()
    for wrong in (7, 15, 16, -1, 1 << 40):
        with pytest.raises(BlockNotFound, match=f"block {wrong} is unknown or holds nothing"):
            engine.cache.pin_blocks([0, wrong])
    assert pins(engine.cache) == 0
    engine.release(sequence)


# -- what is pinned is unpinned
# ------------------------------------------------------------------------------------------------------------


def close(engine: GroupEngine, lease: Lease) -> None:
    lease.close()


def revoke(engine: GroupEngine, lease: Lease) -> None:
    assert engine.cache.revoke("reader") == 1
    with pytest.raises(LeaseExpired):
        lease.close()


def reset_between(engine: GroupEngine, lease: Lease) -> None:
    engine.cache.clear()
    engine.cache.verify()
    assert engine.reusable(A[:17]) == 0
    lease.close()


def refill_between(engine: GroupEngine, lease: Lease) -> None:
    """Everything else is evicted; what is pinned is not."""
    engine.release(engine.add(A[20:36]), store=False)
    engine.cache.verify()
    lease.close()


def twice(engine: GroupEngine, lease: Lease) -> None:
    again = engine.cache.pin_blocks(lease.blocks)
    lease.close()
    assert pins(engine.cache) == len(again.blocks)
    again.close()


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("end", [close, revoke, reset_between, refill_between, twice])
@pytest.mark.parametrize("tier", [None, "device", "host"])
def test_the_end_of_a_lease_unpins_what_it_pinned_in_all_groups(
    make: Make, tier: str | None, end: Any, device: str
) -> None:
    engine = make([8, 8], [8, 8], device=device)
    engine.seed(A[:16])
    engine.cache.content.offload(engine.cache.block_keys(A[:16]))
    before = [by_tier["device"] for by_tier in engine.cached()]
    lease = engine.cache.pin(keys_of(engine, A[:16]), owner="reader", tier=tier)
    assert pins(engine.cache) == len(lease.blocks) == 8
    engine.cache.verify()
    end(engine, lease)
    assert lease.closed and pins(engine.cache) == 0 and engine.free() == [8, 8]
    engine.cache.verify()
    if end in (close, revoke, twice):
        assert [by_tier["device"] for by_tier in engine.cached()] == before and engine.reusable(A[:17]) == 16


def test_a_lease_that_a_destructor_closes_while_it_is_closed_is_unpinned_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make([10, 10], [8, 8])
    engine.seed(A[:16])
    lease, other = (engine.cache.pin(keys_of(engine, A[:16])) for _ in range(2))
    held, is_open = pins(engine.cache), Leases.is_open

    def then_closed(leases: Leases, which: Lease) -> bool:
        answer = is_open(leases, which)
        monkeypatch.setattr(Leases, "is_open", is_open)
        which.close()
        return answer

    monkeypatch.setattr(Leases, "is_open", then_closed)
    lease.close()
    engine.cache.verify()
    assert engine.cache.leases == [other] and pins(engine.cache) == held // 2
    other.close()
    assert pins(engine.cache) == 0


class Closes:
    """Closes a lease when it is collected, wherever that happens."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    def __del__(self) -> None:
        self.lease.close()


@pytest.mark.parametrize("verb", ["admit", "release", "commit"])
def test_a_destructor_inside_a_decision_unpins_all_groups(
    make: Make, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpool.state import admit, verbs

    engine = make([10, 10], [8, 8])
    engine.seed(A[:16])
    sequence = engine.add(A[20:24])
    holder = [Closes(engine.cache.pin(keys_of(engine, A[:16])))]
    module = admit if verb == "admit" else verbs
    inner = getattr(module, verb)

    def change(*args: Any) -> Any:
        holder.clear()
        return inner(*args)

    monkeypatch.setattr(module, verb, change)
    calls: dict[str, Callable[[], object]] = {
        "admit": lambda: engine.add(A[24:28]),
        "release": lambda: engine.release(sequence),
        "commit": lambda: engine.cache.commit(sequence),
    }
    calls[verb]()
    assert engine.cache.leases == [] and pins(engine.cache) == 0
    engine.cache.verify()
    monkeypatch.undo()
    engine.release(*engine.live)


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("by_key", [True, False])
def test_a_copy_that_one_group_loses_gives_the_lease_back_whole(
    make: Make, group: int, by_key: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decided by one thread, enqueued and lost while another one pins what it should bring."""
    target: list[int] = []
    engine = make([8, 8], [8, 8], device=FaultyDevice(CpuDevice(), lambda call, index, move: int(move[1]) in target))
    engine.seed(A[:16])
    keys = keys_of(engine, A[:16])
    with monkeypatch.context() as patched:
        patched.setattr(engine.cache.core.transfer, "drain", lambda: None)
        assert engine.cache.content.offload(keys) == 8
    state, layer_group = engine.cache.core.states[group], engine.cache.groups[group]
    copied = debug.cached(state)["device"][keys[2].tobytes()]
    host_block = int(state.blocks["other_copy"][copied]) - layer_group.device_blocks
    target.append(layer_group.first_host_block + host_block)
    with pytest.raises(BlockNotFound, match=keys[2].tobytes().hex() if by_key else f"block {target[0]} is unknown"):
        if by_key:
            engine.cache.pin(keys, tier="host")
        else:
            engine.cache.pin_blocks([0, target[0]])
    assert engine.cache.leases == [] and pins(engine.cache) == 0
    engine.cache.verify()
    assert engine.reusable(A[:17]) == 16, "the device has it still"


@pytest.mark.parametrize("orders", [True, False], ids=["as it is", "without the note"])
@pytest.mark.parametrize("group", [0, 1])
def test_a_block_that_a_reader_on_a_stream_still_reads_is_overwritten_after_it(
    group: int, orders: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = GroupEngine([4, 4], device="sim")
    engine.seed(A[:16])
    if not orders:
        monkeypatch.setattr(engine.cache.core, "note", lambda *_: None)
    with engine.cache.pin(keys_of(engine, A[:16]), tier="device", stream=engine.b) as lease:
        mine = lease.blocks[lease.groups == group] - engine.cache.groups[group].first_device_block
        engine.compare(group, (mine[:, None] * T + np.arange(T)).reshape(-1), A[:16], engine.b)
    engine.release(engine.add(A[20:36]))
    assert (engine.findings() == []) == orders


# ----------------------------------------
# A pool that is closed by force while another thread pins: the reader never touches memory that is gone.


def test_a_pin_begins_to_read_only_while_the_pool_cannot_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(P=4, S=4, progress=1.0)
    sequence = lab.cache.add_sequence([1, 2, 3])
    lab.cache.commit(sequence)
    keys = lab.cache.block_keys([1, 2, 3])
    begin, closer = lab.cache.core.device.host_access, threading.Thread(target=lab.cache.close, args=(True,))

    def beside_close(*args: Any, **options: Any) -> Any:
        access = begin(*args, **options)
        # Here nobody may get the memory: without the state lock, the pool is closed before this goes on.
        closer.start()
        closer.join(0.2)
        return access

    monkeypatch.setattr(lab.cache.core.device, "host_access", beside_close)
    try:
        lab.cache.pin(keys.keys)
    except (LeaseExpired, PoolClosed):
        pass
    closer.join()
    assert lab.cache.closed and not lab.sim.races
