"""Recurrent groups: which states are kept, moved, shared, published and given back, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from group_engine import GroupsEngine
from kvpool import BlockLayout, KVCacheManager, LayerGroup, OutOfBlocks
from kvpool.device.sim import RaceError, SimDevice
from kvpool.state import records
from tests import debug

Open = Callable[..., GroupsEngine]
A = list(range(100, 148))
"""Twelve blocks of four tokens."""
RECURRENT = {"kind": "recurrent"}


def columns(engine: GroupsEngine, sequence: Any, group: int = 0) -> list[int]:
    """Columns of a sequence's row that have a state."""
    return [i for i, block in enumerate(engine.table(sequence, group)) if block >= 0]


def everything(engine: GroupsEngine) -> list[bytes]:
    """Every byte that a decision depends on, in each group."""
    return [debug.dump(state) for state in engine.states()]


# -- what is kept --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [[33], [8, 25], [9, 24], [1, 4, 4, 12, 12], [17, 3, 13], [1] * 33])
def test_a_prompt_in_chunks_keeps_the_snapshots_of_the_whole(open_: Open, chunks: list[int]) -> None:
    engine = open_(RECURRENT | {"snapshot_tokens": 8})
    sequence, done = engine.add(A[: chunks[0]]), chunks[0]
    for count in chunks[1:]:
        engine.append(sequence, A[done : done + count])
        engine.commit(sequence, max(done, 1) - 1)
        done += count
    engine.finish(sequence)
    keys = engine.prompt(A[:33]).keys
    assert [engine.cached().get(keys[i].tobytes()) is not None for i in (1, 3, 5, 7)] == [True] * 4
    assert [engine.reusable(A[:n]) for n in (9, 17, 25, 33)] == [8, 16, 24, 32]


def test_the_running_state_moves_without_a_block_more(open_: Open) -> None:
    engine = open_(RECURRENT | {"device_blocks": 2})
    sequence = engine.add(A[:3])
    (block,) = engine.table(sequence)
    for token in range(3, 40):
        assert engine.cache.blocks_needed(sequences=sequence.id, new_tokens=1) == 0
        engine.append(sequence, [token])
        engine.commit(sequence, len(sequence) - 1)
    assert engine.table(sequence) == [-1] * 9 + [block]
    assert engine.free_blocks() == [1]


def test_a_state_that_a_reader_pins_is_not_moved(open_: Open) -> None:
    engine = open_(RECURRENT)
    sequence = engine.add(A[:4])
    with engine.cache.pin_blocks(engine.table(sequence)):
        engine.append(sequence, A[4:6])
        assert columns(engine, sequence) == [0, 1]


def test_a_state_that_a_reader_pins_is_not_overwritten(open_: Open) -> None:
    """A token is added behind those of a block, but a state is another one then."""
    engine = open_(RECURRENT)
    sequence = engine.commit(engine.add(A[:6]))
    (_, block) = engine.cache.state_blocks(sequence.id)[0]
    with engine.cache.pin_blocks([block]):
        promised = engine.block(block).copy()
        assert engine.cache.blocks_needed(sequences=sequence.id, new_tokens=1) == 1
        engine.append(sequence, A[6:7])
        assert (engine.block(block) == promised).all()
        engine.append(sequence, A[7:10])
        assert (engine.block(block) == promised).all()
    engine.finish(sequence)


def test_a_state_goes_back_once_what_is_behind_it_is_committed(open_: Open) -> None:
    engine = open_(RECURRENT | {"snapshot_tokens": 4})
    sequence = engine.add(A[:14])
    assert columns(engine, sequence) == [0, 1, 2, 3]
    for committed, expected in ((4, [0, 1, 2, 3]), (5, [1, 2, 3]), (8, [1, 2, 3]), (14, [3])):
        engine.commit(sequence, committed)
        assert columns(engine, sequence) == expected
    assert engine.cache.stats().passed_blocks == 3


