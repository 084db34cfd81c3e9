"""Tables of a step: what they say in pools of every kind, on the host and handed over, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import Engine
from group_engine import GroupsEngine
from kvpool import KVCacheManager
from kvpool.pool import StepTables
from steps import GARBAGE, NAMES, arrays, check, expected, same, spans
from tests.tables.conftest import Two
from tests.tables.uploads import picture

Make = Callable[..., Engine]
Open = Callable[..., GroupsEngine]


def both(cache: KVCacheManager, out: StepTables, *given: Any, **more: Any) -> list[StepTables]:
    """What the two verbs write into arrays like ``out``."""
    other = StepTables(**{name: None if (array := getattr(out, name)) is None else array.copy() for name in NAMES})
    assert cache.tables.step_tables(*given, out=out, **more) is out
    cache.tables.copy_step_tables(other, *given, **more)
    return [out, other]


def assert_refused(cache: KVCacheManager, error: Any, message: str, out: StepTables, *given: Any, **more: Any) -> None:
    """Both verbs refuse that, and change nothing."""
    before = picture(cache)
    for call in (
        lambda: cache.tables.step_tables(*given, **more, out=out),
        lambda: cache.tables.copy_step_tables(out, *given, **more),
    ):
        with pytest.raises(error, match=message):
            call()
    assert picture(cache) == before


# -- what they say -------------------------------------------------------------------------------------------


def test_tables_of_a_step_are_those_of_the_reference(make: Make) -> None:
    for seed in range(25):
        print("seed", seed)
        random = np.random.default_rng(seed)
        engine = make(T=int(random.integers(1, 5)), P=80, max_sequences=6)
        lengths = random.integers(1, 14, random.integers(1, 6)).tolist()
        ids = [engine.add(random.integers(0, 99, length).tolist()).id for length in lengths]
        order = random.permutation(len(ids))[: random.integers(0, len(ids) + 1)]
        which, (first, counts) = [ids[i] for i in order], spans(random, [lengths[i] for i in order])
        wanted = expected(engine.cache, which, first, counts)
        same(engine.cache.tables.step_tables(which, first, counts), wanted)
        spare = int(random.integers(0, 3))
        sizes = (
            len(which) + spare,
            sum(counts) + spare,
            wanted["table"].shape[1] + spare,
            len(wanted["indices"]) + spare,
        )
        if min(sizes):
            some = [name for name in NAMES if random.random() < 0.8]
            for step in both(engine.cache, arrays(*sizes, wanted=some), which, first, counts):
                check(step, wanted)


def test_by_default_a_step_computes_what_is_not_committed(make: Make) -> None:
    engine = make(T=4, P=16)
    finished, two = engine.add(range(6)), engine.add(range(10, 19))
    engine.commit(finished)
    engine.append(finished, [7])
    engine.commit(two, 5)
    ids = [finished.id, two.id]
    wanted = expected(engine.cache, ids, [6, 5], [1, 4])
    for given in ({}, {"counts": [1, 4]}, {"first": [6, 5]}):
        same(engine.cache.tables.step_tables(ids, **given), wanted)
    same(engine.cache.tables.step_tables(finished.id, 6, 1), expected(engine.cache, [finished.id], [6], [1]))
    check(both(engine.cache, arrays(2, 5, 3, 5), ids)[1], wanted)
    engine.rewind(finished, 7)
    for none in ([], [finished.id]):
        wanted = expected(engine.cache, none, [0] * len(none), [0] * len(none))
        same(engine.cache.tables.step_tables(none), wanted)
        for written in both(engine.cache, arrays(2, 0, 1, 0), none):
            check(written, wanted)


def test_a_chunk_of_a_prompt_sees_what_is_before_it_and_nothing_after(make: Make) -> None:
    engine = make(T=4, P=16)
    sequence = engine.add(range(14))
    blocks = engine.cache.block_table(sequence.id).dense()[0].tolist()
    for first, count in ((0, 5), (5, 3), (8, 4), (12, 2), (14, 0), (0, 0)):
        step = engine.cache.tables.step_tables(sequence.id, first, count)
        end = first + count
        assert step.slot_mapping.tolist() == [blocks[t // 4] * 4 + t % 4 for t in range(first, end)]
        assert step.seq_lens.tolist() == [end] and step.table.tolist() == [blocks[: -(-end // 4)]]
        assert step.last_page_len.tolist() == [(end - 1) % 4 + 1 if end else 0]
        assert step.indices.tolist() == step.table[0].tolist() and step.indptr.tolist() == [0, -(-end // 4)]


@pytest.mark.parametrize("upload", [False, True])
def test_rows_may_lie_apart_and_parts_of_one_buffer_are_accepted(make: Make, upload: bool) -> None:
    engine = make(T=2, P=16)
    ids = [engine.add(range(5)).id, engine.add([1]).id]
    wide, line = np.full((3, 9), GARBAGE, np.int32), np.full(12, GARBAGE, np.int32)
    out = StepTables(table=wide[:2, 2:6], indptr=line[:3], indices=line[3:7], seq_lens=line[7:9])
    if upload:
        engine.cache.tables.copy_step_tables(out, ids)
    else:
        engine.cache.tables.step_tables(ids, out=out)
    check(out, expected(engine.cache, ids, [0, 0], [5, 1]))
    for untouched in (wide[:, :2], wide[:, 6:], wide[2], line[9:]):
        assert (untouched == GARBAGE).all()


@pytest.mark.parametrize("sinks", [0, 1, 5])
def test_blocks_that_a_window_has_passed_are_holes_and_left_out_of_the_pages(make: Make, sinks: int) -> None:
    for seed in range(8):
        print("seed", seed)
        random = np.random.default_rng(seed)
        engine = make(T=4, P=40, window=6, sinks=sinks)
        lengths = random.integers(1, 40, 3).tolist()
        committed = [int(random.integers(0, length + 1)) for length in lengths]
        sequences = [engine.add(random.integers(0, 99, length).tolist()) for length in lengths]
        for sequence, done in zip(sequences, committed, strict=True):
            engine.commit(sequence, done)
        ids, (first, counts) = [sequence.id for sequence in sequences], spans(random, lengths, committed)
        wanted = expected(engine.cache, ids, first, counts)
        same(engine.cache.tables.step_tables(ids, first, counts), wanted)
        assert (wanted["slot_mapping"] >= 0).all()
        for step in both(engine.cache, arrays(4, sum(counts) + 1, 11, 33), ids, first, counts):
            check(step, wanted)


def test_tokens_that_a_window_has_passed_have_no_slots(make: Make) -> None:
    engine = make(T=4, P=12, window=6, sinks=2)
    sequence = engine.add(range(30))
    engine.commit(sequence)
    assert [column for column, block in enumerate(engine.table(sequence)) if block == -1] == [1, 2, 3, 4, 5]
    engine.cache.tables.step_tables(sequence.id, 24, 6)
    message = rf"first: expected 24 or more for sequence {sequence.id}, whose window"
    for first in (0, 4, 23):
        assert_refused(engine.cache, ValueError, message, arrays(1, 9, 9, 9), sequence.id, first, 1)


def test_each_group_has_tables_of_its_own(open_: Open) -> None:
    engine = open_({}, {"window": 6}, {"kind": "recurrent"}, {"kind": "cross"})
    decoder, two = engine.add(range(21), encoder_tokens=7), engine.add(range(50, 59), encoder_tokens=0)
    engine.commit(decoder, 17)
    ids = [decoder.id, two.id]
    for group, first, counts, given in (
        (0, [17, 0], [4, 9], ()),
        (1, [17, 0], [4, 9], ()),
        # In a group for cross attention the tokens are the encoder's: first they are written, later they are seen.
        (3, [0, 0], [7, 0], ([0, 0], [7, 0])),
        (3, [7, 0], [0, 0], ([7, 0], [0, 0])),
    ):
        wanted = expected(engine.cache, ids, first, counts, group)
        same(engine.cache.tables.step_tables(ids, *given, group=group), wanted)
        check(both(engine.cache, arrays(2, 13, 6, 9), ids, *given, group=group)[1], wanted)
    for bad in ({"group": 2}, {}, {"group": 4}, {"group": True}):
        assert_refused(engine.cache, (ValueError, TypeError), "group", arrays(2, 13, 6, 9), ids, **bad)


# -- what is refused -----------------------------------------------------------------------------------------

I32 = np.int32
APART = "that follow each other, 8 bytes apart, got strides"
REFUSED: list[tuple[str, Any, str]] = [
    ("slot_mapping", np.zeros(6, I32), "slot_mapping: expected an int64 array, got int32"),
    ("seq_lens", np.zeros(2, np.int64), "seq_lens: expected an int32 array, got int64"),
    ("query_start_loc", [0, 0, 0], "query_start_loc.*list"),
    (
        "table",
        np.zeros(8, I32),
        r"table: expected \[\.\.\., rows, columns\], .* got shape \(8,\)",
    ),
    ("table", np.zeros((1, 2, 4), I32), r"table: expected \[rows, columns\].*got shape \[1, 2, 4\]"),
    (
        "table",
        np.zeros((2, 8), I32)[:, ::2],
        "table: expected columns that follow each other, 4 bytes apart",
    ),
    ("slot_mapping", np.zeros(12, np.int64)[::2], rf"slot_mapping: expected elements {APART} \(16,\)"),
    ("slot_mapping", np.frombuffer(bytearray(60), I32)[1:13].view(np.int64), "slot_mapping: .* a multiple of 8, got "),
    (
        "indptr",
        np.broadcast_to(np.zeros(1, I32), 3),
        "indptr: .* that can be written, got a read-only one",
    ),
    *(
        (
            name,
            np.zeros(few, np.int64 if name == "slot_mapping" else I32),
            f"{name}: expected {few + 1} entries or more",
        )
        for name, few in (("seq_lens", 1), ("query_start_loc", 2), ("indptr", 2), ("slot_mapping", 5), ("indices", 3))
    ),
    ("last_page_len", np.zeros(0, I32), "last_page_len: expected 2 entries or more, got 0"),
    ("table", np.zeros((1, 4), I32), "table: expected 2 rows or more, got 1"),
    ("table", np.zeros((2, 2), I32), "table: expected 3 columns or more"),
]


@pytest.mark.parametrize(("name", "bad", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_bad_arrays_are_named_and_nothing_is_written(two: Two, name: str, bad: Any, message: str) -> None:
    (engine, ids), good, was = two, arrays(2, 6, 4, 4), np.array(bad)
    out = StepTables(**{each: bad if each == name else getattr(good, each) for each in NAMES})
    assert_refused(engine.cache, (TypeError, ValueError), message, out, ids)
    assert all((getattr(good, each) == GARBAGE).all() for each in NAMES) and np.array_equal(np.array(bad), was)


def test_arrays_that_share_memory_are_refused(make: Make) -> None:
    engine = make(T=2, P=16)
    sequence, buffer = engine.add(range(5)), np.full(16, GARBAGE, np.int32)
    for pair in (
        {"table": buffer[:8].reshape(2, 4), "indices": buffer[7:]},
        {"seq_lens": buffer[:2], "slot_mapping": buffer[:10].view(np.int64)},
    ):
        assert_refused(engine.cache, ValueError, "expected memory of its own", StepTables(**pair), sequence.id)
        assert (buffer == GARBAGE).all()


SPANS = [
    ({"first": [0]}, "first: expected 2, one for each of the ids, got 1"),
    ({"counts": [1, 1, 1]}, "counts: expected 2, one for each of the ids, got 3"),
    ({"first": [0.5, 0]}, "first"),
    ({"first": [-1, 0]}, "first, counts: expected tokens of sequence .*, which has 1, got others"),
    *(
        ({"first": [0, first], "counts": [1, count]}, "which has 5")
        for first, count in ((6, 0), (0, -1), (3, 3), (1, 2**63 - 1), (2**63 - 1, 2**63 - 1), (-(2**63), 2**63 - 1))
    ),
]


@pytest.mark.parametrize(("given", "message"), SPANS)
def test_tokens_that_a_sequence_has_not_are_refused(two: Two, given: dict[str, Any], message: str) -> None:
    (engine, ids), out = two, arrays(2, 9, 9, 9)
    assert_refused(engine.cache, (TypeError, ValueError), message, out, ids, **given)
    with pytest.raises((TypeError, ValueError), match=message):
        engine.cache.tables.step_tables(ids, **given)
    assert all((getattr(out, name) == GARBAGE).all() for name in NAMES)


def test_what_are_no_step_tables_is_refused(make: Make) -> None:
    engine, out = make(T=2, P=16), arrays(4, 9, 9, 9)
    live = engine.add([1]).id
    for other in (None, {}, [out.table]):
        with pytest.raises(TypeError, match=r"(?s)target: .*StepTables"):
            engine.cache.tables.copy_step_tables(other, live)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"(?s)out: .*StepTables"):
        engine.cache.tables.step_tables(live, out=out.table)
