"""The synthetic workload is the same for the same seed, and has the shape that a cache is for."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool.replay.content import Request
from kvpool.replay.traces import DEVICE_BLOCKS, synthetic


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


def test_chats_continue_with_what_was_answered_and_start_with_shared_prompts() -> None:
    requests = synthetic(200).requests
    heads = {request.prompt()[:300].tobytes() for request in requests}
    assert len(heads) == 4
    ends = {(r.salt, r.adapter_id, np.concatenate([r.prompt(), r.output()]).tobytes()) for r in requests}
    lengths = {len(tokens) for _, _, tokens in ends}
    continued = sum(
        any(
            (r.salt, r.adapter_id, r.prompt().tobytes()[:length]) in ends
            for length in lengths
            if length < 4 * r.input_length
        )
        for r in requests
    )
    assert continued > 100


def test_tenants_and_adapters_take_part() -> None:
    requests = synthetic(200).requests
    assert {request.salt for request in requests} == {None, "tenant-a", "tenant-b"}
    assert {request.adapter_id for request in requests} == {None, 1}


def test_every_request_fits_the_default_pool() -> None:
    assert all(-(-request.length // 16) <= DEVICE_BLOCKS for request in synthetic(300).requests)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="requests 0 is not at least 1"):
        synthetic(0)
    with pytest.raises(ValueError, match="seed -1 is negative"):
        synthetic(1, seed=-1)
