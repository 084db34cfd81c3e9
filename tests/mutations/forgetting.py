"""Mutations of what is dropped from stores: nothing under way brings it back, and what is confirmed is gone."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_DROPS = "tests/stores/test_drops.py::"

MUTATIONS = (
    Mutation(
        "a_drop_waits_for_no_save",
        "Tombstones.next",
        "saver is None",
        "True",
        "A block that was forgotten comes back, as its save was under way.",
        (f"{_DROPS}test_a_drop_waits_for_the_saves_under_way_that_it_concerns[forget]",),
    ),
    Mutation(
        "what_is_cancelled_counts_as_absent",
        "Tombstones.screen",
        "CANCELLED",
        "0",
        "A store that is down counts as one that answers.",
        (f"{_DROPS}test_what_is_to_be_dropped_says_nothing_of_the_health_of_a_store",),
    ),
)
