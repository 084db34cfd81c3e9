"""Uploads in CUDA graphs of CuPy: each replay writes what was staged for it, and what no graph can have is refused
before anything is captured."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from kvpool import KVCacheManager, PoolClosed
from kvpool.common.arrays.layout import BlockLayout
from kvpool.device.base import Stream
from kvpool.device.cuda import unusable
from kvpool.errors import DeviceError
from kvpool.pool import GraphTables, StepTables
from steps import GARBAGE, NAMES, arrays, check, expected
from tests import emulated

pytestmark = pytest.mark.gpu
LAYOUT = BlockLayout(3, 2, 16, 4, dtype="float16")
ROWS, COLUMNS, SCALE, OFFSET = 3, 8, 6, 3


@pytest.fixture
def cache(cupy: Any) -> Any:
    made = KVCacheManager(LAYOUT, device_blocks=40, host_blocks=8, device="cuda", max_sequences=8)
    yield made
    made.close()


class Captured:
    """A graph that hands over a table for K and V, into every other row, and all tables of a step."""

    def __init__(self, cupy: Any, cache: KVCacheManager, stream: Any) -> None:
        self.cache, self.stream = cache, stream
        self.table = cupy.full((2, 2 * ROWS, COLUMNS), GARBAGE, np.int32)
        self.step = arrays(ROWS, 4 * ROWS * COLUMNS, COLUMNS, ROWS * COLUMNS, put=cupy.asarray)
        cupy.cuda.Device().synchronize()
        gc.collect()  # Memory of other tests that is freed in this thread would end the capture.
        stream.begin_capture()
        rows = list(range(0, 2 * ROWS, 2))
        self.uploads: list[GraphTables] = [
            cache.tables.capture_block_offsets(
                self.table, ROWS, rows=rows, scale=SCALE, v_offset=OFFSET, stream=stream
            ),
            cache.tables.capture_step_tables(self.step, ROWS, stream=stream),
        ]
        self.graph = stream.end_capture()

    def stage(self, ids: Any) -> None:
        for upload in self.uploads:
            upload.stage(ids, stream=self.stream)

    def check(self, dense: np.ndarray, steps: dict[str, np.ndarray]) -> None:
        """What a replay has written: that, and nothing for the sequences that are missing."""
        used, wanted = len(dense), np.full((2, 2 * ROWS, COLUMNS), GARBAGE, np.int32)
        wanted[:, ::2] = -1
        for plane, offset in enumerate((0, OFFSET)):
            wanted[plane, : 2 * used : 2, : dense.shape[1]] = np.where(dense < 0, -1, dense * SCALE + offset)
        np.testing.assert_array_equal(self.table.get(), wanted)
        for name in ("seq_lens", "last_page_len"):
            steps[name] = np.pad(steps[name], (0, ROWS - used))
        for name in ("query_start_loc", "indptr"):
            steps[name] = np.pad(steps[name], (0, ROWS - used), mode="edge")
        steps["table"] = np.pad(steps["table"], ((0, ROWS - used), (0, 0)), constant_values=-1)
        check(self.step, steps, lambda array: array.get())
        with self.stream:
            for array in (self.table, *(getattr(self.step, name) for name in NAMES)):
                array.fill(GARBAGE)


def as_it_is(cache: KVCacheManager, ids: list[int]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    lengths = cache.sequence_length(ids).tolist()
    committed = [int(cache.committed_tokens(sequence)) for sequence in ids]
    counts = [length - first for length, first in zip(lengths, committed, strict=True)]
    return cache.block_table(ids).dense(), expected(cache, ids, committed, counts)


@pytest.mark.parametrize("seed", range(4))
def test_each_replay_writes_the_tables_of_its_step(cupy: Any, cache: KVCacheManager, seed: int) -> None:
    random, stream = np.random.default_rng(seed), cupy.cuda.Stream(non_blocking=True)
    captured = Captured(cupy, cache, stream)
    captured.graph.launch(stream)
    stream.synchronize()
    captured.check(np.zeros((0, 0), np.int32), expected(cache, [], [], []))
    live: list[int] = []
    for turn in range(12):
        if len(live) < 5:
            prompt = random.integers(0, 9, random.integers(1, 16)).tolist()
            live.append(cache.add_sequence(prompt, stream=stream))
        ids = random.permutation(live)[: random.integers(0, ROWS + 1)].tolist()
        captured.stage(ids)
        wanted = as_it_is(cache, ids)
        for _ in range(1 + turn % 2):
            captured.graph.launch(stream)
        cache.commit(ids, stream=stream)
        if ids and random.random() < 0.5:
            live.remove(ids[0])
            cache.release(ids[0], stream=stream)
        grown = [sequence for sequence in live if cache.sequence_length(sequence) < 28]
        cache.append_tokens(grown, [7] * len(grown), [1] * len(grown))
        stream.synchronize()
        captured.check(*wanted)
    for upload in captured.uploads:
        upload.close()
    cache.verify()


def test_what_was_refused_leaves_what_was_staged(cupy: Any, cache: KVCacheManager) -> None:
    """Half-way through the sequences: the first is right, the second does not have that many tokens."""
    stream = cupy.cuda.Stream(non_blocking=True)
    captured, ids = Captured(cupy, cache, stream), cache.add_sequence_batch([[1, 2, 3, 4, 5], [6]], stream=stream).ids
    captured.stage(ids)
    wanted = as_it_is(cache, ids.tolist())
    cache.append_tokens(ids, [8, 8], [1, 1])
    with pytest.raises(ValueError, match="first, counts: expected tokens"):
        captured.uploads[1].stage(ids, [0, 3], [6, 1], stream=stream)
    with pytest.raises(ValueError, match="expected up to 3 sequences.*, got 4"):
        captured.stage([*ids.tolist()] * 2)
    captured.graph.launch(stream)
    stream.synchronize()
    captured.check(*wanted)


@pytest.mark.parametrize(
    "mode", ["streamCaptureModeGlobal", "streamCaptureModeThreadLocal", "streamCaptureModeRelaxed"]
)
def test_what_no_graph_can_have_is_refused_and_the_capture_goes_on(cupy: Any, cache: KVCacheManager, mode: str) -> None:
    stream, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    vectors, table = [cupy.full(size, -7, np.int32) for size in (2, 8, 1)], cupy.full((1, 8), -7, np.int32)
    ids = cache.add_sequence_batch([[1, 2, 3]], stream=other).ids
    with pytest.raises(ValueError, match="expected one that is being captured"):
        cache.tables.capture_block_offsets(table, 1, stream=stream)
    cupy.cuda.Device().synchronize()
    gc.collect()
    stream.begin_capture(getattr(cupy.cuda.runtime, mode))
    captured = cache.tables.capture_block_offsets(table, 1, stream=stream)
    for call in (
        lambda: cache.tables.copy_batch_block_csr(*vectors, ids, stream=stream),
        lambda: cache.tables.copy_batch_block_offsets(table, ids, stream=stream),
        lambda: captured.stage(ids, stream=stream),
    ):
        with pytest.raises(
            ValueError, match=r"expected one that is not being captured.* capture_step_tables upload in a graph"
        ):
            call()
    with pytest.raises(ValueError, match="expected one that is being captured"):
        cache.tables.capture_block_offsets(table, 1, stream=other)
    captured.stage(ids, stream=other)  # in a capture of another stream
    graph = stream.end_capture()
    graph.launch(other)
    other.synchronize()
    assert table.get()[0].tolist() == [*cache.block_table(ids).dense()[0].tolist(), *[-1] * 7]
    assert all((vector.get() == -7).all() for vector in vectors)


def test_a_hand_over_that_the_driver_refuses_is_an_error_and_leaves_no_buffer(cupy: Any, cache: KVCacheManager) -> None:
    if not emulated.running():
        pytest.skip("only the emulated driver can be set to fail")
    from tests.emulated import lab

    stream, table = cupy.cuda.Stream(non_blocking=True), cupy.full((1, 8), -7, np.int32)
    step = StepTables(seq_lens=cupy.full(1, -7, np.int32))
    Captured(cupy, cache, cupy.cuda.Stream(non_blocking=True))  # all is loaded
    for call in (
        lambda: cache.tables.capture_block_offsets(table, 1, stream=stream),
        lambda: cache.tables.capture_step_tables(step, 1, stream=stream),
    ):
        stream.begin_capture()
        with lab.driver().failing("launch", lab.OUT_OF_MEMORY), pytest.raises((DeviceError, MemoryError)):
            call()
        captured = call()
        graph = stream.end_capture()
        captured.stage(cache.add_sequence([1, 2]), stream=stream)
        graph.launch(stream)
        cache.verify()
    stream.synchronize()
    assert table.get()[0, 0] >= 0 and step.seq_lens.get()[0] == 2


def test_a_pool_closes_after_its_replays_while_others_capture(cupy: Any) -> None:
    assert not unusable()
    cache = KVCacheManager(LAYOUT, device_blocks=4, host_blocks=4, device="cuda")
    stream, busy = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    captured, sequence = Captured(cupy, cache, stream), cache.add_sequence([1, 2, 3], stream=stream)
    captured.stage(sequence)
    wanted = as_it_is(cache, [sequence])
    busy.begin_capture()
    captured.graph.launch(stream)
    cache.close()
    for upload in captured.uploads:
        upload.close()
    with pytest.raises(PoolClosed):
        captured.stage(sequence)
    busy.end_capture()
    captured.check(*wanted)  # it was done before the buffers went


@pytest.mark.parametrize("then", ["staged", "closed"])
def test_a_hand_over_goes_on_when_the_stream_of_its_replays_was_destroyed(
    cupy: Any, cache: KVCacheManager, then: str
) -> None:
    """A bare handle keeps no stream alive. What was launched there still reads the buffer."""
    if not emulated.running():
        pytest.skip("a driver may do anything with a stream that was destroyed, and one ends the process")
    stream, runtime = cupy.cuda.Stream(non_blocking=True), cupy.cuda.runtime
    captured, ids = Captured(cupy, cache, stream), cache.add_sequence_batch([[1, 2, 3, 4, 5], [6]], stream=stream).ids
    bare = int(runtime.streamCreateWithFlags(runtime.streamNonBlocking))
    wanted = as_it_is(cache, ids.tolist())
    for upload in captured.uploads:
        upload.stage(ids, stream=bare)
    captured.graph.launch(cupy.cuda.Stream.from_external(Stream(bare)))
    runtime.streamDestroy(bare)
    if then == "staged":
        captured.stage(ids[:0])
        captured.check(*wanted)
        captured.graph.launch(stream)
        stream.synchronize()
        captured.check(np.zeros((0, 0), np.int32), expected(cache, [], [], []))
    for upload in captured.uploads:
        upload.close()
    cupy.cuda.Device().synchronize()
    cache.verify()
