"""The summary says the same as text and as JSON, and reads well when there is nothing to say."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import pytest

from kvpool.replay import Summary
from kvpool.replay.summary import PHASES, CopiedBytes, Hits, MovedBlocks, Verified, format_bytes, peak_memory_bytes

SUMMARY = Summary(
    requests=1000,
    planned=1003,
    peak_active=64,
    skipped=[f"request {n} (line {n + 1}): 9,000 tokens need 563 blocks" for n in range(7)],
    interrupted=False,
    failure=None,
    prompt_tokens=13_732_944,
    output_tokens=349_357,
    hits=Hits(563_616, 277_152, 12, 840_780, 840_780 / 13_732_944),
    blocks=MovedBlocks(794_456, 17_322, 7, 728_067, 55, 3),
    moved=CopiedBytes(3 << 30, 1 << 29, 0, 1.5, 2.5),
    control_us_per_request=dict.fromkeys(PHASES, 50.0),
    verified=Verified(840_780, 14_082_301, 794_456, 17_322, 3, 0),
    stored=None,
    wall_seconds=12.25,
    peak_memory_bytes=600 << 20,
    config={"trace": "a.jsonl", "format": "mooncake", "device_blocks": 50_000, "host_blocks": 50_000, "partial": True},
)


def test_text_holds_every_figure() -> None:
    text = SUMMARY.text()
    for figure in (
        "a.jsonl (mooncake)",
        "1,000 replayed, at most 64 active",
        "7 skipped",
        "request 0 (line 1): 9,000 tokens need 563 blocks",
        "and 2 more",
        "13,732,944 in prompts, 349,357 in answers",
        "840,780 prompt tokens, 6.12%",
        "full blocks: 563,616 device, 277,152 host",
        "partial blocks: 12",
        "794,456 offloaded, 17,322 onboarded",
        "55 offloads saved",
        "7 forgotten on the device, 728,067 on the host",
        "3.5 GiB in 1.50 s, 2.50 GB/s",
        "250.0 µs per request: keys 50.0, match + allocate 50.0, append 50.0, commit 50.0, release 50.0",
        "840,780 reused and 14,082,301 released tokens, 794,456 offloads, 17,322 onboards, 3 partial copies",
        "600.0 MiB at the peak",
        "12.2 s in all",
        "device_blocks 50000, host_blocks 50000, partial True",
    ):
        assert figure in text, figure
    assert "interrupted" not in text and max(map(len, text.splitlines())) <= 140
    assert all(line == line.rstrip() for line in text.splitlines())


def test_json_holds_the_same_and_nothing_that_json_lacks() -> None:
    assert json.loads(json.dumps(SUMMARY.as_dict(), allow_nan=False)) == dataclasses.asdict(SUMMARY)


def test_an_interrupted_run_and_a_failed_one_say_so() -> None:
    text = dataclasses.replace(SUMMARY, interrupted=True, failure="host block 9: other bytes").text()
    assert "interrupted after 1,000 of 1,003 requests" in text
    assert "verified  FAILED: host block 9: other bytes" in text


def test_a_run_that_moved_and_verified_nothing_says_so() -> None:
    nothing: dict[str, Any] = {
        "requests": 0,
        "skipped": [],
        "prompt_tokens": 0,
        "verified": None,
        "peak_memory_bytes": None,
    }
    hits, moved = Hits(0, 0, 0, 0, 0.0), CopiedBytes(0, 0, 0, 0.0, None)
    text = dataclasses.replace(SUMMARY, hits=hits, moved=moved, **nothing).text()
    assert "moved     nothing" in text and "unknown at the peak" in text
    assert "verified" not in text and "skipped" not in text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB"), (1 << 60, "1048576.0 TiB")],
)
def test_bytes_are_printed_in_binary_units(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_peak_memory_is_that_of_this_process() -> None:
    if not sys.platform.startswith(("linux", "darwin")):
        pytest.skip("no way to ask this system")
    before = peak_memory_bytes()
    assert before is not None and 1 << 20 < before < 1 << 40
    block = bytearray(before + (32 << 20))
    block[:: 1 << 12] = b"x" * len(range(0, len(block), 1 << 12))
    after = peak_memory_bytes()
    assert after is not None and after > before
