"""Layer groups: one answer over all of them, every change in all or in none, and what each kind keeps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

from engine import Engine, Make, small_layout
from group_engine import GroupsEngine, Open
from kvpool import BlockLayout, KVCacheManager, LayerGroup, OutOfBlocks
from kvpool.device.cpu import CpuDevice
from kvpool.device.sim import RaceError, SimDevice
from kvpool.errors import DeviceError, IntegrityError
from kvpool.state import records
from kvpool.state.verify import verify_states
from tests import debug
from tests.device.faults import FaultyDevice
from tests.failing import Rig

A = list(range(100, 148))
"""Twelve blocks of four tokens."""
RECURRENT = {"kind": "recurrent"}
CROSS = {"kind": "cross"}


def columns(engine: Any, sequence: Any) -> list[int]:
    """Columns of a sequence's row, in the first group, that have a block or a state."""
    return [i for i, block in enumerate(engine.table(sequence)) if block >= 0]


def test_a_part_that_one_group_has_to_drop_is_reused_in_none(open_: Open) -> None:
    engine = open_({"device_blocks": 2}, {})
    engine.seed(A[:3], committed=3)
    # Both want the tail, and the first group has one block beside it.
    first, second = engine.add_batch([[*A[:3], 1], [*A[:3], 2]])
    assert (first.cached, second.cached) == (3, 0)
    assert [int(state.counters[records.COUNTERS.index("partial_tokens")]) for state in engine.states()] == [3, 3]
    assert [int(state.counters[records.COUNTERS.index("copied_blocks")]) for state in engine.states()] == [0, 1]


@pytest.mark.parametrize("group", [0, 1])
def test_a_sequence_that_lost_a_block_in_one_group_leaves_no_part_of_one_in_any(group: int) -> None:
    """The end that two beams share is copied for the one that writes, and that copy fails in one of the groups."""
    wide = small_layout(4)
    device = FaultyDevice(CpuDevice(), lambda call, index, move: (int(move[0]) >= 8) == bool(group))
    with KVCacheManager(groups=[LayerGroup(wide), LayerGroup(wide)], device_blocks=[8, 8], device=device) as cache:
        first = cache.add_sequence(A[:6])
        cache.commit(first)
        (second,) = cache.fork(first)
        cache.append_tokens(second, [1])
        with pytest.raises(DeviceError, match="lost a block"):
            cache.commit(second)
        place = cache.block_table(first, group=group).dense()[0, 1]
        cache.release(first)  # leaves its end, which the copy would take the place of
        cache.release(second)
        tails = [np.flatnonzero(state.blocks["flags"] & records.TAIL).tolist() for state in cache.core.states]
        assert tails[group] == [place] and cache.match_prefix([*A[:6], 1]).tokens == 6
        cache.verify()
    device.close()


@pytest.mark.parametrize("full", [4, 8])
def test_a_running_state_that_others_can_find_is_not_written_again(open_: Open, full: int) -> None:
    engine = open_(RECURRENT)
    sequence = engine.add(A[: full + 1])
    engine.rewind(sequence, 1)
    engine.commit(sequence)
    (last,) = columns(engine, sequence)
    assert engine.reusable(A[: full + 1]) == full
    engine.append(sequence, [1])
    assert columns(engine, sequence) == [last, last + 1] and engine.reusable(A[: full + 1]) == full
    assert engine.add(A[: full + 1]).cached == full, "and it is the state that it was"


def test_a_rewind_leaves_a_state_to_the_forks_that_hold_it(open_: Open) -> None:
    engine = open_(RECURRENT)
    first = engine.commit(engine.add(A[:5]))
    engine.append(first, A[5:7])
    (second,) = engine.fork(first)
    (shared,) = {*engine.table(first)} - {-1}
    engine.rewind(second, 1)
    assert engine.table(first)[-1] == shared and shared not in engine.table(second)
    engine.check_all()


def test_a_state_that_a_fork_has_published_is_forgotten_before_it_is_written_again(open_: Open) -> None:
    engine = open_(RECURRENT)
    first = engine.add(A[:9])
    (second,) = engine.fork(first)
    engine.commit(second)
    engine.release(second)
    assert engine.reusable(A[:9]) == 8
    engine.rewind(first, 2)
    assert engine.reusable(A[:9]) == 0 and not engine.cached()


