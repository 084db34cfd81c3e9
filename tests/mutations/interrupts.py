"""Mutations of what handlers that raise, and children of a fork, must find."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_CHILDREN = "tests/copying/test_children.py::"

MUTATIONS = (
    Mutation(
        "a_block_keeps_what_has_its_lock",
        "LockHold._made_end",
        "end.generator, self._generator = self._generator, None",
        "end.generator = self._generator",
        "Ctrl-C at the end of a block in a notebook: no thread can call the pool any more.",
        ("tests/copying/test_changes.py::test_a_hold_ends_wherever_exceptions_come_though_their_tracebacks_are_kept",),
    ),
    Mutation(
        "a_handler_in_a_copy_breaks_the_device",
        "Transfer._failed",
        "from_handler(error)",
        "False",
        "Ctrl-C during a copy closes the pool.",
        ("tests/copying/test_failures.py::test_the_next_call_enqueues_what_an_interrupt_has_left[prefetch-]",),
    ),
    Mutation(
        "a_verb_that_ended_half_way_is_not_noted",
        "Changes.call",
        "self._note_torn(error)",
        "pass",
        "The pool goes on with lists that are half changed, and hands out wrong bytes.",
        (
            "tests/copying/test_changes.py::test_a_pool_whose_verb_has_ended_half_way_refuses_all_but_stats_verify_and_close",
        ),
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
        (f"{_CHILDREN}test_a_pool_in_whose_call_another_thread_was_refuses_a_child[state]",),
    ),
    Mutation(
        "addresses_of_shared_memory_are_free_in_a_child",
        "_after_fork",
        "_mmap(address, nbytes, _NO_ACCESS, _PLACE, -1, 0) != address",
        "False",
        "A child crashes: memory that it uses is unmapped.",
        (f"{_CHILDREN}test_what_a_child_maps_is_not_where_its_parent_has_shared_memory",),
    ),
)
