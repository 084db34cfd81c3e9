"""Mutations of what an engine's worker copies: what a load may bring, and when a job is over."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TESTS = "tests/engines/test_transfers.py::"
MUTATIONS = (
    Mutation(
        "a_load_brings_what_nobody_stored",
        "Transfers.load",
        "not self._has(part, checked)",
        "False",
        "A prompt gets the KV that a host block had before, or none at all.",
        (
            f"{TESTS}test_a_host_block_that_no_store_has_filled_is_not_loaded",
            f"{TESTS}test_a_place_that_a_store_left_out_is_not_loaded",
            f"{TESTS}test_a_load_of_what_a_failed_store_should_have_brought_fails",
            f"{TESTS}test_of_a_chunk_that_is_filled_in_part_nothing_else_is_loaded",
        ),
    ),
    Mutation(
        "what_a_store_has_brought_is_not_loaded",
        "Transfers._has",
        "written if checked is None else written | ~np.isin(hosts, checked)",
        "written",
        "A host block that once held a chunk in part is refused for ever, though a store has filled it.",
        (f"{TESTS}test_what_others_have_filled_is_loaded_whatever_was_there_before",),
    ),
    Mutation(
        "a_chunk_keeps_the_places_of_the_last_one",
        "Transfers.store",
        "self._written[part.host_blocks] = False",
        "pass",
        "A prompt gets the KV of the chunk that was in the host block before.",
        (f"{TESTS}test_a_chunk_that_is_stored_again_has_nothing_of_what_was_there",),
    ),
    Mutation(
        "a_failed_store_counts_as_stored",
        "Transfers._end",
        "error is None",
        "True",
        "A prompt gets the KV that a host block had before.",
        (f"{TESTS}test_a_load_of_what_a_failed_store_should_have_brought_fails",),
    ),
    Mutation(
        "a_job_is_over_with_its_first_copy",
        "_is_over",
        "return all(copy.done for copy in job.copies)",
        "return True",
        "The engine computes with KV that has not come.",
        (f"{TESTS}test_a_job_is_not_over_before_its_copies_are",),
    ),
    Mutation(
        "a_load_in_the_middle_of_a_chunk_begins_at_its_start",
        "Transfers.parts",
        "placed[first % per :] = blocks[at : at + count]",
        "placed[:count] = blocks[at : at + count]",
        "A prompt gets the KV of tokens before its own.",
        (f"{TESTS}test_a_load_may_begin_and_end_within_a_chunk",),
    ),
    Mutation(
        "a_slip_of_an_option_is_ignored",
        "EnginePlugin._ignored",
        "difflib.get_close_matches(name, self.options, 1, _NEAR)",
        "()",
        "An engine runs for weeks without the store that its operator has misspelt.",
        ("tests/engines/test_options.py::test_a_slip_of_an_option_is_refused_with_the_name_that_is_meant",),
    ),
)
