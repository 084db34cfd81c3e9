"""Mutations of the store in a Mooncake cluster: what it trusts, when rows are given back, and when nothing is
called."""

from __future__ import annotations

from tests.mutations.mutation import Mutation


def _client(test: str) -> tuple[str]:
    return (f"tests/stores/mooncake/test_client.py::{test}",)


MUTATIONS = (
    Mutation(
        "a_put_that_says_0_is_trusted",
        "MooncakeStore._save",
        "OK if code > 0 else self._code(code) if code else REFUSED",
        "OK",
        "A save is OK, and its block is nowhere.",
        _client("test_a_put_that_stored_nothing_is_refused"),
    ),
    Mutation(
        "rows_are_returned_while_transfers_run",
        "Client.get",
        "time.sleep",
        "bool",
        "A machine that hung writes an old block over one that was loaded and checked since.",
        _client("test_rows_of_a_load_that_the_library_gave_up_are_not_returned_before_it_has_let_go"),
    ),
    Mutation(
        "close_waits_for_no_call",
        "Client.close",
        "not self._calls",
        "True",
        "The process crashes when a call returns to a library that has ended.",
        _client("test_who_closes_waits_for_calls_under_way"),
    ),
    Mutation(
        "a_client_that_is_closed_is_called",
        "Client._call",
        "self._closed",
        "False",
        "The process crashes.",
        _client("test_a_client_that_is_closed_calls_nothing"),
    ),
    Mutation(
        "a_child_calls_the_library",
        "Client.__init__",
        "stays_here(self)",
        "",
        "A child of os.fork() hangs for ever.",
        _client("test_a_child_gets_an_error_and_destroys_nothing"),
    ),
    Mutation(
        "room_is_not_made_below_a_limit",
        "TagLimits.save",
        'drop(np.frombuffer(b"".join(added.gone), np.uint8).reshape(-1, KEY_BYTES))',
        "pass",
        "A tenant has more blocks in the cluster than its limit.",
        _client("test_a_limit_counts_what_was_saved_and_room_is_made_first"),
    ),
)
