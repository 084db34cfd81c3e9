"""Mutations of a store in another process: what its server and its clients take from each other, and how long they
wait."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

PEER, DOORS = "tests/stores/test_peer.py", "tests/stores/test_peer.py"
IMPOSTORS = "tests/remote/test_remote_impostors.py"

_CACHE = "tests/house/test_jit_places.py::test_folder_that_others_can_write_or_replace_is_passed_over_with_a_warning"

MUTATIONS = (
    Mutation(
        "a_client_trusts_whoever_answers_its_greeting",
        "begun",
        "session if hmac.compare_digest(proof, session.proof) else None",
        "session",
        "Whoever takes the port of a server that has ended learns what a worker says first.",
        (f"{IMPOSTORS}::test_an_impostor_in_the_place_of_a_store_serves_nothing",),
    ),
    Mutation(
        "messages_count_without_their_tag",
        "Session.unpack",
        "not hmac.compare_digest(tag, _tag(self._theirs, self._received, head, frames))",
        "False",
        "Whoever sits between a worker and a server changes, repeats or invents messages.",
        (f"{IMPOSTORS}::test_an_impostor_between_a_client_and_a_server_changes_nothing_unnoticed",),
    ),
    Mutation(
        "a_token_admits_a_client_again_and_again",
        "ServerSecret.admits",
        "not max(self._start, now_ns - _PASS_NS) < made <= now_ns or name in self._seen",
        "not max(self._start, now_ns - _PASS_NS) < made <= now_ns",
        "Whoever has heard a pass is let in, and ends the process by the name of the next client.",
        (f"{IMPOSTORS}::test_a_token_is_of_use_once_and_only_with_the_secret",),
    ),
    Mutation(
        "a_message_may_go_on_for_ever",
        "Flow.look",
        "came - self._base > self.most and not self.cut",
        "False",
        "A peer fills the memory of a worker or a server with frames of one message.",
        (
            f"{IMPOSTORS}::test_a_client_that_was_let_in_cannot_fill_the_memory_of_a_server[empty]",
            f"{IMPOSTORS}::test_a_server_cannot_fill_the_memory_of_a_client[before it has proved anything-empty]",
            "tests/publish/test_publish_strangers.py::test_a_message_that_never_ends_ends_its_connection[endpoint-SUB]",
        ),
    ),
    Mutation(
        "a_late_answer_is_taken_for_the_next",
        "Connection.ask",
        "received.message.id != message.id",
        "False",
        "A worker takes the answer to another call: codes that say nothing about its blocks.",
        (f"{PEER}::test_what_no_server_answers_fails_the_call_and_ends_the_connection",),
    ),
    Mutation(
        "a_client_goes_on_waiting_for_a_dead_server",
        "Connection._receive",
        "self._monitor in ready",
        "False",
        "A load over a connection that has ended takes all of its time, and prompts wait for it.",
        (f"{PEER}::test_a_server_killed_in_the_middle_of_a_load_is_a_miss_and_is_used_again_once_it_is_back",),
    ),
    Mutation(
        "a_client_waits_although_nobody_waits_for_it",
        "Connection._receive",
        "if stop():\n    raise Stopped",
        "if stop():\n    pass",
        "A job that is late keeps its rows and its thread until the server answers.",
        (f"{PEER}::test_a_slow_server_is_late_at_the_deadline_and_its_late_answer_reaches_no_row",),
    ),
    Mutation(
        "connections_that_have_ended_are_used_again",
        "PeerStore._taken",
        "link.ended()",
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
        "threads_of_a_server_use_the_same_memory",
        "_Calls._answer",
        "np.arange(len(keys)) + thread * self._blocks_per_call",
        "np.arange(len(keys))",
        "Blocks of two workers that load or save at once are mixed, and dropped as damaged.",
        (
            f"{PEER}::test_no_two_threads_of_a_server_use_the_same_memory[load]",
            f"{PEER}::test_no_two_threads_of_a_server_use_the_same_memory[save]",
        ),
    ),
    Mutation(
        "saves_may_take_all_threads_of_a_server",
        "_Calls._first",
        "may_save = self._saves < max(1, self._store.threads - 1)",
        "may_save = True",
        "A disk that hangs in a save keeps every load of every worker waiting.",
        (f"{PEER}::test_saves_that_hang_keep_no_load_of_another_client_waiting",),
    ),
    Mutation(
        "a_server_reads_calls_without_bound",
        "_Calls.has_room",
        "self.in_flight < self._most",
        "True",
        "A server with a slow store keeps all that its clients send in memory.",
        (f"{PEER}::test_no_more_calls_are_read_than_may_wait",),
    ),
    Mutation(
        "a_server_holds_many_answers_for_who_reads_nothing",
        "Server.__init__",
        "socket.sndhwm, socket.rcvhwm, socket.rcvbuf = answers, messages, _BUFFER_BYTES",
        "socket.sndhwm, socket.rcvhwm, socket.rcvbuf = 4, 4, _BUFFER_BYTES",
        "Clients that read nothing make a server use more memory than its documentation says.",
        (f"{DOORS}::test_a_client_that_reads_nothing_holds_few_answers",),
    ),
    Mutation(
        "who_says_nothing_keeps_its_place",
        "Connections.poll",
        "self._refuse(next(strangers, descriptor))",
        "self._refuse(descriptor)",
        "A peer without the password connects again and again, and no worker is let in any more.",
        ("tests/remote/test_remote_refusals.py::test_peers_that_say_nothing_keep_no_place_from_who_has_the_secret",),
    ),
    Mutation(
        "who_has_the_password_gives_its_place_to_who_has_not",
        "Connections.poll",
        "self._guarded and not flow.messages",
        "self._guarded",
        "A peer without the password ends the connections of all workers by connecting often.",
        ("tests/remote/test_remote_refusals.py::test_peers_that_say_nothing_keep_no_place_from_who_has_the_secret",),
    ),
    Mutation(
        "what_a_store_brings_is_not_compared",
        "Verifier.loaded",
        "difference is not None",
        "False",
        "A replay says that every byte is right, and compared only the first of each token.",
        ("tests/replay/test_replay_store.py::test_a_block_with_one_wrong_byte_is_not_a_block_of_the_prompt",),
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
        "_is_trusted",
        "around = {*folder.parents, *folder.resolve().parents}",
        "around = {folder.parent}",
        "Another user of the machine runs code in an engine, by putting a folder in the place of its cache.",
        (f"{_CACHE}[inside]", f"{_CACHE}[behind a link]"),
    ),
)
