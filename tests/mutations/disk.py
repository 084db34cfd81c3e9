"""Mutations of DiskStore: when a save is told, whose slot may be written, what is evicted, who may use a folder."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

BLOCKS, DAMAGE = "tests/stores/test_disk_blocks.py::", "tests/stores/test_disk_damage.py::"
FOLDER, FAILURES = "tests/stores/test_disk_folder.py::", "tests/stores/test_disk_failures.py::"
SESSIONS = "tests/replay/test_replay_sessions.py::"
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
        "the_end_of_a_prompt_outlives_its_beginning",
        "Index.publish",
        "zip(reversed(keys), reversed(macs), strict=True)",
        "zip(keys, macs, strict=True)",
        "What is left of a prompt cannot be used.",
        (f"{BLOCKS}test_a_store_evicts_as_an_lru_with_limits_through_restarts",),
    ),
    Mutation(
        "two_processes_share_a_folder",
        "Folder._lock_file",
        "fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "Each overwrites what the other has saved.",
        (f"{FOLDER}test_a_second_process_is_refused_until_the_first_is_dead[alone-]",),
    ),
    Mutation(
        "who_removes_a_lock_lets_another_in",
        "Folder._lock",
        "(LOCK, SLAB)",
        "(LOCK,)",
        "Two processes overwrite what the other has saved, once a person has removed a file that looked left behind.",
        (f"{FOLDER}test_a_second_process_is_refused_until_the_first_is_dead[alone-lock]",),
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
        "pages_of_any_length_are_read",
        "_FITS",
        "\"number BETWEEN 0 AND ? AND typeof(content) = 'blob' AND length(content) = ?\"",
        '"number BETWEEN 0 AND ? AND ? > 0"',
        "A database of a few kilobytes of pages makes an engine read gigabytes of something else.",
        (f"{DAMAGE}test_what_a_database_has_too_much_costs_no_memory",),
    ),
    Mutation(
        "a_line_of_a_trace_may_have_any_length",
        "_lines",
        "len(text) > LINE_BYTES_MAX",
        "False",
        "A long line is read in pieces, and the trace is said to be wrong where it is not.",
        ("tests/replay/test_replay_traces.py::test_a_line_without_end_is_not_a_request",),
    ),
    Mutation(
        "users_do_not_wait_for_answers",
        "play",
        "now_s + turn.seconds",
        "now_s",
        "Sessions are played faster than their agents were answered, so fewer others come between.",
        (f"{SESSIONS}test_a_user_waits_for_its_answer_and_pauses_no_longer_than_said",),
    ),
    Mutation(
        "ids_of_all_sessions_are_the_same",
        "play",
        "first += session.ids + len(session.turns)",
        "first += 0",
        "Sessions that have nothing in common hit each other's blocks.",
        (f"{SESSIONS}test_ids_of_two_sessions_mean_different_contents",),
    ),
    Mutation(
        "a_replay_keeps_requests_that_have_ended",
        "schedule",
        "_end(earlier) <= _begin(request)",
        "False",
        "A replay of sessions holds the blocks of requests that were answered long ago.",
        (f"{SESSIONS}test_a_replay_releases_a_request_when_it_has_ended",),
    ),
)
