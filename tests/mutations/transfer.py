"""Mutations of what moves bytes: waits between accesses, levels, tickets, staging, and what becomes of a copy that
failed."""

from __future__ import annotations

from tests.mutations.mutation import Mutation


def _race(scenario: str, file: str = "test_races.py", test: str = "test_nothing_races") -> str:
    return f"tests/race/{file}::{test}[{scenario}]"


MUTATIONS = (
    Mutation(
        "a_block_holds_nothing_back",
        "Transfer._queue_up",
        "self._changes.hold is None",
        "True",
        "Another thread enqueues half of a block, while the rest is not decided.",
        ("tests/sequences/test_exclusive.py::test_nobody_enqueues_what_is_held_back",),
    ),
    Mutation(
        "a_block_allows_every_call",
        "Exclusive.check",
        "frame.f_code in _allowed",
        "True",
        "A call that waits for the device does so under the state lock, and all threads wait with it.",
        ("tests/sequences/test_exclusive.py::test_all_other_calls_are_refused_by_name_and_change_nothing",),
    ),
    Mutation(
        "a_lease_of_a_block_is_never_settled",
        "Leases.settle",
        "self.check_readable(lease)",
        "pass",
        "A reader gets the addresses of a block whose copy the device has refused.",
        ("tests/sequences/test_exclusive.py::test_a_lease_whose_copy_is_refused_is_closed_and_the_end_raises[False]",),
    ),
    # -- each of kvpool.state.records about copies, taken out of the code and not by its switch ------------
    Mutation(
        "copies_read_before_copies_wrote",
        "_need_of_copies",
        "guards >> COPY_READS",
        "guards >> COPY_READS & 2",
        "An onboard reads a host block before the offload that fills it: another prompt's KV.",
        (_race("onboard_from_a_host_block_whose_offload_is_pending"),),
    ),
    Mutation(
        "copies_read_before_the_engine_wrote",
        "_need_of_copies",
        "guards >> COPY_READS",
        "guards >> COPY_READS & 1",
        "An offload keeps what stood in the block before the engine's kernel wrote it.",
        (_race("offload_of_a_block_that_the_engine_is_still_writing"),),
    ),
    Mutation(
        "copies_write_before_copies_read",
        "_need_of_copies",
        "guards >> COPY_WRITES",
        "guards >> COPY_WRITES & 2",
        "An offload overwrites a host block that an onboard is still reading.",
        (_race("eviction_into_a_host_block_that_is_being_onboarded"),),
    ),
    Mutation(
        "copies_write_before_the_engine_read",
        "_need_of_copies",
        "guards >> COPY_WRITES",
        "guards >> COPY_WRITES & 1",
        "An onboard overwrites a block under the kernel of its last reader.",
        (_race("onboard_into_a_block_whose_last_reader_is_queued"),),
    ),
    Mutation(
        "the_engine_reads_before_copies_wrote",
        "_need_of_accesses",
        "guards >> ENGINE_READS",
        "guards >> ENGINE_READS & 2",
        "A kernel attends to a block before the onboard has brought it.",
        (_race("read_of_a_block_that_is_being_onboarded"),),
    ),
    Mutation(
        "the_engine_reads_before_another_stream_wrote",
        "_need_of_accesses",
        "guards >> ENGINE_READS",
        "guards >> ENGINE_READS & 1",
        "A hit on another stream reads KV that its writer has not written yet.",
        (_race("hit_on_a_block_whose_write_is_queued_on_another_stream"),),
    ),
    Mutation(
        "the_engine_writes_before_copies_read",
        "_need_of_accesses",
        "guards >> ENGINE_WRITES",
        "guards >> ENGINE_WRITES & 2",
        "A new sequence overwrites an evicted block before its offload has read it.",
        (_race("reuse_of_an_evicted_block_before_its_offload_has_read_it"),),
    ),
    Mutation(
        "the_engine_writes_before_another_stream_read",
        "_need_of_accesses",
        "guards >> ENGINE_WRITES",
        "guards >> ENGINE_WRITES & 1",
        "A released block is overwritten while a kernel of its last sequence reads it.",
        (_race("reuse_of_a_released_block_on_another_stream"),),
    ),
    Mutation(
        "a_batch_is_one_level",
        "Transfer._independent",
        "self._levels.cut(copy_ops) if cut else [copy_ops]",
        "[copy_ops]",
        "Two evictions into one host block in one step leave either content under either key.",
        (_race("two_evictions_into_one_host_block_in_one_step"),),
    ),
    Mutation(
        "a_pin_waits_for_its_own_batch_alone",
        "Transfer.waiting",
        "bool(self.guards & records.OTHERS_BATCHES_TOO)",
        "False",
        "A lease is given before another thread has enqueued the copy that fills its block.",
        (_race("a_pin_between_decision_and_enqueue"),),
    ),
    Mutation(
        "batches_in_any_order",
        "Transfer._begin",
        "in_order = self.guards & records.TICKET_ORDER",
        "in_order = False",
        "A copy is enqueued before an earlier decision's copy that fills its source.",
        (_race("a_second_admission_between_decision_and_enqueue"),),
    ),
    Mutation(
        "what_is_handed_out_lags",
        "Transfer.may_lag",
        "len(batch.accesses) or len(batch.token_moves)",
        "False",
        "A kernel is enqueued before its stream waits for the load of its block, and reads other bytes.",
        (
            _race("a_kernel_launched_before_the_wait_for_a_load"),
            _race("a_kernel_launched_before_the_save_of_its_block"),
        ),
    ),
    Mutation(
        "a_reader_does_not_wait",
        "Transfer.pending",
        "self.order is None or not self.guards & records.READER_WAITS",
        "True",
        "A reader on the host gets a lease of bytes that are still on their way.",
        (
            _race("a_pin_between_the_start_of_an_onboard_and_its_end"),
            _race("an_import_into_a_block_that_is_being_onboarded"),
        ),
    ),
    Mutation(
        "what_was_lost_stays_findable",
        "Transfer._end",
        "lost and self.guards & records.LOST_CONTENT_IS_FORGOTTEN",
        "False",
        "A prompt hits a block whose copy failed: whatever stood there is its KV.",
        ("tests/race/test_races.py::test_a_failure_at_each_move_of_a_batch_hands_out_nothing_that_never_came",),
    ),
    Mutation(
        "tokens_are_overwritten_before_they_moved",
        "Transfer._move_tokens",
        "self.guards & records.TOKENS_MOVE_BEFORE_REUSE",
        "False",
        "A block that accepted drafts are moved out of is another's before they were read.",
        ("tests/race/test_sequence_races.py::test_nothing_races[dropped_drafts_reused_on_another_stream]",),
    ),
    Mutation(
        "a_layer_is_read_before_it_came",
        "Transfer.wait_for",
        "self.guards & records.ENGINE_READS_LAYER_AFTER_COPY",
        "False",
        "A kernel reads a layer whose load is still on its way.",
        (_race("a_layer_read_while_it_is_loaded"),),
    ),
    Mutation(
        "what_a_stream_waits_for_is_enqueued_later",
        "Transfer.may_lag",
        "not self.guards & records.HANDED_OUT_IS_ENQUEUED",
        "True",
        "A kernel runs before the copies of its blocks: nothing has told its stream to wait.",
        (
            _race("a_kernel_launched_before_the_wait_for_a_load"),
            _race("a_kernel_launched_before_the_save_of_its_block"),
        ),
    ),
    Mutation(
        "staged_buffers_are_taken_at_once",
        "Staging.retain",
        "not self._transfer.guards & records.STAGED_BUFFERS_RETIRE_BY_EVENT",
        "True",
        "A sequence's table on the device has the rows of another.",
        (
            "tests/race/test_handovers.py::test_what_was_staged_arrives_whatever_happens_to_the_sequences_meanwhile",
            "tests/race/test_five_races.py::test_a_step_reads_the_table_that_was_staged_for_it",
        ),
    ),
    Mutation(
        "a_graph_is_staged_for_while_its_replay_reads",
        "Staging.await_replay",
        "not self._transfer.guards & records.STAGED_BUFFERS_RETIRE_BY_EVENT",
        "True",
        "A replay hands over the tables of the step behind it.",
        ("tests/race/test_handovers.py::test_each_replay_hands_over_what_was_staged_for_it",),
    ),
    Mutation(
        "what_was_copied_from_a_lost_block_counts_as_there",
        "Transfer._copy",
        "stale = bool(self._lost) and self._lost.get(int(some[0, SOURCE])) == some[0, TICKET]",
        "stale = False",
        "A block is found whose bytes were copied from one that never came.",
        ("tests/copying/test_failures.py::test_what_builds_on_a_block_that_never_came_is_lost_too",),
    ),
    # -- order ---------------------------------------------------------------------------------------
    Mutation(
        "a_stream_in_use_gives_its_number_away",
        "Order._reusable",
        "(self._complete == self._stream_points) & idle()[:known]",
        "self._complete == self._stream_points",
        "A sequence goes on on a stream of somebody else.",
        ("tests/race/test_order.py::test_a_stream_that_a_sequence_is_on_keeps_its_number",),
    ),
    # -- levels ----------------------------------------------------------------------------------------
    Mutation(
        "levels_forget_reads",
        "_assign",
        "max(scratch[source, 0], scratch[target, 0], scratch[target, 1])",
        "max(scratch[source, 0], scratch[target, 0])",
        "A block is overwritten in the level in which it is read.",
        ("tests/state/test_lists.py::test_moves_of_one_level_do_not_depend_on_each_other",),
    ),
)
