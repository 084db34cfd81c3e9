"""The replay finds what an independent simulation finds, verifies what it reuses, and notices a pool that mixes prompts
up."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.pool.keys import Admission
from kvpool.tools.replay import Replay, ReplayConfig, Request, Summary, Trace, VerificationError, read_trace, synthetic
from kvpool.tools.replay.engine import Admit, Append, Finish, schedule
from tests import data
from tests.planner.test_plan_survey import chains
from tests.seeds import some_of

SMALL = BlockLayout.of_block_bytes(256, 16)


def native(*prompts: tuple[list[int], str | None], output_length: int = 3) -> Trace:
    """A trace of prompts with their salts."""
    requests = [
        Request(i, i + 1, len(tokens), output_length, tokens=np.array(tokens, dtype=np.int32), salt=salt)
        for i, (tokens, salt) in enumerate(prompts)
    ]
    return Trace("crafted", "native", requests)


def run(trace: Trace, layout: BlockLayout = SMALL, **options: Any) -> Summary:
    with Replay(trace, ReplayConfig(layout, device="cpu", **options)) as replay:
        return replay.run()


def block(first: int) -> list[int]:
    return list(range(first, first + 16))


def lru_hits(trace: Trace, capacity: int, active: int, device_blocks: int) -> int:
    """Hit tokens of one plain LRU of blocks named by their whole prefix: no hashes, no tiers, no partial reuse.

    Requests come as to a pool of that many ``device_blocks``.
    """
    used: dict[Any, int] = {}
    idle: OrderedDict[Any, None] = OrderedDict()
    held: dict[int, list[Any]] = {}
    anonymous = hits = 0

    known = {request.index: chains(request, 16) for request in trace.requests}

    def names(request: Request, blocks: int) -> list[Any]:
        return [("of", number) for number in known[request.index][:blocks]]

    lengths: dict[int, int] = {}
    for step in schedule(trace.requests, device_blocks=device_blocks, active=active, tokens_per_block=16):
        grown: list[tuple[Request, int]] = []
        if isinstance(step, Admit):
            request = step.request
            limit = (request.input_length - 1) // 16
            hit_blocks = 0
            for name in names(request, limit):
                if name not in used and name not in idle:
                    break
                idle.pop(name, None)
                used[name] = used.get(name, 0) + 1
                hit_blocks += 1
            hits += 16 * hit_blocks
            held[request.index] = names(request, hit_blocks)
            lengths[request.index] = 16 * hit_blocks
            grown = [(request, request.input_length)]
        elif isinstance(step, Append):
            grown = [(request, lengths[request.index] + count) for request, _, count in step.items]
        elif isinstance(step, Finish):
            for name in reversed(held.pop(step.request.index)):
                used[name] -= 1
                if not used[name]:
                    del used[name]
                    if name[0] != "anonymous":
                        idle[name] = None
        for request, length in grown:
            mine = held[request.index]
            while len(mine) < -(-length // 16):
                while len(used) + len(idle) >= capacity:
                    idle.popitem(last=False)
                anonymous += 1
                mine.append(("anonymous", anonymous))
                used[mine[-1]] = 1
        for request, length in grown:
            mine = held[request.index]
            for i, name in enumerate(names(request, length // 16)):
                if mine[i][0] == "anonymous" and name not in used and name not in idle:
                    del used[mine[i]]
                    mine[i], used[name] = name, 1
            lengths[request.index] = length
    return hits


SIZES = [
    *((400, 0, 64), (900, 0, 8), (300, 300, 1), (300, 300, 8)),
    *((3000, 0, 64), (400, 1500, 1), (300, 100, 8), (900, 400, 8)),
]


@pytest.mark.parametrize(("device_blocks", "host_blocks", "active"), some_of(4, SIZES))
def test_hits_in_all_tiers_are_those_of_one_lru_of_their_sum(device_blocks: int, host_blocks: int, active: int) -> None:
    trace = synthetic(120, seed=5)
    summary = run(trace, device_blocks=device_blocks, host_blocks=host_blocks, active=active, partial=False)
    hits = summary.hits
    assert hits.tokens == lru_hits(trace, device_blocks + host_blocks, active, device_blocks) > 0
    assert (hits.host_tokens > 0) == (host_blocks > 0) and hits.partial_tokens == 0
    assert hits.rate == hits.tokens / summary.prompt_tokens


@pytest.mark.parametrize(("host_blocks", "expected"), [(0, 563_616), (50_000, 840_768)])
def test_conversation_trace_has_the_hits_that_others_find(host_blocks: int, expected: int) -> None:
    trace = read_trace(str(data.recorded_or_skip()), limit=1000)
    layout = BlockLayout.of_block_bytes(16, 16)
    summary = run(trace, layout, device_blocks=50_000, host_blocks=host_blocks, active=64, partial=False)
    assert summary.prompt_tokens == 13_732_944 and summary.requests == 1000
    assert summary.hits.tokens == expected


def test_every_byte_is_right_while_all_kinds_of_moves_happen() -> None:
    trace = synthetic(80, seed=1)
    summary = run(trace, device_blocks=500, host_blocks=600, active=8, verify=True)
    assert summary.requests == 80 and not summary.skipped
    assert min(summary.hits.device_tokens, summary.hits.host_tokens, summary.hits.partial_tokens) > 0
    blocks, verified, moved = summary.blocks, summary.verified, summary.moved
    assert verified is not None
    assert min(blocks.offloaded, blocks.onboarded, blocks.forgotten_host, blocks.offloads_saved) > 0
    assert verified.reused_tokens == summary.hits.tokens
    assert verified.released_tokens == summary.prompt_tokens + summary.output_tokens
    assert verified.offloaded_blocks == blocks.offloaded and verified.onboarded_blocks == blocks.onboarded
    assert moved.offloaded_bytes == blocks.offloaded * SMALL.block_bytes
    assert moved.onboarded_bytes >= blocks.onboarded * SMALL.block_bytes
    assert moved.gigabytes_per_second is not None and moved.gigabytes_per_second > 0


@pytest.mark.parametrize(
    "layout",
    [
        BlockLayout(2, 2, 8, 16, order="block_first"),
        BlockLayout(2, 2, 8, 16, tokens="HND"),
        BlockLayout(2, 2, 8, 16, order="block_first", tokens="HND"),
        BlockLayout(3, 1, 6, 16, dtype="bfloat16", planes=1),
        BlockLayout(1, 1, 3, 7, dtype="float8_e4m3fn"),
        BlockLayout(1, 1, 8, 1),
    ],
    ids=lambda layout: f"{layout.order}-{layout.tokens}-{layout.dtype_name}-{layout.tokens_per_block}",
)
def test_every_layout_is_verified(layout: BlockLayout) -> None:
    blocks = 7_000 // layout.tokens_per_block
    trace = synthetic(20, seed=2)
    summary = run(trace, layout, device_blocks=blocks, host_blocks=blocks, active=4, verify=True)
    assert summary.hits.tokens > 0 and summary.blocks.offloaded > 0


@pytest.mark.parametrize("active", [1, 8])
def test_dropping_the_parent_from_the_key_fails_the_verification(active: int) -> None:
    trace = native(
        (block(0) + block(200) + [7], None),
        (block(100) + block(300) + [7], None),
        (block(100) + block(200) + [7], None),
    )
    config = ReplayConfig(SMALL, 32, active=active, verify=True, partial=False, device="cpu")
    with Replay(trace, config) as replay:
        assert replay.run().hits.tokens == 16
    with Replay(trace, config) as replay:
        replay.cache.core.states.disable_guard("parent_in_key")
        with pytest.raises(VerificationError, match=r"request 2 \(line 3\): was handed out as cached") as caught:
            replay.run()
        assert caught.value.tier == "device" and caught.value.token == 0


@pytest.mark.parametrize("active", [1, 8])
@pytest.mark.parametrize("partial", [False, True])
def test_dropping_the_namespace_from_key_and_comparison_fails_the_verification(active: int, partial: bool) -> None:
    trace = native((block(0) + [7], "a"), (block(0) + [7], "b"))
    config = ReplayConfig(SMALL, 32, active=active, verify=True, partial=partial, device="cpu")
    with Replay(trace, config) as replay:
        assert replay.run().hits.tokens == 0
    with Replay(trace, config) as replay:
        replay.cache.core.states.disable_guard("namespace_in_key")
        replay.cache.core.states.disable_guard("namespace_at_hit")
        with pytest.raises(VerificationError, match=r"token 0, request 1 \(line 2\): was handed out as cached"):
            replay.run()


def test_bytes_that_change_without_the_pool_are_found_at_release() -> None:
    trace = native((block(0) + [7], None), (block(50) + [7], None))

    def overwrite(_: int) -> None:
        replay.cache.memory.device_pool.view(np.uint8)[...] ^= 1

    with Replay(trace, ReplayConfig(SMALL, 32, active=1, verify=True, device="cpu"), progress=overwrite) as replay:
        with pytest.raises(VerificationError, match="request 0 .*was overwritten while in use"):
            replay.run()


def test_cached_tokens_that_are_not_the_hits_by_kind_fail_the_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = native((block(0) + [7], None), (block(0) + [7], None))
    with Replay(trace, ReplayConfig(SMALL, 32, active=1, verify=True, device="cpu")) as replay:
        admit = replay.cache.add_sequence_batch

        def miscounted(*arguments: Any, **options: Any) -> Admission:
            admission = admit(*arguments, **options)
            return admission._replace(host_tokens=admission.device_tokens)

        monkeypatch.setattr(replay.cache, "add_sequence_batch", miscounted)
        with pytest.raises(AssertionError, match=r"request 1 .*: 16 cached tokens, but \[16, 16, 0\] by kind"):
            replay.run()


@pytest.mark.parametrize(("times", "gap_ms"), [((3.0, 8.5), 5500), ((None, None), 1000), ((8.5, 3.0), 0)])
def test_the_clock_of_the_pool_has_the_times_of_the_trace(
    times: tuple[float | None, float | None], gap_ms: int
) -> None:
    trace = native((block(0) + [7], None), (block(0) + [7], None))
    requests = [replace(request, timestamp=at) for request, at in zip(trace.requests, times, strict=True)]
    with Replay(Trace("timed", "native", requests), ReplayConfig(SMALL, 32, active=1, device="cpu")) as replay:
        replay.run()
        gaps = replay.cache.stats().reuse_gap_ms
    assert (gaps.count, gaps.total_ms) == (1, gap_ms)


def test_requests_that_cannot_fit_are_skipped_and_named() -> None:
    trace = native((block(0), None), (block(0) * 3, None), (block(0), None), output_length=17)
    seen: list[int] = []
    with Replay(trace, ReplayConfig(SMALL, 3, device="cpu"), progress=seen.append) as replay:
        summary = replay.run()
    assert summary.requests == 2 and summary.planned == 3
    assert summary.skipped == ["request 1 (line 2): 65 tokens need 5 blocks"]
    assert sum(seen) == 3
