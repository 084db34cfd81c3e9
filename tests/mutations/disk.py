"""Mutations of DiskStore: when a save is told, whose slot may be written, what is evicted, who may use a folder."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

BLOCKS, DAMAGE = "tests/stores/test_disk_blocks.py::", "tests/stores/test_disk_damage.py::"
FOLDER, FAILURES = "tests/stores/test_disk_folder.py::", "tests/stores/test_disk_failures.py::"
MUTATIONS = (
    Mutation(
        "a_save_is_told_before_it_is_durable",
        "DiskStore._finish",
        "self._commits.wait()",
        "",
        "A block that an engine was told of is gone after a crash.",
        (
            f"{BLOCKS}test_saves_that_wait_share_one_commit",
            f"{FAILURES}test_a_save_that_fails_loses_nothing_and_later_ones_go_on[COMMIT-disk I/O error]",
        ),
    ),
    Mutation(
        "a_sync_makes_up_for_one_that_failed",
        "DiskStore._finish",
        "self._failed_syncs != failed_syncs",
        "False",
        "A block that an engine was told of is gone after a power failure.",
        (f"{BLOCKS}test_a_sync_that_fails_is_not_made_up_for_by_the_next_one",),
    ),
    Mutation(
        "a_store_that_was_closed_after_a_crash_is_believed",
        "DiskStore._write_all",
        "not self._index.in_doubt",
        "True",
        "A block whose slot had got other bytes before a crash is acknowledged again, and nothing is written.",
        (f"{DAMAGE}test_a_block_that_is_there_is_saved_again_only_if_a_crash_took_its_bytes[bytes taken-2]",),
    ),
    Mutation(
        "pages_of_a_failed_commit_are_forgotten",
        "DiskStore._write",
        "self._table.give_back(pages)",
        "",
        "Blocks that a user had forgotten are back after a restart.",
        (f"{FAILURES}test_a_drop_that_is_not_durable_is_not_confirmed_and_tried_again[False]",),
    ),
    Mutation(
        "a_block_that_is_read_can_be_evicted",
        "Index.pin",
        "(slot for slot in slots if slot >= 0)",
        "()",
        "A load gets bytes of another block, and the block counts as damaged.",
        (f"{BLOCKS}test_a_block_that_is_read_is_not_overwritten",),
    ),
    Mutation(
        "the_end_of_a_prompt_outlives_its_beginning",
        "Index.publish",
        "zip(reversed(keys), reversed(seals), strict=True)",
        "zip(keys, seals, strict=True)",
        "What is left of a prompt cannot be used.",
        (f"{BLOCKS}test_the_least_recently_used_goes_first_and_of_one_call_the_last",),
    ),
    Mutation(
        "a_load_is_no_use",
        "Table.touch",
        "self.used[slot] = self.now()",
        "",
        "What everybody loads is evicted.",
        (
            f"{BLOCKS}test_the_least_recently_used_goes_first_and_of_one_call_the_last",
            f"{BLOCKS}test_a_restart_keeps_the_order_of_last_use",
        ),
    ),
    Mutation(
        "a_new_secret_keeps_old_rows",
        "DiskStore._read",
        "-(-self._slots // PER_PAGE) if same_secret else 0",
        "-(-self._slots // PER_PAGE)",
        "Blocks that nobody can ever find fill the store.",
        (f"{DAMAGE}test_missing_files[secret]",),
    ),
    Mutation(
        "rows_beyond_the_slab_are_kept",
        "DiskStore._read",
        "table.check(min(had, self._slots))",
        "table.check(self._slots)",
        "A load of a block whose file is gone is told to be damaged, and not absent.",
        (f"{DAMAGE}test_missing_files[slab]",),
    ),
    Mutation(
        "two_stores_of_a_process_share_a_folder",
        "Folder._lock",
        "entry in _open",
        "False",
        "Each overwrites what the other has saved.",
        (f"{FOLDER}test_a_second_store_of_this_process_is_refused_and_the_first_goes_on",),
    ),
    Mutation(
        "two_processes_share_a_folder",
        "Folder._lock",
        "fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "Each overwrites what the other has saved.",
        (f"{FOLDER}test_a_second_process_is_refused_until_the_first_is_dead[alone]",),
    ),
    Mutation(
        "others_can_read_the_folder",
        "check_private",
        "found.st_mode & 0o077",
        "False",
        "Other users of the machine read prompts' KV and the secret.",
        (f"{FOLDER}test_a_folder_that_others_can_reach_is_refused",),
    ),
    Mutation(
        "a_namespace_evicts_others",
        "Index._take",
        "members is not None and len(members) >= limit",
        "False",
        "One tenant pushes out the blocks of all others.",
        (
            f"{BLOCKS}test_a_namespace_at_its_limit_evicts_its_own_oldest",
            f"{BLOCKS}test_a_limit_counts_what_was_saved_before_it_and_before_a_restart",
        ),
    ),
    Mutation(
        "tables_of_anybody_are_read",
        "Database._check_tables",
        "found != [(command,) for command in _TABLES]",
        "False",
        "A database with a view or a trigger that never ends keeps an engine from starting.",
        (f"{DAMAGE}test_tables_that_no_store_has_made_are_put_aside[a trigger that refuses]",),
    ),
    Mutation(
        "pages_of_any_length_are_read",
        "_FITS",
        "\"number BETWEEN 0 AND ? AND typeof(content) = 'blob' AND length(content) = ?\"",
        '"number BETWEEN 0 AND ? AND ? > 0"',
        "A database of a few kilobytes of pages makes an engine read gigabytes of something else.",
        (f"{DAMAGE}test_what_a_database_has_too_much_costs_no_memory",),
    ),
    Mutation(
        "a_line_of_a_trace_may_have_any_length",
        "stream_trace",
        "len(text) > LINE_BYTES_MAX",
        "False",
        "A long line is read in pieces, and the trace is said to be wrong where it is not.",
        ("tests/replay/test_replay_traces.py::test_a_line_without_end_is_no_request",),
    ),
)
