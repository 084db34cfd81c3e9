"""Mutations of eviction: which block is taken, where its content goes, the host's copy, and retention that ends."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_EVICTION, _TIERS = "tests/state/test_scenarios_eviction.py", "tests/state/test_scenarios_tiers.py"
_TTL = (
    "tests/state/test_scenarios_eviction.py::test_a_ttl_goes_on_on_the_host_where_it_was[a host copy was there]",
    "tests/state/test_scenarios_eviction.py::test_a_ttl_goes_on_on_the_host_where_it_was[offloaded as it was evicted]",
)
_TODAY = "tests/state/test_scenarios_eviction.py::test_a_copy_that_becomes_the_only_one_has_the_retention_of_today"
_SOUND = "tests/state/test_verify.py::test_a_sound_pool_has_no_findings"

MUTATIONS = (
    # -- eviction ----------------------------------------------------------------------------------------
    Mutation(
        "priorities_are_ignored",
        "list_of",
        "return first + block.priority",
        "return first + DEFAULT_PRIORITY",
        "System prompts go first.",
        ("tests/state/test_scenarios_eviction.py::test_low_priority_content_goes_first", _SOUND),
    ),
    Mutation(
        "an_empty_block_is_taken_last",
        "victim",
        "b = lists[first + EMPTY, 0]",
        "b = NONE",
        "Content is evicted while blocks stand empty.",
        (f"{_EVICTION}::test_empty_blocks_are_taken_before_content_and_never_offloaded",),
    ),
    Mutation(
        "a_settled_copy_keeps_its_old_uses",
        "on_only_copy",
        "other.uses",
        "block.uses",
        "With offload_min_reuse, content is forgotten that was reused since its copy was made.",
        (f"{_TIERS}::test_uses_are_those_of_the_content_not_of_one_copy",),
    ),
    Mutation(
        "a_settled_copy_was_used_when_it_was_made",
        "on_only_copy",
        "other.used_at",
        "block.used_at",
        "Idle times on the host are too long.",
        ("tests/observe/test_metrics.py::test_a_host_copy_was_used_when_its_device_block_was",),
    ),
    # -- twins ---------------------------------------------------------------------------------------------
    Mutation(
        "more_is_forgotten_than_has_to_be",
        "_offloads",
        "count += 1 if blocks[b].other_copy == NONE and should_offload(group, b) else 0",
        "count += 2",
        "A call forgets content that both tiers have room for.",
        ("tests/state/test_scenarios_tiers.py::test_evictions_go_where_the_onboards_of_the_same_call_came_from",),
    ),
    # -- time ------------------------------------------------------------------------------------------------
    Mutation(
        "a_settled_copy_has_no_ttl",
        "on_only_copy",
        "other.ttl",
        "NONE",
        "What was to matter for a minute keeps its priority for ever once it is on the host alone.",
        (_TODAY, _TTL[0]),
    ),
    Mutation(
        "a_settled_copy_keeps_its_old_priority",
        "on_only_copy",
        "block.priority, block.ttl, block.uses, block.used_at = other.priority, other.ttl, other.uses, other.used_at",
        "block.uses, block.used_at = other.uses, other.used_at",
        "The host evicts what a request has said to matter.",
        (_TODAY,),
    ),
    Mutation(
        "a_copy_has_no_ttl",
        "copy_content",
        "s.priority, s.ttl, s.uses",
        "s.priority, NONE, s.uses",
        "A ttl is lost on the way to the host, and on the way back.",
        (_TTL[1], "tests/state/test_scenarios_eviction.py::test_a_ttl_comes_back_from_the_host"),
    ),
    Mutation(
        "a_ttl_never_ends",
        "expired",
        "blocks[b].priority, blocks[b].ttl = DEFAULT_PRIORITY, NONE",
        "blocks[b].ttl = NONE",
        "A priority that should end never does.",
        ("tests/state/test_scenarios_eviction.py::test_a_ttl_ends_in_the_default_list",),
    ),
)
