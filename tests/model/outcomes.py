"""Outcomes: what calls return or raise, so that pool and model can be compared, and what the pool's policies choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvpool.common.jit import jit
from kvpool.common.jit.intrinsics import array_at, entry_of, record_at
from kvpool.state.policies import agent
from kvpool.state.policies.chains import POLICY
from kvpool.state.records import GROUP


class Failed:
    """What a call raised, compared by the name of its type: the model has exceptions of its own."""

    def __init__(self, error: Exception) -> None:
        self.error, self.name = error, "ValueError" if isinstance(error, ValueError) else type(error).__name__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Failed) and other.name == self.name

    def __repr__(self) -> str:
        return f"raised {self.error!r}"


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return Failed(error)


class Choices:
    """Records what the policies of a pool's groups choose, after their own records."""

    def __init__(self, states: Sequence[Any]) -> None:
        self._books = [np.zeros(POLICY_BYTES // 8 + NOTES, np.int64) for _ in states]
        for state, book in zip(states, self._books, strict=True):
            policy = book[:-NOTES].view(POLICY)
            policy[:] = state.policy_state.policy_state
            policy["choose"] = entry_of(choose_noting, 0, 0, 0)
            state.policy_state.policy_state, state.header.policy_at = policy, book.ctypes.data

    def read(self) -> list[list[int]]:
        """The choices since the last time, by group."""
        records = [book[-NOTES:] for book in self._books]
        choices = [record[1 : 1 + record[0]].tolist() for record in records]
        for record in records:
            record[0] = 0
        return choices


NOTES, POLICY_BYTES = 4096, 2 * POLICY.itemsize


@jit
def choose_noting(at, second, nothing):
    """A hook that chooses as the policy does, and notes it."""
    b = agent.choose(at, second, nothing)
    notes = array_at(record_at(at, GROUP).policy_at + POLICY_BYTES, (NOTES,), np.int64)
    notes[0] += 1
    notes[notes[0]] = b
    return b
