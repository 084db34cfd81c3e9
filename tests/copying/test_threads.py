"""Several threads on one pool: nothing is lost, handed out twice, or read while it changes."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest

from kvpool import BlockKeys, BlockLayout, KVCacheManager, OutOfBlocks
from kvpool.common.jit import jit
from kvpool.common.jit.intrinsics import compare_exchange, load
from kvpool.errors import BlockNotFound
from kvpool.state import control, tiers
from kvpool.state.records import BLOCK, change_word, group_at
from tests.waiting import at_once

T = 4
LAYOUT = BlockLayout(1, 1, 8, T, dtype="uint8", planes=1, order="block_first")


def run(*workers: Callable[[], object]) -> None:
    """Run all at once; what one of them raises is raised here."""
    at_once(lambda work: work(), workers)


@jit
def add_many(blocks: Any, count: int, refs: int, pins: int) -> int:
    """How many of ``count`` changes of the word of block 1 took place."""
    done = 0
    for _ in range(count):
        if change_word(blocks, 1, refs, pins) != -1:
            done += 1
    return done


def test_changes_of_one_word_lose_nothing() -> None:
    blocks, count = np.zeros(3, BLOCK), 1_000_000
    run(lambda: add_many(blocks, count, 1, 0), lambda: add_many(blocks, count, 2, 3))
    assert blocks["ref_word"].tolist() == [0, 3 * count << 32 | 3 * count, 0] and not blocks["key0"].any()


@pytest.mark.parametrize(("refs", "pins"), [(1, 0), (0, 1)])
def test_a_word_never_falls_below_zero(refs: int, pins: int) -> None:
    blocks, count = np.zeros(2, BLOCK), 1_000_000
    changes = [(count, refs, pins), (count, -refs, -pins), (count, -refs, -pins)]
    added, *taken = at_once(lambda change: add_many(blocks, *change), changes)
    word, left = int(blocks["ref_word"][1]), added - sum(taken)
    assert left >= 0 and (word & 0xFFFFFFFF, word >> 32) == (left * refs, left * pins)
    blocks["ref_word"] = (7 << 32) | 5
    for step in ((-6, 0), (0, -8), (-6, 8), (6, -8)):
        assert change_word(blocks, 1, *step) == -1 and int(blocks["ref_word"][1]) == (7 << 32) | 5


@numba.njit(nogil=True)
def send(cells: npt.NDArray[np.int64], data: npt.NDArray[np.int64]) -> None:
    for i in range(data.shape[0]):
        data[i] = i + 1
        compare_exchange(cells, 0, i, i + 1)


@numba.njit(nogil=True)
def receive(cells: npt.NDArray[np.int64], data: npt.NDArray[np.int64]) -> int:
    """Entries that were announced but could not be seen."""
    missing = seen = 0
    while seen < data.shape[0]:
        seen = load(cells, 0)
        if seen and data[seen - 1] != seen:
            missing += 1
    return missing


def test_load_sees_what_was_written_before_the_announcement() -> None:
    cells, data, missing = np.zeros(1, np.int64), np.zeros(2_000_000, np.int64), []
    run(lambda: send(cells, data), lambda: missing.append(receive(cells, data)))
    assert missing == [0]


def pool(device_blocks: int, host_blocks: int, **options: Any) -> KVCacheManager:
    options = {"device": "cpu", "max_sequences": 1024, **options}
    return KVCacheManager(LAYOUT, device_blocks=device_blocks, host_blocks=host_blocks, **options)


@jit
def take_host(groups: npt.NDArray[np.int64], priority: int) -> Any:
    return tiers.take_host(group_at(groups, 0), priority)


def test_eight_threads_that_take_host_blocks_get_each_once() -> None:
    with pool(8, 2000) as cache:
        state, taken = cache.core.tokens, [[] for _ in range(8)]

        def take(mine: list[int]) -> object:
            while True:
                with cache.core.lock:
                    mine.append(take_host(state.groups, 100))
                    if mine[-1] == -1:
                        return mine.pop()
                    change_word(state.blocks, mine[-1], 0, 1)

        run(*(lambda mine=mine: take(mine) for mine in taken))
        assert sorted(sum(taken, [])) == list(range(8, 2008)) and cache.stats().host.free == 0
        with cache.core.lock:
            control.unpin(state.groups, np.array(sum(taken, [])), 0)
        cache.verify()
        assert cache.stats().host.free == 2000


@dataclass
class Story:
    """A text that sequences follow: its tokens, and the bytes of each, a function of all tokens before it too."""

    tokens: npt.NDArray[np.int32]
    bytes: npt.NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        self.bytes = np.zeros((len(self.tokens), 8), np.uint8)
        for i in range(len(self.tokens)):
            seed = np.frombuffer(self.tokens[: i + 1].tobytes(), np.uint8)
            self.bytes[i] = np.random.default_rng(seed).integers(0, 256, 8)


@dataclass(eq=False)
class Live:
    id: int
    story: Story
    length: int


class Library:
    """Stories that share beginnings of many lengths, and a pool that is too small for them."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        roots = [rng.integers(0, 50, 40, np.int32) for _ in range(3)]
        self.stories = [
            Story(np.concatenate([root[: 3 + 5 * i], rng.integers(50, 99, 37 - 5 * i, np.int32)]))
            for root in roots
            for i in range(8)
        ]
        self.cache = pool(48, 40, max_sequences=64)
        self.device = self.cache.memory.device_pool.reshape(-1, 8)
        self.host = self.cache.memory.host_pool.reshape(-1, T, 8)
        self.keys = [
            (key, i, story) for story in self.stories for i, key in enumerate(self.cache.block_keys(story.tokens).keys)
        ]
        self.operations = 0
        self.hits = 0
        self.watched: Callable[[], bool] = lambda: True
        """Whether those who watch have seen enough: workers go on until then."""

    def rows(self, sequence: int, length: int) -> npt.NDArray[np.int64]:
        """Where the tokens of a sequence are in the device pool."""
        table = self.cache.block_table(sequence).dense()[0].astype(np.int64)
        return (table[:, None] * T + np.arange(T)).ravel()[:length]