def test_the_encoder_is_named_exactly_where_there_is_cross_attention(open_: Open) -> None:
    plain, cross = open_({}, {}).cache, open_({}, CROSS).cache
    sequence, batch = cross.add_sequence(A[:6], encoder_tokens=1), [A[:6], A[:7]]
    before = [debug.dump(state) for state in cross.core.states]
    for call in (
        lambda: plain.add_sequence(A[:6], encoder_tokens=4),
        lambda: cross.add_sequence(A[:6]),
        lambda: cross.blocks_needed(A[:6], group=1),
        lambda: cross.blocks_needed(A[:6], group=0, encoder_tokens=3),
        lambda: cross.blocks_needed(A[:6], group=1, encoder_tokens=-1),
        lambda: cross.blocks_needed(sequences=sequence, group=1, encoder_tokens=3),
        *(
            partial(admit, batch, encoder_tokens=wrong)  # type: ignore[arg-type]
            for admit in (cross.add_sequence_batch, cross.plan_batch)
            for wrong in ([1], [1, -1], [1, 1 << 31], [1, 2.5], "ab")
        ),
    ):
        with pytest.raises((TypeError, ValueError), match="encoder_tokens"):
            call()
    assert [debug.dump(state) for state in cross.core.states] == before
    cross.release(sequence)


# -- one answer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [0, 1])
def test_a_table_that_is_handed_over_on_a_stream_takes_the_sequence_there_in_all_groups(group: int) -> None:
    device = SimDevice(0)
    layers = [LayerGroup(small_layout(4)), LayerGroup(small_layout(4), window=8)]
    with KVCacheManager(groups=layers, device_blocks=[8, 8], device=device, max_sequences=2) as cache:
        sequence = cache.add_sequence(A[:9], stream=device.create_stream("engine"))
        table = np.zeros((1, 4), np.int32)
        cache.tables.copy_batch_block_offsets(table, [sequence], stream=device.create_stream("other"), group=group)
        cache.verify()
        cache.release(sequence)
    device.close()


# ----------------------------------------
# Groups for cross attention: blocks for what an encoder gives, taken once, shared by beams, cached for nobody.


def everything(engine: GroupsEngine) -> list[bytes]:
    """Every byte that a decision depends on, in each group."""
    return [debug.dump(state) for state in engine.states()]


def test_a_batch_that_its_encoders_have_no_room_for_changes_nothing(open_: Open) -> None:
    engine = open_({"device_blocks": 30}, CROSS | {"device_blocks": 4}, RECURRENT | {"device_blocks": 30})
    engine.add(A[:6], encoder_tokens=4)
    before = everything(engine)
    with pytest.raises(OutOfBlocks) as raised:
        engine.cache.add_sequence_batch([A[:6], A[6:12]], encoder_tokens=[8, 8])
    assert (raised.value.group, raised.value.needed, raised.value.free) == (1, 4, 3)
    with pytest.raises(ValueError, match="250 device blocks of group 1 are needed at once, of 4: it can never fit"):
        engine.cache.add_sequence(A[:6], encoder_tokens=999)
    assert everything(engine) == before
    assert (
        engine.cache.add_sequence_batch([A[:6], A[6:12]], encoder_tokens=[8, 8], allow_partial_batch=True).admitted == 1
    )


def test_by_default_a_row_has_room_for_all_that_the_device_has_of_an_encoder(open_: Open) -> None:
    engine = open_({"device_blocks": 4}, CROSS | {"device_blocks": 40}, max_sequence_tokens=None)
    assert engine.cache.blocks_needed(A[:6], encoder_tokens=160, group=1) == 40
    sequence = engine.add(A[:6], encoder_tokens=160)
    assert engine.table(sequence, 1) == list(range(40))


def test_an_encoder_that_fits_on_the_device_but_into_no_row_is_refused_by_its_bound(open_: Open) -> None:
    engine = open_({"device_blocks": 30}, CROSS | {"device_blocks": 30}, max_sequence_tokens=16)
    cache, before = engine.cache, everything(engine)
    for call, length in (
        *((partial(call, A[:6], encoder_tokens=17), 17) for call in (cache.add_sequence, cache.imports.reserve)),
        (partial(cache.add_sequence_batch, [A[:6], A[:6]], encoder_tokens=[16, 99]), 99),
    ):
        with pytest.raises(ValueError, match=f"encoder_tokens={length} passes max_sequence_tokens=16"):
            call()
    assert everything(engine) == before
    admission = cache.add_sequence_batch([A[:6], A[:6]], encoder_tokens=[99, 16], allow_partial_batch=True)
    assert list(admission.refused) == [0] and admission.ids[0] == -1 and admission.admitted == 1


