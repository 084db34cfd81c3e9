"""Copies on streams that run late: what the copies order, and what the caller has to wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvpool import HostCache, HostCopies, HostTier, PagedKV
from kvpool.device.base import Stream
from kvpool.device.sim import RaceError, SimDevice
from tests.hostcache.conftest import IDENTITY

BLOCKS, HOST, PAGE, LAYERS = 6, 3, 8, 2
RUNS = [(seed, progress) for seed in range(4) for progress in (0.0, 0.5, 1.0)]


class Engine:
    """An engine with pages of its own on the sim device: its kernels fill blocks with a number, and read blocks."""

    def __init__(self, seed: int, progress: float) -> None:
        self.sim = SimDevice(seed, progress=progress)
        self.pages = [self.sim.allocate(BLOCKS * PAGE, "device").reshape(BLOCKS, PAGE) for _ in range(LAYERS)]
        self.cache = HostCache(HOST, PAGE * LAYERS, identity=IDENTITY)
        self.tier = HostTier.of(self.cache)
        self.copies = HostCopies(self.tier, PagedKV.of(self.pages, "L | B D"), device=self.sim)
        self.stream: Any = self.sim.create_stream("engine")
        self.read: list[int] = []

    def write(self, block: int, value: int, stream: Stream | None = None) -> None:
        """A kernel that fills a block."""
        rows = [page[block] for page in self.pages]
        self.sim.launch(stream or self.stream, lambda: [row.fill(value) for row in rows], stores=rows)

    def look(self, block: int, stream: Stream | None = None) -> None:
        """A kernel that reads a block; what it saw is in ``read``, 0 for a block of several values."""
        rows = [page[block] for page in self.pages]

        def kernel() -> None:
            seen = {int(value) for row in rows for value in row}
            self.read.append(seen.pop() if len(seen) == 1 else 0)

        self.sim.launch(stream or self.stream, kernel, loads=rows)

    def store(self, key: bytes, block: int, publish: bool = True) -> None:
        taken = self.cache.reserve([key])
        done = self.copies.copy_in([block], taken.slots, stream=self.stream)
        if publish:
            done.wait()
        self.cache.publish([key])

    def close(self) -> None:
        self.sim.synchronize()
        self.copies.close()
        self.sim.close()
        self.cache.verify()


@pytest.fixture
def lab() -> Iterator[Callable[..., Engine]]:
    opened: list[Engine] = []

    def build(seed: int = 0, progress: float = 0.5) -> Engine:
        opened.append(Engine(seed, progress))
        return opened[-1]

    yield build
    for engine in opened:
        if not engine.sim.closed:
            engine.close()


@pytest.mark.parametrize(("seed", "progress"), RUNS)
def test_a_prompt_goes_down_and_comes_back(lab: Callable[..., Engine], seed: int, progress: float) -> None:
    """Written, stored, overwritten, loaded into another block, read: in any order that streams and events allow."""
    one = lab(seed, progress)
    for i in range(5):
        key = bytes([65 + i])
        one.write(0, 10 + i)
        one.store(key, 0)
        one.write(0, 99)  # the copy is done: the block may be used again
        with one.cache.pin([key]) as lease:
            done = one.copies.copy_out([1 + i], lease.slots, stream=one.stream)
            done.follow(one.stream)
            one.look(1 + i)
            done.wait()
    one.sim.synchronize()
    assert one.read == [10, 11, 12, 13, 14]


@pytest.mark.parametrize(("seed", "progress"), RUNS)
def test_a_copy_comes_after_the_work_on_the_stream_that_is_named(
    lab: Callable[..., Engine], seed: int, progress: float
) -> None:
    one = lab(seed, progress)
    other = one.sim.create_stream("another stream of the engine")
    one.write(2, 7, other)
    taken = one.cache.reserve([b"k"])
    one.copies.copy_in([2], taken.slots, stream=other).follow(other)
    one.write(2, 8, other)
    one.sim.synchronize()
    np.testing.assert_array_equal(one.tier.blocks[taken.blocks[0]], 7)
    one.cache.publish([b"k"])


def race(one: Engine, does: Callable[[Engine], None]) -> bool:
    """Whether the device finds a race."""
    does(one)
    try:
        one.sim.synchronize()
    except RaceError:
        return True
    return False


def load_by_layers(one: Engine, waits: Callable[[int], bool]) -> None:
    """A kernel for each layer of a block that is loaded in two parts. Some wait for their layer."""
    one.write(0, 5)
    one.store(b"k", 0)
    with one.cache.pin([b"k"]) as lease:
        done = one.copies.copy_out([1], lease.slots, stream=one.stream, layer_parts=2)
        for layer in range(LAYERS):
            if waits(layer):
                done.follow(one.stream, layer)
            row = one.pages[layer][1]
            one.sim.launch(one.stream, lambda row=row: one.read.append(int(row.min())), loads=[row])
        done.wait()
        assert done.done


@pytest.mark.parametrize(("seed", "progress"), RUNS)
def test_a_layer_is_there_once_its_part_is_waited_for(lab: Callable[..., Engine], seed: int, progress: float) -> None:
    one = lab(seed, progress)
    load_by_layers(one, lambda layer: True)
    one.sim.synchronize()
    assert one.read == [5, 5]


@pytest.mark.parametrize("only", [None, 0])
def test_a_layer_that_is_read_before_its_part_is_a_race(lab: Callable[..., Engine], only: int | None) -> None:
    assert race(lab(), lambda one: load_by_layers(one, lambda layer: layer == only))


def overwrite_without_waiting(one: Engine) -> None:
    one.write(0, 1)
    one.copies.copy_in([0], one.cache.reserve([b"k"]).slots, stream=one.stream)
    one.write(0, 2)


def read_without_waiting(one: Engine) -> None:
    one.write(0, 1)
    one.store(b"k", 0)
    with one.cache.pin([b"k"]) as lease:
        one.copies.copy_out([1], lease.slots, stream=one.stream)
        one.look(1)


def publish_before_it_is_written(one: Engine) -> None:
    one.write(0, 1)
    one.store(b"k", 0, publish=False)
    with one.cache.pin([b"k"]) as lease:
        one.copies.copy_out([1], lease.slots, stream=one.stream)


def unpin_before_it_is_read(one: Engine) -> None:
    one.write(0, 1)
    for key in (b"a", b"b", b"c"):
        one.store(key, 0)
    with one.cache.pin([b"a"]) as lease:
        one.copies.copy_out([1], lease.slots, stream=one.stream)
    one.cache.touch([b"b", b"c"])
    one.store(b"d", 0)


@pytest.mark.parametrize(
    "does",
    [overwrite_without_waiting, read_without_waiting, publish_before_it_is_written, unpin_before_it_is_read],
)
def test_what_the_caller_must_wait_for_is_a_race_without(
    lab: Callable[..., Engine], does: Callable[[Engine], None]
) -> None:
    """These are the rules of the documentation. The device finds each, so that an engine's tests find it too."""
    assert race(lab(progress=0.0), does)


def test_done_tells_the_truth(lab: Callable[..., Engine]) -> None:
    one = lab(progress=0.0)
    one.write(0, 5)
    gate = one.sim.stall(one.stream)
    taken = one.cache.reserve([b"k"])
    done = one.copies.copy_in([0], taken.slots, stream=one.stream)
    assert not done.done
    gate.open()
    done.wait()
    assert done.done and (one.tier.blocks[taken.blocks[0]] == 5).all()
    one.cache.publish([b"k"])


def test_closing_waits_for_copies_and_takes_no_bytes_away(lab: Callable[..., Engine]) -> None:
    one = lab(progress=0.0)
    one.write(0, 5)
    block = int(one.cache.reserve([b"k"]).blocks[0])
    one.copies.copy_in([0], [block], stream=one.stream)
    one.copies.close()
    assert (one.tier.blocks[block] == 5).all()
    one.cache.publish([b"k"])


def test_a_copy_is_done_once_its_copies_are_closed() -> None:
    engine = Engine(1, 0.0)
    done = engine.copies.copy_in([0], [0])
    assert not done.done
    engine.close()
    assert done.done
    done.wait()
