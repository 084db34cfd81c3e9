"""Blocks of ``exclusive``: what calls one after the other do, with no other thread's between, enqueued at the end."""

from __future__ import annotations

import gc
import threading
from contextlib import ExitStack, suppress
from inspect import signature
from typing import Any

import numpy as np
import pytest

from engine import Make, small_layout
from failing import Rig
from kvpool import KVCacheManager, OutOfBlocks, PoolClosed
from kvpool.errors import BlockNotFound
from kvpool.state import verbs
from parts import public_names, reach
from tests import debug
from tests.desk import Desk, Ends
from tests.race.lab import Lab
from tests.waiting import at_once

T = 4
INSIDE = r"exclusive: expected match_prefix, pin, .* or Lease.close, got "


def picture(cache: KVCacheManager) -> tuple[bytes, list[bytes]]:
    """Every byte of the state and of what its policy knows."""
    states = cache.core.states
    return debug.dump_all(states), [policy_book for state in states for policy_book in debug.book(state)]


# -- nobody comes between ----------------------------------------------------------------------------------------------


def test_no_call_of_another_thread_comes_between() -> None:
    """The pool has room for two. Each thread gives its blocks back and takes others: there is always room."""
    with KVCacheManager(small_layout(T), device_blocks=4, device="cpu") as cache:

        def run(token: int) -> None:
            with cache.exclusive():
                sequence = cache.add_sequence([token] * 2 * T)
            for turn in range(60):
                with cache.exclusive():
                    cache.release(sequence, store=bool(turn % 2))
                    sequence = cache.add_sequence([token + turn % 3] * 2 * T)
            with cache.exclusive():
                cache.release(sequence)

        at_once(run, (0, 10))
        assert cache.free_blocks == 4
        cache.verify()


# -- what is not allowed inside ----------------------------------------------------------------------------------------

ALLOWED = {"match_prefix", "pin", "add_sequence", "add_sequence_batch", "append_tokens", "commit", "release"}
READS_NOTHING = {"now", "closed", "groups", "layout", "device_pool", "device_pools", "host_pool", "host_pools"}
ELSEWHERE = {"state_blocks"}  # for a pool with states
LATER = {"copy_step_tables", "capture_block_offsets", "capture_step_tables"}  # by ``refuse_inside``, in test_reentry


def arguments(desk: Desk) -> dict[str, Any]:
    """Arguments that calls accept, by their names."""
    hint = {"protocol_version": 1, "message_id": "m", "actions": []}
    return {
        **{"prompt": desk.known, "prompts": [desk.known], "tokens": [1, 2], "key": desk.known.keys[0]},
        **{"ids": desk.both, "counts": [0, 0], "parents": [0, 0], "drafts": [0, 0], "accepted": []},
        **{"available": np.ones((1, 2), bool), "data": [bytes(desk.cache.layout.block_bytes)], "message": hint},
        **{"owner": "reader", "priority": 80, "target": np.zeros((4, 8), np.int32)},
        **{name: np.zeros(64, np.int32) for name in ("indptr", "indices", "last_page_len")},
    }


def test_all_other_calls_are_refused_by_name_and_change_nothing() -> None:
    desk = Desk("cpu")
    desk.ready()
    cache, values = desk.cache, arguments(desk)
    before = picture(cache)
    for name in sorted(public_names() - ALLOWED - READS_NOTHING - ELSEWHERE - LATER - {"exclusive"}):
        with cache.exclusive():
            with pytest.raises(RuntimeError, match=f"{INSIDE}{name}$"):
                call = reach(cache, name)
                call(**{argument: values[argument] for argument in signature(call).parameters if argument in values})
            assert not cache.core.transfer._queue
        assert picture(cache) == before, name
        desk.check(name)
    desk.clear("")


def test_calls_of_other_objects_are_refused_too() -> None:
    desk = Desk("cpu")
    desk.ready()
    cache, loads, export = desk.cache, desk.cache.imports.layer_loads(), desk.cache.memory.export("host")
    before = picture(cache)
    for call, name in (
        (desk.reservation.commit, "commit"),
        (desk.reservation.abort, "abort"),
        (lambda: desk.reservation.overdue, "overdue"),
        (lambda: loads.wait(0), "wait"),
        (lambda: np.from_dlpack(export), "__dlpack"),
        (lambda: cache.__exit__(), "close"),
    ):
        with cache.exclusive(), pytest.raises(RuntimeError, match=INSIDE + name):
            call()
    assert picture(cache) == before
    with cache.exclusive(), pytest.raises(RuntimeError, match="loads: expected None inside exclusive"):
        cache.add_sequence_batch([desk.fresh], loads=loads)
    with cache.exclusive(), pytest.raises(RuntimeError, match="stream: .*inside exclusive, got None"):
        cache.pin(desk.known)
    assert picture(cache) == before and len(cache.leases) == 1
    desk.clear("")


