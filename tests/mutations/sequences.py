"""Mutations of what verbs do to sequences: admission, growth, forks, drafts, windows, reservations."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_REFUSED = "tests/state/test_scenarios_tiers.py::test_a_refused_batch_lets_go_of_the_sources_of_partial_copies"
_DEADLINES = "tests/holders/test_reservation_deadlines.py::"
_LATE = "tests/state/test_scenarios_tiers.py::test_a_failure_late_in_a_batch_leaves_every_byte_of_state"

MUTATIONS = (
    # -- admission ---------------------------------------------------------------------------------------
    Mutation(
        "the_source_of_a_part_is_not_let_go_of",
        "_unhold_matches",
        "unhold(group, out.source)",
        "pass",
        "A call that raises costs a block for good.",
        (_REFUSED,),
    ),
    Mutation(
        "what_was_claimed_is_not_let_go_of",
        "_unhold_matches",
        "unhold(group, row[i])",
        "",
        "A call that raises costs blocks for good.",
        (_LATE,),
    ),
    Mutation(
        "requests_are_undone_in_the_order_in_which_they_were_claimed",
        "unclaim",
        "range(last - 1, first - 1, -1)",
        "range(first, last)",
        "A call that raises loses blocks.",
        (
            "tests/state/test_scenarios_tiers.py::test_a_refused_batch_that_shares_a_beginning_leaves_every_byte_of_state",
        ),
    ),
    Mutation(
        "a_row_keeps_what_was_claimed_for_it",
        "_unhold_matches",
        "unhold(group, row[i])\nrow[i] = NONE",
        "unhold(group, row[i])",
        "The row of a call that raised names blocks that it does not hold.",
        (_LATE,),
    ),
    Mutation(
        "onboards_need_no_block",
        "_needed",
        (
            "fresh_blocks(group, request, outcome_at(out, r).matched, columns_for(group, request)) "
            "+ outcome_at(out, r).onboards"
        ),
        "fresh_blocks(group, request, outcome_at(out, r).matched, columns_for(group, request))",
        "A batch that does not fit is admitted, and ends half-way.",
        ("tests/state/test_scenarios_tiers.py::test_a_batch_that_has_no_room_for_its_onboards_is_refused",),
    ),
    Mutation(
        "every_batch_fits",
        "_fits",
        "return need <= group.bound",
        "return True",
        "A batch that does not fit is admitted, and ends half-way.",
        (_LATE,),
    ),
    Mutation(
        "a_plan_counts_sources_of_parts",
        "blocks_taken",
        "_needed(group, requests, out, n) + free - free_blocks(group, DEVICE) - _spare(group, out, n)",
        "_needed(group, requests, out, n) + free - free_blocks(group, DEVICE)",
        "A scheduler leaves room for blocks that nobody takes.",
        ("tests/sequences/test_plan.py::test_a_part_that_a_batch_has_to_give_up_is_not_planned",),
    ),
    # -- who is meant ------------------------------------------------------------------------------------
    Mutation(
        "an_id_outlives_its_sequence",
        "_release",
        "(sequence.generation + 1) & 0x7FFFFFFF",
        "sequence.generation",
        "A late call for a request that has ended appends to somebody else's.",
        ("tests/state/test_safety.py::test_the_id_of_a_sequence_that_has_ended_is_nobodys",),
    ),
    Mutation(
        "an_id_may_come_twice",
        "check_rows",
        "sequences[slot].mark",
        "False",
        "A sequence is released twice, and its blocks are given to two.",
        ("tests/sequences/test_arguments.py::test_wrong_ids_are_named",),
    ),
    Mutation(
        "a_sequence_that_lost_a_block_goes_on",
        "check_rows",
        "usable and sequences[slot].failed",
        "False",
        "An engine computes from bytes that never came.",
        ("tests/sequences/test_forks.py::test_a_copy_that_fails_fails_its_writer_alone",),
    ),
    # -- growth and rewind ---------------------------------------------------------------------------------
    Mutation(
        "a_rewind_writes_into_a_pinned_block",
        "shared",
        "blocks_of(group)[table_of(group)[slot, i]].ref_word",
        "blocks_of(group)[table_of(group)[slot, i]].ref_word & 0xFFFFFFFF",
        "The engine overwrites tokens that a reader has pinned.",
        ("tests/state/test_safety.py::test_a_rewind_may_use_what_it_gives_back",),
    ),
    Mutation(
        "a_rewind_writes_into_a_shared_block",
        "_shorten",
        "shared(group, slot, i)",
        "False",
        "A sequence overwrites tokens of its forks.",
        ("tests/sequences/test_forks.py::test_a_rewind_into_shared_blocks_leaves_them_to_the_others",),
    ),
    Mutation(
        "a_private_copy_has_no_bytes",
        "private_copy",
        "emit_copy(group, b, fresh, count, WITHIN)",
        "",
        "A beam goes on from whatever stood in its new block.",
        ("tests/sequences/test_forks.py::test_a_rewind_into_shared_blocks_leaves_them_to_the_others",),
    ),
    Mutation(
        "the_blocks_of_an_expired_reservation_are_given_to_others",
        "Reservations.expire",
        "self.deadlines.expire(late)",
        "self.deadlines.expire(late)\nfor number in late:\n    self._open[number].abort()",
        "A loader that hung for a minute overwrites the KV of another prompt.",
        (
            f"{_DEADLINES}test_a_block_that_may_be_written_late_is_nobodys_until_its_loader_ends",
            "tests/race/test_loaders.py::test_a_loader_races_with_nobody"
            "[reuse_of_a_block_that_a_loader_writes_after_its_deadline]",
            "tests/share/test_share_sim.py::"
            "test_what_another_process_writes_after_its_deadline_reaches_nobody_before_the_abort[0-0.0]",
        ),
    ),
    # -- forks and drafts --------------------------------------------------------------------------------
    Mutation(
        "a_fork_holds_nothing",
        "fork",
        "add_reference(blocks_of(group), table[row, j])",
        "pass",
        "Blocks of a fork are given away when its parent ends.",
        ("tests/sequences/test_forks.py::test_a_fork_takes_no_block_and_has_all_that_its_parent_has",),
    ),
    Mutation(
        "a_parent_does_not_know_that_it_was_forked",
        "fork",
        "parent.forked = 1",
        "",
        "Beams write into one block.",
        ("tests/sequences/test_forks.py::test_each_writer_copies_the_shared_end_and_the_last_holder_writes_in_place",),
    ),
    Mutation(
        "a_fork_writes_where_all_can_see",
        "_append",
        "sequence.forked and count",
        "False",
        "Beams write into one block.",
        ("tests/sequences/test_forks.py::test_each_writer_copies_the_shared_end_and_the_last_holder_writes_in_place",),
    ),
    Mutation(
        "a_fork_forgets_the_retention_of_what_it_decodes",
        "_become",
        "sequences[row].generation = generation",
        "sequences[row].generation = generation\nsequences[row].priority, sequences[row].ttl = 35, -1",
        "What beams decode is kept or dropped as somebody else's request said.",
        ("tests/sequences/test_forks.py::test_decoded_blocks_of_a_fork_have_the_retention_of_its_parents",),
    ),
    Mutation(
        "a_fork_forgets_its_duplicates",
        "_become",
        "sequences[row].generation = generation",
        "sequences[row].generation = generation\nsequences[row].duplicates = -1",
        "Content that a beam has computed is lost when somebody else's copy of it goes.",
        (
            "tests/sequences/test_forks.py::test_a_fork_or_beam_publishes_what_its_parent_had_to_leave_to_another[False]",
            "tests/sequences/test_forks.py::test_a_fork_or_beam_publishes_what_its_parent_had_to_leave_to_another[True]",
        ),
    ),
    # -- windows -----------------------------------------------------------------------------------------
    Mutation(
        "a_passed_block_is_given_back_without_a_word",
        "give_columns",
        "emit_access(group, ACCESSED, stream, b)",
        "",
        "A block is overwritten under the last kernel that attends to it.",
        ("tests/race/test_sequence_races.py::test_nothing_races[another_sequence_writes]",),
    ),
)
