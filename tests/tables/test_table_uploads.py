"""Uploads of block tables, whatever their form: which sequences are refused, and what becomes of buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import Engine, open_engine, small_layout
from kvpool import KVCacheManager, PoolClosed
from kvpool.device.base import Stream
from kvpool.errors import DeviceError, UnknownSequence
from tests.tables.uploads import FORMS, Form, Late, picture, vectors

Make = Callable[..., Engine]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


def test_wrong_sequences_are_refused_and_nothing_is_changed(make: Make, form: Form) -> None:
    engine, stranger = make(T=2, P=16), open_engine(2, 4, 0)
    live, gone, foreign = engine.add([1]).id, engine.add(range(5)), stranger.add([1]).id
    engine.release(gone)
    out, untouched = form.targets(3, 4), form.targets(3, 4)
    for ids, error in (
        ([live, live], ValueError),
        ([live, gone.id], UnknownSequence),
        (foreign, UnknownSequence),
        (-1, UnknownSequence),
        ([live, 2**63 - 1], UnknownSequence),
        ([1.5], TypeError),
        (None, TypeError),
        ([[1]], (TypeError, ValueError)),
    ):
        before = picture(engine)
        with pytest.raises(error):  # type: ignore[call-overload]
            form.call(engine.cache, out, ids)
        assert picture(engine) == before and str(out) == str(untouched)
    stranger.cache.close()


def test_a_closed_pool_hands_nothing_over(make: Make, form: Form) -> None:
    engine = make(T=2, P=16)
    sequence, out = engine.add([1]), form.targets(2, 4)
    form.call(engine.cache, out, sequence.id)
    engine.cache.close()
    for ids in (sequence.id, []):
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


def test_a_buffer_that_a_failed_hand_over_may_still_read_waits_for_its_event(form: Form) -> None:
    device = Late()
    cache = KVCacheManager(small_layout(2), device_blocks=16, host_blocks=0, device=device)
    sequence, out = cache.add_sequence(range(5)), form.targets(1, 3)
    device.refusals = 1
    with pytest.raises(DeviceError, match="staging refused"):
        form.call(cache, out, sequence)
    assert cache.stats().uploads == 1 and not cache._staging._free
    cache.verify()
    form.call(cache, out, sequence)
    form.check(cache, out, [sequence])
    assert len(cache._staging._buffers) == 2
    cache.release(sequence)
    cache.close()


# ----------------------------------------
# Block tables that are handed over as CSR: what arrives, what is refused, and how many uploads the statistics see.


GARBAGE = 1234567


def test_what_arrives_is_the_csr_form_and_the_rest_is_left_alone(make: Make) -> None:
    for seed in range(30):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        engine = make(T=int(rng.integers(1, 4)), P=80, max_sequences=6)
        sequences = [engine.add(rng.integers(0, 99, rng.integers(1, 12)).tolist()) for _ in range(rng.integers(1, 6))]
        engine.rewind(sequences[0], len(engine.cache.block_table(sequences[0].id).lengths) - 1)
        ids = rng.permutation([request.id for request in sequences])[: rng.integers(0, len(sequences) + 1)]
        expected = engine.cache.block_table(ids).csr()
        spare = int(rng.integers(0, 3))
        outs = vectors(*(len(part) + spare for part in expected))
        engine.cache.tables.copy_batch_block_csr(*outs, ids)
        for out, part in zip(outs, expected, strict=True):
            np.testing.assert_array_equal(out[: len(part)], part)
            assert (out[len(part) :] == GARBAGE).all()


def test_a_sequence_without_tokens_has_no_blocks_and_no_last_page(make: Make) -> None:
    engine = make(T=2, P=8)
    empty = engine.rewind(engine.add([7, 7]), 2)
    indptr, indices, last = vectors(2, 0, 1)
    engine.cache.tables.copy_batch_block_csr(indptr, indices, last, empty.id)
    assert indptr.tolist() == [0, 0] and last.tolist() == [0]


def test_parts_of_one_buffer_are_accepted_where_they_lie_apart(make: Make) -> None:
    engine = make(T=2, P=8)
    sequence, (buffer,) = engine.add(range(5)), vectors(8)
    engine.cache.tables.copy_batch_block_csr(buffer[:2], buffer[3:6], buffer[2:3], sequence.id)
    blocks = engine.cache.block_table(sequence.id).dense()[0]
    assert buffer.tolist() == [0, 3, 1, *blocks, GARBAGE, GARBAGE]


I32 = np.int32
REFUSED: list[tuple[tuple[Any, Any, Any], type[Exception], str]] = [
    ((None, 4, 2), TypeError, "indptr.*NoneType"),
    ((3, [1], 2), TypeError, "indices.*list"),
    ((3, 4, np.zeros(2, np.int64)), TypeError, "last_page_len.*int64"),
    ((np.zeros((1, 3), I32), 4, 2), ValueError, r"indptr: expected one dimension, got shape \(1, 3\)"),
    (
        (3, np.zeros(8, I32)[::2], 2),
        ValueError,
        r"indices: expected elements that follow each other, 4 bytes apart, got strides \(8,\)",
    ),
    (
        (3, 4, np.zeros(2, I32)[::-1]),
        ValueError,
        r"last_page_len: expected elements that follow each other, 4 bytes apart, got strides \(-4,\)",
    ),
    (
        (np.broadcast_to(np.zeros(3, I32), 3), 4, 2),
        ValueError,
        "indptr: expected an array that can be written, got a read-only one",
    ),
    ((3, np.frombuffer(bytearray(17), np.uint8)[1:].view(I32), 2), ValueError, "indices.*multiple of 4"),
    ((2, 4, 2), ValueError, "indptr: expected 3 entries or more, got 2"),
    ((3, 3, 2), ValueError, "indices: expected 4 entries or more, of which .* are used at most, got 3"),
    ((3, 0, 2), ValueError, "indices: expected 4 entries or more, of which .* are used at most, got 0"),
    ((3, 4, 1), ValueError, "last_page_len: expected 2 entries or more, got 1"),
]


@pytest.mark.parametrize(("given", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_bad_vectors_are_named_and_nothing_is_changed(
    make: Make, given: Any, error: type[Exception], message: str
) -> None:
    engine = make(T=2, P=16)
    ids = [engine.add([1]).id, engine.add(range(5)).id]
    arrays = [vectors(argument)[0] if isinstance(argument, int) else argument for argument in given]
    before, written = picture(engine), [np.array(array) for array in arrays]
    with pytest.raises(error, match=message):
        engine.cache.tables.copy_batch_block_csr(*arrays, ids)
    assert picture(engine) == before
    for array, was in zip(arrays, written, strict=True):
        np.testing.assert_array_equal(array, was)


def test_vectors_that_share_memory_are_refused(make: Make) -> None:
    engine = make(T=2, P=16)
    sequence, (buffer, other) = engine.add(range(5)), vectors(8, 8)
    parts = {"indptr": buffer[:2], "indices": other, "last_page_len": buffer[2:]}
    for name, two in (("indptr", "indices"), ("indices", "last_page_len"), ("indptr", "last_page_len")):
        before = picture(engine)
        with pytest.raises(ValueError, match="expected memory of its own"):
            engine.cache.tables.copy_batch_block_csr(**{**parts, name: other[:4], two: other[3:]}, ids=sequence.id)
        assert picture(engine) == before and (buffer == GARBAGE).all() and (other == GARBAGE).all()


# -- devices that lag, or fail -------------------------------------------------------------------------------


def late(**options: Any) -> tuple[KVCacheManager, Late, int]:
    device = Late()
    cache = KVCacheManager(small_layout(2), device_blocks=16, host_blocks=0, device=device, **options)
    return cache, device, cache.add_sequence(range(5))


def test_statistics_count_the_hand_overs_under_way_and_the_most_there_were() -> None:
    cache, device, sequence = late()
    seen = []
    for step in (1, 1, 1, -2, 1, -1, 1, 1, -1, -1, -1):
        if step > 0:
            cache.tables.copy_batch_block_csr(*vectors(2, 3, 1), sequence)
        else:
            device.done.update(event for event, _ in list(cache._staging._retained)[:-step])
        stats = cache.stats()
        seen.append((stats.uploads, stats.most_uploads))
    # What stats has seen complete is retired by the next upload, from which the count of buffers goes on.
    assert seen[:5] == [(1, 1), (2, 2), (3, 3), (1, 3), (2, 3)]
    assert seen[5:8] == [(1, 3), (2, 3), (3, 3)] and seen[-1][1] == 3
    cache.verify()
    device.done.update(event for event, _ in cache._staging._retained)
    assert cache.stats().uploads == 0
    cache.tables.copy_batch_block_offsets(np.zeros((1, 4), np.int32), sequence)
    assert cache.stats().uploads == 1
    cache.release(sequence)
    cache.close()
    assert (cache.stats().uploads, cache.stats().most_uploads) == (0, 3)


def test_a_device_that_does_everything_at_once_has_nothing_under_way(make: Make) -> None:
    engine = make(T=2, P=8)
    engine.cache.tables.copy_batch_block_csr(*vectors(2, 3, 1), engine.add(range(5)).id)
    stats = engine.cache.stats()
    assert (stats.uploads, stats.most_uploads) == (0, 0)
