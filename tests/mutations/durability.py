"""Mutations of a store that outlives its process: what must be durable before something is acknowledged, and in which
order. The crash proof must see them."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_STATES = ("tests/stores/crash/test_proof.py::test_in_hundreds_of_crash_states_nothing_acknowledged_is_lost",)

MUTATIONS = (
    Mutation(
        "rows_before_bytes_are_durable",
        "stores/disk/disk_store.py",
        "            self._slab.sync()\n",
        "",
        "Power fails, and blocks that were acknowledged have lost their bytes.",
        _STATES,
    ),
    Mutation(
        "a_forget_that_is_not_durable",
        "stores/disk/disk_store.py",
        "        self._commits.wait()\n        return count\n",
        "        return count\n",
        "Power fails, and what was forgotten is back.",
        _STATES,
    ),
    Mutation(
        "commits_that_are_not_durable",
        "stores/disk/database.py",
        '"synchronous = FULL"',
        '"synchronous = NORMAL"',
        "Power fails, and the last acknowledged blocks are gone.",
        _STATES,
    ),
    Mutation(
        "a_save_takes_part_in_a_commit_under_way",
        "stores/disk/commits.py",
        "                self._running, self._next = True, _Batch()\n",
        "                self._running = True\n",
        "A save is acknowledged by a commit that has begun before its bytes were written.",
        _STATES,
    ),
    Mutation(
        "a_row_from_before_a_crash_is_believed",
        "stores/disk/disk_store.py",
        "        self._compare(names, rows, stop)\n",
        "",
        "A block whose slot had got other bytes before a crash is acknowledged again, and nothing is written.",
        (
            *_STATES,
            "tests/stores/test_disk_damage.py::"
            "test_a_block_that_is_there_is_saved_again_only_if_a_crash_took_its_bytes[bytes taken-0]",
        ),
    ),
    Mutation(
        "a_secret_that_is_not_durable",
        "stores/disk/folder.py",
        "            os.fsync(fd)\n        finally:\n            os.close(fd)\n        os.rename(",
        "        finally:\n            os.close(fd)\n        os.rename(",
        "Power fails, the secret is another one, and nothing that was saved is ever found.",
        _STATES,
    ),
    Mutation(
        "a_folder_that_is_not_durable",
        "stores/disk/folder.py",
        "            _sync_path(os.path.dirname(os.path.abspath(path)))\n",
        "            pass\n",
        "Power fails soon after the first opening, and the whole store is gone.",
        _STATES,
    ),
)
