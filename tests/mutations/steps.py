"""Mutations of the tables of a step, and of the question how many blocks are free."""

from __future__ import annotations

from tests.mutations.mutation import Mutation


def _tables(test: str) -> tuple[str]:
    return (f"tests/tables/test_step_tables.py::{test}",)


MUTATIONS = (
    Mutation(
        "columns_behind_the_last_block_keep_what_they_had",
        "_write_row",
        "for c in range(filled, columns):\n    wanted[c] = -1",
        "pass",
        "A kernel that reads whole rows reads blocks of the step before.",
        _tables("test_tables_of_a_step_are_those_of_the_reference"),
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
)
