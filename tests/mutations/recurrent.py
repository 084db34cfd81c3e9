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
)