def test_what_was_not_to_be_stored_is_found_by_nobody(open_: Open) -> None:
    engine = open_(RECURRENT)
    sequence = engine.commit(engine.add(A[:8]))
    engine.release(sequence, store=False)
    assert engine.reusable(A[:9]) == 4, "a commit had passed the state behind four tokens"
    other = engine.commit(engine.add(A[20:28]), 4)
    engine.release(other, store=False)
    assert engine.reusable(A[20:29]) == 0


# -- counting ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_blocks_needed_is_what_is_taken(open_: Open, seed: int) -> None:
    draw = random.Random(seed)
    groups = [
        RECURRENT | {"snapshot_tokens": draw.choice((None, 4, 8, 12)), "device_blocks": 60, "host_blocks": 8}
        for _ in range(2)
    ]
    engine = open_({"device_blocks": 90}, *groups, max_sequence_tokens=256)
    live: list[Any] = []

    for _ in range(60):
        if len(live) < 3:
            tokens = A[: draw.randint(1, 30)]
            expected = [engine.cache.blocks_needed(tokens, group=g) for g in range(3)]
            before = engine.free_blocks()
            live.append(engine.add(tokens))
        else:
            some, count = draw.sample(live, draw.randint(1, 3)), draw.randint(0, 9)
            ids = [one.id for one in some]
            expected = [engine.cache.blocks_needed(sequences=ids, new_tokens=count, group=g) for g in range(3)]
            flat = [draw.randrange(2) for _ in range(count * len(ids))]
            before = engine.free_blocks()
            engine.cache.append_tokens(ids, flat, [count] * len(ids))
            for i, one in enumerate(some):
                engine.appended(one, flat[i * count : i * count + count])
        assert [a - b for a, b in zip(before, engine.free_blocks(), strict=True)] == expected, f"seed {seed}"
        one = draw.choice(live)
        engine.commit(one, draw.randint(int(engine.cache.committed_tokens(one.id)), len(one)))
        if draw.random() < 0.3 or len(one) > 60:
            live.remove(one)
            engine.release(one)
        elif len(live) < 8:
            live += engine.fork(one)