class Worker:
    """Drives sequences of its own through every verb; checks what it reuses before it writes, and all of it before it
    lets go."""

    def __init__(self, library: Library, seed: int, operations: int) -> None:
        self.library, self.cache, self.random, self.operations = library, library.cache, random.Random(seed), operations
        self.live: list[Live] = []

    def run(self) -> None:
        verbs = [self.add, self.append, self.commit, self.rewind, self.release, self.prefetch, self.offload, self.pin]
        weights = [3, 4, 3, 2, 3, 1, 1, 3]
        done = 0
        while done < self.operations or not self.library.watched():
            for verb in self.random.choices(verbs, weights, k=64):
                try:
                    done += verb()
                except OutOfBlocks:
                    done += 1
                    self.release(len(self.live) // 2 + 1)
        while self.live:
            done += self.release(len(self.live))
        self.library.operations += done

    def some(self, most: int) -> list[Live]:
        """Some of the live sequences, at least one if there is one."""
        return self.random.sample(self.live, min(len(self.live), self.random.randint(1, most)))

    def prompt(self) -> tuple[Story, BlockKeys]:
        story = self.random.choice(self.library.stories)
        return story, self.cache.block_keys(story.tokens[: self.random.randint(1, 32)])

    def add(self) -> int:
        chosen = [self.prompt() for _ in range(self.random.randint(1, 3))]
        batch = self.cache.add_sequence_batch([keys for _, keys in chosen], allow_partial_batch=True)
        for i, cached, (story, keys) in zip(batch.ids.tolist(), batch.cached_tokens.tolist(), chosen, strict=False):
            self.live.append(Live(i, story, len(keys)))
            self.write(self.live[-1], cached)
            self.library.hits += cached
        return len(chosen)

    def write(self, sequence: Live, start: int) -> None:
        rows, expected = self.library.rows(sequence.id, sequence.length), sequence.story.bytes
        assert np.array_equal(self.library.device[rows[:start]], expected[:start]), "reused bytes"
        self.library.device[rows[start:]] = expected[start : sequence.length]

    def append(self) -> int:
        chosen = [s for s in self.some(4) if s.length < 40]
        counts = [self.random.randint(1, min(6, 40 - s.length)) for s in chosen]
        new = [s.story.tokens[s.length : s.length + n] for s, n in zip(chosen, counts, strict=True)]
        if chosen:
            self.cache.append_tokens([s.id for s in chosen], np.concatenate(new), counts)
        for sequence, count in zip(chosen, counts, strict=True):
            sequence.length += count
            self.write(sequence, sequence.length - count)
        return len(chosen)

    def commit(self) -> int:
        chosen = self.some(4)
        self.cache.commit([s.id for s in chosen])
        return len(chosen)

    def rewind(self) -> int:
        chosen = self.some(2)
        counts = [self.random.randint(0, s.length - 1) for s in chosen]
        self.cache.rewind([s.id for s in chosen], counts)
        for sequence, count in zip(chosen, counts, strict=True):
            sequence.length -= count
            self.write(sequence, sequence.length)
        return len(chosen)

    def release(self, most: int = 3) -> int:
        chosen = self.some(most)
        for sequence in chosen:
            self.write(sequence, sequence.length)
            self.live.remove(sequence)
        self.cache.release([s.id for s in chosen], store=self.random.random() < 0.8)
        return len(chosen)

    def prefetch(self) -> int:
        self.cache.content.prefetch(self.prompt()[1])
        return 1

    def offload(self) -> int:
        self.cache.content.offload(self.prompt()[1])
        return 1

    def pin(self) -> int:
        """A pin of any tier, of a prompt of which all or nothing may be there."""
        try:
            self.cache.pin(self.prompt()[1], owner="worker").close()
        except BlockNotFound:
            return 1
        return 2


def read_host(library: Library, done: threading.Event, counts: list[int]) -> None:
    """Pin host blocks by key; their bytes are the right ones from the first moment of the lease to its last."""
    rng = random.Random(0)
    while not done.is_set():
        for key, i, story in rng.sample(library.keys, 40):
            lease = library.cache.find_and_pin_host(key)
            counts[lease is not None] += 1
            if lease is not None:
                block = library.host[int(lease.blocks[0]) - library.cache.device_blocks]
                expected = story.bytes[i * T : (i + 1) * T]
                assert np.array_equal(block, expected), "a pinned block does not hold its content"
                time.sleep(0)
                assert np.array_equal(block, expected), "a pinned block changed"
                lease.close()
        time.sleep(0.001)


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("frequent_switches")
@pytest.mark.parametrize("operations", [4_000, pytest.param(100_000, marks=pytest.mark.exhaustive)])
def test_many_operations_of_two_threads_and_a_reader(operations: int) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    library = Library(seed)
    workers = [Worker(library, seed + i, operations // 2) for i in range(2)]
    done, failed, counts, checks = threading.Event(), threading.Event(), [0, 0], []
    library.watched = lambda: failed.is_set() or (counts[1] > 100 and len(checks) >= 5)

    def work() -> None:
        try:
            run(*[worker.run for worker in workers])
        finally:
            done.set()

    def unless_it_fails(watching: Callable[[], None]) -> None:
        try:
            watching()
        except BaseException:
            failed.set()
            raise

    def watch() -> None:
        while not done.wait(0.05):
            library.cache.verify()
            stats = library.cache.stats()
            assert stats.device.free + stats.device.used == 48 and stats.host.free + stats.host.used == 40
            checks.append(stats)

    run(work, lambda: unless_it_fails(lambda: read_host(library, done, counts)), lambda: unless_it_fails(watch))
    library.cache.verify()
    stats = library.cache.stats()
    print(f"{library.operations} operations, {counts} host lookups (missed, pinned), {len(checks)} checks, {stats}")
    assert library.operations >= operations and len(checks) >= 5 and counts[1] > 100 and library.hits > operations // 10
    assert (
        min(stats.offloaded_blocks, stats.onboarded_blocks, stats.partial_blocks, stats.copied_blocks)
        > operations // 1000
    )
    assert stats.device.free == 48 and stats.host.free == 40 and stats.lost_blocks == 0
    assert not any(library.cache.close())