def test_tables_of_an_encoder_are_handed_over_with_its_own_lengths(open_: Open) -> None:
    engine = open_({}, CROSS)
    pair = [engine.add(A[:6], encoder_tokens=9), engine.add(A[:30], encoder_tokens=4)]
    ids, rows = [request.id for request in pair], [engine.table(request, 1) for request in pair]
    target, csr = np.zeros((2, 5), np.int32), [np.zeros(n, np.int32) for n in (3, 4, 2)]
    engine.cache.tables.copy_batch_block_offsets(target, ids, group=1)
    engine.cache.tables.copy_batch_block_csr(*csr, ids, group=1)
    assert target.tolist() == [[*row, *[-1] * (5 - len(row))] for row in rows]
    assert [part.tolist() for part in csr] == [[0, 3, 4], rows[0] + rows[1], [1, 4]]


@pytest.mark.parametrize(
    ("check", "corrupt"),
    [
        ("cross", lambda s, row, b: s.blocks["flags"].__setitem__(b, records.KEYED)),
        ("cross", lambda s, row, b: s.sequences["committed"].__setitem__(row, 1)),
        ("length", lambda s, row, b: s.sequences["length"].__setitem__(row, 4)),
    ],
)
def test_verify_sees_what_an_encoder_may_not_have(open_: Open, check: str, corrupt: Callable[..., object]) -> None:
    engine = open_({}, CROSS)
    sequence = engine.add(A[:6], encoder_tokens=9)
    state = engine.states()[1]
    saved = state.blocks.copy(), state.sequences.copy()
    corrupt(state, sequence.id & 0xFFFFFFFF, engine.table(sequence, 1)[0])
    with pytest.raises(IntegrityError) as raised:
        verify_states(engine.cache.core.states, np.empty(0, np.int64))
    assert raised.value.check == check
    state.blocks[:], state.sequences[:] = saved


# ----------------------------------------
# Recurrent groups: which states are kept, moved, shared, published and given back, and what is refused.

# -- what is kept --------------------------------------------------------------------------------------


def test_a_state_that_a_reader_pins_is_not_moved(open_: Open) -> None:
    engine = open_(RECURRENT)
    sequence = engine.add(A[:4])
    with engine.cache.pin_blocks(engine.table(sequence)):
        engine.append(sequence, A[4:6])
        assert columns(engine, sequence) == [0, 1]


def test_a_state_that_a_reader_pins_is_not_overwritten(open_: Open) -> None:
    """A token is added after those of a block, but a state is another one then."""
    engine = open_(RECURRENT)
    sequence = engine.commit(engine.add(A[:6]))
    (_, block) = engine.cache.tables.state_blocks(sequence.id)[0]
    with engine.cache.pin_blocks([block]):
        promised = engine.block(block).copy()
        assert engine.cache.blocks_needed(sequences=sequence.id, new_tokens=1) == 1
        engine.append(sequence, A[6:7])
        assert (engine.block(block) == promised).all()
        engine.append(sequence, A[7:10])
        assert (engine.block(block) == promised).all()
    engine.finish(sequence)


def test_a_state_goes_back_once_what_follows_it_is_committed(open_: Open) -> None:
    engine = open_(RECURRENT | {"snapshot_tokens": 4})
    sequence = engine.add(A[:14])
    assert columns(engine, sequence) == [0, 1, 2, 3]
    for committed, expected in ((4, [0, 1, 2, 3]), (5, [1, 2, 3]), (8, [1, 2, 3]), (14, [3])):
        engine.commit(sequence, committed)
        assert columns(engine, sequence) == expected
    assert engine.cache.stats().passed_blocks == 3


# -- shortening ----------------------------------------------------------------------------------------


def test_a_rewind_never_passes_what_is_committed(open_: Open) -> None:
    engine = open_({}, RECURRENT)
    sequence = engine.commit(engine.add(A[:10]), 7)
    before = everything(engine)
    with pytest.raises(ValueError, match=r"expected up to 3 tokens .*what was committed has no state before"):
        engine.cache.rewind(sequence.id, [4])
    with pytest.raises(ValueError, match="expected 0 to 10 tokens"):
        engine.cache.rewind(sequence.id, [11])
    assert everything(engine) == before
    engine.rewind(sequence, 3)
    assert len(sequence) == 7


def test_a_rewind_to_a_state_that_others_hold_may_use_what_it_gives_back(open_: Open) -> None:
    engine = open_(RECURRENT | {"snapshot_tokens": 4, "device_blocks": 3})
    sequence = engine.append(engine.commit(engine.add(A[:6])), A[6:13])
    state = engine.table(sequence)[1]
    with engine.cache.pin_blocks(state):
        assert engine.cache.free_blocks == 0
        engine.rewind(sequence, 6)
        assert engine.table(sequence)[1] != state


