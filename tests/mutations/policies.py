"""Mutations of the policies that look at conversations."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_TESTS = "tests/state/test_chains.py::"

MUTATIONS = (
    Mutation(
        "what_a_turn_leaves_over_stays",
        "_leave_over",
        "tier_list.first, NONE, 0",
        "NONE, NONE, 0",
        "Blocks that no prompt continues any more push others out.",
        (f"{_TESTS}test_what_a_turn_has_left_over_goes_before_everything_else",),
    ),
    Mutation(
        "a_shared_beginning_goes_with_one_fork",
        "_stem_worth",
        "worth = max(worth, worth_now(group, policy, other, policy.follows))",
        "worth = -1.0",
        "All conversations that begin alike lose what they have in common, and so all of it.",
        (f"{_TESTS}test_what_forks_share_stays_while_one_of_them_has_more",),
    ),
    Mutation(
        "what_comes_from_the_host_is_a_new_conversation",
        "on_admit",
        "_named(policy, keys, reused, 0)",
        "c, depth",
        "Nobody learns how long a conversation has paused that comes back through the host.",
        (f"{_TESTS}test_what_comes_from_the_host_belongs_to_its_own_conversation",),
    ),
    Mutation(
        "what_the_host_gets_is_of_no_conversation",
        "on_join",
        "c = owners[b] = owners[device]",
        "c = owners[device]",
        "The host forgets what came to it first, whoever comes back sooner.",
        (f"{_TESTS}test_the_host_too_loses_the_conversation_that_is_away_for_longer",),
    ),
)
