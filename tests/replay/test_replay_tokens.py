"""The token streams of the replay are those of the shared protocol."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from kvpool.replay.content import Request, expand_ids, expand_output

HARNESS = Path(__file__).resolve().parents[3] / "shared" / "peerbench" / "replay.py"
MASK = 2**64 - 1


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


@pytest.mark.parametrize("per_id", [16, 512])
def test_each_id_stands_for_its_own_counters(per_id: int) -> None:
    ids = [0, 7, 182_789]
    length = 2 * per_id + 3
    expected = [splitmix64(per_id * ids[i // per_id] + i % per_id) % 128_000 for i in range(length)]
    found = expand_ids(ids, length, per_id)
    assert found.dtype == np.int32 and found.flags.c_contiguous
    assert found.tolist() == expected


def test_equal_ids_give_equal_prefixes_whatever_the_length() -> None:
    assert expand_ids([3, 4], 600, 512).tolist() == expand_ids([3, 4, 5], 1500, 512)[:600].tolist()


def test_outputs_are_those_of_the_request_and_of_no_other() -> None:
    assert expand_output(5, 3).tolist() == [splitmix64(2**50 + 5 * 2**20 + j) % 128_000 for j in range(3)]
    assert expand_output(5, 40).tolist() != expand_output(6, 40).tolist()
    assert len(expand_output(5, 0)) == 0


def test_ids_that_do_not_cover_the_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match="2 ids of 16 tokens do not cover 33 tokens"):
        expand_ids([1, 2], 33, 16)


def test_explicit_tokens_are_taken_as_they_are() -> None:
    tokens = np.array([5, 6], dtype=np.int32)
    request = Request(0, 1, 2, 3, tokens=tokens)
    assert request.prompt() is tokens
    assert request.output().tolist() == expand_output(0, 3).tolist()
    assert request.length == 5 and request.name == "request 0 (line 1)"


def test_streams_equal_those_of_the_peer_benchmark() -> None:
    if not HARNESS.exists():
        pytest.skip(f"no {HARNESS}")
    spec = importlib.util.spec_from_file_location("peer_replay", HARNESS)
    assert spec is not None and spec.loader is not None
    peer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peer)
    assert expand_ids([9, 8, 7], 1300, 512).tolist() == peer.expand([9, 8, 7], 1300).tolist()
    assert expand_output(11, 100).tolist() == peer.expand_out(11, 100).tolist()
