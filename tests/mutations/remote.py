"""Mutations of what workers tell each other: what is pinned while it is sent, and under which keys it enters the other
pool."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

STRANGERS = "tests/publish/test_publish_strangers.py"

MUTATIONS = (
    Mutation(
        "a_server_unpins_what_it_has_not_sent_yet",
        "BlockServer._send_blocks",
        "copied or not self._cache.core.transfer.guards & guards.UNPIN_AFTER_RELEASE",
        "True",
        "A slow client gets blocks that others have written into meanwhile.",
        ("tests/remote/test_remote_leases.py::test_a_slow_client_gets_whole_blocks_while_the_scheduler_goes_on",),
    ),
    Mutation(
        "a_revoked_lease_was_whole",
        "_unpin",
        "try:\n"
        "    lease.close()\n"
        "except LeaseExpired:\n"
        "    whole = False\n"
        "except KVPoolError:\n"
        "    # The pool is closed, and its leases with it.\n"
        "    whole = False",
        "try:\n"
        "    lease.close()\n"
        "except LeaseExpired:\n"
        "    pass\n"
        "except KVPoolError:\n"
        "    # The pool is closed, and its leases with it.\n"
        "    whole = False",
        "A client imports blocks that the server's owner has given to others while they were sent.",
        ("tests/remote/test_remote_leases.py::test_a_client_whose_lease_was_revoked_is_told_that_its_blocks_are_void",),
    ),
    Mutation(
        "a_client_keeps_what_it_has_not_asked_for",
        "BlockClient._connect",
        "socket.rcvhwm = 2 * self._messages",
        "",
        "A server that sends on and on fills the memory of a worker that waits for nothing.",
        ("tests/remote/test_remote_client.py::test_what_a_server_sends_unasked_is_not_kept",),
    ),
    Mutation(
        "blocks_of_another_layout_are_served",
        "BlockServer._check",
        "request.layout != self._layout",
        "False",
        "A client imports blocks whose heads and layers lie elsewhere.",
        ("tests/remote/test_remote_refusals.py::test_pools_that_do_not_fit_together_are_refused_with_the_reason",),
    ),
    Mutation(
        "pools_with_two_secrets_are_not_told",
        "BlockServer._check",
        "request.origin != self._origin",
        "False",
        "With CURVE keys, workers whose secrets differ fetch nothing from each other for ever, and no error says why.",
        ("tests/remote/test_remote_endpoints.py::test_keys_do_not_hide_that_two_pools_have_two_secrets",),
    ),
    Mutation(
        "blocks_enter_before_they_are_said_to_be_whole",
        "_Request.complete",
        "self.whole",
        "True",
        "Bytes that were overwritten on their way are cached as a prompt's.",
        ("tests/remote/test_remote_client.py::test_blocks_without_the_word_that_they_are_whole_do_not_enter_the_pool",),
    ),
    Mutation(
        "a_later_message_has_the_keys_of_the_first",
        "BlockClient.fetch",
        "places[offset : offset + there]",
        "places[:there]",
        "Blocks are cached under the keys of others: a prompt gets another part of itself.",
        ("tests/remote/test_remote_fetch.py::test_a_client_keeps_to_the_limits_that_the_server_names",),
    ),
    Mutation(
        "a_hole_moves_what_is_behind_it",
        "_in_place",
        '[next(blocks) if one == "1" else None for one in request.found or ""]',
        '[*blocks, *(None for one in request.found or "" if one != "1")]',
        "Blocks are cached under the keys of others: a prompt gets another part of itself.",
        ("tests/remote/test_remote_fetch.py::test_unknown_keys_among_known_ones_are_missing_in_place",),
    ),
    Mutation(
        "a_block_goes_under_the_key_of_the_next_one",
        "publish",
        "b, at = ids[i], first + i",
        "b, at = ids[i], first + i + (i == 0)",
        "An import stores KV of one part of a prompt as that of another.",
        ("tests/holders/test_import_blocks.py::test_the_next_request_with_the_prefix_hits",),
    ),
    Mutation(
        "a_subscriber_may_say_anything",
        "Connections.poll",
        "self._of(descriptor, _said) > self._said_most",
        "False",
        "A peer fills the memory of an engine with topics, or with a message that never ends.",
        (f"{STRANGERS}::test_a_message_that_never_ends_ends_its_connection",),
    ),
    Mutation(
        "a_request_may_have_any_number_of_frames",
        "Peer.receive",
        "len(self._message) > FRAMES_MAX",
        "False",
        "A peer fills the memory of an engine with a request that never ends.",
        (f"{STRANGERS}::test_a_message_that_never_ends_ends_its_connection",),
    ),
    Mutation(
        "a_request_may_have_frames_of_any_length",
        "Peer._frame",
        "length > (COMMAND_BYTES_MAX if flags & _COMMAND else FRAME_BYTES_MAX)",
        "False",
        "A peer fills the memory of an engine with a frame of a gigabyte.",
        (f"{STRANGERS}::test_what_no_client_of_a_replay_says_ends_its_connection",),
    ),
    Mutation(
        "heartbeats_are_answered_to_who_does_not_read",
        "Peer._obey",
        "not self._waiting",
        "True",
        "A peer fills the memory of an engine with answers that it does not read.",
        (f"{STRANGERS}::test_a_client_that_asks_whether_anybody_is_there_gets_an_answer",),
    ),
    Mutation(
        "a_file_in_the_way_of_a_socket_is_removed",
        "Peers._listen",
        "stat.S_ISSOCK(os.stat(place, follow_symlinks=False).st_mode)",
        "True",
        "A wrong endpoint deletes a file.",
        (f"{STRANGERS}::test_a_file_that_is_in_the_way_is_not_removed",),
    ),
)
