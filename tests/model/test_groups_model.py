"""Known numbers of pools of several groups, run on the model alone: the judge is judged first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from .groups import GroupsModel
from .tiers import OutOfBlocks, Prompt

A = list(range(100, 140))
"""Ten blocks of four tokens."""


def pool(*groups: dict[str, Any], T: int = 4, **options: Any) -> GroupsModel:
    return GroupsModel(
        [{"device_blocks": 12, "host_blocks": 0} | group for group in groups], tokens_per_block=T, **options
    )


def add(model: GroupsModel, tokens: Sequence[int], **options: Any) -> tuple[int, int]:
    """(sequence, cached tokens)."""
    admitted = model.add_sequence(Prompt(tuple(tokens)), **options)
    model.check()
    return admitted.id, admitted.match.tokens


def seed(model: GroupsModel, tokens: Sequence[int], **options: Any) -> int:
    seq, cached = add(model, tokens, **options)
    model.commit([seq])
    model.check()
    model.release([seq])
    model.check()
    return cached


def reusable(model: GroupsModel, tokens: Sequence[int]) -> int:
    return model.match_prefix(Prompt(tuple(tokens))).tokens


def columns(model: GroupsModel, g: int, seq: int) -> list[int]:
    return [i for i, block in enumerate(model.groups[g].sequences[seq].blocks) if block is not None]


def free(model: GroupsModel) -> list[int]:
    return [group.free("device") for group in model.groups]


RECURRENT = {"kind": "recurrent"}
CROSS = {"kind": "cross"}


def test_one_answer_is_what_every_group_can_reuse() -> None:
    model = pool({}, {"window": 8}, {"window": 16})
    assert seed(model, A[:20]) == 0
    assert reusable(model, A[:21]) == 20
    for group, block in ((1, 4), (2, 2)):
        content = model.groups[group].contents(Prompt(tuple(A[:20])))[block]
        device = model.groups[group].rows[content].device
        model.groups[group].forget_device(device)
        model.groups[group].shelve(device)
    # Without block 4 the small window ends at 16 tokens, of which the large one lacks block 2: both end at 8.
    assert reusable(model, A[:21]) == 8
    seq, cached = add(model, A[:21])
    assert cached == 8
    assert [columns(model, g, seq) for g in range(3)] == [[0, 1, 2, 3, 4, 5]] * 3


def test_tokens_of_a_part_are_the_least_that_any_group_has() -> None:
    model = pool({}, {"window": 4})
    seed(model, A[:7])
    assert reusable(model, A[:8]) == 7
    other = model.groups[1]
    (tail,) = [block for block in other.every_block() if block.tail]
    other.forget_tail(tail)
    other.shelve(tail)
    assert reusable(model, A[:8]) == 4
    before = free(model)
    seq, cached = add(model, A[:8])
    assert cached == 4
    assert model.groups[0].counts["copied_blocks"] == 0
    model.release([seq], store=False)
    assert free(model) == before


def test_a_part_that_one_group_cannot_afford_is_reused_in_none() -> None:
    model = pool({"device_blocks": 2}, {"device_blocks": 8})
    seed(model, A[:3])
    # Both want the tail; the first group has one block beside it.
    admitted = model.add_sequence_batch([Prompt((*A[:3], 1)), Prompt((*A[:3], 2))])
    model.check()
    assert [one.match.partial_tokens for one in admitted] == [3, 0]
    assert [group.counts["copied_blocks"] for group in model.groups] == [0, 1]
    assert [group.counts["partial_tokens"] for group in model.groups] == [3, 3]


def test_a_batch_that_does_not_fit_in_one_group_leaves_all_as_they_were() -> None:
    model = pool({}, {"device_blocks": 3})
    seed(model, A[:8])
    before = [[group.order("device"), group.cached("device")] for group in model.groups]
    with pytest.raises(OutOfBlocks):
        model.add_sequence_batch([Prompt(tuple(A[:9])), Prompt(tuple(A[20:24]))])
    assert before == [[group.order("device"), group.cached("device")] for group in model.groups]
    assert len(model.add_sequence_batch([Prompt(tuple(A[:9])), Prompt(tuple(A[20:24]))], allow_partial_batch=True)) == 1
    seq = [*model.sequences][0]
    with pytest.raises(OutOfBlocks):
        model.append_tokens([seq], [A[9:20]])
    assert all(len(group.sequences[seq].items) == 9 for group in model.groups)


def test_a_rewind_ends_where_no_window_is_left() -> None:
    model = pool({}, {"window": 8})
    seq, _ = add(model, A[:20])
    model.commit([seq])
    assert columns(model, 1, seq) == [3, 4]
    with pytest.raises(ValueError, match="passed"):
        model.rewind([seq], [2])
    assert all(len(group.sequences[seq].items) == 20 for group in model.groups)


def test_pins_of_all_groups_go_with_their_lease() -> None:
    model = pool({"device_blocks": 5}, {"device_blocks": 7})
    seed(model, A[:9])
    before = free(model)
    lease = model.pin([model.groups[0].contents(Prompt(tuple(A[:8])))[1]])
    assert free(model) == [before[0] - 1, before[1] - 1]
    model.close_lease(lease)
    assert free(model) == before
    lease = model.pin_blocks([0, 5, 6])
    assert [len(group.leases[lease].blocks) for group in model.groups] == [1, 2]
    assert model.revoke("") == 1 and free(model) == before


def test_host_tokens_are_those_of_the_group_that_has_most_there() -> None:
    model = pool({"device_blocks": 5, "host_blocks": 4}, {"device_blocks": 12, "host_blocks": 4})
    seed(model, A[:9])
    seed(model, A[20:38])
    match = model.match_prefix(Prompt(tuple(A[:9])))
    assert (match.device_tokens, match.host_tokens) == (0, 8)
    assert model.groups[1].cached("host") == {}
    assert model.prefetch(Prompt(tuple(A[:9]))) == 2
    assert model.match_prefix(Prompt(tuple(A[:9]))).host_tokens == 0


def test_states_are_kept_at_snapshots_and_at_the_end_only() -> None:
    model = pool(RECURRENT | {"snapshot_tokens": 8})
    seq, _ = add(model, A[:22])  # the last full block before the last token is block 4
    assert columns(model, 0, seq) == [1, 3, 4, 5]
    model.append_tokens([seq], [A[22:25]])
    assert columns(model, 0, seq) == [1, 3, 4, 5, 6], "block 5 ends at 24 tokens, a snapshot"
    assert free(model) == [7]
    model.append_tokens([seq], [A[25:33]])
    assert columns(model, 0, seq) == [1, 3, 4, 5, 7, 8], "column 6 moved on to 7, which is a snapshot"
    model.commit([seq], [31])
    assert columns(model, 0, seq) == [7, 8]
    assert model.groups[0].counts["passed_blocks"] == 4
    assert sorted(len(items) for _, items in model.groups[0].cached("device")) == [8, 16, 20, 24]
    model.release([seq])
    assert [reusable(model, A[:n]) for n in (8, 9, 12, 16, 17, 21, 24, 25, 33)] == [0, 8, 8, 8, 16, 20, 20, 24, 24]


def test_reuse_over_groups_rounds_down_to_a_state_and_never_takes_part_of_a_block() -> None:
    model = pool({}, RECURRENT)
    seed(model, A[:15])
    assert reusable(model, A[:15]) == 12
    assert reusable(model, A[:12]) == 0
    seq, cached = add(model, A[:16])
    assert cached == 12
    assert [columns(model, g, seq) for g in range(2)] == [[0, 1, 2, 3], [2, 3]]


def test_a_state_that_others_hold_stays_where_it_is() -> None:
    model = pool(RECURRENT)
    seq, _ = add(model, A[:8])
    assert columns(model, 0, seq) == [0, 1]
    ((fork,),) = model.fork([seq], 1)
    model.append_tokens([seq], [A[8:9]])
    assert columns(model, 0, seq) == [0, 1, 2] and columns(model, 0, fork) == [0, 1]
    model.append_tokens([fork], [A[8:10]])
    model.commit([seq, fork], [8, 8])
    assert columns(model, 0, seq) == [1, 2]
    model.commit([seq, fork])
    assert columns(model, 0, seq) == columns(model, 0, fork) == [2]
    assert reusable(model, A[:9]) == 4, "the state behind column 1 is not kept"
    model.append_tokens([seq], [A[9:17]])
    assert columns(model, 0, seq) == [4], "nobody else knows the running state"


def test_a_shared_running_state_is_copied_before_it_changes() -> None:
    model = pool(RECURRENT)
    seq, _ = add(model, A[:6])
    ((fork,),) = model.fork([seq], 1)
    assert model.blocks_needed(sequences=[seq, fork], new_tokens=1) == [1]
    model.append_tokens([seq, fork], [[1], [2]])
    assert model.groups[0].counts["copied_blocks"] == 1
    first, second = (model.groups[0].sequences[i].blocks[-1] for i in (seq, fork))
    assert first is not second and first.refs == second.refs == 1


def test_a_rewound_state_moves_back_to_the_last_column() -> None:
    model = pool(RECURRENT)
    seq, _ = add(model, A[:6])
    model.commit([seq], [5])
    model.append_tokens([seq], [A[6:14]])
    (running,) = [block for block in model.groups[0].sequences[seq].blocks if block]
    model.rewind([seq], [6])
    assert model.groups[0].sequences[seq].blocks == [None, running]
    with pytest.raises(ValueError, match="passed"):
        model.rewind([seq], [4])
    model.rewind([seq], [3])
    assert model.groups[0].sequences[seq].blocks == [None, running]
    model.check()


def test_what_the_encoder_gave_is_shared_by_beams_and_goes_with_the_last() -> None:
    model = pool({}, CROSS)
    seq, cached = add(model, A[:6], encoder_tokens=9)
    assert cached == 0 and columns(model, 1, seq) == [0, 1, 2]
    ((beam,),) = model.fork([seq], 1)
    model.append_tokens([seq, beam], [A[6:12], A[6:8]])
    model.commit([seq, beam])
    model.rewind([seq], [1])
    model.reorder([seq, beam], [1, 1])
    assert free(model)[1] == 9
    model.check()
    model.release([seq])
    assert free(model)[1] == 9
    model.release([beam])
    assert free(model)[1] == 12
    again, cached = add(model, A[:9], encoder_tokens=1)
    assert cached == 8, "cross attention has no say in what is reused"
    assert columns(model, 1, again) == [0]
    for options in ({}, {"encoder_tokens": None}):
        with pytest.raises(ValueError, match="encoder_tokens"):
            add(model, A[:3], **options)
