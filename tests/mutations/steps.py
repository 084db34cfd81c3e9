"""Mutations of the tables of a step, and of the question how many blocks are free."""

from __future__ import annotations

from tests.mutations.mutation import Mutation


def _tables(test: str) -> tuple[str]:
    return (f"tests/tables/test_step_tables.py::{test}",)


_REFUSED = "test_tokens_that_a_sequence_has_not_are_refused"
_WINDOW = "test_blocks_that_a_window_has_passed_are_holes_and_left_out_of_the_pages"

MUTATIONS = (
    Mutation(
        "a_step_may_name_tokens_that_are_not_there",
        "_number",
        "count > length - begin",
        "False",
        "A kernel writes K and V of a token into a block of another sequence, or outside of the pool.",
        _tables(_REFUSED),
    ),
    Mutation(
        "a_step_may_name_tokens_before_the_first",
        "_number",
        "begin < 0",
        "False",
        "A kernel writes K and V into a block of another sequence.",
        _tables(_REFUSED),
    ),
    Mutation(
        "a_step_may_name_tokens_that_a_window_has_passed",
        "_number",
        "gone and begin < (group.sinks + gone) * group.width",
        "False",
        "The slots of tokens whose block was given back are negative, and a kernel writes before the pool.",
        _tables("test_tokens_that_a_window_has_passed_have_no_slots"),
    ),
    Mutation(
        "an_array_that_is_too_small_for_a_step_is_written_all_the_same",
        "_number",
        "needed > limits[limit]",
        "False",
        "The call writes behind the end of the caller's array.",
        _tables("test_bad_arrays_are_named_and_nothing_is_written[table: expected 3 columns or more]"),
    ),
    Mutation(
        "columns_behind_the_last_block_keep_what_they_had",
        "_write_row",
        "for c in range(filled, columns):\n    wanted[c] = -1",
        "pass",
        "A kernel that reads whole rows reads blocks of the step before.",
        _tables("test_tables_of_a_step_are_those_of_the_reference"),
    ),
    Mutation(
        "blocks_that_a_window_has_passed_are_staged_with_the_others",
        "stage_step",
        "if gone:\n"
        "    memcpy(place, row, 4 * group.sinks)\n"
        "    memcpy(place + 4 * group.sinks, row + 4 * (group.sinks + gone), 4 * (count - group.sinks))\n"
        "else:\n"
        "    memcpy(place, row, 4 * count)",
        "if False:\n"
        "    memcpy(place, row, 4 * group.sinks)\n"
        "    memcpy(place + 4 * group.sinks, row + 4 * (group.sinks + gone), 4 * (count - group.sinks))\n"
        "else:\n"
        "    memcpy(place, row, 4 * count)",
        "Attention with a window reads block -1, and not the last blocks.",
        _tables(_WINDOW),
    ),
    Mutation(
        "pages_of_a_chunk_are_those_of_the_whole_sequence",
        "write_step",
        "(length + width - 1) // width",
        "length // width + 1",
        "An attention library that counts pages sees a block too many.",
        _tables("test_a_chunk_of_a_prompt_sees_what_is_before_it_and_nothing_after"),
    ),
    Mutation(
        "a_step_that_names_a_stream_is_not_ordered_on_it",
        "HostStep.write",
        "return int(use(groups, ids)) if follow else 0",
        "return 0",
        "Kernels on the stream that was named read what another stream has not written yet.",
        (
            "tests/race/test_staging.py::"
            "test_the_stream_that_is_named_follows_the_one_that_the_sequences_were_used_on[False-some]",
        ),
    ),
    Mutation(
        "free_blocks_of_each_group_are_those_of_the_first",
        "free_in_groups",
        "counts[g] = free_blocks(group_at(groups, g), DEVICE)",
        "counts[g] = free_blocks(group_at(groups, 0), DEVICE)",
        "A scheduler admits what one group has no room for.",
        ("tests/sequences/test_plan.py::test_each_group_has_its_own",),
    ),
)