def test_a_block_is_entered_once_and_not_inside_another_call(make: Make) -> None:
    cache = make().cache
    block, other = cache.exclusive(), cache.exclusive()
    with block, pytest.raises(RuntimeError, match=f"{INSIDE}exclusive"), other:
        raise AssertionError("entered")
    with pytest.raises(RuntimeError, match="expected a new context manager for each block"), block:
        raise AssertionError("entered")
    with cache.core.lock, pytest.raises(RuntimeError, match="exclusive inside another call"), other:
        raise AssertionError("entered")
    with other:
        assert cache.core.is_exclusive
    with ExitStack() as stack:
        stack.enter_context(cache.exclusive())
        assert cache.match_prefix([1, 2]).tokens == 0 and cache.core.is_exclusive
    assert not cache.core.is_exclusive and cache.free_blocks


# -- what comes at the end ---------------------------------------------------------------------------------------------


def test_nobody_enqueues_what_is_held_back() -> None:
    rig = Rig(4, 4)
    rig.seed(range(16), committed=16)
    transfer, order = rig.cache.core.transfer, list[int]()
    end = transfer._end
    transfer._end = lambda batch: (order.append(batch.ticket), end(batch))[1]  # type: ignore[func-returns-value]
    rig.device.arm()
    with rig.cache.exclusive():
        sequences = [rig.cache.add_sequence([90 + i] * 5) for i in range(2)]
        rig.cache.release(sequences[0], store=False)
        thread = threading.Thread(target=transfer.drain)
        thread.start()
        thread.join(600)
        assert not thread.is_alive() and not rig.device.seen and transfer._queue
        tickets = list(transfer._queue)
    assert order == tickets == sorted(tickets) and len(np.concatenate(rig.device.seen)) == 4
    rig.cache.release(sequences[1])
    rig.cache.close()


def test_an_exception_in_a_block_leaves_its_calls_done() -> None:
    rig = Rig(4, 4)
    rig.seed(range(16), committed=16)
    rig.device.arm()
    with pytest.raises(OutOfBlocks), rig.cache.exclusive():
        sequence = rig.cache.add_sequence([90] * 5)
        rig.cache.add_sequence([80] * 16)
    assert len(rig.device.seen) == 1 and rig.cache.sequences == [sequence]
    rig.cache.release(sequence)
    rig.cache.close()


def on_the_host() -> tuple[Rig, Any]:
    """A pool that has two blocks on the host alone."""
    rig = Rig(3, 4)
    rig.seed(range(8), committed=8)
    rig.cache.content.offload(list(range(8)))
    rig.release(rig.add(range(50, 62)), store=False)
    return rig, rig.prompt(range(8)).keys


def test_a_lease_is_readable_once_its_block_has_ended() -> None:
    rig, keys = on_the_host()
    cache, seen = rig.cache, list[Any]()

    def read(lease: Any) -> None:
        with suppress(RuntimeError):
            seen.append(lease.addresses)
        with suppress(RuntimeError):
            seen.append(lease.addresses_of(0))

    with cache.exclusive():
        added = cache.add_sequence(list(range(9)))
        lease = cache.pin(keys, tier="device", stream=0)
        read(lease)
        at_once(read, [lease])
        assert not seen and len(lease.blocks) == 2
    again = cache.pin(keys, tier="device")
    assert lease.addresses.tolist() == lease.addresses_of(0).tolist() == again.addresses.tolist()
    for held in cache.leases:
        held.close()
    cache.release(added)
    cache.close()


