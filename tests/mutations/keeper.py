"""Mutations of the keeper: whose KV a prompt gets, what a store's failure costs, and what is counted."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_KEEPER, _FAILURES = "tests/stores/test_storage_manager.py::", "tests/stores/test_storage_manager_failures.py::"
_SAVING = "tests/state/test_saving.py::"

MUTATIONS = (
    Mutation(
        "a_key_alone_is_trusted",
        "Content.context",
        "return block_context(parent, tokens, extra, namespace_bytes(self.whose), self.group)",
        'return b""',
        "Whoever finds two prompts with one key of 16 bytes gets the KV of the other one.",
        tuple(
            f"{_FAILURES}test_the_second_of_two_prompts_with_one_key_gets_a_miss[{differs}]"
            for differs in ("tokens", "salt", "extra_ids", "parent")
        ),
    ),
    Mutation(
        "layouts_are_not_in_the_keys_of_stores",
        "PoolAdapter.names",
        "self._kinds[content.group]",
        'b"group %d" % content.group',
        "After a change of the layout, the bytes of the old one are served.",
        (f"{_KEEPER}test_another_model_or_layout_finds_nothing",),
    ),
    Mutation(
        "blocks_behind_a_wrong_one_enter",
        "Prefetches._enter",
        "loading.request.leading",
        "len(loading.blocks)",
        "A changed byte in a store becomes a wrong token.",
        (
            "tests/stores/test_storage_contract.py::test_a_changed_byte_never_comes_in[pool]",
            f"{_KEEPER}test_damaged_or_failed_blocks_are_reported_until_they_are_right_again",
        ),
    ),
    Mutation(
        "rows_are_as_long_as_the_shortest_block",
        "StorageManager.__init__",
        "nbytes = max(group.block_bytes for group in pool.groups)",
        "nbytes = min(group.block_bytes for group in pool.groups)",
        "Of a pool with several groups of layers, nothing is saved once the first large block has come.",
        (f"{_KEEPER}test_several_groups_of_layers_come_back[600]",),
    ),
    Mutation(
        "what_was_loaded_counts_as_gone",
        "PoolAdapter.answered",
        "(ABSENT, DAMAGED)",
        "list(range(7))",
        "Routers are told that a store has lost what it gave a moment ago, and it is saved once more.",
        ("tests/stores/test_storage_manager_events.py::test_what_was_loaded_is_still_in_its_store",),
    ),
    Mutation(
        "missed_events_are_not_made_up_for",
        "saving.stored",
        "at[CURSOR], at[PLACE], at[MISSED] = at[CURSOR] + gone, 0, at[MISSED] + gone",
        "at[CURSOR], at[MISSED] = at[CURSOR] + gone, at[MISSED] + gone",
        "What was computed while the keeper was busy is never saved.",
        (
            "tests/stores/test_storage_manager_events.py::test_a_storage_manager_that_has_missed_events_learns_what_there_is",
        ),
    ),
    Mutation(
        "promotions_are_not_bounded",
        "TierStorage.free",
        "return max(0, self._room - len(self.unread) - len(self.coming))",
        "return self._room",
        "A long queue of requests displaces what running ones need.",
        (
            f"{_FAILURES}test_promotions_never_displace_more_than_their_room",
            f"{_KEEPER}test_a_prompt_gets_no_more_than_the_room_for_promotions",
        ),
    ),
    Mutation(
        "blocks_of_several_namespaces_are_saved_as_those_of_one",
        "PoolAdapter.take",
        "(content.namespace, content.group)",
        "content.group",
        "A tenant loses its blocks to the quota of another one.",
        (f"{_FAILURES}test_a_namespace_has_its_own_quota_and_not_that_of_its_neighbour",),
    ),
    Mutation(
        "what_was_copied_under_a_revoked_lease_is_saved",
        "PoolAdapter.copy",
        "copied[places] = same & _ended(lease)",
        "copied[places] = same | _ended(lease)",
        "A store keeps bytes of one prompt under the key of another, with a good seal.",
        (f"{_FAILURES}test_nothing_is_saved_that_was_copied_under_a_revoked_lease",),
    ),
    Mutation(
        "clean_copies_count_as_what_is_lost_next",
        "saving.victims",
        "margins[g] - lists[first + EMPTY, 2] - lists[first + CLEAN, 2]",
        "margins[g] - lists[first + EMPTY, 2]",
        "Content is written that the host still keeps long.",
        (f"{_SAVING}test_what_the_host_evicts_next_is_read_in_that_order",),
    ),
)
