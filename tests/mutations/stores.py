"""Mutations of what is common to all stores: keys, seals and secrets, what is saved under which key, and what a hit in
a store may cost."""

from __future__ import annotations

from tests.mutations.mutation import Mutation


def _choice(test: str) -> str:
    return f"tests/stores/test_choice.py::{test}"


def _seal(test: str) -> tuple[str]:
    return (f"tests/stores/test_secrets.py::{test}",)


MUTATIONS = (
    # -- seals, keys and secrets ---------------------------------------------------------------------------
    Mutation(
        "bytes_that_do_not_agree_with_their_seal_are_trusted",
        "StoreCalls._checked",
        "codes[wrong] = DAMAGED",
        "pass",
        "A disk that gives a wrong byte gives a wrong token.",
        ("tests/stores/test_storage_contract.py::test_a_changed_byte_never_comes_in[cache]",),
    ),
    Mutation(
        "a_seal_is_of_bytes_alone",
        "Secret.mac",
        "whole[place * KEY_BYTES : (place + 1) * KEY_BYTES] + fixed",
        "fixed",
        "Who can write to a store gives a prompt the KV of another one.",
        _seal("test_a_mac_covers_key_model_secret_and_every_byte"),
    ),
    Mutation(
        "models_share_keys_that_engines_name",
        "Secret.derive_keys",
        "self._identity",
        "b''",
        "Two models that share a store drop each other's blocks as damaged.",
        _seal("test_no_two_models_or_secrets_share_a_key_or_a_tag"),
    ),
    Mutation(
        "models_share_namespaces",
        "Secret.tag",
        "self._identity + namespace",
        "namespace",
        "Who sees the names of namespaces in a store learns that two models have one tenant.",
        _seal("test_no_two_models_or_secrets_share_a_key_or_a_tag"),
    ),
    Mutation(
        "a_seal_leaves_out_what_the_block_depends_on",
        "Secret.mac",
        'named += len(context).to_bytes(8, "little") + context',
        "pass",
        "Who finds two prompts with one key of 16 bytes gets the KV of the other one.",
        _seal("test_a_mac_covers_key_model_secret_and_every_byte"),
    ),
    Mutation(
        "rows_of_a_job_that_is_done_are_given_away",
        "StoreQueue.let_go",
        "request.returned",
        "request.done",
        "A load that hung writes into the blocks of another request.",
        ("tests/stores/test_queue.py::test_nobody_waits_for_rows_that_hang",),
    ),
    Mutation(
        "the_secret_of_another_user_is_used",
        "read_secret",
        "seen.st_uid not in (os.geteuid(), 0)",
        "False",
        "Who puts a file in the place of the secret can forge blocks and their mac.",
        ("tests/stores/test_secrets.py::test_a_file_of_another_user_is_refused",),
    ),
    # -- choice --------------------------------------------------------------------------------------------
    Mutation(
        "what_is_queued_before_a_load_is_free",
        "LoadOrCompute._risk",
        "max(load.ahead + transfer_s - load.spare, 0.0) / saved",
        "max(transfer_s - load.spare, 0.0) / saved",
        "Prompts wait behind each other at the store, longer than it takes to compute them.",
        (_choice("test_a_hit_at_the_end_of_a_long_queue_is_computed"),),
    ),
    Mutation(
        "probes_never_wait_longer",
        "LoadOrCompute._probe",
        "max(_PROBE * saved, 2 * self._tried, least)",
        "max(_PROBE * saved, least)",
        "A store with a long latency is never used, however much its hits would save.",
        (_choice("test_probes_wait_longer_each_time"),),
    ),
    Mutation(
        "an_epoch_that_cannot_be_asked_for_is_the_first",
        "StoreCalls._asked",
        "self._store.epoch(self._secret.model, new)",
        "self._store.epoch(self._secret.model, new) if new else None",
        "The server of a store is restarted. Who comes meanwhile has the KV of weights that were replaced.",
        ("tests/stores/test_queue.py::test_a_store_that_is_not_there_at_first_is_asked_for_its_epoch_later",),
    ),
    Mutation(
        "a_reset_waits_with_a_clear",
        "Tombstones.clearing",
        "self._cleared.get((request.tag, request.renews))",
        "self._cleared.get((request.tag, False)) or self._cleared.get((request.tag, True))",
        "An engine resets while a clear is under way, and has what others save with the old weights.",
        ("tests/stores/test_queue.py::test_a_reset_beside_a_clear_begins_an_epoch",),
    ),
    Mutation(
        "epochs_are_not_in_the_keys_of_stores",
        "Secret.in_epoch",
        "not epoch",
        "True",
        "After the weights were replaced, the KV of the old ones comes back from a store.",
        (
            "tests/stores/test_host_storage_manager_clear.py::test_after_clear_nothing_is_found_that_was_saved_before",
            "tests/stores/test_memory.py::TestMemoryStore::test_after_a_reset_nothing_is_found_from_before_also_if_the_store_drops_nothing",
        ),
    ),
)
