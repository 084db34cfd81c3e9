"""Sessions of agents: both formats say the same, users play them in a closed loop, and a wrong session is named."""

from __future__ import annotations

import json
import lzma
import re
from math import inf
from pathlib import Path
from typing import Any

import pytest

from kvpool.__main__ import main
from kvpool.tools.replay import Request, TraceError, read_trace
from kvpool.tools.replay.engine import Admit, Finish, schedule
from kvpool.tools.replay.sessions import play
from kvpool.tools.replay.traces import read_sessions

# t, in, out, stop, api_time, think_time, agent, from, keep, runs
CALLS = [
    [0.0, 130, 5, "tool_use", 2.0, 0.0, 0, -1, 0, [[1, 2]]],
    [5.0, 256, 5, "tool_use", None, 3.0, 0, 0, 2, [[3, 1], [9, 1]]],
    [20.0, 128, 0, "end_turn", 400.0, 500.0, 1, 1, 1, [[7, 1]]],
]
PACKED = {"session": "a", "block": 64, "tool_tokens": 1, "system_tokens": 2, "requests": CALLS}


def recorded(t: float, ids: list[int], tokens: int, out: int, api: float | None, think: float | None) -> dict[str, Any]:
    times = {"api_time": api, "think_time": think, "ttft": 0.1}
    return {"t": t, "type": "n", "model": "m", "in": tokens, "out": out, "hash_ids": ids, "stop": "", **times}


FIRST, SECOND = recorded(0.0, [1, 2], 130, 5, 2.0, 0.0), recorded(5.0, [1, 2, 3, 9], 256, 5, None, 3.0)
THIRD = recorded(20.0, [1, 7], 128, 0, 400.0, 500.0)
RECORDED = {
    "id": "a",
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [FIRST, {"t": 20.0, "type": "subagent", "requests": [THIRD]}, SECOND],
}


def read(folder: Path, *sessions: Any, **options: Any) -> list[Request]:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(session) + "\n" for session in sessions))
    trace = read_trace(str(path), **options)
    assert trace.format == "agents"
    return trace.requests


def picture(requests: list[Request]) -> list[tuple[Any, ...]]:
    return [
        (request.prompt().tolist(), request.output_length, request.timestamp, request.seconds) for request in requests
    ]


def test_both_formats_say_the_same(tmp_path: Path) -> None:
    assert picture(read(tmp_path, PACKED)) == picture(read(tmp_path, RECORDED))


def test_a_prompt_repeats_what_its_ids_say_and_its_unfull_end_is_its_own(tmp_path: Path) -> None:
    first, second, third = (request.prompt() for request in read(tmp_path, PACKED))
    assert [len(first), len(second), len(third)] == [130, 256, 128]
    assert (first[:128] == second[:128]).all() and (first[:64] == third[:64]).all()
    assert (first[128:] != second[128:130]).any() and (second[64:128] != third[64:]).any()


def test_ids_of_two_sessions_mean_different_contents(tmp_path: Path) -> None:
    prompts = [request.prompt() for request in read(tmp_path, PACKED, PACKED)]
    assert len({prompt[:64].tobytes() for prompt in prompts}) == 2
    assert len({prompt[128:].tobytes() for prompt in prompts if len(prompt) == 130}) == 2


def test_a_user_waits_for_its_answer_and_pauses_no_longer_than_said(tmp_path: Path) -> None:
    first, second, third = read(tmp_path, PACKED, pause_max=10.0)
    assert first.timestamp is not None and 0 <= first.timestamp < 60
    times = [
        round(request.timestamp - first.timestamp, 6)
        for request in (first, second, third)
        if request.timestamp is not None
    ]
    assert times == [0.0, 2.0 + 3.0, 5.0 + 6.5 + 10.0], "the time of a call that nobody knows is 6.5 s"
    assert (first.seconds, second.seconds, third.seconds) == (2.0, 6.5, 300.0)
    assert (first.returns, second.returns, third.returns) == (second.timestamp, third.timestamp, inf)
    assert (first.stop, second.stop, third.stop) == ("tool_use", "tool_use", "end_turn")


