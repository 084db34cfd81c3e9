"""Mutations of the host tier of an engine that keeps its own blocks: who finds what, which bytes a copy is about, and
what it waits for."""

from __future__ import annotations

from tests.mutations.mutation import Mutation


def _index(test: str) -> str:
    return f"tests/hostcache/test_index.py::{test}"


_MODEL = ("tests/hostcache/test_index_model.py::test_a_cache_does_what_its_model_does[0]",)

MUTATIONS = (
    Mutation(
        "what_is_pending_is_here",
        "_answer",
        "return ABSENT if flags & LOST else WAITING",
        "return HERE",
        "A reader gets a block that nobody has written yet: whatever was there before.",
        _MODEL,
    ),
    Mutation(
        "content_has_the_times_of_what_its_block_had_before",
        "on_insert",
        "block.stored_at = block.used_at = np.uint32(group.now)",
        "",
        "An operator is told that keys stay for hours in a host cache that is too small to keep them for seconds.",
        (_index("test_times_are_those_of_the_content_and_not_of_its_block"),),
    ),
    Mutation(
        "the_identity_is_not_in_the_key",
        "HostCache.__init__",
        "namespace_root(secret_bytes, self.identity.content, None)",
        'namespace_root(secret_bytes, b"", None)',
        "Two models that share a secret have the same hashes for the same keys.",
        (_index("test_keys_of_another_model_are_never_found"),),
    ),
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
        "a_late_write_is_published",
        "HostCache.publish_ordered",
        "key in self._deadlines.overdue",
        "False",
        "A writer whose copy came too late is told that its key can be found.",
        (
            "tests/hostcache/test_deadlines.py::test_a_late_publish_is_refused_even_where_nobody_looked_and_changes_no_other_key",
        ),
    ),
    Mutation(
        "the_block_of_an_expired_reservation_is_given_to_another_writer",
        "HostCache._expire",
        "self._change(hostcache.forget_keys, packed(keys, known=True), now_ms, finish=note)",
        "self._change(hostcache.end_pending, packed(keys, known=True), False, now_ms, finish=note)",
        "A copy that hung for a minute overwrites the KV of another prompt.",
        ("tests/hostcache/test_deadlines.py::test_a_block_that_may_be_written_late_is_nobodys_until_its_writer_ends",),
    ),
    Mutation(
        "a_deadline_outlives_its_reservation",
        "Deadlines.end",
        "self._due.pop(key, None)",
        "",
        "A key that is reserved anew expires by the deadline of its first reservation.",
        ("tests/hostcache/test_deadlines.py::test_the_deadline_of_a_reservation_ends_with_it",),
    ),
    Mutation(
        "a_forgotten_write_gives_its_key_to_another_writer",
        "_forget",
        "coming = blocks[b].flags & LOST == 0\nblocks[b].flags |= LOST",
        "coming = True\n_drop(group, b)",
        "Two writers have one block: a prompt gets bytes of both.",
        (_index("test_a_writer_that_ends_after_its_key_was_forgotten_publishes_nothing[forget]"),),
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
        "slots_of_another_cache_are_copied",
        "HostCopies._host_blocks",
        "host_blocks.fingerprint != self.tier.fingerprint",
        "False",
        "A worker reads the blocks of another model.",
        ("tests/hostcache/test_copies.py::test_bad_arguments_copy_nothing",),
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
        "a_worker_is_not_told_of_a_revoke",
        "HostLease.__exit__",
        "kind is None",
        "False",
        "A worker whose lease was revoked gives the engine bytes of other keys.",
        (_index("test_who_reads_under_a_lease_learns_that_it_was_revoked_meanwhile"),),
    ),
    Mutation(
        "a_lease_is_closed_in_halves",
        "HostCache._end_lease",
        "self._decide(hostcache.end_lease, ids, before, now_ms, finish=lambda _: self._open.pop(lease, None))",
        "(self._open.pop(lease, None), self._decide(hostcache.end_lease, ids, before, now_ms))",
        "An interrupt leaves blocks pinned that no lease names: they are never free again.",
        (
            "tests/hostcache/test_interrupted.py::test_an_exception_at_any_call_leaves_nothing_that_is_not_listed[close]",
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
    Mutation(
        "no_tokens_are_some",
        "_tokens",
        "(first, end) if first < end else (0, 0)",
        "(first, end)",
        "A copy of nothing is refused for a block that it does not touch, and has a GPU copy no bytes.",
        ("tests/hostcache/test_copies.py::test_where_no_token_is_left_nothing_is_looked_at[L | B D]",),
    ),
)
