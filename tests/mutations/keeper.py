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
        "evicted_promotions_keep_their_room",
        "Prefetches._look",
        "host and not device and arrival.until > self._clock()",
        "arrival.until > self._clock()",
        "After content was evicted unread, prefetches bring nothing for a minute.",
        (
            "tests/stores/test_load_room.py::"
            "test_promoted_blocks_of_a_pool_that_are_evicted_unread_leave_their_room_to_the_next_prefetch",
        ),
    ),
    Mutation(
        "what_was_copied_says_what_its_event_has_said",
        "PoolAdapter._read",
        'note_fields(contents, np.stack([records["parent0"], records["parent1"]], axis=1), tokens, extra)',
        "",
        "A store keeps the bytes of one prompt in the name and context of another, which has the same key.",
        (f"{_FAILURES}test_a_mac_covers_what_the_pool_has_under_the_key_now",),
    ),
    Mutation(
        "a_pool_with_a_random_secret_has_a_keeper",
        "_check_secret",
        "persistent and not pool.core.config.persistent_secret",
        "False",
        "Nothing that was saved is found after a restart, and nobody is told why.",
        (f"{_FAILURES}test_a_pool_whose_keys_end_with_it_is_refused_at_once",),
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
        "every_prefetch_that_finds_nothing_was_cached",
        "Prefetches._plan",
        '"cached" if more else "absent"',
        '"cached"',
        "An operator cannot tell a store that has nothing from a pool that has all.",
        (f"{_KEEPER}test_a_prefetch_says_why_there_is_no_more",),
    ),
    Mutation(
        "names_of_what_stores_have_are_forgotten",
        "StoredContent.read",
        "for _, of_rows in (*self._pending, *held):\n    names.update(of_rows)",
        "",
        "A router is told that content of a tenant is content without a salt.",
        (
            "tests/stores/test_storage_manager_events.py::test_what_has_gone_from_the_pool_is_reported_with_its_namespace",
        ),
    ),
    Mutation(
        "what_stores_have_is_not_told_again",
        "StoredContent.read",
        "parts = [*of_stores, of_pool, *again] if cleared else [of_pool, *of_stores]",
        "parts = [of_pool, *of_stores]",
        "After a reset of the pool, routers send nobody to a worker whose disk has the prompt.",
        ("tests/stores/test_storage_manager_mirror.py::test_what_stores_hold_is_reported_again_after_a_reset",),
    ),
    Mutation(
        "content_known_no_more_stays_with_readers",
        "StoredContent.note",
        "self._report(REMOVED, store, [content for content, bits in oldest if bits & 1 << store])",
        "pass",
        "A router keeps blocks of a store for ever that the store lost long ago.",
        ("tests/stores/test_storage_manager_mirror.py::test_content_that_is_known_no_more_is_known_to_no_mirror",),
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
        "what_was_asked_before_a_reset_enters",
        "Prefetches._enter",
        "fetch.generation != self._generation()",
        "False",
        "What was dropped on purpose is found again.",
        (f"{_FAILURES}test_nothing_that_was_asked_before_a_reset_enters_after_it",),
    ),
    Mutation(
        "a_suspended_store_is_asked",
        "CircuitBreaker.usable",
        "if any(now_s < kind.probe_at for kind in down):\n    return False",
        "if any(now_s < kind.probe_at for kind in down):\n    return True",
        "Every request waits for a store that is dead.",
        (
            "tests/stores/test_health.py::test_one_job_probes_it_after_a_while",
            "tests/stores/test_storage_contract.py::test_a_store_that_fails_is_left_alone_and_used_again",
        ),
    ),
    Mutation(
        "dropped_saves_are_not_counted",
        "TierStorage._give_up",
        "self.dropped[self.workers[number].name, reason] += len(blocks)",
        "pass",
        "An operator does not see that a store is too slow for what it is to keep.",
        (
            "tests/stores/test_storage_contract.py::test_what_closing_gives_up_is_counted[pool]",
            f"{_FAILURES}test_a_block_that_is_evicted_before_it_was_copied_is_counted",
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
        "rows_of_blocks_that_have_gone_are_kept",
        "PoolAdapter.pin",
        "worker.give_back(rows[~is_copied])",
        "",
        "With each block that is evicted before it was copied, a row is lost: in the end nothing is saved any more.",
        (f"{_KEEPER}test_a_copy_that_the_device_refuses_saves_nothing_wrong",),
    ),
    Mutation(
        "a_row_keeps_what_was_there_before",
        "PoolAdapter._copy",
        "row[at:] = 0",
        "",
        "Behind a block of one tenant, a store keeps KV of another.",
        (f"{_FAILURES}test_a_row_has_nothing_of_what_was_there_before",),
    ),
    Mutation(
        "to_be_saved_is_a_use",
        "PoolAdapter.copy",
        "pool.core.decide(None, saving.put_back, group.index, ids, before)",
        "",
        "What a store got is kept on the host longer than what is used: hits are lost.",
        (f"{_KEEPER}test_saving_changes_no_order_of_eviction",),
    ),
    Mutation(
        "a_copy_does_not_know_who_was_told_of_the_content",
        "copy_content",
        "t.saved = s.saved",
        "t.saved = 0",
        "Content is saved again each time that it moves between the tiers.",
        (f"{_SAVING}test_content_is_read_once_while_it_moves_between_tiers",),
    ),
    Mutation(
        "what_takes_over_a_host_copy_was_told_to_nobody",
        "sequences._publish",
        "blocks[b].saved = blocks[same_key].saved",
        "",
        "What the host has and is computed once more is saved once more.",
        (f"{_SAVING}test_content_that_is_computed_beside_its_host_copy_is_not_read_again",),
    ),
    Mutation(
        "new_content_counts_as_told",
        "policy.on_insert",
        "block.saved = 0",
        "",
        "What comes into a block whose last content was saved is never saved.",
        (f"{_SAVING}test_content_that_has_gone_and_comes_again_is_read_again",),
    ),
    Mutation(
        "a_saver_that_comes_later_trusts_the_one_before",
        "saving.open_dirty_cursor",
        "blocks_of(group)[b].saved &= ~bit",
        "pass",
        "A keeper over another store saves nothing of what the last one has saved.",
        (f"{_SAVING}test_savers_know_nothing_of_each_other",),
    ),
    Mutation(
        "clean_copies_count_as_what_is_lost_next",
        "saving.victims",
        "margins[g] - lists[first + EMPTY, 2] - lists[first + CLEAN, 2]",
        "margins[g] - lists[first + EMPTY, 2]",
        "Content is written that the host still keeps long.",
        (f"{_SAVING}test_what_the_host_evicts_next_is_read_in_that_order",),
    ),
    Mutation(
        "what_was_saved_first_goes_last",
        "saving.put_back",
        "behind = prev if later == 0 or later >> 31 else behind",
        "pass",
        "A quarter of the host is taken by what nobody has used for longest.",
        tuple(
            f"tests/stores/test_storage_contract.py::test_what_is_saved_before_it_goes_goes_in_its_order[{host}]"
            for host in ("pool", "cache")
        ),
    ),
)
