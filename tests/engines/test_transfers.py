"""Jobs of an engine's worker: the bytes that were stored come back to the blocks that were named, or the job fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool.device.cuda import unusable
from kvpool.device.sim import SimDevice
from kvpool.hostcache.host_copies import HostPlace
from kvpool.integrations.vllm.transfers import Ended, LayerPages, Run, Transfers, pieces

IDENTITY = kvpool.ModelIdentity("toy", "r1", "uint8", "pages", "tests 1")
HOST_BLOCKS, BLOCKS, LAYERS = 10, 24, (3, 2)
PAGES = (48, 48)
"""Bytes of a block in a layer of each group. The groups share memory where their layers have the same number."""
GPU = pytest.param("gpu", marks=pytest.mark.gpu)


class Worker:
    """An engine's memory as vLLM has it: one allocation, in which each layer has pages [blocks, bytes] with gaps."""

    def __init__(self, kind: str, per: int) -> None:
        self.kind, self.per, self.random = kind, per, np.random.default_rng(3)
        self.device: Any = {"cpu": "cpu", "gpu": "auto"}.get(kind) or SimDevice(seed=per)
        self.numpy: Any = np if kind != "gpu" else cupy()
        shape = (max(LAYERS), BLOCKS, PAGES[0] + 16)
        sim = isinstance(self.device, SimDevice)
        take = self.device.allocate(int(np.prod(shape)), "device").view(np.int8).reshape(shape) if sim else None
        memory = self.numpy.zeros(shape, np.int8) if take is None else take
        self.tensors = [memory[layer, :, : PAGES[0]] for layer in range(max(LAYERS))]
        self.groups = [self.tensors[:count] for count in LAYERS]
        self.tier = kvpool.HostTier(HOST_BLOCKS, max(LAYERS) * PAGES[0] * per, identity=IDENTITY)
        group_pieces = [piece for group in self.groups for piece in pieces([*map(LayerPages.whole, group)], per)]
        caches, places = [piece.cache for piece in group_pieces], [piece.place for piece in group_pieces]
        self.copies = kvpool.hostcache.HostCopies(
            self.tier, caches, blocks_per_host_block=per, places=places, device=self.device
        )
        self.pieces = [[piece] for piece in group_pieces]
        self.transfers = Transfers(self.copies, HOST_BLOCKS, per, self.pieces)

    def write(self, group: int, blocks: Sequence[int]) -> np.ndarray:
        """Random bytes into blocks of a group; a copy of them, [layers, blocks, bytes]."""
        values = self.random.integers(-128, 128, (LAYERS[group], len(blocks), PAGES[group]), dtype=np.int8)
        layers = zip(self.groups[group], values, strict=True)
        rows = [(tensor[b], row) for tensor, value in layers for b, row in zip(blocks, value, strict=True)]

        def kernel() -> None:
            for target, row in rows:
                target[...] = self.numpy.asarray(row)

        if self.kind == "sim":
            self.device.launch(None, kernel, stores=[target for target, _ in rows])
        else:
            kernel()
        return values

    def read(self, group: int, blocks: Sequence[int]) -> np.ndarray:
        if self.kind == "sim":
            self.device.synchronize()
        taken = [tensor[list(blocks)] for tensor in self.groups[group]]
        return np.array([tensor if self.kind != "gpu" else tensor.get() for tensor in taken])

    def store(self, job: int, blocks: Sequence[int], counts: Any, firsts: Any, hosts: Sequence[int]) -> None:
        self.transfers.store(job, self.transfers.parts(blocks, counts, firsts, hosts))

    def store_one(self, job: int, block: int, host: int, first: int = 0) -> None:
        """A block of the first group."""
        self.store(job, [block], (1, 0), (first, 0), [host])

    def load(
        self, job: int, blocks: Sequence[int], counts: Any, firsts: Any, hosts: Sequence[int], partial: Any = None
    ) -> None:
        self.transfers.load(job, self.transfers.parts(blocks, counts, firsts, hosts), partial=partial)

    def ended(self, *jobs: int) -> dict[int, Ended]:
        """The jobs that are over, once these are."""
        self.transfers.wait(set(jobs))
        return {result.job: result for result in self.transfers.finished()}


def cupy() -> Any:
    missing = unusable()
    if missing:
        pytest.skip(missing)
    import cupy

    return cupy


Open = Callable[..., Worker]


@pytest.fixture
def open_worker() -> Iterator[Open]:
    opened: list[Worker] = []

    def build(kind: str = "cpu", per: int = 1) -> Worker:
        opened.append(Worker(kind, per))
        return opened[-1]

    yield build
    for worker in opened:
        worker.transfers.close()
        worker.tier.close()


