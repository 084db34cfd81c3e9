"""The synthetic workload is the same for the same seed, and has the shape that a cache is for."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool.tools.replay.content import Request, expand_ids, expand_output
from kvpool.tools.replay.traces import synthetic
from tests.data import CHATS
from tests.data.chats import lines


def content(request: Request) -> tuple[object, ...]:
    return request.prompt().tobytes(), request.output().tobytes(), request.salt, request.adapter_id


def test_same_seed_gives_the_same_requests_and_another_seed_others() -> None:
    first, again, other = (synthetic(50, seed=seed).requests for seed in (3, 3, 4))
    assert [content(r) for r in first] == [content(r) for r in again]
    assert [content(r) for r in first] != [content(r) for r in other]


def test_a_shorter_workload_is_the_head_of_a_longer_one() -> None:
    assert [content(r) for r in synthetic(20).requests] == [content(r) for r in synthetic(60).requests[:20]]


def test_lengths_and_indices_agree_with_the_tokens() -> None:
    trace = synthetic(80, seed=1)
    assert trace.format == "generated" and "seed 1" in trace.name
    for index, request in enumerate(trace.requests):
        assert request.index == index
        assert (len(request.prompt()), len(request.output())) == (request.input_length, request.output_length)
        assert request.prompt().dtype == request.output().dtype == np.int32
        assert request.prompt().min() >= 0 and request.input_length >= 1


# ----------------------------------------
# The token streams of the replay are those of the shared protocol.


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
    tokens = expand_ids(ids, length, per_id)
    assert tokens.dtype == np.int32 and tokens.flags.c_contiguous
    assert tokens.tolist() == expected


def test_outputs_are_those_of_the_request_and_of_no_other() -> None:
    assert expand_output(5, 3).tolist() == [splitmix64(2**50 + 5 * 2**20 + j) % 128_000 for j in range(3)]
    assert expand_output(5, 40).tolist() != expand_output(6, 40).tolist()
    assert len(expand_output(5, 0)) == 0


# ----------------------------------------
# The trace that is part of the project.


def test_the_trace_of_the_tests_is_as_its_generator_writes_it() -> None:
    assert CHATS.read_text(encoding="ascii").splitlines() == [*lines()]
    assert CHATS.stat().st_size < 300_000
