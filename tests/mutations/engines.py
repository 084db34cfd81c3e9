"""Mutations of what an engine's worker copies: what a load may bring, and when a job is over."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TESTS = "tests/engines/test_transfers.py::"
LOCAL = "tests/engines/test_local.py::"
SETTINGS = "tests/engines/test_llamacpp_settings.py::"
STAGED = "tests/engines/test_staged.py::"
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
            f"{TESTS}test_only_the_filled_part_of_a_chunk_is_loaded",
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
    Mutation(
        "states_are_looked_for_whatever_the_adapters",
        "Adapters.key",
        "any(self.scales)",
        "False",
        "llama.cpp answers with KV that was computed with another adapter.",
        (f"{SETTINGS}test_keys_differ_where_adapters_do_and_have_no_part_in_what_is_not_applied",),
    ),
    Mutation(
        "keys_leave_out_what_requests_differ_in",
        "prefix_keys",
        "hashlib.blake2b(settings, digest_size=32, person=b'kvpool settings').digest()",
        "bytes(32)",
        "A prompt gets the KV that was computed with other settings.",
        (f"{LOCAL}test_keys_of_other_settings_differ",),
    ),
    Mutation(
        "a_setting_that_nobody_knows_is_passed_on",
        "checked_settings",
        "name != LORA and name not in HARMLESS",
        "False",
        "A new setting of llama.cpp changes KV, and states are found under the keys of others.",
        (f"{SETTINGS}test_an_unknown_setting_is_refused_by_name",),
    ),
    Mutation(
        "only_the_first_window_is_loaded",
        "LocalBlocks._windows",
        "first += count",
        "return",
        "A state larger than a window is saved and never found.",
        (f"{LOCAL}test_a_state_of_any_size_that_fits_is_found_after_a_restart",),
    ),
    Mutation(
        "an_abandoned_hit_stands_before_others",
        "_Hits.worth",
        "hit.attempt.until < now",
        "False",
        "After some requests that were aborted, hits of others are declined for seconds.",
        (f"{STAGED}test_abandoned_hits_shut_out_others_for_no_longer_than_they_would_be_waited_for",),
    ),
    Mutation(
        "a_hit_that_is_left_stands_before_others",
        "_Hits.leave",
        "hit.lapse(now)",
        "pass",
        "What LMCache has found and does not load is still paid for: hits of others are declined.",
        (f"{STAGED}test_hits_that_are_left_shut_out_nobody_and_say_nothing_of_their_store",),
    ),
    Mutation(
        "a_load_under_way_lapses",
        "_Hits.until",
        "hit.loading = True",
        "pass",
        "A policy never learns that a store is late, and asks it again and again.",
        (f"{STAGED}test_a_load_under_way_does_not_lapse_and_its_store_is_judged_by_it",),
    ),
    Mutation(
        "states_that_were_looked_for_keep_their_room",
        "LocalBlocks._request",
        "if self._storage is not None:\n    self._storage.finish(request)",
        "pass",
        "Look-ups shut out the loads of later ones.",
        (
            f"{LOCAL}test_states_that_were_only_looked_for_take_no_room_from_others",
            f"{LOCAL}test_what_comes_after_a_gap_takes_no_room_from_the_next_prompt",
        ),
    ),
)
