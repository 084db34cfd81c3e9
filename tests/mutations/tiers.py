"""Mutations of who holds a block and where its content goes: references and pins, leases, lists."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_FITS = "tests/state/test_lists.py::test_what_does_not_fit_raises"

MUTATIONS = (
    # -- references and pins, one word -----------------------------------------------------------------
    Mutation(
        "an_exchange_that_failed_counts",
        "change_word",
        "compare_exchange(ref_words, b, old, new)",
        "compare_exchange(ref_words, b, old, new) or True",
        "Of two holds that are taken at once one is lost, and its block is given away under its holder.",
        (
            (
                "tests/race/test_interleavings.py::test_interleavings_keep_the_promise[a word gains a reference "
                "and a pin]"
            ),
        ),
    ),
    Mutation(
        "a_word_falls_below_zero",
        "change_word",
        "new_refs < 0 or new_pins < 0",
        "False",
        "An unpin too many borrows from the references, and a block that is in use looks free.",
        (
            (
                "tests/race/test_interleavings.py::test_interleavings_keep_the_promise[a word loses its last "
                "reference once]"
            ),
        ),
    ),
    Mutation(
        "the_last_reference_takes_the_pins_along",
        "drop_reference",
        "load(ref_words, b)",
        "load(ref_words, b) & REFS",
        "A block that a reader has pinned is evicted when its sequence ends.",
        ("tests/holders/test_reservations.py::test_a_pin_by_id_outlives_an_abort",),
    ),
    Mutation(
        "the_first_reference_drops_the_pins",
        "add_reference",
        "load(ref_words, b)",
        "load(ref_words, b) & REFS",
        "A hit on a block that a reader has pinned takes the pin away.",
        ("tests/state/test_scenarios_tiers.py::test_a_hit_on_a_pinned_block_leaves_it_pinned",),
    ),
    Mutation(
        "an_unpin_frees_what_is_still_held",
        "unpin_block",
        "change_word(blocks_of(group), b, 0, -1) == 0",
        "change_word(blocks_of(group), b, 0, -1) >= 0",
        "A block of a running sequence is a victim once a reader lets go of it.",
        ("tests/state/test_scenarios_tiers.py::test_a_hit_on_a_pinned_block_leaves_it_pinned",),
    ),
    Mutation(
        "a_pinned_block_stays_a_victim",
        "pin_block",
        "unlink(group, b)",
        "",
        "A block is evicted under its reader.",
        ("tests/state/test_scenarios_tiers.py::test_a_hit_on_a_pinned_block_leaves_it_pinned",),
    ),
    Mutation(
        "a_block_that_holds_nothing_is_pinned",
        "pin_blocks",
        "bad = block.flags & LOST != 0 or (block.ref_word == 0 and not block.flags & INDEXED)",
        "bad = False",
        "A lease promises bytes of a block that has none.",
        ("tests/state/test_safety.py::test_what_holds_nothing_cannot_be_pinned",),
    ),
    # -- leases ------------------------------------------------------------------------------------------
    Mutation(
        "a_lease_shows_what_it_unpins",
        "Leases.take",
        "read_only(blocks)",
        "blocks",
        "Whoever writes into what a lease shows unpins the blocks of others.",
        ("tests/state/test_safety.py::test_what_a_lease_shows_is_not_what_it_unpins",),
    ),
    Mutation(
        "a_lease_is_closed_twice",
        "Leases.give_back",
        "not self.is_open(lease)",
        "False",
        "The second close takes somebody else's pin.",
        ("tests/state/test_safety.py::test_what_a_lease_shows_is_not_what_it_unpins",),
    ),
    Mutation(
        "a_lease_is_unpinned_twice",
        "end_pins",
        "len(ids) and ids[0] != NONE",
        "len(ids)",
        "A destructor closes a lease that is being closed, and the pool takes a pin of the block before the first.",
        (
            "tests/holders/test_groups_pins.py::test_a_lease_that_a_destructor_closes_while_it_is_closed_is_unpinned_once",
        ),
    ),
    Mutation(
        "a_lease_of_bytes_that_never_came",
        "Leases.pin",
        "lost is not None",
        "False",
        "A reader copies whatever stood in a block that a failed device did not fill.",
        (
            "tests/copying/test_failures.py::test_a_reader_gets_no_lease_of_bytes_that_never_came",
            "tests/state/test_safety.py::test_a_pin_whose_copy_failed_is_not_a_pin",
        ),
    ),
    Mutation(
        "a_closed_lease_says_nothing_of_its_stream",
        "Leases.give_back",
        "lambda _: self.core.note(ACCESSED, on, lease.blocks)",
        "None",
        "A block is overwritten while a copy that its reader enqueued is still reading it.",
        ("tests/race/test_races.py::test_nothing_races[a_host_block_reused_while_a_copy_of_its_reader_is_pending]",),
    ),
    # -- lists -------------------------------------------------------------------------------------------
    Mutation(
        "a_block_is_taken_out_of_no_list",
        "unlink",
        "which < 0",
        "False",
        "A defect of the lists writes into memory of others in place of an error.",
        (f"{_FITS}[unlink]",),
    ),
    Mutation(
        "a_block_is_put_into_two_lists",
        "_link",
        "blocks[b].list >= 0",
        "False",
        "A defect of the lists gives one block to two sequences in place of an error.",
        (f"{_FITS}[relink]", f"{_FITS}[push_back]", f"{_FITS}[push_front]"),
    ),
)
