"""Mutations of what handlers that raise, and children of a fork, must find."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_EXACT, _CHILDREN = "tests/copying/test_signals.py::", "tests/copying/test_children.py::"

MUTATIONS = (
    Mutation(
        "two_signals_at_once_end_the_deferral",
        "_Outermost.__enter__",
        "_current = None",
        "",
        "After Ctrl-C and a timeout at once, no later call of the process is protected.",
        (f"{_EXACT}test_deferring_goes_on_after_two_signals_at_once",),
    ),
    Mutation(
        "a_signal_at_the_end_undoes_nothing",
        "interrupt._leave",
        "_owed.append(undo)",
        "pass",
        "A timeout leaves a sequence that nobody has, whose blocks are held for ever.",
        (f"{_EXACT}test_a_signal_before_any_instruction_finds_the_call_undone_or_whole[cpu-pin]",),
    ),
    Mutation(
        "a_lock_of_a_thread_that_is_gone_is_waited_for",
        "Process.after_fork",
        "if why:\n"
        '    lost = LostLock(f"{why}: {self._remedy}")\n'
        "    for part, name, _ in locks:\n"
        "        setattr(part, name, lost)",
        "if False:\n"
        '    lost = LostLock(f"{why}: {self._remedy}")\n'
        "    for part, name, _ in locks:\n"
        "        setattr(part, name, lost)",
        "A child that uses the pool hangs for ever.",
        (f"{_CHILDREN}test_a_pool_in_whose_call_another_thread_was_refuses_a_child",),
    ),
    Mutation(
        "addresses_of_shared_memory_are_free_in_a_child",
        "_after_fork",
        "_mmap(address, nbytes, _NO_ACCESS, _PLACE, -1, 0) != address",
        "False",
        "A child crashes: memory that it uses is unmapped.",
        (f"{_CHILDREN}test_what_a_child_maps_is_not_where_its_parent_has_shared_memory",),
    ),
    Mutation(
        "a_keeper_answers_a_child",
        "HostStorageManager.find",
        "self._process.check(self)",
        "",
        "A key is PENDING for ever in a child.",
        (f"{_CHILDREN}test_a_host_storage_manager_refuses_a_child_and_keeps_its_parent",),
    ),
)
