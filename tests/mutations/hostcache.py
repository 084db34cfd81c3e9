"""Mutations of the host tier of an engine that keeps its own blocks: who finds what, which bytes a copy is about, and
what it waits for."""

from __future__ import annotations

from tests.mutations.mutation import Mutation


def _index(test: str) -> str:
    return f"tests/hostcache/test_index.py::{test}"


_MODEL = ("tests/hostcache/test_index_model.py::test_a_cache_does_what_its_model_does[0]",)

MUTATIONS = (
    Mutation(
        "a_victim_is_what_the_call_offers",
        "reserve",
        "pin_block(group, matches[i, 2])",
        "",
        "A store evicts what the same request was told to be there.",
        _MODEL,
    ),
    Mutation(
        "a_forgotten_write_is_published",
        "hostcache.end_pending",
        "publishes and not block.flags & LOST",
        "publishes",
        "What was cleared, since the weights are other ones now, is found again.",
        (_index("test_a_writer_that_ends_after_its_key_was_forgotten_publishes_nothing[clear]"),),
    ),
    Mutation(
        "a_host_cache_takes_the_newest",
        "touch",
        "range(len(words) - 1, -1, -1)",
        "range(len(words))",
        "The beginning of a prompt is evicted before its end, which then is of no use.",
        _MODEL,
    ),
    Mutation(
        "a_key_is_the_hash_alone",
        "has_content",
        "if not group.guards & TOKENS_AT_HIT:\n    return True",
        "if not group.guards & TOKENS_AT_HIT or group.device_blocks == 0:\n    return True",
        "Whoever finds two keys with one hash reads another's KV.",
        (_index("test_a_hash_alone_is_never_a_hit"),),
    ),
    Mutation(
        "a_copy_does_not_wait_for_the_engine",
        "HostCopies._enqueue",
        "device.wait(stream, device.record(after))",
        "",
        "The host keeps what stood in the block before the engine's kernel wrote it.",
        (
            "tests/hostcache/test_copies.py::test_a_copy_comes_after_the_work_on_the_stream_that_is_named[0-0.0]",
            "tests/hostcache/test_copies.py::test_a_prompt_goes_down_and_comes_back[1-0.5]",
        ),
    ),
    Mutation(
        "done_before_it_is_enqueued",
        "HostCopies._enqueue",
        "device.enqueue(Fragments(fragments), stream)\nevents.append(device.record(stream))",
        "events.append(device.record(stream))\ndevice.enqueue(Fragments(fragments), stream)",
        "A key is published, and a block reused, while its bytes are on their way.",
        ("tests/hostcache/test_copies.py::test_a_prompt_goes_down_and_comes_back[0-0.0]",),
    ),
    Mutation(
        "a_skip_is_cut_to_whole_blocks",
        "_cut",
        "max(span.first_token - i * width, 0)",
        "0",
        "A load overwrites tokens that the engine has computed and others are reading.",
        ("tests/hostcache/test_copies.py::test_tokens_are_exact_and_counted_over_all_blocks_of_a_call[L | P B T H D]",),
    ),
    Mutation(
        "a_skip_counts_anew_in_each_staging",
        "_pieces",
        "first, end = max(skip, begin), begin + staging.tokens",
        "first, end = begin + min(skip, staging.tokens), begin + staging.tokens",
        "Of each chunk of a prompt the first tokens are missing.",
        (
            "tests/kernels/test_kv_stagings.py::test_the_skip_is_exact_to_the_token_over_all_stagings"
            "[cpu-vllm_flash_attention-True]",
        ),
    ),
    Mutation(
        "chunks_are_published_in_the_order_of_a_set",
        "HostCache.in_order",
        "sorted(checked_keys, key=self._order.__getitem__)",
        "checked_keys",
        "Of a prompt whose last quarter was evicted, one chunk can be used.",
        (
            "tests/hostcache/test_index.py::test_the_order_of_a_prompt_is_that_of_its_reservation[0]",
            "tests/stores/test_host_storage_manager_steps.py::test_a_prompt_is_saved_in_its_order_whatever_the_order_of_its_ends",
        ),
    ),
    Mutation(
        "a_store_that_hangs_is_not_told_if_another_does_not",
        "TierStorage.close",
        "all(over)",
        "over[-1]",
        "Memory is used again into which a store may still write.",
        ("tests/stores/test_host_storage_manager.py::test_a_call_that_hangs_is_reported_for_either_store",),
    ),
)