@pytest.mark.parametrize("raises", [False, True])
def test_a_lease_whose_copy_is_refused_is_closed_and_the_end_raises(raises: bool) -> None:
    rig, keys = on_the_host()
    rig.device.arm(lambda place: place == 1)
    with pytest.raises(ZeroDivisionError if raises else BlockNotFound), rig.cache.exclusive():
        added = rig.cache.add_sequence_batch([list(range(9))])
        lost, kept = (rig.cache.pin(keys[i : i + 1], tier="device", stream=0) for i in (1, 0))
        assert not raises or 1 / 0
    assert rig.lost == 1 and sorted([lost.closed, kept.closed]) == [False, True]
    closed, kept = (lost, kept) if lost.closed else (kept, lost)
    with pytest.raises(BlockNotFound):
        closed.addresses  # noqa: B018
    assert len(kept.addresses) == 1
    kept.close()
    rig.failed = added.ids.tolist()
    rig.check_failed()
    rig.cache.close()


def test_a_lease_of_a_block_whose_end_was_interrupted_is_settled_when_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, keys = on_the_host()
    transfer = rig.cache.core.transfer
    rig.device.arm(lambda place: place == 1)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(transfer, "drain", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with rig.cache.exclusive():
            added = rig.cache.add_sequence_batch([list(range(9))])
            leases = [rig.cache.pin(keys[i : i + 1], tier="device", stream=0) for i in (0, 1)]
    assert transfer.waiting
    outcomes = []
    for lease in leases:
        try:
            outcomes.append(len(lease.addresses))
        except BlockNotFound:
            outcomes.append(0)
    assert sorted(outcomes) == [0, 1] and not transfer.waiting and len(rig.cache.leases) == 1
    rig.cache.leases[0].close()
    rig.failed = added.ids.tolist()
    rig.check_failed()
    rig.cache.close()


def test_streams_are_ordered_as_those_of_single_calls() -> None:
    for seed in range(4):
        lab = Lab(4, 4, seed=seed)
        first, two = lab.commit(lab.add([1, 2, 3])), lab.prompt([1, 2])
        with lab.cache.exclusive():
            lab.cache.commit(first.id, stream=lab.a)
            lab.cache.release(first.id, stream=lab.a)
        del lab.live[first.id]
        with lab.cache.exclusive():
            added = lab.cache.add_sequence_batch([[1, 2, 9], [5, 6, 7]], stream=lab.b)
            lease = lab.cache.pin(two.keys, stream=lab.b)
        with lab.on(lab.b):
            for new, tokens in zip(added.ids.tolist(), ([1, 2, 9], [5, 6, 7]), strict=True):
                lab.admitted(new, tokens)
        lab.read(lease, [1, 2], lab.b)
        with lab.cache.exclusive():
            lease.close(lab.b)
            lab.cache.release(added.ids, stream=lab.b)
        lab.live.clear()
        assert not lab.findings(), f"seed {seed}"


def test_a_state_in_doubt_ends_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_way(*_: object) -> None:
        raise ArithmeticError("half-way")

    desk = Desk("cpu")
    desk.ready()
    cache, copies = desk.cache, desk.cache.core.transfer.moved.nbytes
    with pytest.raises(PoolClosed, match="in doubt"), cache.exclusive():
        cache.add_sequence(desk.fresh)
        monkeypatch.setattr(verbs, "commit", half_way)
        with pytest.raises(ArithmeticError):
            cache.commit(desk.sequence)
        with pytest.raises(PoolClosed, match="in doubt"):
            cache.release(desk.sequence)
    assert cache.core.transfer.moved.nbytes == copies
    cache.close(force=True)


# -- destructors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["between", "inside a call", "collector"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_destructor_in_a_block_may_close_a_lease_and_is_refused_what_waits(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk("cpu")
    desk.ready()
    cache, refusals, names = desk.cache, list[str](), desk.cache.core.names
    learn = names.learn

    def act() -> None:
        for call in (cache.stats, lambda: cache.pin(desk.known), cache.close, lambda: cache.imports.reserve([1])):
            with pytest.raises(RuntimeError, match="exclusive") as refused:
                call()
            refusals.append(str(refused.value))
        desk.lease.close()

    owners = [Ends(act)]
    if where != "collector":
        owners[0].itself = None  # type: ignore[assignment]

    def meanwhile(keys: Any) -> None:
        owners.clear()
        learn(keys)

    with cache.exclusive():
        if where == "inside a call":
            monkeypatch.setattr(names, "learn", meanwhile)
        else:
            owners.clear()
            gc.collect()
        cache.add_sequence(desk.fresh)
    assert len(refusals) == 4 and desk.lease.closed
    desk.check(where)
    desk.clear(where)
