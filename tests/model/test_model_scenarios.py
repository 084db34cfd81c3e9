"""The scenarios with known numbers, run on the model alone: the judge is judged first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from .batches import check_ranges, range_of
from .model import Model
from .tiers import LeaseExpired, OutOfBlocks, PoolBusy, Prompt, UnknownSequence


class Clock:
    """Milliseconds that tests set."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def model(T: int = 4, P: int = 8, S: int = 0, **options: object) -> Model:
    return Model(tokens_per_block=T, device_blocks=P, host_blocks=S, **options)  # type: ignore[arg-type]


def prompt(*tokens: int, **names: object) -> Prompt:
    return Prompt(tuple(tokens), **names)  # type: ignore[arg-type]


def add(pool: Model, tokens: Sequence[int], **options: object) -> tuple[int, int]:
    """(sequence, cached tokens)."""
    admitted = pool.add_sequence(Prompt(tuple(tokens)), **options)
    pool.check()
    return admitted.id, admitted.match.tokens


def finish(pool: Model, seq: int, *, committed: int | None = None, store: bool = True) -> None:
    """Commit all but the last token, then release."""
    length = len(pool.sequences[seq].items)
    counts = max(length - 1, pool.sequences[seq].committed) if committed is None else committed
    pool.commit([seq], [counts])
    pool.check()
    pool.release([seq], store=store)
    pool.check()


def seed(pool: Model, tokens: Sequence[int], **options: object) -> int:
    seq, cached = add(pool, tokens, **options)
    finish(pool, seq)
    return cached


def cached(pool: Model, tokens: Sequence[int]) -> int:
    return pool.match_prefix(Prompt(tuple(tokens))).tokens


def test_empty_blocks_go_first_then_the_lowest_priority() -> None:
    pool = model(P=6, S=2)
    seed(pool, [*range(9)])
    seed(pool, [*range(100, 105)], retention=[(0, None, 5, None)])
    assert pool.free("device") == 6 and pool.free("host") == 2
    low = pool.cached("device")[((None, None), prompt(*range(100, 104)).items)]
    assert pool.order("device")[3] == low, "three empty blocks, then priority 5"
    add(pool, [*range(200, 216)])
    assert pool.cached("host") == {}, "neither empty blocks nor priority 5 are offloaded"
    add(pool, [300])
    assert len(pool.cached("host")) == 1


def test_leaves_age_first() -> None:
    pool = model(P=4)
    seed(pool, [*range(9)])
    add(pool, [50, 51, 52, 53, 54, 55])
    assert cached(pool, range(9)) == 8
    add(pool, [60])
    assert cached(pool, range(9)) == 4


def test_ttl_falls_back_to_the_default_list() -> None:
    clock = Clock()
    pool = model(P=4, clock=clock)
    clock.now = 5
    seed(pool, [*range(5)], retention=[(0, 4, 80, 3)])
    seed(pool, [*range(10, 15)], retention=[(0, 4, 50, 8)])
    b1, b2 = (pool.cached("device")[c] for c in pool.rows)
    assert pool.refresh() == 0 and pool.order("device")[-2:] == [b2, b1]
    assert pool.refresh(9) == 1 and pool.order("device")[-2:] == [b1, b2]
    assert pool.refresh(13) == 1 and pool.order("device")[-2:] == [b1, b2]
    assert pool.refresh(99) == 0


@pytest.mark.parametrize(
    ("T", "length", "ranges", "expected"),
    [
        (64, 256, [(0, 64, 80), (64, 128, 50)], [80, 50, 35, 35]),
        (32, 127, [(0, 63, 80), (63, 127, 30)], [80, 80, 30, 30]),
        (32, 128, [(0, 1, 80), (1, 2, 5)], [80, 35, 35, 35]),
        (64, 192, [(65, 129, 30), (0, 65, 80)], [80, 80, 30]),
    ],
)
def test_a_block_takes_the_range_of_its_first_token(
    T: int, length: int, ranges: list[tuple[int, int, int]], expected: list[int]
) -> None:
    pool = model(T=T, P=8)
    seq, _ = add(pool, range(length), retention=[(*r, None) for r in ranges])
    assert [block.priority for block in pool.sequences[seq].blocks] == expected


