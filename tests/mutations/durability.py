"""Mutations of a store that outlives its process: what must be durable before something is acknowledged, and in which
order. The crash proof must see them."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_STATES = ("tests/stores/crash/test_proof.py::test_in_hundreds_of_crash_states_nothing_acknowledged_is_lost",)

MUTATIONS = (
    Mutation(
        "rows_before_bytes_are_durable",
        "DiskStore._begin_commit",
        "self._slab.sync()",
        "pass",
        "Power fails, and blocks that were acknowledged have lost their bytes.",
        _STATES,
    ),
    Mutation(
        "a_forget_that_is_not_durable",
        "DiskStore._forget",
        "self._commits.wait()\nreturn count",
        "return count",
        "Power fails, and what was forgotten is back.",
        _STATES,
    ),
    Mutation(
        "commits_that_are_not_durable",
        "Database._open",
        '"synchronous = FULL"',
        '"synchronous = NORMAL"',
        "Power fails, and the last acknowledged blocks are gone.",
        _STATES,
    ),
    Mutation(
        "a_save_takes_part_in_a_commit_under_way",
        "GroupCommit._run",
        """with self._lock:
    self._next, self._led = Future(), False
begun = self._begin()""",
        """begun = self._begin()
with self._lock:
    self._next, self._led = Future(), False""",
        "A save is acknowledged by a commit that has begun before its bytes were written.",
        _STATES,
    ),
    Mutation(
        "a_secret_that_is_not_durable",
        "Folder.write",
        "os.fsync(fd)",
        "",
        "Power fails, the secret is another one, and nothing that was saved is ever found.",
        _STATES,
    ),
)