def test_a_rewind_without_room_for_a_state_that_others_hold_is_refused(open_: Open) -> None:
    engine = open_(RECURRENT | {"device_blocks": 2})
    alone, shared = (engine.append(engine.add(A[i : i + 3]), A[i + 3 : i + 7]) for i in (0, 20))
    engine.fork(shared)
    engine.rewind(alone, 1)
    before = everything(engine)
    with pytest.raises(OutOfBlocks):
        engine.cache.rewind([alone.id, shared.id], [3, 4])
    assert everything(engine) == before


def test_a_path_is_not_kept_without_room_for_the_states_that_others_hold(open_: Open) -> None:
    engine = open_({"device_blocks": 24}, RECURRENT | {"snapshot_tokens": 4, "device_blocks": 12})
    sequence = engine.commit(engine.add(A[:6]))
    engine.draft(sequence, [1, 2, 3, 4, 5, 6, 7, 8], [-1, -1, 1, 2, 2, 4, 5, 6])
    engine.fork(sequence)
    while engine.cache.free_blocks_per_group[1] > 1:
        engine.add([int(engine.cache.free_blocks_per_group[1])])
    before = everything(engine)
    with pytest.raises(OutOfBlocks):
        engine.cache.accept_drafts(sequence.id, 8, [1, 2, 4, 5, 6, 7])
    assert everything(engine) == before


# -- beams -----------------------------------------------------------------------------------------------


def test_a_fork_at_the_end_of_a_column_leaves_the_state_to_both(open_: Open) -> None:
    engine = open_(RECURRENT)
    first = engine.commit(engine.add(A[:7]))
    engine.append(first, A[7:8])
    (second,) = engine.fork(first)
    source = engine.table(first)[1]
    engine.append(first, [1])
    engine.append(second, [2])
    for request in (first, second):
        assert engine.cache.tables.state_blocks(request.id).tolist() == [[source, engine.table(request)[2]]]
        engine.commit(request)
        assert columns(engine, request) == [2]


# -- what engines ask --------------------------------------------------------------------------------------


def test_an_engine_gets_the_places_of_states(open_: Open) -> None:
    engine = open_({}, RECURRENT | {"snapshot_tokens": 8})
    places = partial(engine.cache.tables.state_blocks, group=1)
    first = engine.add(A[:14])
    row = engine.table(first, 1)
    assert row[0] == -1 and min(row[1:]) >= 0 and places([first.id]).tolist() == [[-1, row[3]]]
    for committed, at in ((3, 1), (8, 1), (9, 2), (12, 2), (13, 3)):
        engine.commit(first, committed)
        assert places(first.id).tolist() == [[row[at], row[3]]]
    second = engine.commit(engine.add(A[:3]))
    (block,) = engine.table(second, 1)
    assert places([second.id, first.id]).tolist() == [[block, block], [row[3], row[3]]]
    for group in (0, None, 2):
        with pytest.raises(ValueError, match=f"group: .*{group}"):
            places(first.id, group=group)


def test_states_of_a_batch_are_found_by_the_tokens_of_their_own_sequences() -> None:
    groups = [LayerGroup(small_layout(4)), LayerGroup(small_layout(1), kind="recurrent", snapshot_tokens=4)]
    cache = KVCacheManager(groups=groups, device_blocks=[8, 8], max_sequences=2, device=CpuDevice())
    ids = cache.add_sequence_batch([A[:4], A[4:8]]).ids
    cache.append_tokens(ids, A[8:16], [4, 4])
    cache.commit(ids)
    cache.release(ids)
    assert cache.match_prefix([*A[4:8], *A[12:16], 1]).tokens == 8
    cache.close()


@pytest.mark.parametrize("named", [True, False])
def test_a_state_is_read_after_what_wrote_it_on_the_stream_that_asked(named: bool) -> None:
    device = SimDevice(0, progress=0.0)
    writer, reader = device.create_stream("writer"), device.create_stream("reader")
    layout = BlockLayout(layers=1, kv_heads=1, head_dim=4, tokens_per_block=1)
    groups = [LayerGroup(layout, kind="recurrent")]
    cache = KVCacheManager(groups=groups, tokens_per_block=4, device_blocks=[4], device=device, max_sequences=2)
    sequence = cache.add_sequence(A[:3], stream=writer)
    block = int(cache.tables.state_blocks(sequence)[0, 1])
    device.launch(writer, lambda: cache.memory.device_pool.__setitem__((0, 0, block), 1), writes=[(block, 0, 1)])
    cache.commit(sequence, stream=writer)
    assert cache.tables.state_blocks(sequence, stream=reader if named else None).tolist() == [[block, block]]
    with nullcontext() if named else pytest.raises(RaceError, match="nothing orders two accesses"):
        device.launch(reader, lambda: None, reads=[(block, 0, 1)])
        device.synchronize()
    if named:
        cache.release(sequence)
    cache.close()
    device.close()


