"""Mutations of what callers pass: memory that they change, objects that lie, copies and pickles, and stores."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_COPIED = "tests/sequences/test_private_memory.py::test_arguments_are_copied"
_LYING = "tests/sequences/test_changing_arguments.py"

MUTATIONS = (
    # -- memory that others change during the call ----------------------------------------------------------
    Mutation(
        "tokens_are_not_copied",
        "token_array",
        "ids = tokens.copy()",
        "ids = tokens",
        "A prompt that changes during the call is cached under the key of another.",
        (f"{_COPIED}[tokens]",),
    ),
    Mutation(
        "ids_and_counts_are_not_copied",
        "int64_array",
        "integers = values.copy()",
        "integers = values",
        "A count that grows behind its check writes behind a row of the block table.",
        (f"{_COPIED}[integers]",),
    ),
    Mutation(
        "other_integers_are_not_copied",
        "_integers",
        "return view.copy()",
        "return found",
        "The same, for arrays that are none of NumPy's.",
        (f"{_COPIED}[integers]",),
    ),
    Mutation(
        "keys_are_not_copied",
        "key_rows",
        "array.copy()",
        "found",
        "A lease has blocks of other keys than those that it names.",
        (f"{_COPIED}[keys]",),
    ),
    Mutation(
        "keys_of_jobs_are_not_copied",
        "keys_argument",
        "np.array(keys)",
        "np.asarray(keys)",
        "A block comes back under a key that was not asked for.",
        (f"{_COPIED}[keys of jobs]",),
    ),
    Mutation(
        "the_keys_of_a_list_are_read_twice",
        "opaque_keys._tuple_of",
        "return tuple(iterator)",
        "return keys",
        "Keys are reserved that the caller has taken out of the list.",
        ("tests/hostcache/test_arguments.py::test_keys_of_any_length_and_from_any_iterable",),
    ),
    # -- objects that lie ------------------------------------------------------------------------------------
    Mutation(
        "a_subclass_says_what_shape_its_flags_have",
        "_flags",
        "flags = np.asarray(values)[...]",
        "flags = values[...]",
        "Jitted code reads and writes behind an array that is shorter than it said.",
        (f"{_LYING}::test_blocks_that_are_there_are_asked_for_nothing",),
    ),
    Mutation(
        "keys_have_a_state_that_can_be_set",
        "BlockKeys.__setstate__",
        "def __setstate__(self, state: object) -> None:\n"
        '    raise TypeError("BlockKeys have no state to set: a pickle has the arguments of their constructor")',
        "def _setstate(self, state: object) -> None:\n"
        '    raise TypeError("BlockKeys have no state to set: a pickle has the arguments of their constructor")',
        "A pickle has keys trusted that no pool has hashed.",
        (f"{_LYING}::test_keys_are_made_once",),
    ),
    Mutation(
        "a_copy_of_step_tables_knows_the_places_of_the_first",
        "StepTables.__getstate__",
        'return {**vars(self), "_known": {}}',
        "return dict(vars(self))",
        "A step writes to arrays that may have been freed.",
        (f"{_LYING}::test_the_tables_of_a_copy_are_written_and_no_others[deepcopy]",),
    ),
    # -- stores ------------------------------------------------------------------------------------------------
    Mutation(
        "a_store_writes_to_the_rows_of_a_job",
        "StoreCalls._checked",
        "self._store.load(keys.copy(), rows.copy(), lambda: request.done)",
        "self._store.load(np.array(keys, copy=None), rows, lambda: request.done)",
        "A store has one row checked, and another one trusted.",
        ("tests/stores/test_queue.py::test_a_block_in_another_row_or_under_another_key_is_damaged[its row]",),
    ),
    Mutation(
        "a_code_becomes_a_byte_before_it_is_checked",
        "_codes",
        "codes = np.array(answer)",
        "codes = np.array(answer).astype(np.uint8)",
        "A store that answers 257 is trusted to have said OK.",
        ("tests/stores/test_queue.py::test_codes_that_are_none_are_failures[[257 257]-find]",),
    ),
    Mutation(
        "an_error_is_asked_for_its_text",
        "_text_of",
        "return type(error).__name__",
        "raise",
        "An error without a text ends a thread of the queue, and its job never returns.",
        ("tests/stores/test_queue.py::test_no_error_of_a_store_ends_a_thread[Mute-find]",),
    ),
)
