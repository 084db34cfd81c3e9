"""Mutations of a store in another process: what its server and its clients take from each other, and how long they
wait."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

PEER, DOORS = "tests/stores/test_peer.py", "tests/stores/test_peer_doors.py"

MUTATIONS = (
    Mutation(
        "a_late_answer_is_taken_for_the_next",
        "Connection.ask",
        "answer.id != message.id",
        "False",
        "A worker takes the answer to another call: codes that say nothing about its blocks.",
        (f"{PEER}::test_what_no_server_answers_fails_the_call_and_ends_the_connection",),
    ),
    Mutation(
        "a_client_goes_on_waiting_for_a_dead_server",
        "Connection._wait",
        "self._monitor in ready",
        "False",
        "A load over a connection that has ended takes all of its time, and prompts wait for it.",
        (f"{PEER}::test_a_server_killed_in_the_middle_of_a_load_is_a_miss_and_is_used_again_once_it_is_back",),
    ),
    Mutation(
        "a_client_waits_although_nobody_waits_for_it",
        "Connection._wait",
        "if stop():\n    raise _Stopped",
        "if stop():\n    pass",
        "A job that is late keeps its rows and its thread until the server answers.",
        (f"{PEER}::test_a_slow_server_is_late_at_the_deadline_and_its_late_answer_reaches_no_row",),
    ),
    Mutation(
        "connections_that_have_ended_are_used_again",
        "PeerStore._taken",
        "connection.ended()",
        "False",
        "After a restart of the server, the first calls fail although it is back.",
        (f"{PEER}::test_a_server_that_was_restarted_costs_no_failed_call",),
    ),
    Mutation(
        "frames_of_any_length_are_blocks",
        "frames_argument",
        "len(frames) != count",
        "False",
        "A message with missing or additional frames is read as if it were whole.",
        (f"{PEER}::test_what_no_server_answers_fails_the_call_and_ends_the_connection",),
    ),
    Mutation(
        "threads_of_a_server_load_into_the_same_memory",
        "StoreCalls.answer",
        "rows += thread * self.blocks_per_call\nanswer, seals = self._store.load(request.keys, rows.copy(), stop)",
        "answer, seals = self._store.load(request.keys, rows.copy(), stop)",
        "Blocks of two workers that load at once are mixed, count as damaged, and are dropped.",
        (f"{PEER}::test_no_two_threads_of_a_server_use_the_same_memory[load]",),
    ),
    Mutation(
        "threads_of_a_server_save_from_the_same_memory",
        "StoreCalls.answer",
        "rows += thread * self.blocks_per_call\nself._memory[rows] = request.blocks",
        "self._memory[rows] = request.blocks",
        "Of two workers that save at once, one has saved bytes of the other.",
        (f"{PEER}::test_no_two_threads_of_a_server_use_the_same_memory[save]",),
    ),
    Mutation(
        "saves_may_take_all_threads_of_a_server",
        "StoreServer._first",
        "may_save = self._saves < max(1, self._store.threads - 1)",
        "may_save = True",
        "A disk that hangs in a save keeps every load of every worker waiting.",
        (f"{PEER}::test_saves_that_hang_keep_no_load_of_another_client_waiting",),
    ),
    Mutation(
        "a_server_reads_calls_without_bound",
        "StoreServer._run",
        "zmq.POLLIN if self._under_way < self._calls_most else 0",
        "zmq.POLLIN",
        "A server with a slow store keeps all that its clients send in memory.",
        (f"{PEER}::test_no_more_calls_are_read_than_may_wait",),
    ),
    Mutation(
        "a_server_holds_many_answers_for_who_reads_nothing",
        "StoreServer._listen",
        "socket.sndhwm, socket.rcvhwm = 1, 2",
        "socket.sndhwm, socket.rcvhwm = 4, 4",
        "Clients that read nothing make a server use more memory than its documentation says.",
        (f"{DOORS}::test_a_client_that_reads_nothing_holds_few_answers",),
    ),
    Mutation(
        "who_says_nothing_keeps_its_place",
        "Connections.poll",
        "self._refuse(next(iter(self._strangers), descriptor))",
        "self._refuse(descriptor)",
        "A peer without the password connects again and again, and no worker is let in any more.",
        (
            f"{DOORS}::test_peers_that_say_nothing_keep_no_place_from_who_has_the_secret",
            "tests/remote/test_remote_refusals.py::test_peers_that_say_nothing_keep_no_place_from_who_has_the_secret",
        ),
    ),
    Mutation(
        "who_has_the_password_gives_its_place_to_who_has_not",
        "Connections.heard",
        "self._strangers.pop(int(frame.get(zmq.SRCFD)), None)",
        "frame.get(zmq.SRCFD)",
        "A peer without the password ends the connections of all workers by connecting often.",
        (
            f"{DOORS}::test_peers_that_say_nothing_keep_no_place_from_who_has_the_secret",
            "tests/remote/test_remote_refusals.py::test_peers_that_say_nothing_keep_no_place_from_who_has_the_secret",
        ),
    ),
    Mutation(
        "the_password_of_a_server_is_logged",
        "_authenticator",
        "ThreadAuthenticator(context, log=_SILENT)",
        "ThreadAuthenticator(context)",
        "At level DEBUG, a log has what lets anybody in.",
        (
            f"{DOORS}::test_the_secret_is_shown_nowhere",
            "tests/remote/test_remote_endpoints.py::test_the_password_is_in_no_log",
        ),
    ),
    Mutation(
        "what_a_store_brings_is_not_compared",
        "Verifier.loaded",
        "found is not None",
        "False",
        "A replay says that every byte is right, and compared only the first of each token.",
        ("tests/replay/test_replay_store.py::test_a_block_with_one_wrong_byte_is_no_block_of_the_prompt",),
    ),
    Mutation(
        "blocks_without_bytes_are_found_by_runs_that_compare_bytes",
        "Storing.__init__",
        '"digests of tokens" if written else "no content"',
        '"digests of tokens"',
        "A run without --verify makes the next one with it fail.",
        (
            "tests/replay/test_replay_store.py::"
            "test_a_run_that_writes_no_bytes_leaves_nothing_for_one_that_compares_them",
        ),
    ),
    Mutation(
        "the_folders_around_compiled_code_may_be_renamed_by_others",
        "_stays",
        "return all(_keeps_entries(folder) for folder in {*path.parents, *path.resolve().parents})",
        "return _keeps_entries(path.parent)",
        "Another user of the machine runs code in an engine, by putting a folder in the place of its cache.",
        ("tests/house/test_jit_cache.py::test_a_folder_inside_one_that_others_can_rename_is_refused",),
    ),
)
