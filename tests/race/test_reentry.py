"""Calls from inside calls, and ends that come at the worst moment: destructors, signal handlers, Ctrl-C, revocation,
passing errors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import small_layout
from kvpool import KVCacheManager, Lease, PoolClosed
from kvpool.device.base import NULL_STREAM, DeviceEvent, Stream, WrappedDevice
from kvpool.errors import DeviceError, LeaseExpired
from kvpool.pool.transfer import transfer
from kvpool.pool.transfer.waits import STREAMS_KEPT
from steps import arrays
from tests.race.lab import Lab


class Owner:
    """Something of the application's that closes a lease when it is collected."""

    def __init__(self, lease: Lease, log: list[str]) -> None:
        self.lease, self.log, self.itself = lease, log, self

    def __del__(self) -> None:
        self.log.append("closed")
        self.lease.close()


def collected_at(threshold: int) -> tuple[list[str], list[str]]:
    """A lease whose owner is collected somewhere inside an admission that moves blocks both ways; the log, and what
    went wrong."""
    lab, log = Lab(2, 4, seed=threshold), []  # type: ignore[var-annotated]
    lab.seed([1, 2, 3], committed=2)
    lab.cache.content.offload([1, 2, 3])
    lab.release(lab.add([21, 22, 23, 24]), store=False)
    lab.seed([31, 32, 33, 34], committed=4)
    lab.sim.synchronize()
    prompt = lab.prompt([1, 2, 3])
    gc.collect()
    Owner(lab.cache.pin(lab.keys([1, 2, 3]), tier="host", stream=lab.b), log)
    gc.set_threshold(threshold, 10**6, 10**6)
    gc.enable()
    try:
        sequence = lab.cache.add_sequence(prompt, stream=lab.a)
    finally:
        gc.disable()
    inside = list(log)
    gc.collect()
    lab.cache.release(sequence, store=False)
    lab.release(lab.add([31, 32, 33, 34]))
    return inside, lab.findings()


def test_a_lease_that_the_collector_closes_anywhere_inside_a_call_harms_nothing() -> None:
    before, told = gc.get_threshold(), gc.callbacks[:]
    gc.disable()
    gc.callbacks.clear()  # those of other libraries would be called at each of many collections
    try:
        collected_at(10**6)  # compiles
        ends = [collected_at(threshold) for threshold in range(3, 60, 2)]
    finally:
        gc.set_threshold(*before)
        gc.callbacks[:] = told
        gc.enable()
    assert any(inside for inside, _ in ends), "no collection came inside the call"
    assert not any(failures for _, failures in ends), ends


def test_a_lease_that_a_destructor_closes_inside_a_call_of_the_device_is_unpinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(4, 2)
    lab.seed([1, 2, 3], committed=2)
    owners = [Owner(lab.cache.pin(lab.keys([1, 2, 3])), [])]
    entered = lab.sim._findings.entered

    def collect(bound: Any) -> None:
        if owners:
            owners.clear()
            gc.collect()
        entered(bound)

    monkeypatch.setattr(lab.sim._findings, "entered", collect)
    lab.add([9, 9, 9])
    assert lab.cache.leases == [] and lab.cache.stats().device.pinned == 0
    assert not lab.findings()


def test_a_release_while_its_own_thread_has_the_transfer_lock_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(6, 2)
    order, other = lab.cache.core.transfer.order, [lab.cache.add_sequence([1, 2, 3], stream=lab.b)]
    assert order is not None
    follow = order.follow_copies

    def meanwhile(stream: Stream) -> None:
        lab.cache.release(other.pop())
        follow(stream)

    monkeypatch.setattr(order, "follow_copies", meanwhile)
    lab.cache.core.follow(lab.a)
    assert not other and not lab.findings()


def test_a_release_inside_the_copies_of_another_call_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    with KVCacheManager(small_layout(2), device_blocks=4, host_blocks=4, device="cpu") as cache:
        first = cache.add_sequence([1, 2, 3, 4, 5])
        cache.commit(first)
        cache.release(first)
        held = [cache.add_sequence([7, 7])]
        copy = cache.core.device.copy_blocks

        def meanwhile(moves: Any, stream: Stream = NULL_STREAM) -> None:
            if held:
                cache.release(held.pop())
            copy(moves, stream)

        monkeypatch.setattr(cache.core.device, "copy_blocks", meanwhile)
        cache.release(cache.add_sequence([8, 8, 8, 8, 8]))
        assert not held
        cache.verify()


