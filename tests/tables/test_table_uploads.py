"""Uploads of block tables, whatever their form: which sequences are refused, and what becomes of buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from engine import Engine, small_layout
from kvpool import KVCacheManager, PoolClosed
from kvpool.device.base import Stream
from kvpool.errors import DeviceError, UnknownSequence
from steps import GARBAGE
from tests.tables.conftest import Two
from tests.tables.uploads import FORMS, HOST_STEP, Form, Late, picture, vectors

Make = Callable[..., Engine]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


@pytest.mark.parametrize("form", [*FORMS.values(), HOST_STEP], ids=[*FORMS, "step on the host"])
def test_wrong_sequences_are_refused_and_nothing_is_changed(make: Make, form: Form) -> None:
    engine, stranger = make(T=2, P=16, S=8), make(2, 4)
    live, gone, foreign = engine.add([1]).id, engine.add(range(5)), stranger.add([1]).id
    away, failed = (engine.add(range(10 * n, 10 * n + 3)).id for n in (1, 2))
    engine.release(gone)
    engine.cache.swap_out(away)
    out, untouched = form.targets(3, 4), form.targets(3, 4)
    marks = engine.cache.core.tokens.sequences["failed"]
    refused: list[tuple[Any, Any]] = [
        *((ids, UnknownSequence) for ids in ([live, gone.id], foreign, -1, [live, 2**63 - 1])),
        *((ids, (TypeError, ValueError)) for ids in ([live, live], [1.5], None, [[1]])),
        (away, (ValueError, UnknownSequence)),
        (failed, DeviceError),
    ]
    marks[failed & 0xFFFFFFFF] = 1
    for ids, error in refused:
        before = picture(engine.cache)
        with pytest.raises(error):
            form.call(engine.cache, out, ids)
        assert picture(engine.cache) == before and str(out) == str(untouched)
    marks[failed & 0xFFFFFFFF] = 0
    form.call(engine.cache, out, live)
    engine.cache.close(force=True)
    for ids in (live, []):
        with pytest.raises(PoolClosed):
            form.call(engine.cache, out, ids)
    assert not engine.cache._staging._buffers


def test_sequences_that_outgrow_their_buffer_before_the_snapshot_are_staged_whole(
    make: Make, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    engine = make(T=1, P=1100)
    sequence, out = engine.add([1]), form.targets(1, 1100)
    take, grown = engine.cache._staging.take, []

    def meanwhile(nbytes: int, stream: Stream, user: Any) -> Any:
        buffer = take(nbytes, stream, user)
        if not grown:
            grown.append(engine.cache.append_tokens(sequence.id, range(1050)))
        return buffer

    monkeypatch.setattr(engine.cache.core.device, "in_memory", False)
    monkeypatch.setattr(engine.cache._staging, "take", meanwhile)
    form.call(engine.cache, out, sequence.id)
    form.check(engine.cache, out, [sequence.id])
    engine.cache.rewind(sequence.id, 1050)


@pytest.fixture
def late() -> Late:
    return Late()


@pytest.fixture
def pool(late: Late) -> Iterator[KVCacheManager]:
    with KVCacheManager(small_layout(2), device_blocks=16, host_blocks=0, device=late) as cache:
        yield cache


def test_a_buffer_that_a_failed_hand_over_may_still_read_waits_for_its_event(
    form: Form, late: Late, pool: KVCacheManager
) -> None:
    sequence, out = pool.add_sequence(range(5)), form.targets(1, 3)
    late.refusals = 1
    with pytest.raises(DeviceError, match="staging refused"):
        form.call(pool, out, sequence)
    assert pool.stats().uploads == 1 and not pool._staging._free
    pool.verify()
    form.call(pool, out, sequence)
    form.check(pool, out, [sequence])
    assert len(pool._staging._buffers) == 2


# ----------------------------------------
# Block tables that are handed over as CSR: what arrives, what is refused, and how many uploads the statistics see.


def test_what_arrives_is_the_csr_form_and_the_rest_is_left_alone(make: Make) -> None:
    for seed in range(30):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        engine = make(T=int(rng.integers(1, 4)), P=80, max_sequences=6)
        sequences = [engine.add(rng.integers(0, 99, rng.integers(1, 12)).tolist()) for _ in range(rng.integers(1, 6))]
        engine.rewind(sequences[0], engine.cache.sequence_length(sequences[0].id))
        ids = rng.permutation([request.id for request in sequences])[: rng.integers(0, len(sequences) + 1)]
        expected, spare = engine.cache.block_table(ids).csr(), int(rng.integers(0, 3))
        outs = vectors(*(len(part) + spare for part in expected))
        engine.cache.tables.copy_batch_block_csr(*outs, ids)
        for out, part in zip(outs, expected, strict=True):
            np.testing.assert_array_equal(out, [*part, *[GARBAGE] * spare])


def test_parts_of_one_buffer_are_accepted_where_they_lie_apart(make: Make) -> None:
    engine = make(T=2, P=8)
    sequence, (buffer,) = engine.add(range(5)), vectors(8)
    engine.cache.tables.copy_batch_block_csr(buffer[:2], buffer[3:6], buffer[2:3], sequence.id)
    blocks = engine.cache.block_table(sequence.id).dense()[0]
    assert buffer.tolist() == [0, 3, 1, *blocks, GARBAGE, GARBAGE]


I32 = np.int32
REFUSED: list[tuple[tuple[Any, Any, Any], str]] = [
    ((None, 4, 2), "indptr.*NoneType"),
    ((3, [1], 2), "indices.*list"),
    ((3, 4, np.zeros(2, np.int64)), "last_page_len.*int64"),
    ((np.zeros((1, 3), I32), 4, 2), r"indptr: expected one dimension, got shape \(1, 3\)"),
    ((3, np.zeros(8, I32)[::2], 2), r"indices: .* follow each other, 4 bytes apart, got strides \(8,\)"),
    ((3, 4, np.zeros(2, I32)[::-1]), r"last_page_len: .* follow each other, 4 bytes apart, got strides \(-4,\)"),
    ((np.broadcast_to(np.zeros(3, I32), 3), 4, 2), "indptr: .* that can be written, got a read-only one"),
    ((3, np.frombuffer(bytearray(17), np.uint8)[1:].view(I32), 2), "indices.*multiple of 4"),
    ((2, 4, 2), "indptr: expected 3 entries or more, got 2"),
    ((3, 3, 2), "indices: expected 4 entries or more, of which .* are used at most, got 3"),
    ((3, 4, 1), "last_page_len: expected 2 entries or more, got 1"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_bad_vectors_are_named_and_nothing_is_changed(two: Two, given: Any, message: str) -> None:
    engine, ids = two
    arrays = [vectors(argument)[0] if isinstance(argument, int) else argument for argument in given]
    before, written = picture(engine.cache), [np.array(array) for array in arrays]
    with pytest.raises((TypeError, ValueError), match=message):
        engine.cache.tables.copy_batch_block_csr(*arrays, ids)
    assert picture(engine.cache) == before
    for array, was in zip(arrays, written, strict=True):
        np.testing.assert_array_equal(array, was)


@pytest.mark.parametrize(("first", "second"), list(combinations(("indptr", "indices", "last_page_len"), 2)))
def test_vectors_that_share_memory_are_refused(make: Make, first: str, second: str) -> None:
    engine = make(T=2, P=16)
    sequence, (buffer, other) = engine.add(range(5)), vectors(8, 8)
    parts = {"indptr": buffer[:2], "indices": other, "last_page_len": buffer[2:]}
    before = picture(engine.cache)
    with pytest.raises(ValueError, match="expected memory of its own"):
        engine.cache.tables.copy_batch_block_csr(**{**parts, first: other[:4], second: other[3:]}, ids=sequence.id)
    assert picture(engine.cache) == before and (buffer == GARBAGE).all() and (other == GARBAGE).all()


# -- devices that lag, or fail -------------------------------------------------------------------------------


def test_statistics_count_the_hand_overs_under_way_and_the_most_there_were(late: Late, pool: KVCacheManager) -> None:
    sequence, counts = pool.add_sequence(range(5)), []
    for step in (1, 1, 1, -2, 1, -1, 1, 1, -1, -1, -1):
        if step > 0:
            pool.tables.copy_batch_block_csr(*vectors(2, 3, 1), sequence)
        else:
            late.done.update(event for event, _ in list(pool._staging._retained)[:-step])
        counts.append((pool.stats().uploads, pool.stats().most_uploads))
    # What stats has seen complete is retired by the next upload, from which the count of buffers goes on.
    assert counts[:5] == [(1, 1), (2, 2), (3, 3), (1, 3), (2, 3)]
    assert counts[5:8] == [(1, 3), (2, 3), (3, 3)] and counts[-1][1] == 3
    pool.verify()
    late.done.update(event for event, _ in pool._staging._retained)
    assert pool.stats().uploads == 0
    pool.tables.copy_batch_block_offsets(np.zeros((1, 4), np.int32), sequence)
    assert pool.stats().uploads == 1
    pool.close()
    assert (pool.stats().uploads, pool.stats().most_uploads) == (0, 3)
