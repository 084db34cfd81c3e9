"""Mutations of what is common to all stores: keys, seals and secrets, what is saved under which key, and what a hit in
a store may cost."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_HASHED = (
    "tests/stores/test_host_storage_manager_clear.py"
    "::test_what_is_published_after_clear_is_not_saved_for_what_was_before"
)

_ROOM = "tests/stores/test_load_room.py::"
_POLICIES = "tests/stores/test_host_storage_manager_policies.py::"
_STEPS = "tests/stores/test_host_storage_manager_steps.py::"


def _host(test: str) -> str:
    return f"tests/stores/test_host_storage_manager.py::{test}"


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
    Mutation(
        "what_is_finished_is_told_again_and_again",
        "Callbacks.make",
        "os.eventfd_read(self.fileno)",
        "pass",
        "An engine that waits for jobs spins on one core.",
        ("tests/stores/test_queue.py::test_the_rows_of_a_load_that_hangs_come_back_when_it_has_returned",),
    ),
    # -- choice --------------------------------------------------------------------------------------------
    Mutation(
        "a_load_takes_nothing_from_the_budget",
        "LoadOrCompute.choose",
        "self._budget -= load.risk",
        "",
        "A store that dies while many loads are on their way delays every one of their prompts.",
        (_choice("test_many_loads_at_once_share_what_may_be_lost"),),
    ),
    Mutation(
        "what_is_queued_before_a_load_is_free",
        "LoadOrCompute._risk",
        "max(load.ahead + transfer_s - load.spare, 0.0) / saved",
        "max(transfer_s - load.spare, 0.0) / saved",
        "Prompts wait behind each other at the store, longer than it takes to compute them.",
        (_choice("test_a_hit_at_the_end_of_a_long_queue_is_computed"),),
    ),
    Mutation(
        "a_hit_is_computed_whoever_waits_for_the_engine_then",
        "LoadOrCompute._risk",
        "0 < waited > load.ahead + transfer_s - saved",
        "False",
        "A load that has waited long waits for the engine too: the slowest prompts take 1.7 times as long.",
        (_choice("test_a_hit_that_would_make_an_older_load_wait_for_the_engine_waits_for_the_store"),),
    ),
    Mutation(
        "free_probes_grow_without_end",
        "LoadOrCompute._probe",
        "risk <= _FREE * saved",
        "True",
        "The first prompts wait for a dead store longer than is promised.",
        (_choice("test_the_first_hits_in_a_dead_store_cost_no_more_than_half_of_one"),),
    ),
    Mutation(
        "late_loads_are_forgotten",
        "LoadOrCompute.end",
        "_WORSE * (max(load.promise - share, 0.0) - self._worse)",
        "0 * (max(load.promise - share, 0.0) - self._worse)",
        "Each hit in a dead store waits again, until the whole budget is lost.",
        (_choice("test_loads_that_gain_less_than_expected_end_until_one_succeeds"),),
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
        "what_was_lent_after_a_clear_is_saved_for_what_was_before",
        "StoreCalls._lent",
        "not request.done",
        "True",
        "The KV of new weights is found by an engine that has the old ones.",
        (_HASHED,),
    ),
    Mutation(
        "the_store_is_not_told_of_an_epoch",
        "StoreCalls._clear",
        'self._asked(new=True) if request.renews else b""',
        'b""',
        "What was saved after the weights were replaced is not found after a restart.",
        (
            "tests/stores/test_disk_blocks.py::TestDiskStore::test_what_is_saved_after_a_reset_is_there_after_it_was_closed",
            "tests/stores/test_host_storage_manager_clear.py::"
            "test_what_is_saved_after_a_clear_is_found_by_a_later_process[killed]",
        ),
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
    Mutation(
        "stores_are_lent_more_than_their_share",
        "HostCacheAdapter.__init__",
        "min(most, room // sum(worker.savers for worker in workers))",
        "max(most, room // sum(worker.savers for worker in workers))",
        "A store that hangs keeps the whole cache pinned: the engine can store nothing more.",
        (_host("test_small_caches_lend_stores_no_more_than_their_share"),),
    ),
    Mutation(
        "a_step_begins_with_what_was_known_at_the_end_of_the_last",
        "HostStorageManager._settle",
        "self._storage.poll()",
        "",
        "Each cold request waits for a store one step longer than for its answer.",
        (f"{_STEPS}test_a_cold_request_loses_no_step_and_one_to_a_remote_store[remote-cold2-warm2]",),
    ),
    Mutation(
        "the_same_trouble_is_told_again_and_again",
        "TroubleLog.note",
        "now_s - since < REPEAT_SECONDS",
        "False",
        "A dead store fills the log.",
        ("tests/stores/test_troubles.py::test_one_warning_for_each_kind_of_trouble_and_then_a_count",),
    ),
    Mutation(
        "what_nobody_reads_takes_room_for_ever",
        "TierStorage.free",
        "while self.unread and next(iter(self.unread.values())).until <= now_s:\n"
        "    self.drop(next(iter(self.unread)))",
        "",
        "After some requests that were aborted, nothing comes from a store any more.",
        (
            "tests/stores/test_host_storage_manager_policies.py::test_what_came_and_nobody_reads_makes_room_after_a_while",
        ),
    ),
    Mutation(
        "evicted_blocks_take_room_until_they_would_have_been_read",
        "KeyLoads._free",
        "if self._storage.free < wanted:\n    self.drop_evicted()",
        "",
        "Blocks that others have evicted shut out loads, though they occupy no room.",
        (f"{_ROOM}test_unread_blocks_that_are_evicted_leave_their_room_to_the_next_request_at_once",),
    ),
    Mutation(
        "a_block_that_the_engine_has_written_again_waits_for_its_reader",
        "KeyLoads.note_written",
        "self.drop_unread(keys)",
        "pass",
        "A block that was evicted unread, and that the engine has written since, takes room from loads.",
        (f"{_ROOM}test_a_block_that_was_evicted_unread_and_that_the_engine_writes_again_does_not_count",),
    ),
    Mutation(
        "what_had_no_room_is_absent_for_a_while",
        "KeyLoads._load",
        'self._miss(keys[len(room) :], "crowded", remember=False)',
        'self._miss(keys[len(room) :], "crowded")',
        "Of a prompt that is longer than the host, one window comes.",
        (f"{_POLICIES}test_a_prompt_of_any_length_comes_through_a_small_host[12]",),
    ),
    Mutation(
        "stores_are_asked_for_what_has_no_room",
        "KeyLoads._ask",
        "not self.closed and (self._free(1) or self._storage.may_wait(hit))",
        "not self.closed",
        "A request whose end has no room waits for its stores in every step, and never begins.",
        (f"{_POLICIES}test_while_there_is_no_room_no_store_is_asked",),
    ),
    Mutation(
        "what_is_saved_before_it_goes_stays_longest",
        "HostCacheAdapter.lend",
        "lease.close(used=self._save != EVICT)",
        "lease.close()",
        "What is used is evicted before what is saved: hits are lost.",
        (f"{_POLICIES}test_saving_what_goes_next_changes_no_order_of_eviction",),
    ),
    Mutation(
        "what_no_store_shall_get_is_saved_later",
        "HostStorageManager.publish",
        "self._adapter.leave_unsaved([key for key in ordered_keys if key in private])",
        "pass",
        "KV that its owner wants on no disk is written there when it is read, or before it is evicted.",
        tuple(f"{_POLICIES}test_what_is_published_as_unsaved_reaches_no_store[{save}]" for save in ("reuse", "evict")),
    ),
    Mutation(
        "what_came_from_a_store_is_saved_to_it_again",
        "HostCacheAdapter.publish",
        "self.cache.read_dirty(self._cursor, blocks)",
        "pass",
        "Each load from a store is followed by a save of the same bytes.",
        (f"{_POLICIES}test_what_came_from_a_store_is_not_saved_before_it_goes",),
    ),
    Mutation(
        "saves_put_a_prompt_out_of_its_order",
        "HostCacheAdapter.ended",
        "self.cache.touch(prompt)",
        "pass",
        "With a store, a prompt loses its beginning first, so that the rest of it is worth nothing.",
        ("tests/stores/test_host_storage_manager_policies.py::test_a_prompt_that_was_saved_loses_its_end_first",),
    ),
    Mutation(
        "a_prompt_in_pieces_keeps_the_order_of_a_piece",
        "HostCacheAdapter.touch",
        "waiting[last].prompt = prompt",
        "pass",
        "With a store, the end of a prompt that came in pieces is evicted last.",
        ("tests/stores/test_host_storage_manager_policies.py::test_a_prompt_that_was_saved_loses_its_end_first",),
    ),
    Mutation(
        "all_hits_of_a_step_are_judged_as_one",
        "KeyLoads._enqueue",
        "self._queued.setdefault((number, is_stored, hit), [])",
        'self._queued.setdefault((number, is_stored, ""), [])',
        "A short hit is loaded though it comes sooner computed, because a long one came in the same step.",
        (
            "tests/stores/test_host_storage_manager_policies.py::test_the_keys_of_each_hit_are_judged_together_and_apart_from_others",
        ),
    ),
    Mutation(
        "a_save_of_nothing_is_an_answer",
        "_failed",
        '"absent" if request.kind == SAVE else ""',
        '""',
        "A store that is dead counts as well again, because a block was evicted before it was asked.",
        ("tests/stores/test_health.py::test_a_save_of_what_is_gone_does_not_change_health_and_is_not_a_probe",),
    ),
    Mutation(
        "a_request_does_not_wait_for_the_room_of_others",
        "TierStorage.waits",
        "free < min(blocks, self._room)",
        "False",
        "With a small host, most of what a store has is computed again.",
        (f"{_ROOM}test_a_request_waits_for_the_room_of_another_and_loads_all",),
    ),
    Mutation(
        "a_request_waits_for_room_that_it_holds_itself",
        "TierStorage.may_wait",
        "not any(block in self.unread or block in self.coming for block in self._wanted.get(user, ()))",
        "True",
        "The first token of a long prompt comes a second late.",
        (f"{_ROOM}test_a_prompt_longer_than_the_room_does_not_wait_for_itself",),
    ),
    Mutation(
        "a_request_waits_for_room_again_and_again",
        "TierStorage.may_wait",
        "user in self._waited",
        "False",
        "A request that waits for room that nobody gives back is never computed.",
        (f"{_ROOM}test_a_request_waits_for_room_for_half_of_its_time_and_only_once",),
    ),
)
