"""Mutations of the policies that look at conversations."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_TESTS = "tests/state/test_chains.py::"

MUTATIONS = (
    Mutation(
        "reuse_counts_no_turns",
        "reuse.class_of",
        "min(count, KINDS - 1) * MEMBERS",
        "0",
        "A conversation that has come back goes like those that never do.",
        (f"{_TESTS}test_whoever_has_come_back_stays_where_most_never_do",),
    ),
    Mutation(
        "pauses_teach_nothing",
        "pauses.learn",
        "rates[BACK, row, last] += 1.0 if came else 0.0",
        "",
        "The policy cannot tell a conversation that comes back soon from one that does not.",
        (f"{_TESTS}test_the_conversation_that_is_away_for_longer_goes_though_it_was_used_later",),
    ),
    Mutation(
        "what_a_turn_leaves_over_stays",
        "begin_release",
        "chain.first, NONE, 0",
        "NONE, NONE, 0",
        "Blocks that no prompt continues any more push others out.",
        (f"{_TESTS}test_what_a_turn_has_left_over_goes_before_everything_else",),
    ),
    Mutation(
        "a_shared_beginning_goes_with_one_fork",
        "_stem_worth",
        "worth = max(worth, worth_now(h, book, other, book.follows))",
        "worth = -1.0",
        "All conversations that begin alike lose what they have in common, and so all of it.",
        (f"{_TESTS}test_what_forks_share_stays_while_one_of_them_has_more",),
    ),
    Mutation(
        "the_end_of_a_conversation_is_not_heard",
        "worth_now",
        "chain.returns == ENDS",
        "False",
        "An engine that says ends=True gains nothing.",
        (f"{_TESTS}test_what_the_engine_says_goes_before_what_was_learnt",),
    ),
    Mutation(
        "the_policy_chooses_among_all_priorities",
        "victim",
        "blocks_of(h)[b].priority == DEFAULT_PRIORITY",
        "True",
        "A priority that a caller gave does not decide any more.",
        (f"{_TESTS}test_priorities_stand_above_the_policy",),
    ),
    Mutation(
        "adaptive_follows_who_would_have_hit_less",
        "_compare",
        "ahead > 0.0",
        "ahead < 0.0",
        "The pool follows the worse of its policies.",
        (f"{_TESTS}test_adaptive_follows_who_would_have_hit_more_and_a_switch_moves_no_block",),
    ),
    Mutation(
        "an_undo_forgets_the_records",
        "_arrays",
        "[] if state.book is None else state.book.arrays",
        "[]",
        "A refused list of operations leaves the policy with what never happened.",
        (f"{_TESTS}test_what_is_refused_changes_no_byte_of_the_records[agent]",),
    ),
    Mutation(
        "a_block_keeps_the_chain_of_its_former_content",
        "take_victim",
        "owners_of(h, book_of(h))[b] = NONE",
        "pass",
        "A prompt that comes back through the host counts as another conversation, whose blocks then go.",
        (f"{_TESTS}test_what_comes_from_the_host_belongs_to_its_own_conversation",),
    ),
    Mutation(
        "what_comes_from_the_host_is_a_new_conversation",
        "on_admit",
        "_named(book, keys, reused, np.int64(0))",
        "c, depth",
        "Nobody learns how long a conversation has paused that comes back through the host.",
        (f"{_TESTS}test_what_comes_from_the_host_belongs_to_its_own_conversation",),
    ),
    Mutation(
        "what_no_chain_finds_stays",
        "choose",
        "_is_stray(h, book, oldest)",
        "False",
        "Content of requests that reuse nothing fills the pool, however old it is.",
        (f"{_TESTS}test_what_is_of_no_conversation_goes_when_it_is_the_oldest",),
    ),
    Mutation(
        "what_lru_has_left_of_a_chain_is_forgotten",
        "find_first",
        "is_listed(h, book, c, front)",
        "False",
        "After a switch, the conversation that LRU was about to evict counts as gone.",
        (f"{_TESTS}test_what_lru_has_left_of_a_conversation_is_still_known",),
    ),
    Mutation(
        "a_flood_of_low_priority_is_learnt_from",
        "on_admit",
        "priority != LIST",
        "False",
        "Prompts of a tenant that was given a low priority teach the policy that nobody comes back.",
        (f"{_TESTS}test_what_has_a_low_priority_is_no_conversation",),
    ),
)
