"""Mutations of what content is: keys, what a hit compares, what is published and when, and who is told."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_APART = "tests/state/test_safety.py::test_the_namespace_tag_alone_keeps_prompts_apart"

MUTATIONS = (
    # -- keys, and each of kvpool.state.records about it, taken out of the code and not by its switch --------
    Mutation(
        "the_parent_is_not_in_the_key",
        "_end",
        "guards & PARENT_IN_KEY",
        "False",
        "The same tokens behind another beginning hit: KV that attended to another prompt.",
        ("tests/state/test_scenarios_reuse.py::test_the_same_tokens_after_another_beginning_are_other_content",),
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
        "blocks_of(group)[b].namespace != namespace",
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
        "different |= block_tokens[b, i] ^ tokens[start + i]",
        "different |= 0",
        "Where two keys collide, a prompt gets another's KV.",
        ("tests/state/test_safety.py::test_a_key_that_collides_is_not_a_hit[True]",),
    ),
    Mutation(
        "a_hit_does_not_compare_extra_ids",
        "has_content",
        "len(extra) > 0 or blocks_of(group)[b].flags & EXTRA",
        "False",
        "Where two keys collide, a prompt about one image gets KV of another.",
        ("tests/state/test_safety.py::test_a_key_that_collides_is_not_a_hit_for_other_extra_ids",),
    ),
    Mutation(
        "the_keys_of_a_pickle_are_trusted",
        "keys.unproven",
        "prompt._groups is None",
        "False",
        "A forged block is found behind another prompt's beginning: who goes on there reads KV of other tokens.",
        ("tests/state/test_safety.py::test_a_pickle_with_keys_of_another_prompt_is_refused",),
    ),
    Mutation(
        "a_loss_ignores_its_ticket",
        "_lose",
        "blocks[b].ticket != ticket",
        "False",
        "A failure that is reported late takes the content of whoever has the block now.",
        ("tests/race/test_races.py::test_a_failure_that_is_reported_after_a_reset_harms_nobody",),
    ),
    Mutation(
        "extra_ids_are_not_in_the_key",
        "block_key",
        "if some:\n    for i in range(len(extra)):\n        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, U(extra[i]))",
        "if False:\n    for i in range(len(extra)):\n        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, U(extra[i]))",
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
    # -- publishing -----------------------------------------------------------------------------------------
    Mutation(
        "a_collision_is_published",
        "_publish",
        "not has_content(group, same_key, blocks[b].namespace, tokens_of(group)[b], extra_in(group, b), 0)",
        "False",
        "Of two contents under one key, one is taken for the host copy of the other.",
        ("tests/state/test_safety.py::test_content_whose_key_collides_is_not_published",),
    ),
    Mutation(
        "a_failed_sequence_stores_its_end",
        "stored_tail",
        "sequence.failed",
        "False",
        "Bytes that never came are found as the end of a prompt.",
        (
            "tests/sequences/test_groups.py::test_a_sequence_that_lost_a_block_in_one_group_leaves_no_part_of_one_in_any",
        ),
    ),
    Mutation(
        "a_loss_fails_the_sequence_in_the_first_group_only",
        "lose",
        "len(groups) if failed else 0",
        "1 if failed else 0",
        "A group takes the end of a sequence for good whose bytes never came.",
        (
            "tests/sequences/test_groups.py::test_a_sequence_that_lost_a_block_in_one_group_leaves_no_part_of_one_in_any[1]",
        ),
    ),
    Mutation(
        "a_rewound_block_stays_findable",
        "_shorten",
        "if blocks[b].flags & PUBLISHED:\n    forget(group, b)",
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
        "keys.unproven",
        "made_by is not origin and made_by != origin",
        "False",
        "Content is stored under keys that this pool would never give it.",
        ("tests/state/test_safety.py::test_keys_are_refused_by_a_pool_with_another_secret",),
    ),
    Mutation(
        "an_import_is_not_pinned",
        "take_missing",
        "change_word(blocks, b, 0, 1)",
        "",
        "A host block is evicted into while an import writes it.",
        ("tests/holders/test_import_blocks.py::test_what_is_being_written_cannot_be_found_or_evicted",),
    ),
)
