"""Mutations of the five races of ``docs/races.md``: most rules are taken out so that kvpool does what the project that
shipped the race did. The rule of staged buffers is in ``transfer.py``."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_FIVE = "tests/race/test_five_races.py"

MUTATIONS = (
    Mutation(
        "a_decision_takes_no_lock",
        "Core._decide",
        "self.lock",
        "nullcontext()",
        "Two threads take one victim, or a reader pins it between its choice and its removal.",
        (f"{_FIVE}::test_a_victim_is_chosen_and_taken_in_one_step",),
    ),
    Mutation(
        "a_pin_takes_no_lock",
        "Leases.pin",
        "core.lock",
        "ExitStack()",
        "A reader finds a block under its key, the block is evicted, and the reader pins and reads other content.",
        (f"{_FIVE}::test_a_block_is_looked_up_and_pinned_in_one_step",),
    ),
    Mutation(
        "the_skip_is_dropped",
        "kv_copy._copy",
        'integer_argument("skip_prefix_n_tokens", skip, 0, total)',
        "0",
        "A load overwrites blocks of a shared prefix while another request reads them.",
        (
            f"{_FIVE}::test_a_chunk_that_is_loaded_leaves_a_prefix_alone_that_another_request_reads",
            "tests/kernels/test_kv_stagings.py::test_the_skip_is_exact_to_the_token_over_all_stagings",
        ),
    ),
    Mutation(
        "the_skip_is_rounded_down_to_blocks",
        "kv_copy._copy",
        'integer_argument("skip_prefix_n_tokens", skip, 0, total)',
        'integer_argument("skip_prefix_n_tokens", skip, 0, total) // cache.tokens_per_block * cache.tokens_per_block',
        "A load overwrites the tokens at the end of a skipped prefix that fill no block.",
        ("tests/kernels/test_kv_stagings.py::test_the_skip_is_exact_to_the_token_over_all_stagings",),
    ),
    Mutation(
        "a_claim_follows_the_content",
        "take_device",
        """
b, deadline = take_victim(group, DEVICE, PRIORITY_MAX)
if b == NONE:
    raise RuntimeError("a block was taken that was not counted")
if blocks[b].flags & INDEXED:
    _evict(group, b, deadline)
""",
        """
from kvpool.state.index import find_key
from kvpool.state.policies.block_lists import unlink
from kvpool.state.policies.policy import LISTS_PER_TIER, lists_of, victim
b = victim(group, DEVICE, PRIORITY_MAX)
if b == NONE:
    raise RuntimeError("a block was taken that was not counted")
if blocks[b].flags & INDEXED:
    _evict(group, b, NONE)
    if find_key(group, blocks[b].key0, blocks[b].key1) >= group.device_blocks:
        blocks[b].list += LISTS_PER_TIER
unlink(group, b)
""",
        "A device has more free blocks than it has blocks, and the count of used ones is negative.",
        (f"{_FIVE}::test_counts_stay_on_the_tier_of_their_block",),
    ),
    Mutation(
        "requests_of_a_batch_are_admitted_one_by_one",
        "admit.admit",
        """
n = claim(groups, requests, out, allow_partial)
if n > 0:
    _fill(groups, requests, out, n, now_ms)
return n
""",
        """
for r in range(len(requests)):
    n = claim(groups, requests[r : r + 1], out[:, r : r + 1], allow_partial)
    if n <= 0:
        return r if allow_partial else n
    _fill(groups, requests[r : r + 1], out[:, r : r + 1], n, now_ms)
return len(requests)
""",
        "A request reuses less than its scheduler was told, since one before it in the batch has evicted the rest.",
        (f"{_FIVE}::test_a_batch_reuses_what_was_promised_before_it",),
    ),
    Mutation(
        "a_lease_is_closed_without_the_lock",
        "Leases.close",
        "self.core.lock",
        "ExitStack()",
        "A reader's unpin is lost, or its block is in a list and held.",
        ("tests/race/test_interleavings.py::test_whoever_changes_a_reference_word_holds_the_state_lock[two_unpins]",),
    ),
)