def test_bad_ranges_are_refused() -> None:
    for ranges in ([(0, None), (4, 8)], [(4, 4)], [(0, 5), (4, 8)], [(-1, 4)]):
        with pytest.raises(ValueError, match="retention"):
            check_ranges([(*r, 80, None) for r in ranges])
    assert range_of(7, check_ranges([(4, None, 9, 1), (0, 4, 80, None)])) == (9, 1)


def test_growth_and_rewind_take_and_return_blocks() -> None:
    pool = model(T=64, P=16)
    seq, _ = add(pool, range(575))
    blocks = pool.sequences[seq].blocks
    assert len(blocks) == 9
    pool.append_tokens([seq], [[1, 2]])
    tenth = blocks[-1].id
    pool.append_tokens([seq], [[3, 4, 5]])
    assert len(blocks) == 10
    pool.rewind([seq], [4])
    assert len(blocks) == 9 and pool.order("device")[0] == tenth


def test_the_next_steps_need_is_known() -> None:
    pool = model(T=16, P=64)
    assert pool.blocks_needed(Prompt(tuple(range(136)))) == 9
    assert pool.blocks_needed(Prompt(tuple(range(512)))) == 32
    seq, _ = add(pool, range(302))
    assert pool.blocks_needed(sequences=[seq], new_tokens=5) == 1
    pool = model(T=16, P=16)
    seed(pool, range(64))
    assert pool.match_prefix(Prompt(tuple(range(64)))).device_tokens == 48
    assert pool.blocks_needed(Prompt(tuple(range(64)))) == 4


def test_errors_change_nothing() -> None:
    pool = model(P=4)
    seed(pool, range(9))
    before = (pool.order("device"), pool.cached("device"), dict(pool.counts))
    for call, error in (
        (lambda: pool.add_sequence(Prompt(tuple(range(17)))), ValueError),
        (lambda: pool.add_sequence_batch([prompt(1), prompt(*range(16))]), OutOfBlocks),
        (lambda: pool.release([7]), UnknownSequence),
        (lambda: pool.add_sequence(prompt()), ValueError),
    ):
        with pytest.raises(error):
            call()
        pool.check()
        assert (pool.order("device"), pool.cached("device"), dict(pool.counts)) == before


def test_reuse_counts_whole_blocks_and_copied_tokens() -> None:
    pool = model(P=8)
    seq, got = add(pool, range(9))
    assert (got, pool.free("device")) == (0, 5)
    pool.append_tokens([seq], [[9, 10]])
    finish(pool, seq)
    assert pool.free("device") == 8
    seq, got = add(pool, range(9))
    assert (got, pool.free("device")) == (8, 5)
    finish(pool, seq)
    assert cached(pool, range(5)) == 4 and cached(pool, [0]) == 0
    assert cached(pool, range(10)) == 9 and cached(pool, [*range(10), 11]) == 10


def test_namespaces_never_match_each_other() -> None:
    pool = model(P=16)
    extra = (1, 1, 2, 2, 3, 3, 0, 0, 0)
    seq = pool.add_sequence(prompt(*range(9), extra_ids=extra)).id
    finish(pool, seq)
    for ids, tokens in ((extra, 8), ((4, 4, 5, 5, 6, 6, 0, 0, 0), 0), ((1, 1, 2, 2, 4, 4, 0, 0, 0), 4)):
        assert pool.match_prefix(prompt(*range(9), extra_ids=ids)).tokens == tokens
    for names in ({"salt": "A"}, {"adapter_id": 1}, {}):
        assert pool.match_prefix(prompt(*range(9), **names)).tokens == 0
    seq = pool.add_sequence(prompt(*range(9), salt="A")).id
    finish(pool, seq)
    assert pool.match_prefix(prompt(*range(9), salt="A")).tokens == 8
    assert pool.match_prefix(prompt(*range(9), salt="B")).tokens == 0


