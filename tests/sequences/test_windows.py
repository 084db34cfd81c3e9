"""Sliding windows: what goes back and when, what a prefix needs to be reused, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import Engine
from kvpool import IntegrityError, KVCacheManager
from tests import debug
from tests.failing import Rig

Make = Callable[..., Engine]
A = list(range(100, 140))
"""Ten blocks of four tokens."""


def present(engine: Engine, sequence: Any) -> list[int]:
    """Columns of a sequence's row that have a block."""
    return [i for i, block in enumerate(engine.table(sequence)) if block >= 0]


@pytest.mark.parametrize(
    ("window", "sinks", "expected"),
    [
        (None, 0, [0, 1, 2, 3, 4]),
        (1, 0, [3, 4]),  # sees the 18th token only, in block 4; block 3 is the last full one
        (3, 0, [3, 4]),
        (4, 0, [3, 4]),
        (7, 0, [3, 4]),  # token 18 sees 12 and later
        (8, 0, [2, 3, 4]),
        (8, 1, [0, 2, 3, 4]),
        (8, 5, [0, 1, 2, 3, 4]),
        (18, 0, [0, 1, 2, 3, 4]),
        (1 << 30, 0, [0, 1, 2, 3, 4]),
    ],
)
def test_after_a_commit_what_the_next_token_sees_is_there_and_nothing_else(
    make: Make, window: int | None, sinks: int, expected: list[int]
) -> None:
    engine = make(T=4, P=5, window=window, sinks=sinks)
    sequence = engine.add(A[:18])
    assert present(engine, sequence) == [0, 1, 2, 3, 4]
    engine.commit(sequence)
    assert present(engine, sequence) == expected
    assert engine.cache.stats().passed_blocks == engine.free() == 5 - len(expected)


def test_a_prompt_that_has_no_place_in_a_row_is_refused_as_such(make: Make) -> None:
    engine = make(T=4, P=6, window=8, max_sequence_tokens=400)
    with pytest.raises(ValueError, match="max_sequence_tokens=400"):
        engine.add(range(401))


# -- reuse -----------------------------------------------------------------------------------------


def evict(engine: Engine, block: int) -> None:
    """Have another sequence take blocks until this one's content is gone."""
    taken = []
    while block in engine.cached().values():
        taken.append(engine.add([7000 + len(taken)]))
    engine.release(*taken, store=False)


def test_a_missing_sink_ends_what_can_be_reused(make: Make) -> None:
    engine = make(T=4, P=10, window=8, sinks=6)
    engine.seed(A[:32], committed=32, retention=[(4, 8, 10, None)])
    assert engine.reusable(A[:34]) == 32
    evict(engine, engine.cached()[engine.keys(A[:32])[1]])
    assert engine.reusable(A[:34]) == 4


# -- rewind ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 11])
def test_a_rewind_keeps_all_that_the_next_token_sees_or_is_refused(make: Make, window: int) -> None:
    engine = make(T=4, P=10, window=window)
    sequence = engine.commit(engine.add(A[:30]))
    engine.append(sequence, A[30:38])
    before = debug.dump(engine.cache.core.tokens)
    first = present(engine, sequence)[0]
    fewest = max(4 * first + window - 1, 4 * first + 4)
    with pytest.raises(ValueError, match=f"its window has passed; accepted are up to {38 - fewest} tokens"):
        engine.cache.rewind(sequence.id, [39 - fewest])
    assert debug.dump(engine.cache.core.tokens) == before
    engine.rewind(sequence, 8)  # what was not committed can always go
    engine.rewind(sequence, 30 - fewest)
    engine.release(engine.commit(engine.append(sequence, range(9))))


# -- tables, loaders, failures ---------------------------------------------------------------------


