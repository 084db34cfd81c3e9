"""Mutations of what is dropped from stores: nothing under way brings it back, and what is confirmed is gone."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_DROPS, _KEEPER = "tests/stores/test_drops.py::", "tests/stores/test_storage_manager_forget.py::"
_PEER, _FAILURES = "tests/stores/test_peer.py::", "tests/stores/test_disk_failures.py::"

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
        "what_was_begun_before_a_drop_goes_on",
        "StoreQueue.add",
        "self._screen(other)",
        "pass",
        "KV of weights that were replaced is loaded after a clear.",
        (f"{_DROPS}test_what_a_store_answers_after_a_drop_counts_no_more[clear-load]",),
    ),
    Mutation(
        "a_store_that_is_down_is_asked_for_what_was_dropped",
        "StoreQueue.add",
        "self._screen(request)",
        "",
        "A tenant's content is found after it has left, until the store has dropped it.",
        (f"{_DROPS}test_until_a_store_that_is_down_confirms_nothing_is_found_loaded_or_saved[forget]",),
    ),
    Mutation(
        "a_drop_that_fails_is_confirmed",
        "StoreQueue.returned",
        "if error:\n    self.drops.failed(request, self._clock())\nelse:\n    self.settle(request, OK)",
        "self.settle(request, OK)",
        "An operator is told that content is gone, and it is not.",
        (
            f"{_DROPS}test_until_a_store_that_is_down_confirms_nothing_is_found_loaded_or_saved[clear]",
            f"{_FAILURES}test_a_drop_that_is_not_durable_is_not_confirmed_and_tried_again[True]",
        ),
    ),
    Mutation(
        "a_queued_save_takes_along_what_is_dropped",
        "StoreRequest.call_begins",
        "np.flatnonzero(self._codes[part] == WAITING)",
        "np.arange(part.stop - part.start)",
        "A block that was forgotten comes back, as its save was queued.",
        (f"{_DROPS}test_a_queued_save_leaves_out_what_is_dropped",),
    ),
    Mutation(
        "what_is_cancelled_counts_as_absent",
        "Tombstones.screen",
        "CANCELLED",
        "0",
        "A store that is down counts as one that answers.",
        (f"{_DROPS}test_what_is_to_be_dropped_says_nothing_of_the_health_of_a_store",),
    ),
    Mutation(
        "tags_of_models_begin_alike",
        "Secret.__init__",
        "hashlib.blake2b(self._identity, key=self._tags, digest_size=MODEL_BYTES)",
        'hashlib.blake2b(b"", key=self._tags, digest_size=MODEL_BYTES)',
        "New weights of one model take the blocks of all others along.",
        ("tests/stores/test_secrets.py::test_no_two_models_or_secrets_share_a_key_or_a_tag",),
    ),
    Mutation(
        "a_forget_of_nothing_waits_for_no_commit",
        "DiskStore._forget",
        "self._commits.wait()\nreturn count",
        "if count:\n    self._commits.wait()\nreturn count",
        "A block that was evicted a moment before is back after a crash, although it was forgotten.",
        (f"{_FAILURES}test_what_was_evicted_for_a_save_that_failed_and_is_forgotten_stays_gone_after_a_crash",),
    ),
    Mutation(
        "prefetches_go_on_after_a_forget",
        "StorageManager._forgotten",
        'self._prefetches.stop_all("forgotten", concerns)',
        "",
        "A prompt that was forgotten comes back with a prefetch that was under way.",
        (f"{_KEEPER}test_a_prefetch_of_which_a_part_has_come_brings_no_more[prompt]",),
    ),
    Mutation(
        "a_save_that_is_over_is_noted_after_a_forget",
        "StorageManager._forgotten",
        "self._storage.poll()",
        "pass",
        "Content that was computed again is never saved: the storage manager assumes that the store has it.",
        (f"{_KEEPER}test_a_save_that_is_over_and_not_noted_is_taken_back[prompt]",),
    ),
    Mutation(
        "what_waits_is_saved_after_a_forget",
        "StorageManager._forgotten",
        'self._storage.give_up("forgotten", concerns)',
        "",
        "Nobody learns that blocks were not saved because they were forgotten.",
        (f"{_KEEPER}test_what_waits_to_be_saved_is_given_up_and_counted[prompt]",),
    ),
    Mutation(
        "a_store_that_is_full_of_drops_is_found_too_late",
        "StorageManager._forget_blocks",
        "worker.check_forget(len(contents))",
        "pass",
        "A call that raises has forgotten half.",
        (f"{_KEEPER}test_too_much_that_waits_to_be_dropped_is_refused_before_anything_has_changed",),
    ),
    Mutation(
        "a_served_drop_waits_for_no_save",
        "_Calls._first",
        "saving and not may_save or drops and saves",
        "saving and not may_save",
        "A block that was forgotten comes back on a peer: its client had given its save up.",
        (f"{_PEER}test_a_save_that_its_client_gave_up_leaves_nothing_that_was_dropped_later[False]",),
    ),
    Mutation(
        "a_save_from_before_a_drop_is_served",
        "_Calls._answer",
        "request.stale",
        "False",
        "A block that was forgotten comes back on a peer: its save was still in the network.",
        (f"{_PEER}test_a_save_that_arrives_after_a_drop_of_its_client_is_not_kept",),
    ),
)
