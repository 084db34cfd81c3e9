"""The synthetic workload is the same for the same seed, and has the shape that a cache is for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from kvpool.tools.replay.content import Request, expand_ids, expand_output
from kvpool.tools.replay.traces import DEVICE_BLOCKS, read_trace, synthetic
from tests.data import CHATS, TRACES, harness_or_skip, recorded
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
    spec = importlib.util.spec_from_file_location("peer_replay", harness_or_skip() / "replay.py")
    assert spec is not None and spec.loader is not None
    peer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peer)
    assert expand_ids([9, 8, 7], 1300, 512).tolist() == peer.expand([9, 8, 7], 1300).tolist()
    assert expand_output(11, 100).tolist() == peer.expand_out(11, 100).tolist()


# ----------------------------------------
# The trace that is part of the project.


def test_the_trace_of_the_tests_is_as_its_generator_writes_it() -> None:
    assert CHATS.read_text(encoding="ascii").splitlines() == [*lines()]
    assert CHATS.stat().st_size < 300_000


def test_the_trace_of_the_tests_has_chats_of_several_turns_with_shared_beginnings() -> None:
    requests = read_trace(str(CHATS)).requests
    prompts = [tuple(request.hash_ids.tolist()) for request in requests if request.hash_ids is not None]
    turns = [{ids[:-1] for ids in prompts[:at] if len(ids) > 12} for at in range(600)]
    further = [
        ids for ids, before in zip(prompts, turns, strict=True) if any(ids[: len(turn)] == turn for turn in before)
    ]
    assert len(further) > 150, "turns that go on with a prompt that is longer than any system prompt"
    assert len({ids[0] for ids in prompts}) < 100, "many requests begin alike"


@pytest.mark.parametrize("folder", ["", "gone"])
def test_a_folder_of_traces_that_lacks_the_trace_is_an_error(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TRACES, raising=False)
    assert recorded() is None
    monkeypatch.setenv(TRACES, str(tmp_path / folder))
    with pytest.raises(FileNotFoundError, match=f"{TRACES}: expected a folder with conversation_trace.jsonl, got '"):
        recorded()
