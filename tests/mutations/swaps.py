"""Mutations of swapping, sequences that wait on the host, and of operations that are done together."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MUTATIONS = (
    # -- swaps ---------------------------------------------------------------------------------------------
    Mutation(
        "a_refused_swap_keeps_what_it_claimed",
        "_unclaim",
        "unhold(group, targets[i])",
        "pass",
        "A swap that raises costs host blocks for good.",
        ("tests/sequences/test_swaps.py::test_without_room_on_the_host_nothing_has_changed",),
    ),
    Mutation(
        "a_refused_swap_keeps_its_marks",
        "_unclaim",
        "blocks_of(group)[sources[i]].flags &= ~ONBOARDING",
        "pass",
        "The next swap after one that raised takes blocks that it has not counted.",
        ("tests/sequences/test_swaps.py::test_without_room_on_the_host_nothing_has_changed",),
    ),
    Mutation(
        "an_end_that_is_not_committed_is_left_behind",
        "_copy_rest",
        "tokens = group.width if has_states(group) else min(group.width, sequence.length - i * group.width)",
        "tokens = group.width if has_states(group) else min(group.width, sequence.committed - i * group.width)",
        "A sequence that was swapped out goes on with tokens whose KV is somebody else's.",
        ("tests/sequences/test_swaps.py::test_drafts_come_back_and_a_path_of_them_is_kept",),
    ),
    Mutation(
        "forks_that_leave_together_are_copied_one_by_one",
        "_claim",
        "not blocks[sources[i]].flags & ONBOARDING",
        "True",
        "A family of forks is refused though the host has room for it.",
        ("tests/sequences/test_swaps.py::test_forks_that_leave_together_share_on_the_host_and_when_they_are_back",),
    ),
    Mutation(
        "what_a_swapped_sequence_holds_is_forgotten_with_its_other_copy",
        "forget_everywhere",
        "other == NONE or blocks_of(group)[other].ref_word & REFS == 0",
        "True",
        "Content is computed again though a sequence has it.",
        ("tests/sequences/test_swaps.py::test_what_others_compute_is_forgotten_but_not_what_a_swapped_sequence_holds",),
    ),
    Mutation(
        "a_lost_copy_on_the_host_is_not_noticed",
        "_lost_one",
        "row = (swapped_of(group) if sequences_of(group)[slot].live == SWAPPED else table_of(group))[slot]",
        "row = table_of(group)[slot]",
        "A sequence comes back with KV that never arrived on the host.",
        ("tests/sequences/test_swaps.py::test_a_sequence_whose_copy_was_refused_can_only_be_released[0-False]",),
    ),
    Mutation(
        "a_copy_to_the_host_does_not_wait_for_what_is_not_committed",
        "_note_written",
        "emit_access(group, WROTE, stream, row[i])",
        "pass",
        "A sequence comes back with KV that was still being computed when it left.",
        ("tests/race/test_sequence_races.py::test_nothing_races[a_sequence_leaves_while_the_engine_still_writes_it]",),
    ),
    Mutation(
        "what_waits_on_the_host_is_not_forgotten",
        "give_back",
        "not store",
        "not store and stream != NONE",
        "What a tenant asked to be forgotten is reused.",
        ("tests/sequences/test_swaps.py::test_a_swapped_sequence_is_released_beside_others[False]",),
    ),
    Mutation(
        "a_lost_block_is_published_with_the_duplicates",
        "publish_range",
        "PUBLISHED | LOST",
        "PUBLISHED",
        "A prompt hits a block of a swapped sequence whose copy back was refused: whatever stood there is its KV.",
        ("tests/sequences/test_swaps.py::test_a_duplicate_whose_copy_back_was_refused_is_found_by_nobody",),
    ),
)