def test_who_waited_before_a_request_began_comes_so_much_later(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(json.dumps(PACKED) + "\n")
    waits = iter((7.0, 0.5, 0.0))
    played = list(play(read_sessions(str(tmp_path / "trace.jsonl")), 1, 10.0, waited=lambda: next(waits)))
    times = [(request.timestamp or 0.0) - (played[0].timestamp or 0.0) for request in played]
    assert times == pytest.approx([0.0, 5.0 + 7.0, 12.0 + 16.5 + 0.5])


def test_the_longest_pause_may_vary_and_is_the_same_in_each_run(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(PACKED) + "\n" for _ in range(20)))
    sessions = read_sessions(str(tmp_path / "trace.jsonl"))

    def longest(varies: float) -> list[float]:
        played = play(sessions, 3, 10.0, varies)
        waits = [
            (request.returns or 0.0) - (request.timestamp or 0.0) - 6.5 for request in played if request.seconds == 6.5
        ]
        return [round(wait, 6) for wait in waits]

    assert longest(0.0) == [10.0] * 20
    drawn = longest(0.5)
    assert drawn == longest(0.5) and len(set(drawn)) == 20 and 5.0 <= min(drawn) < 8.0 < 12.0 < max(drawn) <= 15.0
    with pytest.raises(ValueError, match="varies: expected 0 to 1, got 1.5"):
        next(play(sessions, varies=1.5))


@pytest.mark.parametrize("users", [1, 3, 50])
def test_no_more_users_play_than_there_are_and_every_session_is_played_once(users: int, tmp_path: Path) -> None:
    sessions = [
        {**PACKED, "block": 64, "requests": [[0.0, 64, n, "", 10.0, 0, 0, -1, 0, [[1, 1]]]] * 3} for n in range(9)
    ]
    requests = read(tmp_path, *sessions, users=users)
    assert sorted(request.output_length for request in requests) == sorted(list(range(9)) * 3)
    assert [request.index for request in requests] == list(range(27))
    begins = [request.timestamp or 0.0 for request in requests]
    assert begins == sorted(begins)
    most = max(sum(begin <= now < begin + 10.0 for begin in begins) for now in begins)
    assert most <= users and (users == 1 or most > 1)


def test_a_replay_releases_a_request_when_it_has_ended(tmp_path: Path) -> None:
    requests = read(tmp_path, *[PACKED] * 5, users=2)
    running: dict[int, Request] = {}
    for step in schedule(requests, device_blocks=10_000, active=64, tokens_per_block=16):
        if isinstance(step, Finish):
            del running[step.request.index]
        elif isinstance(step, Admit):
            assert len(running) < 2, "a user has one request at a time"
            running[step.request.index] = step.request
    assert not running


