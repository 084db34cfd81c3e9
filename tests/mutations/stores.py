"""Mutations of what is common to all stores: keys, seals and secrets, what is saved under which key, and what a hit in
a store may cost."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_HASHED = "tests/stores/test_hostkeeper_hashing.py::test_what_is_published_after_clear_is_not_saved_for_what_was_before"


def _host(test: str) -> str:
    return f"tests/stores/test_hostkeeper.py::{test}"


def _choice(test: str) -> str:
    return f"tests/stores/test_choice.py::{test}"


def _seal(test: str) -> tuple[str]:
    return (f"tests/stores/test_seals.py::{test}",)


MUTATIONS = (
    # -- seals, keys and secrets ---------------------------------------------------------------------------
    Mutation(
        "bytes_that_do_not_agree_with_their_seal_are_believed",
        "stores/calls.py",
        "                codes[wrong] = DAMAGED\n",
        "                pass\n",
        "A disk that gives a wrong byte gives a wrong token.",
        ("tests/stores/test_queue.py::test_a_changed_byte_is_damaged_and_forgotten",),
    ),
    Mutation(
        "a_seal_is_of_bytes_alone",
        "stores/seals.py",
        "key.tobytes() + length + self._identity",
        "length + self._identity",
        "Who can write to a store gives a prompt the KV of another one.",
        _seal("test_a_seal_is_of_key_model_secret_and_every_byte"),
    ),
    Mutation(
        "models_share_keys_that_engines_name",
        "stores/seals.py",
        "self._identity + own.generation, key=self._opaque",
        "own.generation, key=self._opaque",
        "Two models that share a store drop each other's blocks as damaged.",
        _seal("test_two_models_share_no_key_and_no_namespace"),
    ),
    Mutation(
        "models_share_namespaces",
        "stores/seals.py",
        "self._identity + namespace, key=self._tags",
        "namespace, key=self._tags",
        "A tenant of one model has less room in a store by what a tenant of another one has there.",
        _seal("test_two_models_share_no_key_and_no_namespace"),
    ),
    Mutation(
        "one_key_is_for_all_purposes",
        "stores/seals.py",
        "_NAME + purpose, key=secret",
        "_NAME, key=secret",
        "An engine that chooses its keys can choose one with which all prompts of a tenant begin.",
        _seal("test_keys_that_an_engine_names_are_no_keys_of_prompts"),
    ),
    Mutation(
        "the_secret_of_another_user_is_used",
        "stores/secret_files.py",
        " or seen.st_uid not in (os.geteuid(), 0):",
        ":",
        "Who puts a file in the place of the secret can forge blocks and their seals.",
        ("tests/stores/test_secret_files.py::test_a_file_of_another_user_is_refused",),
    ),
    Mutation(
        "what_is_finished_is_told_again_and_again",
        "stores/queue.py",
        "                os.eventfd_read(self._signal)\n",
        "                pass\n",
        "An engine that waits for jobs spins on one core.",
        ("tests/stores/test_queue.py::test_a_hanging_load_is_late_at_its_deadline_and_its_rows_come_back_later",),
    ),
    # -- choice --------------------------------------------------------------------------------------------
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
    Mutation(
        "what_was_lent_after_a_clear_is_saved_for_what_was_before",
        "stores/calls.py",
        "                if len(there) and not job.done:\n                    own = ",
        "                if len(there):\n                    own = ",
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
