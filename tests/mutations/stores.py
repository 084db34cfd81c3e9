"""Mutations of what stands before stores: whether a prefix is loaded or computed, and what is saved under which key."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_HASHED = "tests/stores/test_hostkeeper_hashing.py::test_what_is_published_after_clear_is_not_saved_for_what_was_before"


def _host(test: str) -> str:
    return f"tests/stores/test_hostkeeper.py::{test}"


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
    Mutation(
        "what_was_lent_after_a_clear_is_saved_for_what_was_before",
        "stores/queue.py",
        "            if len(there) and not job.done:\n                own = ",
        "            if len(there):\n                own = ",
        "The KV of new weights is found by an engine that has the old ones.",
        (_HASHED,),
    ),
    Mutation(
        "clear_lets_saves_go_on",
        "keepers/hostsaves.py",
        "        for job in self._jobs:\n            job.cancel()\n",
        "",
        "The KV of new weights is found by an engine that has the old ones.",
        (_HASHED,),
    ),
    Mutation(
        "generations_are_not_in_the_keys_of_stores",
        "stores/seals.py",
        "self._identity + own.generation, key",
        "self._identity, key",
        "After the weights were replaced, the KV of the old ones comes back from a store.",
        (
            _host("test_after_clear_nothing_is_found_that_was_saved_before"),
            "tests/stores/test_queue.py::test_nothing_is_found_of_another_generation",
        ),
    ),
    Mutation(
        "stores_are_lent_more_than_their_share",
        "keepers/hostsaves.py",
        "max(1, min(AT_ONCE, room // sum(",
        "max(1, max(AT_ONCE, room // sum(",
        "A store that hangs keeps the whole cache pinned: the engine can store nothing more.",
        (_host("test_small_caches_lend_stores_no_more_than_their_share"),),
    ),
    Mutation(
        "a_save_of_nothing_is_an_answer",
        "keepers/health.py",
        '"absent" if job.kind == jobs.SAVE else ""}',
        '""}',
        "A store that is dead counts as well again, because a block was evicted before it was asked.",
        ("tests/stores/test_health.py::test_a_save_of_what_is_not_there_any_more_says_nothing_and_is_no_probe",),
    ),
)
