"""Mutations of what content is: keys, what a hit compares, what is published and when, and who is told."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_APART = "tests/state/test_safety.py::test_the_namespace_tag_alone_keeps_prompts_apart"

MUTATIONS = (
    # -- keys, and each of kvpool.state.guards about it, taken out of the code and not by its switch --------
    Mutation(
        "the_parent_is_not_in_the_key",
        "block_key",
        "guards & PARENT_IN_KEY",
        "False",
        "The same tokens behind another beginning hit: KV that attended to another prompt.",
        ("tests/state/test_scenarios_reuse.py::test_the_same_tokens_behind_another_beginning_are_other_content",),
    ),
    Mutation(
        "the_namespace_is_not_in_the_key",
        "namespace_root",
        'fields if in_key else b""',
        'b""',
        "The contents of two tenants have one key, so that only one is cached, and routers take one for the other.",
        ("tests/state/test_safety.py::test_no_two_names_of_a_namespace_are_taken_for_each_other",),
    ),
    Mutation(
        "a_hit_does_not_compare_the_namespace",
        "has_content",
        "blocks_of(h)[b].namespace != namespace",
        "False",
        "Where two keys collide, a tenant gets whole blocks of another one.",
        (_APART,),
    ),
    Mutation(
        "a_partial_hit_does_not_compare_the_namespace",
        "_is_child",
        "blocks[b].namespace == namespace",
        "True",
        "Where two roots collide, a tenant gets the beginning of another one's block.",
        (_APART,),
    ),
    Mutation(
        "a_hit_does_not_compare_the_tokens",
        "has_content",
        "different |= own[b, i] ^ tokens[start + i]",
        "different |= 0",
        "Where two keys collide, a prompt gets another's KV.",
        ("tests/state/test_safety.py::test_a_key_that_collides_is_no_hit[True]",),
    ),
    Mutation(
        "a_hit_does_not_compare_extra_ids",
        "has_content",
        "extra.shape[0] > 0 or blocks_of(h)[b].flags & EXTRA",
        "False",
        "Where two keys collide, a prompt about one image gets KV of another.",
        ("tests/state/test_safety.py::test_a_key_that_collides_is_no_hit_for_other_extra_ids",),
    ),
    Mutation(
        "a_refused_list_leaves_the_names_that_it_forgot",
        "Together._decide",
        "core.names.restore(names)",
        "",
        "After a refused list, a sequence that runs on has no salt any more: the keys of its next turn are a KeyError.",
        ("tests/sequences/test_together.py::test_a_refusal_leaves_the_names_of_namespaces",),
    ),
    Mutation(
        "the_keys_of_a_pickle_are_believed",
        "Prompts._own",
        "not keys.proven",
        "False",
        "A forged block is found behind another prompt's beginning: who goes on there reads KV of other tokens.",
        ("tests/state/test_safety.py::test_a_pickle_with_keys_of_another_prompt_is_refused",),
    ),
    Mutation(
        "a_loss_ignores_its_ticket",
        "lose",
        "blocks[b].ticket != ticket",
        "False",
        "A failure that is reported late takes the content of whoever has the block now.",
        ("tests/race/test_races.py::test_a_failure_that_is_reported_after_a_reset_harms_nobody",),
    ),
    Mutation(
        "extra_ids_are_not_in_the_key",
        "block_key",
        "if some:\n"
        "    for i in range(extra.shape[0]):\n"
        "        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, U(extra[i]))",
        "if False:\n"
        "    for i in range(extra.shape[0]):\n"
        "        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, U(extra[i]))",
        "Of two images behind the same tokens only one is ever cached.",
        ("tests/state/test_scenarios_reuse.py::test_extra_ids_are_part_of_the_key",),
    ),
    Mutation(
        "a_partial_hit_does_not_compare_extra_ids",
        "same_tokens",
        "mine != asked",
        "False",
        "A prompt about one image gets KV that was computed from another.",
        ("tests/state/test_scenarios_reuse.py::test_extra_ids_are_part_of_the_content",),
    ),
    Mutation(
        "an_empty_salt_is_none",
        "_field",
        "value is None",
        "not value and value != 0",
        'The tenant whose salt is "" shares with everyone who has none.',
        ("tests/state/test_safety.py::test_no_two_names_of_a_namespace_are_taken_for_each_other",),
    ),
    Mutation(
        "a_salt_of_bytes_is_one_of_text",
        "_field",
        'kind, data = b"s", value.encode()',
        "data = value.encode()",
        "Two tenants that think themselves apart share.",
        ("tests/state/test_safety.py::test_no_two_names_of_a_namespace_are_taken_for_each_other",),
    ),
    Mutation(
        "fields_of_a_namespace_run_together",
        "_field",
        'kind + len(data).to_bytes(8, "little") + data',
        "kind + data",
        "A salt and an adapter can be chosen so that they name somebody else's namespace.",
        ("tests/state/test_safety.py::test_no_two_names_of_a_namespace_are_taken_for_each_other",),
    ),
    Mutation(
        "the_last_token_is_reused",
        "reusable",
        "(0 if request.reserves else 1)",
        "0",
        "A request that is cached whole has nothing to compute, and so no logits.",
        ("tests/state/test_scenarios_reuse.py::test_whole_blocks_are_reused_and_the_last_token_never",),
    ),
    Mutation(
        "a_private_copy_forgets_its_extra_ids",
        "copy_tokens",
        "blocks[target].flags |= EXTRA",
        "",
        "A fork of a prompt with an image publishes its block as one of plain text.",
        ("tests/sequences/test_forks.py::test_a_copy_keeps_namespace_extra_ids_and_priority",),
    ),
    # -- publishing -----------------------------------------------------------------------------------------
    Mutation(
        "a_content_is_published_twice",
        "_publish",
        "if device_copy(h, found) != NONE:\n"
        "    return False",
        "",
        "Two device blocks claim to be the same content, and twins no longer pair up.",
        ("tests/sequences/test_forks.py::test_equal_ends_of_forks_are_published_once",),
    ),
    Mutation(
        "a_collision_is_published",
        "_publish",
        "if not has_content(h, found, blocks[b].namespace, tokens_of(h)[b], extra, 0):\n"
        "    return False  # other content has this key",
        "if not has_content(h, found, blocks[b].namespace, tokens_of(h)[b], extra, 0):\n"
        "    pass",
        "Of two contents under one key, one is taken for the host copy of the other.",
        ("tests/state/test_safety.py::test_content_whose_key_collides_is_not_published",),
    ),
    Mutation(
        "a_host_copy_of_what_is_computed_again_stays_a_victim_like_others",
        "_publish",
        "emit(h, STORED, b)\n"
        "reshelve(h, found)",
        "emit(h, STORED, b)",
        "The host evicts what is nowhere else, and keeps what the device has as well.",
        ("tests/state/test_scenarios_tiers.py::test_content_that_is_computed_again_makes_its_host_copy_redundant",),
    ),
    Mutation(
        "a_duplicate_is_forgotten",
        "publish_range",
        "sequence.duplicates = i",
        "pass",
        "Content that was computed twice is lost when the first copy of it goes.",
        ("tests/state/test_scenarios_reuse.py::test_a_duplicate_takes_over_when_the_published_block_is_gone",),
    ),
    Mutation(
        "a_hole_that_a_window_left_is_published",
        "publish_range",
        "b == NONE",
        "False",
        "A block that a sequence does not hold gets a key of it: who hits it reads another prompt's KV.",
        ("tests/sequences/test_windows.py::test_a_duplicate_that_its_window_has_passed_is_not_published",),
    ),
    Mutation(
        "an_eviction_that_offloads_is_no_removal",
        "_offload",
        "h.removals += 1",
        "",
        "A duplicate on the device is not published when the device copy has gone to the host.",
        ("tests/state/test_scenarios_tiers.py::test_a_duplicate_takes_over_when_the_published_block_is_offloaded",),
    ),
    Mutation(
        "a_tail_is_stored_twice",
        "_store_tail",
        "enter(h, b, TAIL)\n"
        "supersede(h, b)",
        "enter(h, b, TAIL)",
        "Every turn of a chat leaves its unfull end behind, until lookups no longer see the right one.",
        ("tests/state/test_scenarios_reuse.py::test_a_longer_tail_replaces_the_one_that_it_starts_with",),
    ),
    Mutation(
        "tails_of_other_beginnings_are_rivals",
        "rival_child",
        "_is_child(h, i, blocks[b].parent0, blocks[b].parent1, blocks[b].namespace)",
        "True",
        "The end of a prompt is forgotten since another one, of any tenant, ends alike.",
        ("tests/state/test_scenarios_reuse.py::test_the_same_tail_behind_two_beginnings_is_two_tails",),
    ),
    Mutation(
        "a_published_end_is_stored_as_a_tail",
        "give_back",
        "not blocks[b].flags & PUBLISHED",
        "True",
        "A full block that others can find is entered a second time, as an unfull one.",
        (
            "tests/sequences/test_forks.py::test_what_a_fork_has_published_stays_when_one_that_committed_less_of_it_is_released_last",
        ),
    ),
    Mutation(
        "a_failed_sequence_stores_its_end",
        "stored_tail",
        "sequence.failed",
        "False",
        "Bytes that never came are found as the end of a prompt.",
        (
            "tests/sequences/test_groups.py::test_a_sequence_that_lost_a_block_in_one_group_leaves_no_part_of_one_behind_in_any",
        ),
    ),
    Mutation(
        "a_loss_fails_the_sequence_in_the_first_group_only",
        "lose",
        "heads.shape[0] if failed else 0",
        "1 if failed else 0",
        "A group takes the end of a sequence for good whose bytes never came.",
        (
            "tests/sequences/test_groups.py::test_a_sequence_that_lost_a_block_in_one_group_leaves_no_part_of_one_behind_in_any[1]",
        ),
    ),
    Mutation(
        "not_storing_forgets_what_others_hold",
        "give_back",
        "word & REFS == 0",
        "True",
        "A request that is not to be stored takes a block of a running one out of the cache.",
        ("tests/sequences/test_beams.py::test_what_others_go_on_from_is_not_forgotten_with_a_beam",),
    ),
    Mutation(
        "not_storing_forgets_what_was_reused",
        "give_back",
        "i >= sequences_of(h)[slot].reused",
        "True",
        "A request that is not to be stored takes the system prompt of all others out of the cache.",
        ("tests/state/test_scenarios_reuse.py::test_release_without_storing_keeps_what_others_stored",),
    ),
    Mutation(
        "a_rewound_block_stays_findable",
        "_shorten",
        "if blocks[b].flags & PUBLISHED:\n"
        "    forget(h, b, NONE)",
        "",
        "A block is written anew while others find it under its old key.",
        ("tests/state/test_scenarios_reuse.py::test_a_writer_gives_up_the_key_of_a_rewound_block",),
    ),
    Mutation(
        "a_rewound_block_keeps_its_key",
        "_shorten",
        "blocks[b].flags &= ~KEYED",
        "",
        "What is written after a rewind is published under the key of what stood there before.",
        ("tests/state/test_scenarios_reuse.py::test_a_writer_gives_up_the_key_of_a_rewound_block",),
    ),
    # -- imports --------------------------------------------------------------------------------------------
    Mutation(
        "keys_of_another_secret_are_taken",
        "check_origin",
        "prompt.origin is not origin and prompt.origin != origin",
        "False",
        "Content is stored under keys that this pool would never give it.",
        ("tests/state/test_safety.py::test_keys_are_refused_by_a_pool_with_another_secret",),
    ),
    Mutation(
        "an_import_after_a_reset_is_published",
        "Imports._publish",
        "generation != heads[0, records.H.generation]",
        "False",
        "Blocks that a reset has given to others get the keys of an import.",
        ("tests/holders/test_import_blocks.py::test_a_reset_meanwhile_stores_nothing",),
    ),
    Mutation(
        "an_import_is_published_beside_what_was_computed",
        "publish",
        "b == NONE or find_key(h, keys[at, 0], keys[at, 1]) != NONE",
        "b == NONE",
        "One content has two representatives.",
        ("tests/holders/test_import_blocks.py::test_content_that_is_computed_meanwhile_is_not_stored_twice",),
    ),
    Mutation(
        "an_import_is_not_pinned",
        "take",
        "change_word(blocks, np.int64(b), np.int64(0), np.int64(1))",
        "",
        "A host block is evicted into while an import writes it.",
        ("tests/holders/test_import_blocks.py::test_what_is_being_written_cannot_be_found_or_evicted",),
    ),
    # -- events -----------------------------------------------------------------------------------------------
    Mutation(
        "an_event_is_of_two_tiers",
        "_record",
        "events[before].tier == tier",
        "True",
        "A router is told that a host block is on the device.",
        ("tests/observe/test_events.py::test_no_event_is_of_two_tiers",),
    ),
    Mutation(
        "an_event_joins_what_is_not_its_parent",
        "_record",
        "kind == STORED and not first and events[before].kind == STORED and events[before].group == "
        "h.group and events[before].tier == tier and events[before].priority == blocks[b].priority and "
        "events[before].key0 == blocks[b].parent0 and events[before].key1 == blocks[b].parent1",
        "kind == STORED and not first and events[before].kind == STORED and events[before].group == "
        "h.group and events[before].tier == tier and events[before].priority == blocks[b].priority",
        "A router chains a block to another prompt.",
        ("tests/observe/test_events.py::test_every_prompt_and_every_call_begins_an_event_of_its_own",),
    ),
    Mutation(
        "an_event_joins_that_of_an_earlier_call",
        "_record",
        "not first",
        "True",
        "An event of one call is told as a part of another's, with that one's tokens before it.",
        ("tests/observe/test_events.py::test_every_prompt_and_every_call_begins_an_event_of_its_own",),
    ),
    Mutation(
        "dropped_events_are_not_counted",
        "_slot",
        "counters_of(h).events_dropped += 1",
        "",
        "A router that was late never learns that it believes in blocks that are gone.",
        ("tests/observe/test_groups_stats.py::test_events_that_any_group_dropped_are_counted",),
    ),
)