@pytest.mark.parametrize("per", [1, 2, 3])
@pytest.mark.parametrize("kind", ["cpu", "sim", GPU])
def test_what_was_stored_comes_back_into_other_blocks(open_worker: Open, kind: str, per: int) -> None:
    worker = open_worker(kind, per)
    wanted = worker.write(0, [5, 3, 9, 11, 2, 4]), worker.write(1, [17, 20, 18])
    hosts = [7, 1, 0, 5, 9, 2, 3, 4, 6][: -(-6 // per) + -(-3 // per)]
    worker.store(1, [5, 3, 9, 11, 2, 4, 17, 20, 18], (6, 3), (6 * per, 0), hosts)
    assert worker.ended(1)[1].error is None
    worker.write(0, range(BLOCKS))
    worker.load(2, [1, 0, 6, 8, 7, 10, 23, 21, 22], (6, 3), (6 * per, 0), hosts)
    ended = worker.ended(2)[2]
    assert ended.error is None
    assert ended.nbytes == 6 * LAYERS[0] * PAGES[0] + 3 * LAYERS[1] * PAGES[1]
    np.testing.assert_array_equal(worker.read(0, [1, 0, 6, 8, 7, 10]), wanted[0])
    np.testing.assert_array_equal(worker.read(1, [23, 21, 22]), wanted[1])


@pytest.mark.parametrize("kind", ["cpu", "sim", GPU])
def test_a_load_may_begin_and_end_within_a_chunk(open_worker: Open, kind: str) -> None:
    worker = open_worker(kind, 3)
    wanted = worker.write(0, range(6))
    worker.store(1, range(6), (6, 0), (0, 0), [4, 8])
    worker.ended(1)
    before = worker.read(0, [12, 15])
    worker.load(2, [13, 14], (2, 0), (2, 0), [4, 8])
    assert worker.ended(2)[2].error is None
    np.testing.assert_array_equal(worker.read(0, [13, 14]), wanted[:, 2:4])
    np.testing.assert_array_equal(worker.read(0, [12, 15]), before)


def test_a_host_block_that_no_store_has_filled_is_not_loaded(open_worker: Open) -> None:
    worker = open_worker()
    worker.store_one(1, 0, 4)
    worker.ended(1)
    before = worker.read(0, [1, 2])
    worker.load(2, [1, 2], (2, 0), (0, 0), [4, 5])
    assert "never written" in str(worker.ended(2)[2].error)
    np.testing.assert_array_equal(worker.read(0, [1, 2]), before)


def test_a_place_that_a_store_left_out_is_not_loaded(open_worker: Open) -> None:
    """A sliding window may have passed the first blocks of a chunk before it is stored."""
    worker = open_worker(per=3)
    worker.store(1, [0, 1], (2, 0), (1, 0), [4])
    worker.ended(1)
    worker.load(2, [5, 6], (2, 0), (1, 0), [4])
    worker.load(3, [5, 6, 7], (3, 0), (0, 0), [4])
    ended = worker.ended(2, 3)
    assert ended[2].error is None and ended[3].error is not None


def test_a_chunk_that_is_stored_again_has_nothing_of_what_was_there(open_worker: Open) -> None:
    worker = open_worker(per=2)
    worker.store(1, [0, 1], (2, 0), (0, 0), [4])
    worker.ended(1)
    worker.store_one(2, 3, 4, 1)
    worker.ended(2)
    worker.load(3, [5, 6], (2, 0), (0, 0), [4])
    assert worker.ended(3)[3].error is not None


class Failing:
    """Copies of which some fail: by number, from 1."""

    def __init__(self, copies: Any, *numbers: int) -> None:
        self.copies, self.numbers, self.calls = copies, numbers, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.copies, name)

    def copy_in(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls in self.numbers:
            raise kvpool.errors.DeviceError("as the test asks")
        return self.copies.copy_in(*arguments, **options)


def test_a_load_of_what_a_failed_store_should_have_brought_fails(open_worker: Open) -> None:
    worker = open_worker()
    worker.transfers = Transfers(Failing(worker.copies, 2), HOST_BLOCKS, 1, worker.pieces)  # type: ignore[arg-type]
    for job, error in ((1, None), (2, "as the test asks")):
        worker.store(job, [0], (1, 0), (0, 0), [4])
        assert worker.ended(job)[job].error == error
    worker.load(3, [1], (1, 0), (0, 0), [4])
    assert "store failed" in str(worker.ended(3)[3].error)
    worker.store_one(4, 0, 4)
    worker.ended(4)
    worker.load(5, [1], (1, 0), (0, 0), [4])
    assert worker.ended(5)[5].error is None


def test_a_job_that_failed_is_over_when_its_other_copies_are(open_worker: Open) -> None:
    worker = open_worker("sim")
    worker.transfers = Transfers(Failing(worker.copies, 2), HOST_BLOCKS, 1, worker.pieces)  # type: ignore[arg-type]
    gate = worker.device.stall(None)
    worker.store(1, [0, 1], (1, 1), (0, 0), [4, 5])
    assert worker.transfers.finished() == []
    gate.open()
    assert worker.ended(1)[1].error == "as the test asks"


@pytest.mark.parametrize("kind", ["sim"])
def test_a_job_is_not_over_before_its_copies_are(open_worker: Open, kind: str) -> None:
    worker = open_worker(kind)
    wanted = worker.write(0, [0])
    gate = worker.device.stall(None)
    worker.store_one(1, 0, 4)
    worker.transfers.wait({7})
    assert worker.transfers.finished() == []
    gate.open()
    worker.transfers.wait({1})
    np.testing.assert_array_equal(worker.tier.blocks[4].view(np.int8).reshape(LAYERS[0], -1), wanted[:, 0])
    assert [result.job for result in worker.transfers.finished()] == [1]
    assert worker.transfers.finished() == []


def test_layers_with_blocks_of_different_sizes_have_places_of_their_own() -> None:
    """As attention beside states or indices. What comes after another worker's first byte stays as it is."""
    random, widths, per = np.random.default_rng(4), [8, 48, 8, 16], 2
    tensors = [random.integers(-128, 128, (6, width), np.int8) for width in widths]
    tier = kvpool.HostTier(3, 16 + per * sum(widths), identity=IDENTITY)
    tier.blocks[...] = 99
    group = pieces([*map(LayerPages.whole, tensors)], per, first_byte=16)
    assert [(len(piece.cache.bases[0]), piece.place.first_byte) for piece in group] == [(2, 16), (1, 48), (1, 144)]
    caches, places = [piece.cache for piece in group], [piece.place for piece in group]
    copies = kvpool.hostcache.HostCopies(tier, caches, blocks_per_host_block=per, places=places)
    transfers = Transfers(copies, 3, per, [group])
    transfers.store(1, transfers.parts([5, 1, 3], (3,), (0,), [2, 0]))
    assert [result.nbytes for result in transfers.finished()] == [3 * sum(widths)]
    assert (tier.blocks[:, :16] == 99).all() and (tier.blocks[1] == 99).all()
    before = [tensor.copy() for tensor in tensors]
    for tensor in tensors:
        tensor[...] = 0
    transfers.load(2, transfers.parts([0, 2, 4], (3,), (0,), [2, 0]))
    assert [result.error for result in transfers.finished()] == [None]
    for tensor, old in zip(tensors, before, strict=True):
        np.testing.assert_array_equal(tensor[[0, 2, 4]], old[[5, 1, 3]])
        assert not tensor[[1, 3, 5]].any()
    transfers.close()


WRONG_PLACES: list[Any] = [
    HostPlace(-8, 8, ((0, 8, 8),)),
    HostPlace(0, -8, ((0, 8, 8),)),
    HostPlace(0, 8, ((-1, 8, 8),)),
    HostPlace(0, 8, ()),
    HostPlace(0, 8, ((0, 8, 8),) * 2),
    HostPlace(0, 8, ((0, 8),)),
    HostPlace(1 << 62, 8, ((0, 8, 8),)),
    (0, 8, ()),
    5,
]


@pytest.mark.parametrize("place", WRONG_PLACES)
def test_a_place_outside_of_the_host_blocks_is_refused(place: Any) -> None:
    cache = pieces([LayerPages.whole(np.zeros((4, 8), np.int8))], 1)[0].cache
    for places in ([place], [None, None]):
        with pytest.raises((TypeError, ValueError), match="places"):
            kvpool.hostcache.HostCopies(kvpool.HostTier(2, 8, identity=IDENTITY), cache, places=places)


@pytest.mark.parametrize(
    ("counts", "firsts", "expected"),
    [
        ((4, 0), (0, 0), set()),
        ((3, 0), (1, 0), {4}),
        ((3, 0), (0, 0), {2}),
        ((2, 1), (2, 3), {2}),
        ((1, 2), (0, 1), {4, 2, 7}),
    ],
)
def test_host_blocks_that_are_filled_in_part_are_named(counts: Any, firsts: Any, expected: set[int]) -> None:
    worker = Worker("cpu", 2)
    hosts = [4, 2, 7][: sum(-(-(first % 2 + count) // 2) for count, first in zip(counts, firsts, strict=True) if count)]
    worker.store(1, range(sum(counts)), counts, firsts, hosts)
    ended = worker.ended(1)[1]
    assert (ended.store, ended.host_blocks, ended.partial) == (True, set(hosts), expected)
    worker.transfers.close()


@pytest.mark.parametrize("before", ["nothing", "a chunk in part", "a failed store"])
def test_what_others_have_filled_is_loaded_whatever_was_there_before(open_worker: Open, before: str) -> None:
    """As with stores, which fill host blocks without the worker."""
    worker = open_worker(per=2)
    worker.transfers = Transfers(Failing(worker.copies, before == "a failed store"), HOST_BLOCKS, 2, worker.pieces)  # type: ignore[arg-type]
    if before != "nothing":
        worker.store_one(1, 3, 5)
        assert (worker.ended(1)[1].error is None) == (before == "a chunk in part")
    worker.tier.blocks[5] = 7
    worker.load(2, [4, 6], (2, 0), (0, 0), [5], partial=())
    assert worker.ended(2)[2].error is None
    assert (worker.read(0, [4, 6]) == 7).all()


def test_only_the_filled_part_of_a_chunk_is_loaded(open_worker: Open) -> None:
    worker = open_worker(per=2)
    worker.store_one(1, 3, 5, 1)
    worker.ended(1)
    before = worker.read(0, [4, 6, 8, 9])
    worker.load(2, [4, 6, 8, 9], (4, 0), (0, 0), [5, 2], partial=[5])
    worker.load(3, [6, 8, 9], (3, 0), (1, 0), [5, 2], partial=[5])
    worker.load(4, [8, 9], (2, 0), (0, 0), [2], partial=[2])
    ended = worker.ended(2, 3, 4)
    assert [ended[job].error is None for job in (2, 3, 4)] == [False, True, False]
    np.testing.assert_array_equal(worker.read(0, [4]), before[:, :1])


FIRST_JOBS = """
import sys
from tests.engines.serve import compilations
from tests.engines.test_transfers import Worker
kind, per = sys.argv[1], int(sys.argv[2])
worker = Worker(kind, per)
worker.transfers.warm_up()
compiled = compilations()
hosts = [7, 1, 0, 5, 9, 2, 3][: -(-6 // per) + 1]
for stored, loaded in ((1, 2), (3, 4)):
    worker.store(stored, [5, 3, 9, 11, 2, 4, 17], (6, 1), (6 * per, 0), hosts)
    assert worker.ended(stored)[stored].error is None
    worker.load(loaded, [1, 0, 6, 8, 7, 10, 23], (6, 1), (6 * per, 0), hosts)
    assert worker.ended(loaded)[loaded].error is None
worker.transfers.close()
print(compiled)
"""


@pytest.mark.parametrize("per", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
@pytest.mark.parametrize("kind", ["cpu", GPU])
def test_the_first_job_compiles_nothing(kind: str, per: int) -> None:
    if kind == "gpu":
        cupy()
    command = [sys.executable, "-c", FIRST_JOBS, kind, str(per)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout.strip().splitlines()[-1:]) == (0, ["[]"]), done.stderr[-3000:]


def test_memory_that_is_none_of_blocks_and_jobs_that_do_not_fit_are_refused(open_worker: Open) -> None:
    for tensor in (np.zeros(8, np.int8), np.zeros((4, 8), np.int8)[:, ::2]):
        with pytest.raises(ValueError, match="tensors"):
            pieces([LayerPages(tensor, 8, (Run(0, 0, 8, 1, 8, 8),))], 1)
    for run in (Run(1, 0, 8, 1, 8, 8), Run(0, 1, 8, 1, 8, 8), Run(0, 0, 4, 2, 5, 4), Run(4, 0, 4, 2, -4, 4)):
        with pytest.raises(ValueError, match="within"):
            pieces([LayerPages(np.zeros((4, 8), np.int8), 8, (run,))], 1)
    worker = open_worker()
    for count, hosts in ((2, [4]), (2, [4, 5, 6]), (1, [4]), (3, [4, 5, 6])):
        with pytest.raises(ValueError, match="host_blocks"):
            worker.store(1, [0, 1], (count, 0), (0, 0), hosts)
