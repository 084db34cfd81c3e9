"""Mutations of what workers tell each other: what is pinned while it is sent, and under which keys it enters the other
pool."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

STRANGERS = "tests/publish/test_publish_strangers.py"

MUTATIONS = (
    Mutation(
        "a_server_unpins_what_it_has_not_sent_yet",
        "_HostTier._send_blocks",
        "offer.copied or not self._cache.core.transfer.guards & records.UNPIN_AFTER_RELEASE",
        "True",
        "A slow client gets blocks that others have written into meanwhile.",
        ("tests/remote/test_remote_leases.py::test_a_slow_client_gets_whole_blocks_while_the_scheduler_goes_on",),
    ),
    Mutation(
        "a_revoked_lease_was_whole",
        "_HostTier._send_blocks",
        "any(lease.closed for lease in leases)",
        "False",
        "A client imports blocks that the server's owner has given to others before they were sealed.",
        ("tests/remote/test_remote_leases.py::test_blocks_whose_lease_was_revoked_before_their_macs_are_not_sent",),
    ),
    Mutation(
        "blocks_of_another_layout_are_served",
        "_HostTier._check",
        "hello.layout != self._layout",
        "False",
        "A client imports blocks whose heads and layers lie elsewhere.",
        ("tests/remote/test_remote_refusals.py::test_pools_that_do_not_fit_together_are_refused_with_the_reason",),
    ),
    Mutation(
        "blocks_need_not_fit_their_seal",
        "Exchange._in_place",
        "arrival is not None and not self._link.verify_mac(arrival.content, request.mac)",
        "False",
        "Bytes that were overwritten on their way are cached as a prompt's.",
        ("tests/remote/test_remote_client.py::test_blocks_with_wrong_macs_do_not_enter_the_pool",),
    ),
    Mutation(
        "a_block_goes_under_the_key_of_the_next_one",
        "publish_taken",
        "b, at = ids[i], first + i",
        "b, at = ids[i], first + i + (i == 0)",
        "An import stores KV of one part of a prompt as that of another.",
        ("tests/holders/test_import_blocks.py::test_the_next_request_with_the_prefix_hits",),
    ),
    Mutation(
        "a_request_may_have_any_number_of_frames",
        "_Peer.messages",
        "len(message) == FRAMES_MAX",
        "False",
        "A peer fills the memory of an engine with a request that never ends.",
        (f"{STRANGERS}::test_a_message_that_never_ends_ends_its_connection",),
    ),
    Mutation(
        "a_request_may_have_frames_of_any_length",
        "_Peer._read",
        "length > (COMMAND_BYTES_MAX if flags & _COMMAND else FRAME_BYTES_MAX)",
        "False",
        "A peer fills the memory of an engine with a frame of a gigabyte.",
        (f"{STRANGERS}::test_what_no_client_of_a_replay_says_ends_its_connection",),
    ),
    Mutation(
        "heartbeats_are_answered_to_who_does_not_read",
        "_Peer._obey",
        "not self.unsent()",
        "True",
        "A peer fills the memory of an engine with answers that it does not read.",
        (f"{STRANGERS}::test_a_client_that_asks_whether_anybody_is_there_gets_an_answer",),
    ),
)
