"""The planner's curves are those of an LRU cache written down in plain Python, at every capacity; its sample knows its
error."""

from __future__ import annotations

import itertools
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.tools.planner import stack as stack_module
from kvpool.tools.planner import survey_of
from kvpool.tools.planner.stack import BUCKETS, bucket_of
from kvpool.tools.planner.survey import NOBODY, OTHERS, TENANTS_MAX, Gaps, Surveyor, coarse_limits
from kvpool.tools.replay import Replay, ReplayConfig, Trace, read_trace, stream_trace, synthetic
from kvpool.tools.replay.content import Request
from tests import data
from tests.exact import At

PLANNER = str(Path(stack_module.__file__).parent)

NAMES: dict[tuple[Any, ...], int] = {}
"""A number for each prefix: for its namespace, or for the number of the prefix before it and the tokens of a block."""


def chains(request: Request, size: int) -> list[int]:
    """What distinguishes each full block of a request: namespace and all tokens up to its end."""
    tokens, numbers = [*request.prompt().tolist(), *request.output().tolist()], list[int]()
    above = NAMES.setdefault((request.salt, request.adapter_id), len(NAMES))
    for end in range(size, len(tokens) + 1, size):
        above = NAMES.setdefault((above, *tokens[end - size : end]), len(NAMES))
        numbers.append(above)
    return numbers


