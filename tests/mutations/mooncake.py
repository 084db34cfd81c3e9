"""Mutations of the store in a Mooncake cluster: what it trusts, when rows are given back, and when nothing is
called."""

from __future__ import annotations

from tests.mutations.mutation import Mutation


def _client(test: str) -> tuple[str]:
    return (f"tests/stores/mooncake/test_client.py::{test}",)


MUTATIONS = (
    Mutation(
        "close_waits_for_no_call",
        "Client.close",
        "not self._calls",
        "True",
        "The process crashes when a call returns to a library that has ended.",
        _client("test_who_closes_waits_for_calls_under_way"),
    ),
)
