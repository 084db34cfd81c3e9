"""Large batches that no stream of a caller waits for are enqueued after the call that decided them, part by part; all
others before it returns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool import BlockLayout, KVCacheManager
from kvpool.device.base import NULL_STREAM, Stream, WrappedDevice
from kvpool.device.regions import ALL_LAYERS, Layers
from kvpool.device.sim import SimDevice
from kvpool.errors import DeviceError
from tests.children import in_child
from tests.waiting import at_once

BLOCKS, WIDTH = 8, 2
PROMPT = list(range(BLOCKS * WIDTH)) + [99]


class Counted(WrappedDevice):
    """Notes how many moves each call copies, and in which thread. Waits before each one until it may go on."""

    def __init__(self, inner: SimDevice) -> None:
        super().__init__(inner)
        self.calls: list[tuple[int, int]] = []
        self.may = threading.Event()
        self.may.set()
        self.refused = -1

    def copy_blocks(self, moves: NDArray[np.int64], stream: Stream = NULL_STREAM, layers: Layers = ALL_LAYERS) -> None:
        self.may.wait()
        self.calls.append((len(moves), threading.get_ident()))
        if self.refused in moves[:, 1]:
            raise DeviceError("set to fail")
        super().copy_blocks(moves, stream, layers)


Made = tuple[KVCacheManager, Counted]


@pytest.fixture
def made() -> Iterator[tuple[KVCacheManager, Counted]]:
    """A pool whose device takes 3 moves at once, with the prompt on the host alone."""
    sim = SimDevice(0, progress=0.3)
    sim.at_once = 3
    device = Counted(sim)
    cache = KVCacheManager(BlockLayout(2, 1, 2, WIDTH), device_blocks=BLOCKS + 2, host_blocks=BLOCKS, device=device)
    sequence = cache.add_sequence(PROMPT)
    cache.commit(sequence)
    cache.release(sequence)
    push_out(cache)
    device.calls.clear()
    yield cache, device
    device.may.set()
    device.refused = -1
    cache.close(force=True)
    sim.close()
    assert not sim.races


def push_out(cache: KVCacheManager) -> None:
    cache.release(cache.add_sequence([7] * (BLOCKS + 2) * WIDTH), store=False)


def no_thread(call: Callable[[], None]) -> None:
    """In the place of ``Transfer.start``: the thread never comes."""


def wait_for_thread(cache: KVCacheManager) -> None:
    """Until all that it was given so far is enqueued."""
    ended = threading.Event()
    cache.core.transfer.start(ended.set)
    assert ended.wait(600)


def test_a_prefetch_returns_before_its_copies_are_enqueued(made: Made) -> None:
    cache, device = made
    device.may.clear()
    assert cache.content.prefetch(PROMPT) == BLOCKS
    assert not device.calls
    device.may.set()
    wait_for_thread(cache)
    assert [moves for moves, _ in device.calls] == [3, 3, 2]
    assert threading.get_ident() not in {thread for _, thread in device.calls}
    assert cache.add_sequence_batch([PROMPT]).device_tokens.tolist() == [BLOCKS * WIDTH]


CALLS: dict[str, Callable[[KVCacheManager], object]] = {
    "add": lambda cache: cache.add_sequence(PROMPT),
    "pin": lambda cache: cache.pin(cache.block_keys(PROMPT).keys, tier="device").close(),
    "commit": lambda cache: cache.commit(cache.sequences),
    "close": lambda cache: cache.close(force=True),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_follows_has_everything_enqueued_when_it_returns(made: Made, call: str) -> None:
    cache, device = made
    cache.add_sequence([5])
    cache.core.transfer.start = no_thread  # type: ignore[method-assign]
    assert cache.content.prefetch(PROMPT) == BLOCKS
    CALLS[call](cache)
    assert sum(moves for moves, _ in device.calls) == BLOCKS
    assert {thread for _, thread in device.calls} == {threading.get_ident()}


def test_the_lock_is_free_between_the_parts_of_a_large_batch(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, device = made
    transfer, seen = cache.core.transfer, []
    copy = transfer._copy
    monkeypatch.setattr(transfer, "_copy", lambda *args: (seen.append(transfer.enqueuing), copy(*args)))
    cache.add_sequence(PROMPT)
    assert [moves for moves, _ in device.calls] == [3, 3, 2] and seen == [True] * 3


def test_a_copy_that_is_refused_after_the_call_raises_at_the_next_one_that_names_it(made: Made) -> None:
    cache, device = made
    cache.core.transfer.start = no_thread  # type: ignore[method-assign]
    cache.content.prefetch(PROMPT)
    device.refused = 4
    sequence = cache.add_sequence(PROMPT)  # names none of its own yet; its hits include what is refused now
    device.refused = -1
    with pytest.raises(DeviceError, match="lost a block"):
        cache.append_tokens(sequence, [1])
    assert cache.stats().lost_blocks >= 1


def test_a_batch_goes_on_behind_an_error_that_is_not_a_refusal(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, device = made
    transfer, fails = cache.core.transfer, [True]
    copy = transfer._copy

    def once(*args: Any) -> None:
        if len(device.calls) == 1 and fails.pop():
            fails.append(False)
            raise MemoryError("an array of the host")
        copy(*args)

    monkeypatch.setattr(transfer, "_copy", once)
    with pytest.raises(MemoryError):
        cache.add_sequence(PROMPT)
    monkeypatch.undo()
    cache.add_sequence(PROMPT)
    assert [moves for moves, _ in device.calls] == [3, 3, 2]
    cache.verify()


def test_one_thread_serves_all_decisions_and_ends_with_the_pool(made: Made) -> None:
    cache, device = made
    worker = cache.core.transfer._worker
    assert not worker.running, "none where nothing has lagged"
    for _ in range(3):
        assert cache.content.prefetch(PROMPT) == BLOCKS
        wait_for_thread(cache)
        push_out(cache)
    assert worker.running and len({caller for _, caller in device.calls} - {threading.get_ident()}) == 1
    device.may.clear()
    assert cache.content.prefetch(PROMPT) == BLOCKS
    closer = threading.Thread(target=cache.close)
    closer.start()
    device.may.set()
    closer.join(600)
    assert not closer.is_alive() and not worker.running


def test_the_thread_of_a_pool_that_nobody_closed_ends_with_it() -> None:
    sim = SimDevice(0)
    sim.at_once = 1
    cache = KVCacheManager(BlockLayout(2, 1, 2, WIDTH), device_blocks=BLOCKS + 2, host_blocks=BLOCKS, device=sim)
    cache.release(cache.add_sequence(PROMPT))
    wait_for_thread(cache)
    end = cache.core.transfer._worker._end
    assert end.locked()
    del cache
    assert end.acquire(timeout=600)
    sim.close()


def test_a_child_enqueues_itself_what_the_thread_of_its_parent_would(made: Made) -> None:
    cache, device = made
    cache.content.prefetch(PROMPT)
    wait_for_thread(cache)
    push_out(cache)

    def child() -> None:
        device.calls.clear()
        assert cache.content.prefetch(PROMPT) == BLOCKS
        cache.add_sequence(PROMPT)
        assert sum(moves for moves, _ in device.calls) == BLOCKS
        cache.close(force=True)

    in_child(child)


def test_without_a_thread_the_caller_enqueues(made: Made) -> None:
    cache, device = made

    def none(call: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    cache.core.transfer.start = none  # type: ignore[method-assign]
    cache.content.prefetch(PROMPT)
    assert {thread for _, thread in device.calls} == {threading.get_ident()}


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_lag_and_threads_that_admit_agree(seed: int) -> None:
    print(f"seed {seed}")
    sim = SimDevice(seed, progress=0.5)
    sim.at_once = 1
    prompts = [[10 * i + k for k in range(7)] for i in range(8)]
    with KVCacheManager(BlockLayout(2, 1, 2, WIDTH), device_blocks=20, host_blocks=16, device=sim) as cache:

        def work(number: int) -> None:
            random = np.random.default_rng([seed, number])
            for _ in range(40):
                prompt = prompts[int(random.integers(len(prompts)))]
                if random.random() < 0.5:
                    (cache.content.prefetch if random.random() < 0.5 else cache.content.offload)(prompt)
                    continue
                sequence = cache.add_sequence(prompt, stream=sim_streams[number])
                rows = [(int(block), 0, 1) for block in cache.block_table(sequence).dense()[0] if block >= 0]
                sim.launch(sim_streams[number], lambda: None, reads=rows)
                cache.commit(sequence)
                cache.release(sequence)

        sim_streams = [sim.create_stream(str(number)) for number in range(3)]
        at_once(work, range(3))
        wait_for_thread(cache)
        cache.verify()
        sim.synchronize()
    sim.close()
    assert not sim.races
