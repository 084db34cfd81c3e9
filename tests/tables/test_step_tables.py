"""Tables of a step: what they say in pools of every kind, on the host and handed over, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import steps
from engine import Engine
from group_engine import GroupsEngine
from kvpool import KVCacheManager, PoolClosed
from kvpool.errors import DeviceError, UnknownSequence
from kvpool.pool import StepTables
from steps import GARBAGE, NAMES, arrays, check, expected, same, spans
from tests.tables.uploads import picture

Make = Callable[..., Engine]
Open = Callable[..., GroupsEngine]


def both(cache: KVCacheManager, out: StepTables, *given: Any, **more: Any) -> list[StepTables]:
    """What the two verbs write into arrays like ``out``."""
    other = StepTables(**{name: None if (array := getattr(out, name)) is None else array.copy() for name in NAMES})
    assert cache.tables.step_tables(*given, out=out, **more) is out
    cache.tables.copy_step_tables(other, *given, **more)
    return [out, other]


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
    same(engine.cache.tables.step_tables(ids), wanted)
    same(engine.cache.tables.step_tables(ids, counts=[1, 4]), wanted)
    same(engine.cache.tables.step_tables(ids, [6, 5]), wanted)
    same(engine.cache.tables.step_tables(finished.id, 6, 1), expected(engine.cache, [finished.id], [6], [1]))
    check(both(engine.cache, arrays(2, 5, 3, 5), ids)[1], wanted)


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


def test_nothing_to_compute_is_written_as_nothing(make: Make) -> None:
    engine = make(T=2, P=8)
    empty = engine.rewind(engine.add([7, 7]), 2)
    for ids, n in (([], 0), ([empty.id], 1)):
        step = engine.cache.tables.step_tables(ids)
        assert step.query_start_loc.tolist() == step.indptr.tolist() == [0] * (n + 1)
        assert step.table.shape == (n, 0) and step.last_page_len.tolist() == step.seq_lens.tolist() == [0] * n
        out = arrays(n + 1, 0, 1, 0)
        for written in both(engine.cache, out, ids):
            assert (
                written.query_start_loc[: n + 1].tolist() == [0] * (n + 1) and (written.seq_lens[n:] == GARBAGE).all()
            )


def test_rows_may_lie_apart_and_parts_of_one_buffer_are_accepted(make: Make) -> None:
    engine = make(T=2, P=16)
    ids = [engine.add(range(5)).id, engine.add([1]).id]
    wide, line = np.full((3, 9), GARBAGE, np.int32), np.full(12, GARBAGE, np.int32)
    out = StepTables(table=wide[:2, 2:6], indptr=line[:3], indices=line[3:7], seq_lens=line[7:9])
    for call in (
        lambda: engine.cache.tables.step_tables(ids, out=out),
        lambda: engine.cache.tables.copy_step_tables(out, ids),
    ):
        wide[:], line[:] = GARBAGE, GARBAGE
        call()
        check(out, expected(engine.cache, ids, [0, 0], [5, 1]))
        assert (wide[:, :2] == GARBAGE).all() and (wide[:, 6:] == GARBAGE).all() and (line[9:] == GARBAGE).all()


@pytest.mark.parametrize("sinks", [0, 1, 5])
def test_blocks_that_a_window_has_passed_are_holes_and_left_out_of_the_pages(make: Make, sinks: int) -> None:
    for seed in range(8):
        print("seed", seed)
        random = np.random.default_rng(seed)
        engine = make(T=4, P=40, window=6, sinks=sinks)
        ids, lengths, committed = [], [], []
        for length in random.integers(1, 40, 3).tolist():
            sequence = engine.add(random.integers(0, 99, length).tolist())
            done = int(random.integers(0, length + 1))
            engine.commit(sequence, done)
            ids.append(sequence.id)
            lengths.append(length)
            committed.append(done)
        first, counts = spans(random, lengths, committed)
        wanted = expected(engine.cache, ids, first, counts)
        same(engine.cache.tables.step_tables(ids, first, counts), wanted)
        assert (wanted["slot_mapping"] >= 0).all()
        for step in both(engine.cache, arrays(4, sum(counts) + 1, 11, 33), ids, first, counts):
            check(step, wanted)
        engine.release(*[engine.live[sequence] for sequence in ids])


def test_tokens_that_a_window_has_passed_have_no_slots(make: Make) -> None:
    engine = make(T=4, P=12, window=6, sinks=2)
    sequence = engine.add(range(30))
    engine.commit(sequence)
    gone = engine.table(sequence).index(-1), len(engine.table(sequence)) - engine.table(sequence)[::-1].index(-1)
    assert gone == (1, 6)
    engine.cache.tables.step_tables(sequence.id, 24, 6)
    for first in (0, 4, 23):
        before = picture(engine)
        for call in (
            lambda first=first: engine.cache.tables.step_tables(sequence.id, first, 1),
            lambda first=first: engine.cache.tables.copy_step_tables(arrays(1, 9, 9, 9), sequence.id, first, 1),
        ):
            with pytest.raises(
                ValueError, match=rf"first: expected 24 or more for sequence {sequence.id}, whose window"
            ):
                call()
        assert picture(engine) == before


def test_each_group_has_tables_of_its_own(open_: Open) -> None:
    engine = open_({}, {"window": 6}, {"kind": "recurrent"}, {"kind": "cross"})
    decoder, two = engine.add(range(21), encoder_tokens=7), engine.add(range(50, 59), encoder_tokens=0)
    engine.commit(decoder, 17)
    ids = [decoder.id, two.id]
    for group in (0, 1):
        wanted = expected(engine.cache, ids, [17, 0], [4, 9], group)
        same(engine.cache.tables.step_tables(ids, group=group), wanted)
        check(both(engine.cache, arrays(2, 13, 6, 9), ids, group=group)[1], wanted)
    # In a group for cross attention the tokens are the encoder's: first they are written, later they are seen.
    for first, counts in (([0, 0], [7, 0]), ([7, 0], [0, 0])):
        wanted = expected(engine.cache, ids, first, counts, 3)
        same(engine.cache.tables.step_tables(ids, first, counts, group=3), wanted)
        check(both(engine.cache, arrays(2, 7, 2, 2), ids, first, counts, group=3)[1], wanted)
    for bad in ({"group": 2}, {}, {"group": 4}, {"group": True}):
        for call in (
            engine.cache.tables.step_tables,
            lambda *given, **more: engine.cache.tables.copy_step_tables(arrays(2, 13, 6, 9), *given, **more),
        ):
            with pytest.raises((ValueError, TypeError), match="group"):
                call(ids, **bad)


def test_beams_share_blocks_until_they_write(make: Make) -> None:
    engine = make(T=4, P=16)
    parent = engine.add(range(6))
    engine.commit(parent)
    forks = engine.cache.fork(parent.id, 2).tolist()
    beams = [parent.id, *forks]
    engine.cache.append_tokens(beams, [1, 2, 3], [1, 1, 1])
    engine.cache.reorder(beams, [1, 1, 2])
    engine.cache.append_tokens(beams, [4, 5, 6], [1, 1, 1])
    step = engine.cache.tables.step_tables(beams, [7] * 3, [1] * 3)
    same(step, expected(engine.cache, beams, [7] * 3, [1] * 3))
    assert len(set(step.slot_mapping.tolist())) == 3 and len(set(step.table[:, 0].tolist())) == 1
    engine.cache.release(forks)


# -- what is refused -----------------------------------------------------------------------------------------

I32 = np.int32
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"slot_mapping": np.zeros(6, I32)}, TypeError, "slot_mapping: expected an int64 array, got int32"),
    ({"seq_lens": np.zeros(2, np.int64)}, TypeError, "seq_lens: expected an int32 array, got int64"),
    ({"query_start_loc": [0, 0, 0]}, TypeError, "query_start_loc.*list"),
    (
        {"table": np.zeros(8, I32)},
        ValueError,
        r"table: expected \[\.\.\., rows, columns\], with one of each at least, got shape \(8,\)",
    ),
    ({"table": np.zeros((1, 2, 4), I32)}, ValueError, r"table: expected \[rows, columns\].*got shape \[1, 2, 4\]"),
    (
        {"table": np.zeros((2, 8), I32)[:, ::2]},
        ValueError,
        r"table: expected columns that follow each other, 4 bytes apart, got strides \(32, 8\)",
    ),
    (
        {"slot_mapping": np.zeros(12, np.int64)[::2]},
        ValueError,
        r"slot_mapping: expected elements that follow each other, 8 bytes apart, got strides \(16,\)",
    ),
    (
        {"slot_mapping": np.frombuffer(bytearray(60), I32)[1:13].view(np.int64)},
        ValueError,
        "slot_mapping: expected an address that is a multiple of 8, got .*",
    ),
    (
        {"indptr": np.broadcast_to(np.zeros(1, I32), 3)},
        ValueError,
        "indptr: expected an array that can be written, got a read-only one",
    ),
    ({"seq_lens": np.zeros(1, I32)}, ValueError, "seq_lens: expected 2 entries or more, got 1"),
    ({"query_start_loc": np.zeros(2, I32)}, ValueError, "query_start_loc: expected 3 entries or more, got 2"),
    ({"last_page_len": np.zeros(0, I32)}, ValueError, "last_page_len: expected 2 entries or more, got 0"),
    ({"indptr": np.zeros(2, I32)}, ValueError, "indptr: expected 3 entries or more, got 2"),
    ({"table": np.zeros((1, 4), I32)}, ValueError, "table: expected 2 rows or more, got 1"),
    ({"table": np.zeros((2, 2), I32)}, ValueError, "table: expected 3 columns or more"),
    ({"slot_mapping": np.zeros(5, np.int64)}, ValueError, "slot_mapping: expected 6 entries or more"),
    ({"indices": np.zeros(3, I32)}, ValueError, "indices: expected 4 entries or more"),
]


@pytest.mark.parametrize(("bad", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_bad_arrays_are_named_and_nothing_is_written(
    make: Make, bad: dict[str, Any], error: type[Exception], message: str
) -> None:
    engine = make(T=2, P=16)
    ids = [engine.add([1]).id, engine.add(range(5)).id]
    good = arrays(2, 6, 4, 4)
    out = StepTables(**{name: bad.get(name, getattr(good, name)) for name in NAMES})
    was = {name: np.array(array) for name, array in bad.items()}
    before = picture(engine)
    for call in (
        lambda: engine.cache.tables.step_tables(ids, out=out),
        lambda: engine.cache.tables.copy_step_tables(out, ids),
    ):
        with pytest.raises(error, match=message):
            call()
        assert picture(engine) == before
        assert all((getattr(good, name) == GARBAGE).all() for name in NAMES)
        assert all(np.array_equal(np.array(array), was[name]) for name, array in bad.items())


def test_arrays_that_share_memory_are_refused(make: Make) -> None:
    engine = make(T=2, P=16)
    sequence, buffer = engine.add(range(5)), np.full(16, GARBAGE, np.int32)
    for pair in (
        {"table": buffer[:8].reshape(2, 4), "indices": buffer[7:]},
        {"seq_lens": buffer[:2], "slot_mapping": buffer[:10].view(np.int64)},
    ):
        with pytest.raises(ValueError, match="expected memory of its own"):
            engine.cache.tables.step_tables(sequence.id, out=StepTables(**pair))
        with pytest.raises(ValueError, match="expected memory of its own"):
            engine.cache.tables.copy_step_tables(StepTables(**pair), sequence.id)
        assert (buffer == GARBAGE).all()


SPANS = [
    ({"first": [0]}, ValueError, "first: expected 2, one for each of the ids, got 1"),
    ({"counts": [1, 1, 1]}, ValueError, "counts: expected 2, one for each of the ids, got 3"),
    ({"first": [0.5, 0]}, TypeError, "first"),
    ({"first": [-1, 0]}, ValueError, "first, counts: expected tokens of sequence .*, which has 1, got others"),
    ({"first": [0, 6]}, ValueError, "which has 5"),
    ({"counts": [0, -1]}, ValueError, "which has 5"),
    ({"first": [0, 3], "counts": [1, 3]}, ValueError, "which has 5"),
    ({"first": [0, 1], "counts": [1, 2**63 - 1]}, ValueError, "which has 5"),
    ({"first": [0, 2**63 - 1], "counts": [1, 2**63 - 1]}, ValueError, "which has 5"),
    ({"first": [0, -(2**63)], "counts": [1, 2**63 - 1]}, ValueError, "which has 5"),
]


@pytest.mark.parametrize(("given", "error", "message"), SPANS)
def test_tokens_that_a_sequence_has_not_are_refused(
    make: Make, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    engine, out = make(T=2, P=16), arrays(2, 9, 9, 9)
    ids = [engine.add([1]).id, engine.add(range(5)).id]
    before = picture(engine)
    for call in (
        lambda: engine.cache.tables.step_tables(ids, **given),
        lambda: engine.cache.tables.step_tables(ids, **given, out=out),
        lambda: engine.cache.tables.copy_step_tables(out, ids, **given),
    ):
        with pytest.raises(error, match=message):
            call()
        assert picture(engine) == before and all((getattr(out, name) == GARBAGE).all() for name in NAMES)


def test_wrong_sequences_are_refused_and_nothing_is_written(make: Make) -> None:
    engine, out = make(T=2, P=16), arrays(4, 9, 9, 9)
    live, gone = engine.add([1]).id, engine.add([2])
    engine.release(gone)
    calls = (
        engine.cache.tables.step_tables,
        lambda ids: engine.cache.tables.step_tables(ids, out=out),
    )
    for ids, error in ([live, live], ValueError), ([live, gone.id], UnknownSequence), (None, TypeError):
        before = picture(engine)
        for call in calls:
            with pytest.raises(error):
                call(ids)
        assert picture(engine) == before and (out.table == GARBAGE).all()
    for wrong in (None, {}, [out.table], tuple(getattr(out, name) for name in NAMES)):
        with pytest.raises(TypeError, match=r"(?s)target: .*StepTables"):
            engine.cache.tables.copy_step_tables(wrong, live)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"(?s)out: .*StepTables"):
        engine.cache.tables.step_tables(live, out=out.table)
    engine.cache.close()
    for ids in ([], [live]):
        for call in calls:
            with pytest.raises(PoolClosed):
                call(ids)


def test_arrays_of_a_step_cannot_be_exchanged() -> None:
    """They are looked at once: another array in the same place would not be seen."""
    out = arrays(1, 1, 1, 1)
    with pytest.raises(AttributeError):
        out.table = np.zeros((1, 1), np.int32)  # type: ignore[misc]


def test_a_sequence_whose_copy_failed_has_no_tables(make: Make) -> None:
    engine = make(T=2, P=16)
    sequence = engine.add([1])
    engine.cache.core.tokens.sequences["failed"][sequence.id & 0xFFFFFFFF] = 1
    for call in (
        lambda: engine.cache.tables.step_tables(sequence.id),
        lambda: engine.cache.tables.copy_step_tables(arrays(1, 1, 1, 1), sequence.id),
    ):
        with pytest.raises(DeviceError, match="lost a block"):
            call()
    engine.cache.core.tokens.sequences["failed"][sequence.id & 0xFFFFFFFF] = 0


def test_a_sequence_that_waits_on_the_host_has_no_tables(make: Make) -> None:
    engine = make(T=2, P=16, S=8)
    sequence = engine.add([1, 2, 3])
    engine.cache.swap_out(sequence.id)
    for call in (
        lambda: engine.cache.tables.step_tables(sequence.id),
        lambda: engine.cache.tables.copy_step_tables(arrays(1, 3, 3, 3), sequence.id),
    ):
        with pytest.raises((ValueError, UnknownSequence), match="swap"):
            call()
    engine.cache.resume(sequence.id)


def test_steps_share_the_module_of_names() -> None:
    assert NAMES == steps.NAMES == tuple(name for name in StepTables.__dataclass_fields__ if not name.startswith("_"))