def test_a_call_inside_a_decision_keeps_the_stream_of_that_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(6, 2)
    other = lab.cache.add_sequence([41, 42, 43])
    lab.seed([1, 2, 3], committed=2, stream=lab.b)
    names = lab.cache.core.names
    learn = names.learn

    def meanwhile(keys: Any) -> None:
        monkeypatch.setattr(names, "learn", learn)
        lab.cache.release(other)
        learn(keys)

    monkeypatch.setattr(names, "learn", meanwhile)
    assert lab.add([1, 2, 3], stream=lab.a).cached == 2
    assert not lab.findings()


def test_a_call_while_a_decision_is_collected_takes_its_copies_along(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(4, 4)
    lab.seed([1, 2, 3], committed=2)
    other = lab.cache.add_sequence([41, 42, 43])
    take = transfer.partial

    def meanwhile(function: Any, *args: Any) -> Any:
        if function is transfer.collect:
            monkeypatch.setattr(transfer, "partial", take)
            lab.cache.release(other)
        return take(function, *args)

    monkeypatch.setattr(transfer, "partial", meanwhile)
    assert lab.cache.content.offload([1, 2, 3]) == 1
    with lab.cache.pin(lab.keys([1, 2, 3]), tier="host") as lease:
        lab.read(lease, [1, 2])
    assert lab.cache.sequences == [] and not lab.findings()


@pytest.mark.parametrize("where", ["a decision", "copies"])
@pytest.mark.parametrize(
    "call",
    [
        "pin",
        "import_blocks",
        "reserve",
        "load_targets",
        "copy_batch_block_offsets",
        "copy_batch_block_csr",
        "copy_step_tables",
        "close",
    ],
)
def test_what_waits_is_refused_inside_another_call(monkeypatch: pytest.MonkeyPatch, call: str, where: str) -> None:
    """There it would wait for others with the lock that they wait for, or for the lock that this thread has."""
    with KVCacheManager(small_layout(2), device_blocks=4, host_blocks=4, device="cpu") as cache:
        sequence = cache.add_sequence([1, 2, 3])
        cache.commit(sequence)
        keys = cache.block_keys([1, 2, 3])
        calls: dict[str, Callable[[], object]] = {
            "pin": lambda: cache.pin(keys),
            "import_blocks": lambda: cache.imports.import_blocks(keys, [bytes(cache.layout.block_bytes)]),
            "reserve": lambda: cache.imports.reserve([7, 8, 9]),
            "load_targets": lambda: cache.imports.load_targets(sequence),
            "copy_batch_block_offsets": lambda: cache.tables.copy_batch_block_offsets(
                np.zeros((1, 4), np.int32), sequence
            ),
            "copy_batch_block_csr": lambda: cache.tables.copy_batch_block_csr(*np.zeros((3, 4), np.int32), sequence),
            "copy_step_tables": lambda: cache.tables.copy_step_tables(arrays(1, 3, 2, 2), sequence),
            "close": cache.close,
        }
        refused = []
        owner, name = (cache.core.transfer, "collect") if where == "a decision" else (cache.core.device, "copy_blocks")
        inner = getattr(owner, name)

        def meanwhile(*args: Any) -> Any:
            monkeypatch.setattr(owner, name, inner)
            with pytest.raises(RuntimeError, match=f"{call} inside another call"):
                calls[call]()
            refused.append(call)
            return inner(*args)

        monkeypatch.setattr(owner, name, meanwhile)
        assert cache.content.offload(keys) == 1
        assert refused == [call] and cache.leases == cache.imports.reservations == []
        cache.verify()
        cache.release(sequence)


# -- ends at the worst moment ------------------------------------------------------------------------


class Hooked(WrappedDevice):
    """Does something once, when a thread has waited for an event."""

    hook: Callable[[], object] | None = None

    def synchronize(self, event: DeviceEvent | None = None) -> None:
        super().synchronize(event)
        if event is not None and self.hook is not None:
            hook, self.hook = self.hook, None
            hook()


@pytest.mark.parametrize(("end", "error"), [("revoke", LeaseExpired), ("close", PoolClosed)])
def test_a_lease_that_ends_while_its_reader_waits_is_not_given(end: str, error: type[Exception]) -> None:
    lab = Lab(4, 2, wrap=Hooked)
    assert isinstance(lab.cache.core.device, Hooked)
    lab.seed([1, 2, 3], committed=2)
    lab.cache.content.offload([1, 2, 3])
    lab.cache.core.device.hook = {"revoke": lambda: lab.cache.revoke("reader"), "close": lab.cache.close}[end]
    with pytest.raises(error):
        lab.cache.pin(lab.keys([1, 2, 3]), owner="reader", tier="host")
    assert lab.cache.leases == [] and not lab.sim.races
    if end == "revoke":
        assert not lab.findings()


class Once(WrappedDevice):
    """Fails once, at the first ``armed`` call behind a copy."""

    armed, copied = "", False

    def copy_blocks(self, moves: Any, stream: Stream = NULL_STREAM) -> None:
        super().copy_blocks(moves, stream)
        self.copied = True

    def _may(self, call: str) -> None:
        if self.armed == call and self.copied:
            self.armed = ""
            raise DeviceError(f"{call} refused once")

    def record(self, stream: Stream) -> DeviceEvent:
        self._may("record")
        return super().record(stream)

    def query(self, event: DeviceEvent) -> bool:
        self._may("query")
        return super().query(event)


@pytest.mark.parametrize("call", ["record", "query"])
def test_a_passing_error_behind_a_copy_leaves_no_copy_that_nobody_waits_for(call: str) -> None:
    lab = Lab(3, 2, wrap=Once)
    device = lab.cache.core.device
    assert isinstance(device, Once)
    lab.seed([1, 2, 3], committed=2)
    lab.release(lab.add([11, 12, 13, 14, 15]), store=False)
    lab.sim.synchronize()
    device.copied, device.armed = False, call
    lab.cache.content.prefetch([1, 2, 3])
    with pytest.raises(PoolClosed, match=f"{call} refused once"):
        lab.add([21, 22, 23, 24, 25], stream=lab.b)
    lab.cache.close()
    assert not lab.sim.races


def test_a_device_that_raises_an_exit_gives_the_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(3, 2)
    lab.seed([1, 2, 3], committed=2)
    monkeypatch.setattr(lab.cache.core.transfer, "drain", lambda: (_ for _ in ()).throw(SystemExit))
    with pytest.raises(SystemExit):
        lab.cache.close()
    assert lab.cache._pools.closed


# -- and more that review found ------------------------------------------------------------------------


def test_a_pinned_block_that_its_sequence_is_filling_keeps_its_tokens() -> None:
    lab = Lab(4, 0, T=4)
    sequence = lab.commit(lab.add([1, 2, 3]))
    lab.sim.synchronize()
    (block,) = lab.table(sequence)
    lease = lab.cache.pin_blocks([block])
    lab.append(sequence, [4])  # behind the pinned tokens
    before = lab.block(block)[:, :, :3].copy()
    lab.append(lab.rewind(sequence, 2), [9])
    assert lab.table(sequence) != [block]
    lab.sim.synchronize()
    np.testing.assert_array_equal(lab.block(block)[:, :, :3], before)
    lease.close()
    assert not lab.findings()


def test_a_rewind_by_nothing_moves_a_sequence_to_its_stream() -> None:
    lab = Lab(4, 0)
    sequence = lab.add([1, 2, 3])
    lab.cache.rewind(sequence.id, [0], stream=lab.b)
    lab._streams[sequence.id] = lab.b
    lab.check(sequence)
    assert not lab.findings()


def test_streams_that_are_at_rest_give_their_numbers_to_new_ones() -> None:
    lab = Lab(4, 2)
    for turn in range(5 * STREAMS_KEPT):
        stream = lab.sim.create_stream(str(turn))
        lab.release(lab.add([turn % 3, 7, turn, 7], stream=stream))
        lab.sim.synchronize(lab.sim.record(stream))
    assert lab.cache.core.transfer.order is not None
    assert len(lab.cache.core.transfer.order._streams) <= 2 * STREAMS_KEPT
    assert not lab.findings()
