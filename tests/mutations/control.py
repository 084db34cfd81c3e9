"""Mutations of what callers do to cached content by its name, of keys that grow, and of what several groups fetch."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_CONTROL, _REMOTE = "tests/sequences/test_control.py::", "tests/remote/test_remote_groups.py::"

MUTATIONS = (
    Mutation(
        "who_computes_it_twice_brings_forgotten_content_back",
        "_withdraw",
        "sequence.private, sequence.duplicates = 1, NONE",
        "pass",
        "A tenant has left, and what its last requests held is found again.",
        (f"{_CONTROL}test_what_running_sequences_hold_is_unfindable_and_goes_when_they_end",),
    ),
    Mutation(
        "a_fork_publishes_what_its_parent_must_not",
        "_become",
        "sequences[row].generation = generation",
        "sequences[row].generation = generation\nsequences[row].private = 0",
        "A request that was to leave no trace leaves that of its beams.",
        (f"{_CONTROL}test_a_fork_of_a_withdrawn_sequence_publishes_nothing_either",),
    ),
    Mutation(
        "pools_with_other_windows_serve_each_other",
        "served",
        "(group.kind, group.window, group.sinks, [layout.fingerprint for layout in group.layouts])",
        "(group.kind, [layout.fingerprint for layout in group.layouts])",
        "KV that another model computed is taken for this one's.",
        (f"{_REMOTE}test_pools_whose_groups_differ_are_refused",),
    ),
    Mutation(
        "a_request_may_have_more_bytes_than_its_client",
        "UnderWay.accept",
        "(request.nbytes, limits.bytes_per_client, 'bytes in one request')",
        "(0, limits.bytes_per_client, 'bytes in one request')",
        "A request of large blocks waits for ever, and its client with it.",
        (f"{_REMOTE}test_limits_hold_for_the_bytes_of_each_group",),
    ),
)
