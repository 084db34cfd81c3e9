"""Loaders and imports over groups of layers: each group gets what it lacks, and a prompt is found once all of them have
it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from groups_lab import CROSS, FULL, NARROW, RECURRENT, GroupEngine, Make, T, pins
from groups_lab import make as make
from kvpool import OutOfBlocks
from kvpool.device.cpu import CpuDevice
from kvpool.errors import DeviceError
from kvpool.pool.reservations import Share
from tests.device.faults import FaultyDevice

A = list(range(100, 140))


# -- reservations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("cached", [0, 10, 16])
def test_a_loader_fills_every_group_and_the_next_request_reuses_all_of_it(make: Make, device: str, cached: int) -> None:
    engine = make([12, 12], device=device)
    if cached:
        engine.seed(A[:cached])
    before = engine.free()
    with engine.cache.imports.reserve(A[:22], stream=engine.b) as reservation:
        assert (reservation.tokens, reservation.skip_prefix_n_tokens) == (22, cached)
        engine.load(reservation, A, engine.b)
        reservation.commit()
    engine.cache.verify()
    assert engine.free() == before and engine.reusable(A[:23]) == 22
    engine.release(engine.add(A[:23], cached=22))


@pytest.mark.parametrize("end", ["abort", "revoke", "clear", "exit"])
def test_what_is_not_committed_goes_back_in_every_group(make: Make, end: str) -> None:
    engine = make([12, 12], [4, 4])
    engine.seed(A[:16])
    orders, cached = engine.orders(), engine.cached()
    with engine.cache.imports.reserve(A[:22], owner="gone") as reservation:
        engine.load(reservation, A)
        assert engine.free() == [6, 8] and engine.cached() == cached
        if end == "abort":
            reservation.abort()
        elif end == "revoke":
            assert engine.cache.revoke("gone") == 1
        elif end == "clear":
            engine.cache.clear(force=True)
    assert reservation.closed and engine.free() == [12, 12] and engine.reusable(A[:23]) == (0 if end == "clear" else 16)
    if end != "clear":
        assert engine.cached() == cached
        assert [order["device"][:2] for order in engine.orders()] == [order["device"][:2] for order in orders], (
            "empty, and next"
        )


def test_a_reservation_that_one_group_has_no_room_for_takes_nothing(make: Make) -> None:
    engine = make([12, 5])
    engine.add([7000])
    orders = engine.orders()
    with pytest.raises(OutOfBlocks):
        engine.cache.imports.reserve(A[:18])
    with pytest.raises(
        ValueError, match="prompt: 6 device blocks of group 1 are needed at once, of 5: it can never fit"
    ):
        engine.cache.imports.reserve(A[:22])
    assert engine.orders() == orders and engine.cache.imports.reservations == []


@pytest.mark.parametrize("group", [0, 1])
def test_a_reservation_that_lost_a_copy_in_one_group_can_only_be_aborted(make: Make, group: int) -> None:
    target: list[int] = []

    def fails(call: int, index: int, move: np.ndarray) -> bool:
        return bool(target and target[0] <= move[1] < target[0] + 6)

    engine = make([6, 6], [8, 8], device=FaultyDevice(CpuDevice(), fails))
    engine.seed(A[:8])
    engine.cache.content.offload(engine.cache.block_keys(A[:8]))
    engine.release(engine.add(range(24)), store=False)
    target.append(engine.cache.groups[group].first_device_block)
    with engine.cache.imports.reserve(A[:12]) as reservation:
        with pytest.raises(DeviceError, match="abort it"):
            reservation.commit()
    assert reservation.closed and engine.free() == [6, 6]
    engine.cache.verify()
    assert engine.reusable(A[:9]) == 8, "the host has it still"


def test_several_groups_are_named(make: Make) -> None:
    engine = make([8, 8], [4, 4])
    prompt = engine.cache.block_keys(A[:4])
    with engine.cache.imports.reserve(A[:6]) as reservation:
        (targets,) = engine.cache.imports.load_targets(engine.add(A[:3]))
        calls: list[Callable[[Any], object]] = [
            *(reservation.blocks_of, reservation.slot_mapping_of, targets.blocks_of, targets.slot_mapping_of),
            lambda group: engine.cache.imports.import_blocks(prompt, [bytes(FULL.block_bytes)], group=group),
        ]
        for wrong in (None, 2, -1, "a", 1.0):
            for call in calls:
                with pytest.raises((TypeError, ValueError), match=f"group: .*{wrong!r}"):
                    call(wrong)
        with pytest.raises(ValueError, match="group: expected 0 to 1 where there are several.*got None"):
            reservation.blocks  # noqa: B018
    engine.release(*engine.live)


# -- a store beside the engine -----------------------------------------------------------------------------------------


def served(engine: GroupEngine, filled: int | None) -> Any:
    """What two sequences leave, of which a store has filled the first up to a token (None: without a store)."""
    engine.seed(A[:6])
    prompts, at = [A[:21], A[30:34]], [6, 0]
    ids = engine.cache.add_sequence_batch(prompts, stream=engine.a).ids
    if filled is not None:
        first, other = engine.cache.imports.load_targets(ids, stream=engine.b)
        assert [(part.skip_prefix_n_tokens, part.tokens) for part in (first, other)] == [(6, 21), (0, 4)]
        for g in (0, 1):
            assert first.blocks_of(g).tolist() == engine.cache.block_table(ids[:1], group=g).dense()[0, :6].tolist()
            assert (first.slot_mapping_of(g) >= 0).tolist() == [False] * 6 + [True] * 15
        engine.load(first, A, engine.b)
        at = [max(6, filled), 0]
        engine.cache.commit(ids, at, stream=engine.b)
    for g in (0, 1):
        engine.cache.block_table(ids, engine.a, group=g)
        for sequence, tokens, start in zip(ids.tolist(), prompts, at, strict=True):
            engine.put(g, engine.slots(g, sequence, start, len(tokens)), tokens)
    engine.live.update(zip(ids.tolist(), map(list, prompts), strict=True))
    for sequence, tokens in zip(ids.tolist(), (A[21:24], A[34:39]), strict=True):
        engine.append(sequence, tokens)
    engine.cache.commit(ids)
    tables = [engine.cache.block_table(ids, group=g).dense().tolist() for g in (0, 1)]
    engine.release(*ids.tolist())
    left = tables, engine.cached(), engine.free()
    engine.release(engine.add(A[:25], cached=24))
    return left


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("filled", [0, 6, 7, 12, 21])
def test_sequences_go_on_the_same_in_every_group_whether_or_not_a_store_took_part(
    make: Make, device: str, filled: int
) -> None:
    plain, stored = (served(make([14, 14], device=device), at) for at in (None, filled))
    assert plain == stored


def test_cross_attention_has_slots_for_the_encoder_that_are_never_left_out(make: Make) -> None:
    engine = make([12, 12], groups=[CROSS, FULL])
    sequence = engine.add(A[:10], encoder_tokens=7)
    engine.cache.commit(sequence)
    (load_targets,) = engine.cache.imports.load_targets(sequence)
    assert (
        load_targets.skip_prefix_n_tokens == load_targets.tokens == 10 and (load_targets.slot_mapping_of(1) == -1).all()
    )
    table = engine.cache.block_table(sequence, group=0).dense()[0]
    assert load_targets.slot_mapping_of(0).tolist() == [table[i // T] * T + i % T for i in range(7)]
    engine.release(sequence)
    with engine.cache.imports.reserve(A[:14], encoder_tokens=37) as reservation:
        assert reservation.tokens == 14 and reservation.skip_prefix_n_tokens == 10
        assert len(reservation.blocks_of(0)) == 10 and reservation.slot_mapping_of(0).shape == (37,)
        assert (reservation.slot_mapping_of(0) >= 0).all() and (reservation.slot_mapping_of(1) >= 0).sum() == 4
        engine.load(reservation, A)
        reservation.commit()
    assert engine.free() == [12, 12] and engine.reusable(A[:15]) == 14
    with engine.cache.imports.reserve(A[:14], encoder_tokens=0) as reservation:
        assert reservation.blocks_of(0).shape == reservation.slot_mapping_of(0).shape == (0,)


def test_the_length_of_an_encoder_is_given_exactly_where_there_is_cross_attention(make: Make) -> None:
    with pytest.raises(ValueError, match="encoder_tokens: expected None.*got 3"):
        make([8, 8]).cache.imports.reserve(A[:4], encoder_tokens=3)
    cache = make([8, 8], groups=[CROSS, FULL]).cache
    for wrong in (None, -1, "x", [1, 2]):
        with pytest.raises((TypeError, ValueError), match="encoder_tokens"):
            cache.imports.reserve(A[:4], encoder_tokens=wrong)
    for call in (cache.imports.reserve, cache.add_sequence):
        with pytest.raises(ValueError, match="group 0 .* it can never fit"):
            call(A[:4], encoder_tokens=2**31 - 1)
    with pytest.raises(ValueError, match="group: expected a group without cross attention, got 0"):
        cache.imports.import_blocks(cache.block_keys(A[:8]), [bytes(CROSS.block_bytes)], group=0)
    assert cache.imports.reservations == []


def test_a_loader_brings_the_states_that_are_kept() -> None:
    share = Share(np.array([-1, 0, -1, 5], np.int32), "recurrent", T, 14, 0)
    assert share.slots().tolist() == [-1] * 7 + [0] + [-1] * 5 + [5], "after 8 and after all 14 tokens"
    assert share._replace(skip=8).slots().tolist() == [-1] * 13 + [5] and share._replace(skip=8).writes(0)[
        :, 0
    ].tolist() == [5]


# -- order -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False], ids=["as it is", "without the wait"])
@pytest.mark.parametrize("group", [0, 1])
def test_without_a_stream_no_group_has_a_block_that_something_enqueued_still_reads(
    group: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process, whose stream the pool cannot know, writes where an evicted block is being offloaded."""
    capacities = [12, 12]
    capacities[group] = 4
    engine = GroupEngine(capacities, [8, 8], device="sim")
    engine.seed(A[:16])
    if not waits:
        monkeypatch.setattr(engine.cache._reservations, "_wait_until_free", lambda _: None)
    elsewhere = engine.sim.create_stream("elsewhere")  # type: ignore[union-attr]
    with engine.cache.imports.reserve(A[20:36]) as reservation:
        engine.put(group, reservation.slot_mapping_of(group), A[20:36], elsewhere)
        engine.sim.synchronize(engine.sim.record(elsewhere))  # type: ignore[union-attr]
    assert (engine.findings() == []) == waits