def test_a_partial_match_copies_what_is_shared() -> None:
    pool = model(T=8, P=8)
    seed(pool, range(17))
    seq, got = add(pool, [*range(11), 99])
    assert got == 11 and pool.counts["copied_blocks"] == 1
    assert pool.sequences[seq].blocks[1].id not in pool.cached("device").values()


def test_a_partial_source_is_no_reason_to_fail() -> None:
    pool = model(P=3)
    seq, _ = add(pool, range(9))
    finish(pool, seq, committed=9)
    assert pool.free("device") == 3
    seq, got = add(pool, range(9))
    assert got == 8 and pool.counts["copied_blocks"] == 0
    pool = model(P=3)
    seq, _ = add(pool, range(10))
    finish(pool, seq)
    seq, got = add(pool, [*range(9), 42])
    assert got == 9 and pool.counts["copied_blocks"] == 0, "the source itself, shortened"


def test_release_without_storing_leaves_nothing() -> None:
    pool = model()
    seq, _ = add(pool, range(9))
    finish(pool, seq, store=False)
    assert cached(pool, range(9)) == 0 and pool.free("device") == 8
    assert pool.cached("device") == {}


def test_rewind_into_a_shared_block_copies_it() -> None:
    pool = model()
    one, _ = add(pool, range(12, 17))
    pool.commit([one], [4])
    two, got = add(pool, range(12, 17))
    assert got == 4
    shared = pool.sequences[one].blocks[0]
    pool.rewind([one], [3])
    pool.check()
    assert pool.sequences[one].blocks[0] is not shared
    assert pool.sequences[two].blocks[0] is shared
    pool.rewind([two], [3])
    pool.check()
    assert pool.cached("device") == {}, "the sole holder un-publishes"


def test_a_duplicate_is_published_when_the_first_copy_is_gone() -> None:
    pool = model(P=5)
    one, _ = add(pool, range(5))
    two, _ = add(pool, range(5))
    pool.commit([one, two])
    finish(pool, one, committed=5)
    add(pool, range(100, 112))
    assert cached(pool, range(5)) == 0
    pool.commit([two])
    pool.check()
    assert cached(pool, range(5)) == 4


def test_priorities_decide_who_stays() -> None:
    pool = model(P=4)
    seed(pool, range(8), retention=[(0, 4, 90, None), (4, 8, 10, None)])
    seed(pool, range(10, 18))
    seed(pool, range(20, 28), retention=[(0, None, 20, None)], decode_priority=20)
    assert seed(pool, range(10, 18)) == 4
    assert seed(pool, range(8)) == 4
    assert cached(pool, range(20, 28)) == 0


def test_priority_with_ttl_loses_to_what_lasts() -> None:
    clock = Clock()
    pool = model(P=8, clock=clock)
    seed(pool, range(12), retention=[(0, None, 80, 10)])
    seed(pool, range(20, 32), retention=[(0, None, 50, None)])
    clock.now = 50
    pool.refresh()
    seed(pool, range(40, 52))
    assert cached(pool, range(20, 32)) == 11


def test_the_important_child_outlives_its_parent_and_the_other_way_round() -> None:
    pool = model(P=5)
    seq, _ = add(pool, range(8), retention=[(0, 4, 0, None), (4, 8, 90, None)])
    finish(pool, seq, committed=8)
    add(pool, range(100, 116))
    assert len(pool.cached("device")) == 1
    pool = model(P=2)
    seq, _ = add(pool, range(8), retention=[(0, 4, 90, None), (4, 8, 0, None)])
    finish(pool, seq, committed=8)
    seq, _ = add(pool, range(50, 54))
    finish(pool, seq, store=False)
    assert cached(pool, [*range(4), 200, 201, 202, 203]) == 4


def test_host_copies_live_by_the_rules() -> None:
    pool = model(P=2, S=2)
    seed(pool, range(5))
    seed(pool, range(10, 18))
    assert len(pool.cached("host")) == 1 and pool.counts["offloaded_blocks"] == 1
    match = pool.match_prefix(Prompt(tuple(range(5))))
    assert (match.device_tokens, match.host_tokens) == (0, 4)
    assert seed(pool, range(5)) == 4
    kept = pool.host.redundant
    assert len(kept) == 1, "the host copy stays, as the first victim"
    seed(pool, range(10, 18))
    assert pool.counts["offloads_saved"] >= 1


