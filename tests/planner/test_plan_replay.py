"""The planner foretells what the replay finds, and meets the figures that an independent simulation found on the
published trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool.arrays.layout import BlockLayout
from kvpool.planner import survey_of
from kvpool.replay import Replay, ReplayConfig, Trace, read_trace, stream_trace, synthetic

TRACE = Path(__file__).resolve().parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
LAYOUT = BlockLayout.of_block_bytes(16, 16)


@pytest.fixture(scope="module")
def head() -> Trace:
    """The first 1,000 requests of the published trace."""
    if not TRACE.exists():
        pytest.skip(f"no {TRACE}")
    return read_trace(str(TRACE), limit=1_000)


def replayed(trace: Trace, device_blocks: int, host_blocks: int = 0, active: int = 64) -> int:
    config = ReplayConfig(LAYOUT, device_blocks, host_blocks, active=active, partial=False, device="cpu")
    with Replay(trace, config) as replay:
        hits = replay.run().hits.tokens
        replay.cache.verify()
    return hits


def test_curve_is_the_replays_where_chats_wait_for_their_answers() -> None:
    trace = synthetic(300, seed=1)
    survey = survey_of(trace.requests)
    for device_blocks in (600, 1_500, 4_000, 20_000):
        hits = replayed(trace, device_blocks, active=1)
        assert hits > 100_000
        assert survey.hit_tokens(device_blocks) == pytest.approx(hits, rel=0.01)


def test_both_tiers_hit_like_one_cache_of_the_summed_size() -> None:
    trace = synthetic(300, seed=2)
    survey = survey_of(trace.requests)
    for device_blocks, host_blocks in ((600, 900), (1_500, 2_500)):
        hits = replayed(trace, device_blocks, host_blocks, active=1)
        assert survey.hit_tokens(device_blocks + host_blocks) == pytest.approx(hits, rel=0.01)
        assert survey.hit_tokens(device_blocks) < 0.9 * hits


@pytest.mark.parametrize(
    ("device_blocks", "share"),
    [(20_000, 0.03725), (50_000, 0.04104), (100_000, 0.06122), (200_000, None), (400_000, None)],
)
def test_curve_of_the_published_trace_is_the_replays(head: Trace, device_blocks: int, share: float | None) -> None:
    survey = survey_of(head.requests)
    found = survey.hit_tokens(device_blocks)
    assert found == pytest.approx(replayed(head, device_blocks), rel=0.01)
    if share is not None:
        assert found / survey.prompt_tokens == pytest.approx(share, abs=0.000005)


def test_ceiling_of_the_published_trace_by_its_own_ids() -> None:
    if not TRACE.exists():
        pytest.skip(f"no {TRACE}")
    survey = survey_of((request for _, request in stream_trace(str(TRACE))), tokens_per_block=512)
    assert (survey.requests, survey.prompt_blocks, survey.curve.ceiling) == (12_031, 288_500, 105_592)
    assert round(100 * survey.curve.ceiling / survey.prompt_blocks, 2) == 36.60
    assert round(100 * survey.ceiling_tokens / survey.prompt_tokens, 2) == 37.34


def test_sample_of_the_published_trace_is_as_good_as_it_says(head: Trace) -> None:
    exact, sampled = survey_of(head.requests).curve, survey_of(head.requests, sample=0.05).curve
    for capacity in (20_000, 50_000, 100_000, 400_000):
        error = sampled.error(capacity)
        assert abs(sampled.hits(capacity) - exact.hits(capacity)) < 3 * error < 0.03 * exact.lookups