def test_a_dense_table_keeps_its_columns_and_csr_leaves_holes_out(make: Make) -> None:
    engine = make(T=4, P=24, window=8, sinks=3)
    sequences = [engine.commit(engine.add([i, *A[:n]])) for i, n in enumerate((29, 2, 20))]
    ids = [one.id for one in sequences]
    table = engine.cache.block_table(ids)
    dense, csr = table.dense(), table.csr()
    assert (dense[0] >= 0).tolist() == [True] + [False] * 4 + [True] * 3
    assert csr.indptr.tolist() == [0, 4, 5, 9] and csr.last_page_len.tolist() == [2, 3, 1]
    assert csr.indices.tolist() == dense[dense >= 0].tolist()
    given = [np.full(len(part), 77, np.int32) for part in csr]
    engine.cache.copy_batch_block_csr(*given, ids)
    for found, part in zip(given, csr, strict=True):
        np.testing.assert_array_equal(found, part)
    target = np.full((3, 9), 77, np.int32)
    engine.cache.copy_batch_block_offsets(target, ids, scale=10)
    np.testing.assert_array_equal(target[:, :8], np.where(dense < 0, -1, dense * 10))
    assert (target[:, 8] == -1).all()


def test_a_lost_block_fails_the_sequences_that_hold_it_and_no_others() -> None:
    rig = Rig(8, 8, window=4)
    rig.seed(A[:8], committed=8)
    other = rig.commit(rig.add(range(24)))
    assert present(rig, other) == [5]
    rig.release(rig.add(range(500, 527)), store=False)  # all but the window of the other goes to the host
    rig.device.arm(lambda place: True)
    with pytest.raises(Exception, match="lost a block"):
        rig.cache.block_table(rig.cache.add_sequence(rig.prompt(A[:9])))
    rig.device.arm()
    rig.append(other, [1, 2])
    rig.cache.release([int(i) for i in rig.cache.core.live()])
    rig.cache.verify()
    rig.cache.close()


# -- what is checked -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"window": 0}, ValueError, "window=0"),
        ({"window": -4}, ValueError, "window=-4"),
        ({"window": 4.0}, TypeError, "window=4.0"),
        ({"window": True}, TypeError, "window=True"),
        ({"window": 8, "sinks": -1}, ValueError, "sinks=-1"),
        ({"sinks": 3}, ValueError, "sinks=3: accepted is 0 without a window"),
    ],
)
def test_windows_that_make_no_sense_are_refused(
    make: Make, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        KVCacheManager(make().cache.layout, device_blocks=4, device="cpu", **options)


def test_verify_finds_a_window_that_has_passed_too_much(make: Make) -> None:
    engine = make(T=4, P=24, window=6)
    sequence = engine.commit(engine.add(A[:20]))
    row, state = sequence.id & 0xFFFFFFFF, engine.cache.core.tokens
    kept, first = state.table[row, 3], state.sequences["first"][row]
    state.table[row, 3] = -1
    with pytest.raises(IntegrityError, match="table: row"):
        engine.cache.verify()
    state.sequences["first"][row] = 4
    with pytest.raises(IntegrityError, match="window: sequence"):
        engine.cache.verify()
    state.table[row, 3], state.sequences["first"][row] = kept, first


def test_a_duplicate_that_its_window_has_passed_is_not_published(make: Make) -> None:
    engine = make(P=24, window=8)
    one, two = engine.add(A[:20]), engine.add(A[:20])
    engine.commit(one)
    engine.commit(two)
    assert present(engine, two) == [3, 4]
    engine.release(one, store=False)
    assert engine.reusable(A[:21]) == 12
    engine.append(two, A[20:24])
    engine.commit(two)
    assert engine.reusable(A[:25]) == 24 and len(engine.cached()) == 6


def test_what_is_cached_behind_a_gap_is_not_claimed(make: Make) -> None:
    engine = make(P=12, window=8)
    engine.seed(A[:24], committed=24)
    engine.cache.forget(engine.prompt(A[:24]).keys[4:5])
    planned = engine.cache.plan_batch([A[:25]])
    engine.cache.verify()
    assert planned.admitted == 1 and engine.add(A[:25]).cached == 16