def test_low_priority_is_forgotten_and_thirty_is_offloaded() -> None:
    for priority, expected in ((29, 0), (30, 1)):
        pool = model(P=2, S=4)
        seed(pool, range(5), retention=[(0, None, priority, None)])
        add(pool, range(10, 18))
        assert len(pool.cached("host")) == expected
        assert pool.counts["forgotten_device_blocks"] == 1 - expected


def test_prefetch_and_offload_move_without_holding() -> None:
    pool = model(P=4, S=4)
    seed(pool, range(9))
    assert pool.offload(Prompt(tuple(range(8)))) == 2 and pool.free("host") == 4
    pool.check()
    seq, _ = add(pool, range(50, 66))
    assert pool.cached("device") == {} and pool.counts["offloads_saved"] == 2
    pool.release([seq])
    assert pool.prefetch(Prompt(tuple(range(8)))) == 2
    pool.check()
    assert pool.match_prefix(Prompt(tuple(range(9)))).device_tokens == 8
    assert pool.free("device") == 4 and len(pool.host.redundant) == 2


def test_pins_hold_what_nobody_uses() -> None:
    pool = model(P=4, S=1)
    seq, _ = add(pool, range(8))
    lease = pool.pin_blocks([b.id for b in pool.sequences[seq].blocks])
    finish(pool, seq, committed=8)
    assert pool.free("device") == 2
    pool.close_lease(lease)
    assert pool.free("device") == 4
    with pytest.raises(LeaseExpired):
        pool.close_lease(lease)
    (content, other) = pool.contents(Prompt(tuple(range(8))))
    assert pool.find_and_pin_host(content) is None
    pool.offload(Prompt(tuple(range(4))))
    first, second = pool.find_and_pin_host(content), pool.pin([content], owner="r")
    assert pool.free("host") == 0 and pool.revoke("r") == 1 and pool.free("host") == 0
    assert second is not None and first is not None
    with pytest.raises(PoolBusy):
        add(pool, [7])
        pool.reset()
    pool.reset(force=True)
    pool.check()
    assert pool.free("host") == 0 and pool.cached("host") == {}
    pool.close_lease(first)
    pool.check()
    assert pool.free("host") == 1 and pool.order("device") == [0, 1, 2, 3]
    assert other not in pool.rows


def test_a_batch_is_claimed_before_anything_is_evicted() -> None:
    pool = model(P=16)
    seed(pool, range(7))
    a, b = pool.add_sequence_batch([prompt(0, 1, 2, 3, 4, 10), prompt(0, 1, 2, 3, 4, 20)])
    pool.check()
    assert (a.match.tokens, b.match.tokens) == (5, 5)
    first, second = (pool.sequences[x.id].blocks for x in (a, b))
    assert first[0] is second[0] and first[1] is not second[1]
    for order in ((0, 1), (1, 0)):
        pool = model(P=16)
        seed(pool, range(9))
        both = [prompt(*range(7), 10), prompt(*range(9))]
        got = pool.add_sequence_batch([both[i] for i in order])
        assert [x.match.tokens for x in got] == [(7, 8)[i] for i in order]
    pool = model(P=4, S=4)
    seed(pool, range(9))
    promised = pool.match_prefix(Prompt(tuple(range(9))))
    miss, hit = pool.add_sequence_batch([prompt(50), prompt(*range(9))])
    assert (miss.missed_blocks, hit.match.device_tokens) == (1, promised.device_tokens)


def test_a_partial_batch_keeps_the_head_that_fits() -> None:
    pool = model(P=3)
    batch = [prompt(*range(5)), prompt(9), prompt(8), prompt(7)]
    with pytest.raises(OutOfBlocks):
        pool.add_sequence_batch(batch)
    assert len(pool.add_sequence_batch(batch, allow_partial_batch=True)) == 2
    assert pool.add_sequence_batch([]) == []
    pool.check()
