"""Mutations of what callers do to cached content by its name, of keys that grow, and of what several groups fetch."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_CONTROL, _KEYS, _REMOTE = (
    "tests/sequences/test_control.py::",
    "tests/sequences/test_keys.py::",
    "tests/remote/test_remote_groups.py::",
)

MUTATIONS = (
    Mutation(
        "who_computes_it_twice_brings_forgotten_content_back",
        "_withdraw",
        "sequence.private, sequence.duplicates = 1, NONE",
        "pass",
        "A tenant has left, and what its last requests held is found again.",
        (f"{_CONTROL}test_what_running_sequences_hold_is_unfindable_and_goes_when_they_end",),
    ),
    Mutation(
        "forgetting_leaves_the_host_copy",
        "_erase",
        "forget_both(group, device, blocks_of(group)[device].other_copy)",
        "forget(group, device)",
        "Content that was to be forgotten comes back from the host.",
        (f"{_CONTROL}test_forgetting_is_reported",),
    ),
    Mutation(
        "forgetting_a_prompt_leaves_its_tail",
        "forget_prompt",
        "finds_parts(group) and start < request.length",
        "False",
        "The last tokens of a prompt that was to be forgotten are copied for others.",
        (f"{_CONTROL}test_the_stored_tail_of_a_prompt_goes_with_it",),
    ),
    Mutation(
        "a_longer_tail_goes_with_a_prompt",
        "begun_tail",
        "count <= left",
        "True",
        "Forgetting one prompt reads behind its end, and forgets what others have.",
        (f"{_CONTROL}test_the_stored_tail_of_a_prompt_goes_with_it",),
    ),
    Mutation(
        "a_tenant_that_leaves_takes_all_others_along",
        "forget_namespace",
        "blocks[b].flags & INDEXED and blocks[b].namespace == namespace",
        "blocks[b].flags & INDEXED",
        "One tenant empties the cache of all.",
        (f"{_CONTROL}test_other_namespaces_and_other_prompts_stay",),
    ),
    Mutation(
        "a_fork_publishes_what_its_parent_must_not",
        "_become",
        "sequences[row].generation = generation",
        "sequences[row].generation = generation\nsequences[row].private = 0",
        "A request that was to leave no trace leaves that of its beams.",
        (f"{_CONTROL}test_a_fork_of_a_withdrawn_sequence_publishes_nothing_either",),
    ),
    Mutation(
        "who_publishes_nothing_leaves_a_tail",
        "stored_tail",
        "sequence.private",
        "False",
        "A request that was to leave no trace leaves its last tokens.",
        (f"{_CONTROL}test_a_request_that_publishes_nothing_leaves_no_tail_either",),
    ),
    Mutation(
        "who_reuses_nothing_reuses",
        "findable",
        "return 0 if request.fresh else reusable(request)",
        "return reusable(request)",
        "Logprobs of a prompt are missing, since its tokens were not computed.",
        (f"{_CONTROL}test_a_request_that_reuses_nothing_computes_all_and_leaves_it_to_others",),
    ),
    Mutation(
        "a_priority_that_is_given_later_never_ends",
        "set_retention",
        "if listed:\n    _start_clock(group, b, NONE)",
        "",
        "Content that was to be kept for a minute is kept for ever, and the expiries are wrong.",
        (f"{_CONTROL}test_the_time_of_a_priority_begins_now_or_at_release",),
    ),
    Mutation(
        "what_was_computed_twice_is_not_counted",
        "publish_committed",
        "sequences_of(group)[slot].recomputed += count",
        "",
        "A scheduler does not see that requests compute the same prefix at the same time.",
        (
            "tests/sequences/test_explain.py::"
            "test_tokens_that_two_requests_compute_at_the_same_time_are_recomputed_by_the_second",
        ),
    ),
    Mutation(
        "a_next_turn_hashes_all_again",
        "BlockKeys.of_private",
        "self._fill(tokens, keys, extra_ids, scope, groups, first)",
        "self._fill(tokens, keys, extra_ids, scope, groups, 0)",
        "Each turn of a conversation hashes all turns before it.",
        (
            f"{_KEYS}test_a_next_turn_hashes_the_blocks_that_it_fills_and_no_others",
            f"{_KEYS}test_what_was_hashed_is_not_looked_at_again",
        ),
    ),
    Mutation(
        "extended_keys_lose_the_extra_ids_of_before",
        "BlockKeys.extend",
        "zeros[0] if known is None else known",
        "zeros[0]",
        "The block in which an image ends is found by prompts with another image.",
        (f"{_KEYS}test_extended_keys_are_those_of_the_whole_prompt",),
    ),
    Mutation(
        "keys_of_a_sequence_are_taken_from_behind_a_gap",
        "read_row",
        "known == i and i < len(keys) and blocks[b].flags & KEYED",
        "i < len(keys)",
        "A next turn is looked up under keys that no block has.",
        (f"{_KEYS}test_full_blocks_that_are_not_committed_are_hashed",),
    ),
    Mutation(
        "a_loader_is_not_told_of_sinks",
        "is_needed",
        "i < group.sinks",
        "False",
        "What was fetched of a windowed group is no prefix that can be reused.",
        (f"{_REMOTE}test_a_group_gets_what_the_prefix_needs_of_it_and_no_more",),
    ),
    Mutation(
        "a_group_is_served_from_the_rows_of_the_first",
        "_HostTier._send_blocks",
        "self._cache.groups[request.group].first_host_block",
        "self._cache.groups[0].first_host_block",
        "A client gets memory that is not the block it asked for, or none.",
        (f"{_REMOTE}test_what_is_here_already_is_not_fetched_again",),
    ),
    Mutation(
        "pools_with_other_windows_serve_each_other",
        "served",
        "(group.kind, group.window, group.sinks, [layout.fingerprint for layout in group.layouts])",
        "(group.kind, [layout.fingerprint for layout in group.layouts])",
        "KV that another model computed is taken for this one's.",
        (f"{_REMOTE}test_pools_whose_groups_differ_are_refused",),
    ),
    Mutation(
        "a_request_may_have_more_bytes_than_its_client",
        "UnderWay.accept",
        "(request.nbytes, limits.bytes_per_client, 'bytes in one request')",
        "(0, limits.bytes_per_client, 'bytes in one request')",
        "A request of large blocks waits for ever, and its client with it.",
        (f"{_REMOTE}test_limits_hold_for_the_bytes_of_each_group",),
    ),
)