# ----------------------------------------
# Sliding windows: what goes back and when, what a prefix needs to be reused, and what is refused.


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
    assert columns(engine, sequence) == [0, 1, 2, 3, 4]
    engine.commit(sequence)
    assert columns(engine, sequence) == expected
    assert engine.cache.stats().passed_blocks == engine.free() == 5 - len(expected)


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
    first = columns(engine, sequence)[0]
    fewest = max(4 * first + window - 1, 4 * first + 4)
    with pytest.raises(ValueError, match=f"expected up to {38 - fewest} tokens .*its window has passed"):
        engine.cache.rewind(sequence.id, [39 - fewest])
    assert debug.dump(engine.cache.core.tokens) == before
    engine.rewind(sequence, 8)  # what was not committed can always go
    engine.rewind(sequence, 30 - fewest)
    engine.release(engine.commit(engine.append(sequence, range(9))))


# -- tables, loaders, failures ---------------------------------------------------------------------


def test_a_dense_table_keeps_its_columns_and_csr_leaves_holes_out(make: Make) -> None:
    engine = make(T=4, P=24, window=8, sinks=3)
    ids = [engine.commit(engine.add([i, *A[:n]])).id for i, n in enumerate((29, 2, 20))]
    dense, csr = engine.cache.block_table(ids).dense(), engine.cache.block_table(ids).csr()
    assert (dense[0] >= 0).tolist() == [True] + [False] * 4 + [True] * 3
    assert csr.indptr.tolist() == [0, 4, 5, 9] and csr.last_page_len.tolist() == [2, 3, 1]
    assert csr.indices.tolist() == dense[dense >= 0].tolist()
    target, outs = np.full((3, 9), 77, np.int32), [np.full(len(part), 77, np.int32) for part in csr]
    engine.cache.tables.copy_batch_block_csr(*outs, ids)
    engine.cache.tables.copy_batch_block_offsets(target, ids, scale=10)
    assert [out.tolist() for out in outs] == [part.tolist() for part in csr]
    np.testing.assert_array_equal(target[:, :8], np.where(dense < 0, -1, dense * 10))


def test_a_lost_block_fails_the_sequences_that_hold_it_and_no_others() -> None:
    rig = Rig(8, 8, window=4)
    rig.seed(A[:8], committed=8)
    other = rig.commit(rig.add(range(24)))
    assert columns(rig, other) == [5]
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


@pytest.mark.parametrize(("window", "last"), [(6, 3), (1, 4)], ids=["seen", "parent of the next block"])
def test_verify_finds_a_window_that_has_passed_too_much(make: Make, window: int, last: int) -> None:
    engine = make(T=4, P=24, window=window)
    sequence = engine.commit(engine.add(A[:20]))
    row, state = sequence.id & 0xFFFFFFFF, engine.cache.core.tokens
    kept, first = state.table[row, last], state.sequences["first"][row]
    state.table[row, last] = -1
    with pytest.raises(IntegrityError, match="table: row"):
        engine.cache.verify()
    state.sequences["first"][row] = last + 1
    with pytest.raises(IntegrityError, match="window: sequence"):
        engine.cache.verify()
    state.table[row, last], state.sequences["first"][row] = kept, first


def test_a_duplicate_that_its_window_has_passed_is_not_published(make: Make) -> None:
    engine = make(P=24, window=8)
    first, two = engine.add(A[:20]), engine.add(A[:20])
    engine.commit(first)
    engine.commit(two)
    assert columns(engine, two) == [3, 4]
    engine.release(first, store=False)
    assert engine.reusable(A[:21]) == 12
    engine.append(two, A[20:24])
    engine.commit(two)
    assert engine.reusable(A[:25]) == 24 and len(engine.cached()) == 6


def test_what_is_cached_after_a_gap_is_not_claimed(make: Make) -> None:
    engine = make(P=12, window=8)
    engine.seed(A[:24], committed=24)
    engine.cache.content.forget(engine.prompt(A[:24]).keys[4:5])
    planned = engine.cache.plan_batch([A[:25]])
    engine.cache.verify()
    assert planned.admitted == 1 and engine.add(A[:25]).cached == 16