def test_a_prompt_and_what_it_will_decode_are_counted_together(open_: Open) -> None:
    engine = open_(RECURRENT | {"snapshot_tokens": 8})
    assert [engine.cache.blocks_needed(A[:6], new_tokens=n) for n in (0, 2, 3, 11, 26)] == [2, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", range(4))
def test_a_call_without_room_changes_nothing(open_: Open, seed: int) -> None:
    draw = random.Random(seed)
    engine = open_({"device_blocks": 60}, RECURRENT | {"device_blocks": 5, "snapshot_tokens": 4})
    sequence = engine.add(A[:10])
    (fork,) = engine.fork(sequence)
    engine.append(fork, [1])
    assert engine.free_blocks()[1] == 1
    before = everything(engine)
    with pytest.raises(OutOfBlocks) as raised:
        engine.cache.append_tokens([fork.id, sequence.id], [7] * 20, draw.choice(([10, 10], [4, 16])))
    assert (raised.value.group, raised.value.free) == (1, 1)
    with pytest.raises(OutOfBlocks):
        engine.cache.add_sequence(A[20:30])
    assert everything(engine) == before


def test_a_sequence_may_not_pass_the_end_of_its_row(open_: Open) -> None:
    engine = open_(RECURRENT, max_sequence_tokens=16)
    sequence = engine.add(A[:15])
    before = everything(engine)
    with pytest.raises(ValueError, match="would pass max_sequence_tokens=16"):
        engine.cache.append_tokens(sequence.id, [1, 2])
    assert everything(engine) == before
    engine.append(sequence, [1])


# -- shortening ----------------------------------------------------------------------------------------


def test_a_rewind_never_passes_what_is_committed(open_: Open) -> None:
    engine = open_({}, RECURRENT)
    sequence = engine.commit(engine.add(A[:10]), 7)
    before = everything(engine)
    with pytest.raises(ValueError, match=r"what was committed has no state before; accepted are up to 3 tokens"):
        engine.cache.rewind(sequence.id, [4])
    with pytest.raises(ValueError, match="accepted are 0 to 10 tokens"):
        engine.cache.rewind(sequence.id, [11])
    assert everything(engine) == before
    engine.rewind(sequence, 3)
    assert len(sequence) == 7


def test_a_rewind_that_needs_a_copy_without_room_changes_nothing(open_: Open) -> None:
    engine = open_(RECURRENT | {"device_blocks": 2})
    sequence = engine.add(A[:7])
    engine.fork(sequence)
    assert columns(engine, sequence) == [0, 1]
    before = everything(engine)
    with pytest.raises(OutOfBlocks):
        engine.cache.rewind(sequence.id, [1])
    assert everything(engine) == before


@pytest.mark.parametrize("extra", [None, [0, 0, 5, 0, 0, 7, 0, 0, 9, 0, 0, 0]])
def test_tokens_without_a_block_are_known_when_a_state_moves_back_among_them(
    open_: Open, extra: list[int] | None
) -> None:
    engine = open_(RECURRENT)
    sequence = engine.add(A[:12], extra_ids=extra)
    engine.append(sequence, A[12:21])
    engine.rewind(sequence, 18)
    assert columns(engine, sequence) == [0], "the state of column 1 came here"
    engine.append(sequence, [1])
    engine.commit(sequence)
    engine.append(sequence, [2, 3, 4, 5])
    engine.commit(sequence)
    engine.release(sequence)
    tokens, ids = [*A[:3], 1, 2, 3, 4, 5, 0], None if extra is None else [*extra[:3], *[0] * 6]
    assert (
        engine.reusable(tokens, extra_ids=ids) == 8
        and engine.reusable(tokens[:5], extra_ids=None if ids is None else ids[:5]) == 0
    )
    assert engine.reusable(tokens, extra_ids=[1] * 9) == engine.reusable([*A[:8], 0], extra_ids=ids) == 0


def test_what_is_found_after_drafts_is_the_accepted_path(open_: Open) -> None:
    engine = open_({"device_blocks": 24}, RECURRENT | {"snapshot_tokens": 4, "device_blocks": 24})
    sequence = engine.commit(engine.add(A[:6]))
    engine.draft(sequence, [1, 2, 3, 4, 5, 6, 7, 8], [-1, -1, 1, 2, 2, 4, 5, 6])
    (fork,) = engine.fork(sequence)
    engine.keep(sequence, 8, [1, 2, 4, 5, 6, 7])
    engine.commit(sequence)
    engine.release(sequence)
    assert engine.reusable([*A[:6], 2, 3, 5, 6, 7, 8, 0]) == 12
    assert engine.reusable([*A[:6], 1, 2, 3, 4, 5, 6, 0]) == 4
    engine.commit(fork)
    assert engine.reusable([*A[:6], 1, 2, 3, 4, 5, 6, 0]) == 12


def test_a_path_is_not_kept_without_room_for_the_states_that_others_hold(open_: Open) -> None:
    engine = open_({"device_blocks": 24}, RECURRENT | {"snapshot_tokens": 4, "device_blocks": 12})
    sequence = engine.commit(engine.add(A[:6]))
    engine.draft(sequence, [1, 2, 3, 4, 5, 6, 7, 8], [-1, -1, 1, 2, 2, 4, 5, 6])
    engine.fork(sequence)
    while engine.cache.free_blocks[1] > 1:
        engine.add([int(engine.cache.free_blocks[1])])
    before = everything(engine)
    with pytest.raises(OutOfBlocks):
        engine.cache.keep(sequence.id, 8, [1, 2, 4, 5, 6, 7])
    assert everything(engine) == before


# -- beams -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [None, [3] * 6])
def test_beams_take_the_tokens_of_their_parents_along(open_: Open, extra: list[int] | None) -> None:
    engine = open_(RECURRENT | {"device_blocks": 24, "snapshot_tokens": 12})
    first = engine.commit(engine.add(A[:6], extra_ids=extra))
    second, third = engine.fork(first, 2)
    for i, beam in enumerate((first, second, third)):
        engine.append(beam, [i] * 3)
    engine.reorder([first, second, third], [1, 2, 1])
    for i, beam in enumerate((first, second, third)):
        engine.append(beam, [10 + i] * 3)
        engine.commit(beam, 12)
        engine.release(beam)
    found = [[1, 1, 1, 10, 10, 10, 0], [2, 2, 2, 11, 11, 11, 0], [1, 1, 1, 12, 12, 12, 0], [0, 0, 0, 10, 10, 10, 0]]
    ids = None if extra is None else extra + [0] * 7
    assert [engine.reusable([*A[:6], *end], extra_ids=ids) for end in found] == [12, 12, 12, 4]


def test_a_fork_at_the_end_of_a_column_leaves_the_state_to_both(open_: Open) -> None:
    engine = open_(RECURRENT)
    first = engine.commit(engine.add(A[:7]))
    engine.append(first, A[7:8])
    (second,) = engine.fork(first)
    source = engine.table(first)[1]
    engine.append(first, [1])
    engine.append(second, [2])
    for one in (first, second):
        assert engine.cache.state_blocks(one.id).tolist() == [[source, engine.table(one)[2]]]
        engine.commit(one)
        assert columns(engine, one) == [2]


# -- bytes -------------------------------------------------------------------------------------------------


def test_states_come_back_from_the_host_as_they_were_written() -> None:
    parts = [BlockLayout(layers=2, kv_heads=1, head_dim=24, tokens_per_block=1, dtype="uint8", planes=1),
             BlockLayout(layers=1, kv_heads=3, head_dim=8, tokens_per_block=1, order="block_first")]  # fmt: skip
    full = BlockLayout(layers=1, kv_heads=1, head_dim=8, tokens_per_block=4)
    groups = [LayerGroup(full), LayerGroup(parts, kind="recurrent", snapshot_tokens=8)]
    with KVCacheManager(groups=groups, device_blocks=[20, 6], host_blocks=[20, 8], device="cpu") as cache:

        def bytes_of(block: int, part: int) -> Any:
            pool = cache.device_pools[1][part]
            return (pool[block] if parts[part].order == "block_first" else pool[:, :, block]).view(np.uint8)

        sequence = cache.add_sequence(A[:20])
        for block in [b for b in cache.block_table(sequence, group=1).dense()[0].tolist() if b >= 0]:
            for part in range(2):
                bytes_of(block, part)[...] = 16 * part + block + 1
        ids = {n: cache.block_table(sequence, group=1).dense()[0][n // 4 - 1] for n in (8, 16)}
        cache.commit(sequence)
        (fork,) = cache.fork(sequence)
        cache.release([sequence, fork])
        # takes all blocks
        cache.release([cache.add_sequence(range(9)), cache.add_sequence(range(20, 40))], store=False)
        assert cache.match_prefix(A[:19]).host_tokens == 4, "one state"
        for n in (8, 16):
            again = cache.add_sequence(A[: n + 1])
            block, _ = cache.state_blocks(again, group=1)[0].tolist()
            assert cache.cached_tokens(again) == n
            for part in range(2):
                assert (bytes_of(block, part) == 16 * part + ids[n] + 1).all()
            cache.release(again, store=False)
        cache.verify()


@pytest.mark.parametrize("seed", range(4))
def test_every_state_that_is_reused_is_the_one_of_its_prefix(open_: Open, seed: int) -> None:
    draw = random.Random(seed)
    engine = open_(
        {"device_blocks": 30, "host_blocks": 20},
        RECURRENT | {"device_blocks": 9, "host_blocks": 6, "snapshot_tokens": 8},
    )
    documents, reused = [[draw.randrange(2) for _ in range(32)] for _ in range(4)], 0
    for _ in range(40):
        sequence = engine.add(draw.choice(documents)[: draw.randint(1, 32)])
        reused += sequence.cached
        engine.append(sequence, [draw.randrange(2) for _ in range(draw.randint(1, 8))])
        engine.finish(sequence)
    assert reused and engine.cache.core.states[1].counters[records.COUNTERS.index("onboarded_blocks")], (
        f"seed {seed}: nothing came back"
    )


# -- loaders ---------------------------------------------------------------------------------------------


def test_a_reservation_has_the_states_that_will_be_kept_and_can_be_taken_back(open_: Open) -> None:
    engine = open_({}, RECURRENT | {"snapshot_tokens": 8})
    engine.seed(A[:9])
    before, order = engine.free_blocks(), [debug.lists(state)["device"] for state in engine.states()]
    for tokens in (A[:20], A[:9], A[20:30]):
        reservation = engine.cache.reserve(tokens)
        assert reservation.skip_prefix_n_tokens == (8 if tokens[0] == 100 else 0)
        engine.cache.verify()
        reservation.abort()
        assert engine.free_blocks() == before
    assert sorted(order[1]) == sorted(debug.lists(engine.states()[1])["device"])
    reservation = engine.cache.reserve(A[:20])
    row = engine.reserved(reservation, 1)
    assert [i for i, block in enumerate(row) if block >= 0] == [1, 3, 4]
    for side in engine.sides:
        engine.fill(
            side,
            engine.reserved(reservation, side.index),
            engine.expected.of((None, None), [(t, 0) for t in A[:20]]),
            8,
        )
    reservation.commit()
    assert engine.reusable(A[:21]) == 20 and engine.add(A[:21]).cached == 20


# -- what engines ask --------------------------------------------------------------------------------------


def test_an_engine_is_told_where_states_are(open_: Open) -> None:
    engine = open_({}, RECURRENT | {"snapshot_tokens": 8})
    first = engine.add(A[:14])
    row = engine.table(first, 1)
    assert row[0] == -1 and min(row[1:]) >= 0
    assert engine.cache.state_blocks([first.id], group=1).tolist() == [[-1, row[3]]]
    for committed, at in ((3, 1), (8, 1), (9, 2), (12, 2), (13, 3)):
        engine.commit(first, committed)
        assert engine.cache.state_blocks(first.id, group=1).tolist() == [[row[at], row[3]]]
    second = engine.commit(engine.add(A[:3]))
    (block,) = engine.table(second, 1)
    found = engine.cache.state_blocks([second.id, first.id], group=1)
    assert found.dtype == np.int32 and found.tolist() == [[block, block], [row[3], row[3]]]
    for group, text in ((0, "group=0: accepted are recurrent groups"), (None, "group=None"), (2, "group=2")):
        with pytest.raises(ValueError, match=text):
            engine.cache.state_blocks(first.id, group=group)


@pytest.mark.parametrize("named", [True, False])
def test_a_state_is_read_behind_what_wrote_it_on_the_stream_that_asked(named: bool) -> None:
    device = SimDevice(0, progress=0.0)
    writer, reader = device.create_stream("writer"), device.create_stream("reader")
    layout = BlockLayout(layers=1, kv_heads=1, head_dim=4, tokens_per_block=1)
    groups = [LayerGroup(layout, kind="recurrent")]
    cache = KVCacheManager(groups=groups, tokens_per_block=4, device_blocks=[4], device=device, max_sequences=2)
    sequence = cache.add_sequence(A[:3], stream=writer)
    block = int(cache.state_blocks(sequence)[0, 1])
    device.launch(writer, lambda: cache.device_pool.__setitem__((0, 0, block), 1), writes=[(block, 0, 1)])
    cache.commit(sequence, stream=writer)
    assert cache.state_blocks(sequence, stream=reader if named else None).tolist() == [[block, block]]
    with nullcontext() if named else pytest.raises(RaceError, match="nothing orders two accesses"):
        device.launch(reader, lambda: None, reads=[(block, 0, 1)])
        device.synchronize()
    if named:
        cache.release(sequence)
    cache.close()
    device.close()