@pytest.mark.parametrize("group", [0, 1])
def test_a_block_that_an_aborted_loader_is_still_writing_is_overwritten_after_it(make: Make, group: int) -> None:
    engine = make([4, 4], device="sim")
    reservation = engine.cache.imports.reserve(A[:16], stream=engine.b)
    engine.put(group, reservation.slot_mapping_of(group), A[:16], engine.b)
    reservation.abort()
    engine.release(engine.add(A[20:36]))


# -- imports -----------------------------------------------------------------------------------------------------------


def host_block(engine: GroupEngine, g: int, tokens: list[int], i: int) -> bytes:
    """Block ``i`` of a prompt as another pool's host tier has it, parts one after the other."""
    content = b""
    for part, layout in enumerate(engine.cache.groups[g].layouts):
        part_bytes = np.zeros(layout.block_bytes, np.uint8)
        view = part_bytes.view(layout.storage_dtype).reshape(layout.host_shape(1)[1:])
        view = (view.swapaxes(2, 3) if layout.tokens == "HND" else view).view(np.uint8)
        for slot, token_bytes in enumerate(engine.bytes_of(g, part, tokens)[i * T : (i + 1) * T]):
            view[:, :, slot] = token_bytes
        content += part_bytes.tobytes()
    return content


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_an_import_is_found_once_all_groups_have_what_they_need(make: Make, device: str) -> None:
    engine = make([8, 8], [8, 8], device=device)
    prompt = engine.cache.block_keys(A[:17])
    assert (
        engine.cache.imports.import_blocks(prompt, [host_block(engine, 0, A[:17], i) for i in range(4)], group=0) == 4
    )
    assert engine.reusable(A[:17]) == 0
    assert (
        engine.cache.imports.import_blocks(prompt, [host_block(engine, 1, A[:17], i) for i in (2, 3)], first=2, group=1)
        == 2
    )
    engine.cache.verify()
    assert engine.reusable(A[:17]) == 16 and pins(engine.cache) == 0
    assert (
        engine.cache.imports.import_blocks(prompt, [host_block(engine, 1, A[:17], i) for i in (1, 2)], first=1, group=1)
        == 1
    )
    engine.release(engine.add(A[:17], cached=16))


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_states_are_imported_by_the_block_that_precedes_them(make: Make, device: str) -> None:
    engine = make([8, 4], [8, 4], groups=[FULL, RECURRENT], device=device)
    prompt = engine.cache.block_keys(A[:17])
    engine.cache.imports.import_blocks(prompt, [host_block(engine, 0, A[:17], i) for i in range(4)], group=0)
    assert engine.cache.imports.import_blocks(prompt, [bytes(range(24))], first=2, group=1) == 1
    assert engine.reusable(A[:17]) == 12
    assert (engine.cache.memory.host_pools[1][0].view(np.uint8).reshape(4, 24) == np.arange(24)).all(axis=1).sum() == 1
    with engine.cache.pin(prompt.keys[2:3], tier="host") as lease:
        assert lease.groups.tolist() == [0, 1]


def test_a_reset_during_an_import_leaves_no_group_pinned(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make([8, 8], [4, 4])
    for start in (0, 20):
        engine.seed(A[start : start + 16])
        engine.cache.content.offload(engine.cache.block_keys(A[start : start + 16]))
    fill, pinned = engine.cache._writer._fill, []

    def reset_then_fill(*args: Any) -> None:
        engine.cache.verify()
        pinned.append(pins(engine.cache))
        engine.cache.clear()
        fill(*args)

    monkeypatch.setattr(engine.cache._writer, "_fill", reset_then_fill)
    prompt = engine.cache.block_keys([*A[20:28], *range(8)])
    data = [bytes(NARROW.block_bytes)] * 4
    assert engine.cache.imports.import_blocks(prompt, data, group=1) == 0
    assert pinned[0] >= 2 and pins(engine.cache) == 0
    engine.cache.verify()
