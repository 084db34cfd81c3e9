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
        "an_end_that_is_not_committed_is_left_behind",
        "_copy_rest",
        "tokens = group.width if has_states(group) else min(group.width, sequence.length - i * group.width)",
        "tokens = group.width if has_states(group) else min(group.width, sequence.committed - i * group.width)",
        "A sequence that was swapped out goes on with tokens whose KV is somebody else's.",
        ("tests/sequences/test_swaps.py::test_drafts_come_back_and_a_path_of_them_is_kept",),
    ),
    Mutation(
        "a_copy_to_the_host_does_not_wait_for_what_is_not_committed",
        "_note_written",
        "emit_access(group, WROTE, stream, row[i])",
        "pass",
        "A sequence comes back with KV that was still being computed when it left.",
        ("tests/race/test_sequence_races.py::test_nothing_races[a_sequence_leaves_while_the_engine_still_writes_it]",),
    ),
)