@pytest.mark.parametrize("command", ["replay", "plan"])
def test_commands_take_a_folder_of_recorded_sessions(command: str, tmp_path: Path, capsys: Any) -> None:
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps(RECORDED, indent=1))
    assert main([command, str(tmp_path), "--users", "2", "--pause-max", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["requests"] == 6 and report["prompt_tokens"] == 2 * (130 + 256 + 128)
    assert picture(read_trace(str(tmp_path / "a.json")).requests) == picture(read(tmp_path, RECORDED))
    assert main([command, str(tmp_path), "--device-blocks", "9", "--host-blocks", "0"]) == 0
    if command == "replay":
        assert re.search(rf"request \d \({tmp_path}/[ab].json\): .* need \d+ blocks", capsys.readouterr().out)


def test_a_packed_file_may_be_compressed_with_xz(tmp_path: Path) -> None:
    path = tmp_path / "sessions.xz"
    path.write_bytes(lzma.compress(json.dumps(PACKED).encode() + b"\n"))
    assert len(read_trace(str(path), limit=2).requests) == 2
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match="line 2: cannot be read"):
        read_trace(str(path))


def call(**columns: Any) -> dict[str, Any]:
    names = ("t", "in", "out", "stop", "api_time", "think_time", "agent", "from", "keep", "runs")
    changed = {**dict(zip(names, CALLS[1], strict=True)), **columns}
    return {**PACKED, "requests": [CALLS[0], list(changed.values())]}


BROKEN = [
    ({**PACKED, "block": 0}, "'block' must be an integer within 1..1048576, found 0"),
    ({**PACKED, "requests": 5}, "'requests' must be a list of lists of 10, found 5"),
    ({**PACKED, "requests": [[1, 2]]}, "'requests' must be a list of lists of 10"),
    (call(t=-1), "request 1: column 't' must be a finite number of at least 0"),
    ({**PACKED, "requests": [[*CALLS[1][:7], -1, 0, [[1, 4]]], CALLS[0]]}, "'requests' must be in the order of 't'"),
    (call(**{"in": 0}), "request 1: column 'in' must be an integer within 1..10000000, found 0"),
    (call(**{"in": 192}), "request 1: hash_ids: expected .*got 4 ids of 64 tokens for 192 tokens"),
    (call(stop=7), "request 1: column 'stop' must be Unicode text, found 7"),
    (call(think_time=float("nan")), "request 1: column 'think_time' must be a finite number"),
    (call(**{"from": 1}), "request 1: column 'from' must be an integer within -1..0, found 1"),
    (call(keep=3), "request 1: column 'keep' must be an integer within 0..2, found 3"),
    (call(runs=[[1, True]]), "column 'runs' must hold integers"),
    (call(runs=[[1, 2**40]]), "column 'runs' must hold integers within 0..2147483647"),
    (call(runs=[[1, 2**31 - 1]] * 3), "request 1: .* ids of 64 tokens for 256 tokens"),
    ({**RECORDED, "block_size": "64"}, "'block_size' must be an integer"),
    ({**RECORDED, "hash_id_scope": "global"}, "'hash_id_scope' must be 'local'"),
    ({**RECORDED, "requests": [FIRST, 7]}, "request 1: a JSON object is expected, found 7"),
    ({**RECORDED, "requests": [{"t": 0, "requests": [{**FIRST, "in": None}]}]}, "request 0: request 0: column 'in'"),
    ({**RECORDED, "requests": [{**FIRST, "hash_ids": [1, -2]}]}, "request 0: column 'hash_ids' must hold integers"),
    ({**RECORDED, "requests": [{"t": 0}]}, "request 0: column 'hash_ids' is missing"),
]


@pytest.mark.parametrize(("session", "reason"), BROKEN, ids=[reason[:60] for _, reason in BROKEN])
def test_a_wrong_session_is_named_with_its_fault(session: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=f"line 2: .*{reason}"):
        read(tmp_path, PACKED, session)


def test_a_wrong_file_of_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot be read: it is a folder without \*.json"):
        read_trace(str(tmp_path))
    (tmp_path / "a.json").write_text(json.dumps(RECORDED))
    (tmp_path / "b.json").write_text('{\n"id": 1\n,,}')
    with pytest.raises(TraceError, match="b.json, line 3: not JSON"):
        read_trace(str(tmp_path))


@pytest.mark.parametrize("command", ["replay", "plan"])
def test_who_plays_sessions_is_refused_for_a_trace_of_requests(command: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"tokens": [1, 2]}\n')
    assert main([command, str(path), "--users", "3"]) == 2
    reason = f"{path}: users 3: expected a trace with sessions of agents, got requests (native)"
    assert reason in capsys.readouterr().err


def test_ids_of_a_session_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.tools.replay.traces._IDS_MAX", 7)
    with pytest.raises(TraceError, match="request 2: the prompts of the session have more than 7 ids together"):
        read(tmp_path, PACKED)
