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
