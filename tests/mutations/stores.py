"""Mutations of the choice between loading a prefix and computing it: what a hit in a store may cost."""

from __future__ import annotations

from tests.mutations.mutation import Mutation


def _choice(test: str) -> str:
    return f"tests/stores/test_choice.py::{test}"


MUTATIONS = (
    Mutation(
        "a_load_takes_nothing_from_the_budget",
        "keepers/choice.py",
        "            self._budget -= load.risk\n",
        "",
        "A store that dies while many loads are on their way delays every one of their prompts.",
        (_choice("test_many_loads_at_once_share_what_may_be_lost"),),
    ),
    Mutation(
        "what_is_queued_before_a_load_is_free",
        "keepers/choice.py",
        "takes = max(2 * load.ahead",
        "takes = max(0 * load.ahead",
        "Prompts wait behind each other at the store, longer than it takes to compute them.",
        (_choice("test_a_hit_behind_a_long_queue_is_computed"),),
    ),
    Mutation(
        "free_probes_grow_without_end",
        "keepers/choice.py",
        "if self._fresh and risk <= _FREE * saved:",
        "if self._fresh:",
        "The first prompts wait for a dead store longer than is promised.",
        (_choice("test_the_first_hits_in_a_dead_store_cost_no_more_than_half_of_one"),),
    ),
    Mutation(
        "late_loads_are_forgotten",
        "keepers/choice.py",
        "self._worse += _WORSE *",
        "self._worse += 0 *",
        "Each hit in a dead store waits again, until the whole budget is lost.",
        (_choice("test_loads_that_gain_less_than_expected_end_until_one_succeeds"),),
    ),
    Mutation(
        "probes_never_wait_longer",
        "keepers/choice.py",
        "max(_PROBE * saved, 2 * self._tried, least)",
        "max(_PROBE * saved, least)",
        "A store with a long latency is never used, however much its hits would save.",
        (_choice("test_probes_wait_longer_each_time"),),
    ),
)
