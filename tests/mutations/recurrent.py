"""Mutations of recurrent states: which are overwritten, copied, found and given back."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MUTATIONS = (
    Mutation(
        "a_published_state_moves_on",
        "_moves_on",
        "blocks_of(group)[b].ref_word == 1 and not blocks_of(group)[b].flags & PUBLISHED",
        "blocks_of(group)[b].ref_word == 1",
        "A state that others find is overwritten with that of a longer prefix.",
        ("tests/sequences/test_groups.py::test_a_running_state_that_others_can_find_is_not_written_again",),
    ),
    Mutation(
        "a_state_that_others_hold_moves_on",
        "_moves_on",
        "blocks_of(group)[b].ref_word == 1",
        "True",
        "A reader, or a fork, has the state of a longer prefix than it was promised.",
        (
            "tests/sequences/test_groups.py::test_a_state_that_a_reader_pins_is_not_moved",
            "tests/sequences/test_groups.py::test_a_fork_at_the_end_of_a_column_leaves_the_state_to_both",
        ),
    ),
    Mutation(
        "a_pinned_state_is_overwritten",
        "_is_copied",
        "sequence.length % group.width != 0 and blocks_of(group)[b].ref_word != 1",
        "False",
        "A reader's state changes under it.",
        ("tests/sequences/test_groups.py::test_a_state_that_a_reader_pins_is_not_overwritten",),
    ),
    Mutation(
        "a_shared_state_is_written_again",
        "_own",
        "blocks[b].ref_word != 1",
        "False",
        "A rewind of one beam changes the state of the others.",
        ("tests/sequences/test_groups.py::test_a_rewind_leaves_a_state_to_the_forks_that_hold_it",),
    ),
    Mutation(
        "a_state_that_is_written_again_stays_findable",
        "_own",
        "blocks[b].flags & PUBLISHED",
        "False",
        "Others find a state under the key of a prefix that it is not behind.",
        (
            "tests/sequences/test_groups.py::test_a_state_that_a_fork_has_published_is_forgotten_before_it_is_written_again",
        ),
    ),
    Mutation(
        "a_state_is_rewound_behind_what_was_committed",
        "rewind_need",
        "counts[k] > sequence.length - sequence.committed",
        "counts[k] > sequence.length",
        "A sequence goes on from a state that is gone.",
        ("tests/sequences/test_groups.py::test_a_rewind_never_passes_what_is_committed",),
    ),
    Mutation(
        "states_that_nobody_goes_on_from_stay",
        "give_passed",
        "counters_of(group).passed_blocks += give_columns(group, slot, first, last, BACK)",
        (
            "if not has_states(group):\n"
            "    counters_of(group).passed_blocks += give_columns(group, slot, first, last, BACK)"
        ),
        "Every commit costs a block for good.",
        ("tests/sequences/test_groups.py::test_a_state_goes_back_once_what_follows_it_is_committed",),
    ),
    Mutation(
        "states_that_others_hold_need_no_room",
        "keep_need",
        "shared += 1 if row[i] != NONE and blocks_of(group)[row[i]].ref_word != 1 else 0",
        "shared += 0",
        "A path of drafts is kept by half, since there is no block for the copy of a state.",
        ("tests/sequences/test_groups.py::test_a_path_is_not_kept_without_room_for_the_states_that_others_hold",),
    ),
)
