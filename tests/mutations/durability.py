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
        "a_row_from_before_a_crash_is_trusted",
        "Index.reserve",
        "self._again(key, tag, key in same, keep) if self.is_doubtful(key) else HERE",
        "HERE",
        "A block whose slot had got other bytes before a crash is acknowledged again, and nothing is written.",
        (
            *_STATES,
            "tests/stores/test_disk_damage.py::"
            "test_a_block_that_was_there_at_a_crash_is_made_durable_once[bytes taken-0]",
        ),
    ),
    Mutation(
        "right_bytes_are_written_again",
        "DiskStore._same",
        "self._slab.has(slot, int(rows[place]))",
        "False",
        "After a crash all blocks that are saved again are written, and others are evicted for them.",
        ("tests/stores/test_disk_damage.py::test_a_save_after_a_crash_writes_only_the_blocks_that_are_damaged",),
    ),
    Mutation(
        "the_slot_of_a_failed_commit_is_free",
        "Index.abort",
        "self._unclear if unclear else self._free",
        "self._free",
        "A commit has failed, and is durable all the same. The next block takes its slot, power fails, and neither the "
        "old bytes nor the new ones of an acknowledged block are there.",
        (
            "tests/stores/test_disk_damage.py::"
            "test_a_commit_that_fails_takes_neither_the_old_bytes_nor_the_new[durable]",
        ),
    ),
    Mutation(
        "the_old_row_stays_beside_the_new_one",
        "Index.complete",
        "before not in (-1, slot)",
        "False",
        "Each block that gets other bytes after a crash takes a slot from the store until it is opened again.",
        ("tests/stores/test_disk_damage.py::test_a_block_that_gets_other_bytes_while_it_is_read_keeps_its_slot",),
    ),
    Mutation(
        "a_secret_that_is_not_durable",
        "Folder.write",
        "os.fsync(fd)",
        "",
        "Power fails, the secret is another one, and nothing that was saved is ever found.",
        _STATES,
    ),
    Mutation(
        "a_folder_that_is_not_durable",
        "Folder.__init__",
        "_sync_path(os.path.dirname(os.path.abspath(path)))",
        "pass",
        "Power fails soon after the first opening, and the whole store is gone.",
        _STATES,
    ),
)