def lru_hits(requests: list[Request], size: int, capacities: Iterable[int]) -> Iterator[list[int]]:
    """For each capacity, the blocks that each request finds in an LRU cache: all hits are claimed, then everything is
    touched from the tail."""
    rows = [(chains(request, size), (request.input_length - 1) // size) for request in requests]
    for capacity in capacities:
        cache: OrderedDict[int, None] = OrderedDict()
        hits_of_requests = []
        for blocks, usable in rows:
            hits = 0
            while hits < usable and blocks[hits] in cache:
                hits += 1
            hits_of_requests.append(hits)
            for block in reversed(blocks):
                cache[block] = None
                cache.move_to_end(block)
            while len(cache) > capacity:
                cache.popitem(last=False)
        yield hits_of_requests


def native(seed: int, count: int = 60) -> list[Request]:
    """Requests that repeat, extend and vary each other's prompts and answers."""
    random = Random(seed)
    texts: list[list[int]] = [[]]
    requests = []
    for index in range(count):
        kept = random.choice(texts)[: random.randint(0, 60)]
        tokens = kept + [random.randint(0, 2) for _ in range(random.randint(1, 9))]
        answer = [random.randint(0, 2) for _ in range(random.randint(0, 9))]
        texts.append(tokens + answer)
        outputs = np.array(answer, np.int32) if random.random() < 0.6 else None
        salt, adapter = random.choice((None, None, "a")), random.choice((None, None, None, 1, "1"))
        fields: dict[str, Any] = {"tokens": np.array(tokens, np.int32), "outputs": outputs, "timestamp": float(index)}
        requests.append(Request(index, 0, len(tokens), len(answer), **fields, salt=salt, adapter_id=adapter))
    return requests


def by_ids(seed: int, tokens_per_id: int, count: int = 60) -> list[Request]:
    """The same with ids for prompts, whose last one covers more than the prompt."""
    random = Random(seed)
    lists: list[list[int]] = [[]]
    requests = []
    for index in range(count):
        kept = random.choice(lists)[: random.randint(0, 12)]
        ids = kept + [random.randint(0, 40) for _ in range(random.randint(1, 4))]
        lists.append(ids)
        length = len(ids) * tokens_per_id - random.randint(0, tokens_per_id - 1)
        fields: dict[str, Any] = {"hash_ids": np.array(ids, np.uint64), "tokens_per_id": tokens_per_id}
        requests.append(Request(index, 0, length, random.randint(0, 30), **fields))
    return requests


def assert_equals_lru(requests: list[Request], size: int) -> None:
    survey = survey_of(requests, tokens_per_block=size, sample=1.0)
    assert survey.curve.exact
    distinct = {chain for request in requests for chain in chains(request, size)}
    assert survey.distinct_blocks == len(distinct)
    for capacity, hits in enumerate(lru_hits(requests, size, range(len(distinct) + 3))):
        assert survey.curve.hits(capacity) == sum(hits), capacity
    assert survey.curve.ceiling == survey.curve.hits(len(distinct)) and survey.curve.error(5) == 0
    for wanted in (1, survey.curve.ceiling / 2, survey.curve.ceiling, survey.curve.ceiling + 1):
        capacity, reachable = survey.curve.capacity_for(wanted), min(wanted, survey.curve.ceiling)
        assert survey.curve.hits(capacity) >= reachable > survey.curve.hits(capacity - 1)


@pytest.mark.parametrize("start", [1, stack_module._START])
@pytest.mark.parametrize(("seed", "size"), [(1, 1), (2, 2), (3, 3), (1, 5)])
def test_curve_of_tokens_is_that_of_an_lru_cache(
    seed: int, size: int, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with tables that grow and are compacted all the time."""
    monkeypatch.setattr(stack_module, "_START", start)
    assert_equals_lru(native(seed), size)


@pytest.mark.parametrize(("tokens_per_id", "size"), [(8, 4), (4, 8), (6, 4), (5, 7), (8, 8)])
def test_curve_of_ids_is_that_of_an_lru_cache(tokens_per_id: int, size: int) -> None:
    assert_equals_lru(by_ids(4, tokens_per_id), size)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other instructions look for signals there")
def test_an_exception_at_any_call_leaves_a_request_recorded_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_module, "_START", 1)  # Tables grow and are compacted all the time.
    requests = native(5, 12)

    def figures(k: int) -> tuple[At, list[object]]:
        surveyor, at = Surveyor(2, keep=True), At(k, within=PLANNER)
        for request in requests[:-2]:
            surveyor.record(request)
        at.run(partial(surveyor.record, requests[-2]))
        for request in requests[surveyor.requests :]:
            surveyor.record(request)
        survey, uses = surveyor.survey(), [(use.blocks.tolist(), *use[2:]) for use in surveyor.uses]
        curves = [curve.cumulative.tolist() for curve in (survey.curve, survey.uses)]
        counts = (survey.requests, survey.prompt_tokens, survey.output_tokens, survey.prompt_blocks, survey.gaps)
        return at, [curves, counts, uses, survey.runs.tolist(), survey.longest_blocks, survey.distinct_blocks]

    _, expected = figures(1 << 30)
    for k in itertools.count(1):
        at, found = figures(k)
        assert found == expected, at.where
        if not at.reached:
            break
    assert k > 10


def test_last_token_of_a_prompt_is_never_found_and_answers_are() -> None:
    tokens = np.arange(8, dtype=np.int32)
    first = Request(0, 0, 8, 4, tokens=tokens, outputs=np.arange(8, 12, dtype=np.int32))
    again = Request(1, 0, 8, 0, tokens=tokens)
    longer = Request(2, 0, 13, 0, tokens=np.arange(13, dtype=np.int32))
    survey = survey_of([first, again, longer], tokens_per_block=4)
    assert survey.curve.ceiling == 1 + 3
    assert (survey.prompt_blocks, survey.longest_blocks, survey.distinct_blocks) == (2 + 2 + 4, 4, 3)
    assert (survey.prompt_tokens, survey.output_tokens, survey.ceiling_tokens) == (29, 4, 16)


def test_each_tenant_has_the_curve_of_its_own_requests_in_the_shared_cache() -> None:
    requests, done = native(6, 80), list[int]()
    survey = survey_of(requests, tokens_per_block=3, progress=done.append)
    assert done == [1] * 80
    assert {tenant.name for tenant in survey.tenants} == {"a", NOBODY}
    capacities = (1, 5, 20, 60, 150, 10_000)
    for capacity, hits_of_requests in zip(capacities, lru_hits(requests, 3, capacities), strict=True):
        for tenant in survey.tenants:
            of = [request.salt or NOBODY for request in requests]
            tenant_hits = [hits for hits, name in zip(hits_of_requests, of, strict=True) if name == tenant.name]
            assert tenant.curve.hits(capacity) == sum(tenant_hits)
            assert tenant.requests == len(tenant_hits)


def test_tenants_are_named_by_their_column_before_the_salt_and_share_a_line_when_too_many() -> None:
    tokens = np.arange(9, dtype=np.int32)
    requests = [Request(n, 0, 9, 0, tokens=tokens, tenant=f"t{n}", salt="s") for n in range(TENANTS_MAX + 5)]
    tenants = {tenant.name: tenant for tenant in survey_of(requests, tokens_per_block=4).tenants}
    assert len(tenants) == TENANTS_MAX + 1 and tenants[OTHERS].requests == 5
    assert tenants["t0"].curve.ceiling == 0 and tenants["t1"].curve.ceiling == 2 and tenants[OTHERS].curve.ceiling == 10
    assert survey_of([Request(0, 0, 9, 0, tokens=tokens)]).tenants == []


def test_coarse_distances_are_kept_within_a_hundredth() -> None:
    limits = coarse_limits(BUCKETS)
    random = Random(7)
    for distance in [*range(1, 600), *(random.randint(1, 2**31) for _ in range(500))]:
        bucket = bucket_of(distance)
        assert limits[bucket - 1] < distance <= limits[bucket] <= distance * 1.01
        assert distance > 255 or limits[bucket] == distance


def test_reuse_gaps_are_counted_by_requests_and_by_seconds() -> None:
    tokens = np.arange(9, dtype=np.int32)
    times = [0.0, 0.5, 20.0, 100_000.0]
    requests = [Request(n, 0, 9, 0, tokens=tokens, timestamp=time) for n, time in enumerate(times)]
    requests.append(Request(4, 0, 9, 0, tokens=tokens))
    gaps = survey_of(requests, tokens_per_block=4).gaps
    assert gaps.requests == [(2, 8)]
    assert [row for row in gaps.seconds if row[1]] == [(1.0, 2), (30.0, 2), (604_800.0, 2)]


def test_the_labels_of_reuse_gaps_fit_side_by_side() -> None:
    """A chart has room for about eight characters below each of its bars."""
    requests = [(2, 1), (1_000, 1), (None, 2)]
    assert Gaps(requests, []).bars() == ("requests", [("< 2", 0.25), ("< 1,000", 0.25), ("longer", 0.5)])
    assert Gaps(requests, [(30.0, 1), (604_800.0, 3)]).bars() == ("time", [("< 30 s", 0.25), ("< 7 d", 0.75)])


def test_prefixes_that_carry_the_reuse_are_named() -> None:
    shared, deeper = list(range(8)), list(range(100, 112))
    prompts = [shared + [200 + n] * 5 for n in range(4)] + [shared + deeper + [300 + n] for n in range(3)]
    requests = [Request(n, 0, len(p), 0, tokens=np.array(p, np.int32)) for n, p in enumerate(prompts)]
    prefixes = survey_of(requests, tokens_per_block=4).prefixes
    first, second = prefixes.top
    assert (first.first_request, first.start, first.tokens, first.reuses, first.hit_tokens) == (0, 0, 8, 6, 48)
    assert (second.first_request, second.start, second.tokens, second.reuses, second.hit_tokens) == (4, 8, 12, 2, 24)
    assert first.share == pytest.approx(2 / 3) and (prefixes.reused_blocks, prefixes.distinct_blocks) == (5, 9)
    assert (prefixes.blocks_for_half, prefixes.blocks_for_most) == (2, 5)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_sample_is_as_good_as_it_says(seed: int) -> None:
    requests = synthetic(900, seed=seed).requests
    exact = survey_of(requests)
    for share in (0.1, 0.3):
        sampled = survey_of(requests, sample=share)
        curve, lookups = sampled.curve, exact.curve.lookups
        assert sampled.prompt_tokens == exact.prompt_tokens and sampled.curve.lookups == lookups
        assert sampled.distinct_blocks == pytest.approx(exact.distinct_blocks, rel=0.1)
        for capacity in (1_000, 3_000, 10_000, exact.distinct_blocks):
            difference, error = abs(curve.hits(capacity) - exact.curve.hits(capacity)), curve.error(capacity)
            assert difference <= 3.5 * error, (seed, share, capacity)
            assert 0 < error < 0.1 * lookups
        assert curve.error(exact.distinct_blocks) < 0.01 * lookups
        capacity = curve.capacity_for(curve.ceiling / 2)
        assert curve.hits(capacity) >= curve.ceiling / 2 * 0.999 >= curve.hits(int(capacity * 0.97)) * 0.999


def test_a_sample_that_follows_next_to_nothing_is_refused() -> None:
    requests = synthetic(100).requests
    with pytest.raises(
        ValueError, match=r"sample: expected .* at least 128 distinct blocks.*, got 0\.001, which follows \d+"
    ):
        survey_of(requests, sample=0.001)
    assert survey_of([], sample=0.001).requests == 0


# ----------------------------------------
# The planner foretells what the replay finds. On the published trace it meets the figures of an independent simulation.


LAYOUT = BlockLayout.of_block_bytes(16, 16)


def replayed(trace: Trace, device_blocks: int, active: int = 64) -> int:
    config = ReplayConfig(LAYOUT, device_blocks, active=active, partial=False, device="cpu")
    with Replay(trace, config) as replay:
        hits = replay.run().hits.tokens
        replay.cache.verify()
    return hits


def test_curve_is_the_replays() -> None:
    """Where chats wait for their answers, and of a trace of chats."""
    waiting, chats = synthetic(150, seed=1), read_trace(str(data.CHATS))
    for trace, device_blocks, active in ((waiting, 600, 1), (waiting, 1_500, 1), (chats, 20_000, 64)):
        hits = replayed(trace, device_blocks, active)
        assert survey_of(trace.requests).hit_tokens(device_blocks) == pytest.approx(hits, rel=0.01)


def test_curve_of_the_published_trace_is_the_replays() -> None:
    head = read_trace(str(data.recorded_or_skip()), limit=1_000)
    survey = survey_of(head.requests)
    for device_blocks, share in ((20_000, 0.03725), (50_000, 0.04104), (100_000, 0.06122)):
        hit_tokens = survey.hit_tokens(device_blocks)
        assert hit_tokens == pytest.approx(replayed(head, device_blocks), rel=0.01)
        assert hit_tokens / survey.prompt_tokens == pytest.approx(share, abs=0.000005)


def test_ceiling_of_the_published_trace_by_its_own_ids() -> None:
    requests = (request for _, request in stream_trace(str(data.recorded_or_skip())))
    survey = survey_of(requests, tokens_per_block=512)
    assert (survey.requests, survey.prompt_blocks, survey.curve.ceiling) == (12_031, 288_500, 105_592)
    assert round(100 * survey.curve.ceiling / survey.prompt_blocks, 2) == 36.60
    assert round(100 * survey.ceiling_tokens / survey.prompt_tokens, 2) == 37.34
