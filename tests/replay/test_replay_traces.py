"""Traces are read in three formats, and a broken line is named with what is wrong with it."""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool import BlockLayout
from kvpool.storage import MemoryStore
from kvpool.tools.replay import ReplayConfig
from kvpool.tools.replay.content import expand_ids
from kvpool.tools.replay.sessions import play
from kvpool.tools.replay.traces import Trace, TraceError, read_trace, stream_trace, synthetic

LAYOUT = BlockLayout.of_block_bytes(256, 16)

MOONCAKE = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
QWEN = {
    "chat_id": 159,
    "parent_chat_id": -1,
    "timestamp": 61.114,
    "input_length": 33,
    "output_length": 7,
    "type": "text",
    "turn": 1,
    "hash_ids": [4, 5, 6],
}
NATIVE = {"tokens": [1, 2, 3], "output_tokens": [4, 5], "salt": "a", "adapter_id": 3, "timestamp": 1}


def write(folder: Path, *rows: Any) -> str:
    path = folder / "trace.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(folder: Path, *rows: Any, **options: Any) -> Trace:
    return read_trace(write(folder, *rows), **options)


def test_mooncake_columns_stand_for_512_tokens_an_id(tmp_path: Path) -> None:
    trace = read(tmp_path, MOONCAKE, {**MOONCAKE, "hash_ids": [0, 2]})
    assert trace.format == "mooncake" and [r.index for r in trace.requests] == [0, 1]
    first, second = (request.prompt() for request in trace.requests)
    assert len(first) == 600
    assert (first[:512] == second[:512]).all() and (first[512:] != second[512:]).any()


def test_qwen_columns_stand_for_16_tokens_an_id(tmp_path: Path) -> None:
    trace = read(tmp_path, QWEN)
    (request,) = trace.requests
    assert trace.format == "qwen" and request.tokens_per_id == 16
    assert len(request.prompt()) == 33 and request.output_length == 7


def test_native_lines_hold_the_tokens_themselves(tmp_path: Path) -> None:
    trace = read(tmp_path, NATIVE, {"tokens": [9], "output_length": 2}, {"tokens": [9], "adapter_id": "b"})
    first, second, third = trace.requests
    assert trace.format == "native"
    assert first.prompt().tolist() == [1, 2, 3] and first.output().tolist() == [4, 5]
    assert (first.salt, first.adapter_id) == ("a", 3)
    assert len(second.output()) == 2 and (second.salt, second.adapter_id) == (None, None)
    assert third.output_length == 0 and third.adapter_id == "b"


def test_tenants_and_times_of_arrival_are_read_in_seconds(tmp_path: Path) -> None:
    rows = ({**MOONCAKE, "timestamp": 1500, "tenant": "a"}, {**QWEN, "tenant": "b"}, {**NATIVE, "tenant": "c"})
    requests = [read(tmp_path, row).requests[0] for row in rows]
    assert [(request.tenant, request.timestamp) for request in requests] == [("a", 1.5), ("b", 61.114), ("c", 1.0)]
    (bare,) = read(tmp_path, {"tokens": [1]}).requests
    assert (bare.tenant, bare.timestamp) == (None, None)


def test_a_stream_gives_each_request_before_the_next_line_is_read(tmp_path: Path) -> None:
    stream = stream_trace(write(tmp_path, MOONCAKE, "broken\n"))
    format, request = next(stream)
    assert format == "mooncake" and request.index == 0
    with pytest.raises(TraceError, match="line 2"):
        next(stream)


@pytest.mark.parametrize("packed", [False, True])
def test_dash_is_standard_input(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.dumps(MOONCAKE).encode() + b"\n"
    raw = io.BufferedReader(io.BytesIO(gzip.compress(data) if packed else data))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw))
    trace = read_trace("-")
    assert trace.name == "<stdin>" and len(trace.requests) == 1
    assert not raw.closed


def test_what_follows_the_limit_is_not_read(tmp_path: Path) -> None:
    assert len(read(tmp_path, MOONCAKE, MOONCAKE, "rubbish", limit=2).requests) == 2


def test_a_forced_format_overrides_the_columns(tmp_path: Path) -> None:
    row = {**MOONCAKE, "input_length": 32}
    assert read(tmp_path, row, format="qwen").requests[0].tokens_per_id == 16
    with pytest.raises(TraceError, match="line 1: unknown column 'hash_ids'"):
        read(tmp_path, {**MOONCAKE, "tokens": [1]}, format="native")


def without(row: dict[str, Any], column: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != column}


BROKEN = [
    ("{not json\n", r"not JSON: .* at column 2"),
    ("[1, 2]\n", "a JSON object is expected, found a list"),
    ("[" * 100_000 + "\n", "not JSON"),
    *((without(MOONCAKE, column), f"column '{column}' is missing") for column in MOONCAKE),
    ({**MOONCAKE, "input_length": "6"}, "'input_length' must be an integer within .*, found \"6\""),
    ({**MOONCAKE, "input_length": True}, "'input_length' must be an integer within .*, found true"),
    ({**MOONCAKE, "input_length": 0}, "'input_length' must be an integer within 1..2147483647, found 0"),
    ({**MOONCAKE, "input_length": 1025}, "2 ids of 512 tokens cover 1024 tokens, input_length is 1025"),
    ({**MOONCAKE, "output_length": -1}, "'output_length' must be an integer within 0..1048576, found -1"),
    ({**MOONCAKE, "hash_ids": 3}, "'hash_ids' must be a list, found 3"),
    ({**MOONCAKE, "hash_ids": [0, False]}, "'hash_ids' must hold integers within .*, found false at position 1"),
    ({**MOONCAKE, "hash_ids": [0, -1]}, r"'hash_ids' must hold integers within 0..\d+, found -1 at position 1"),
    ({**MOONCAKE, "hash_ids": [2**55, 0]}, "found 36028797018963968 at position 0"),
    ({**MOONCAKE, "timestamp": "now"}, "'timestamp' must be a finite number of at least 0, found"),
    ({**MOONCAKE, "timestamp": -1}, "'timestamp' must be a finite number of at least 0, found -1"),
    ({**MOONCAKE, "timestamp": float("nan")}, "'timestamp' must be a finite number"),
    ({**MOONCAKE, "timestamp": 10**400}, "'timestamp' must be a finite number"),
    ({**MOONCAKE, "tenant": "\ud800"}, "'tenant' must be Unicode text"),
    (NATIVE, "column 'timestamp'|column 'input_length' is missing"),
]


@pytest.mark.parametrize(("row", "reason"), BROKEN, ids=[reason[:50] for _, reason in BROKEN])
def test_a_broken_line_is_named_with_its_fault(row: Any, reason: str, tmp_path: Path) -> None:
    path = write(tmp_path, MOONCAKE, row)
    with pytest.raises(TraceError, match=reason) as caught:
        read_trace(path)
    assert caught.value.line == 2 and str(caught.value).startswith(f"{path}, line 2: ")


def test_a_line_without_end_is_not_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.tools.replay.traces.LINE_BYTES_MAX", 1000)
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(json.dumps(MOONCAKE).encode().ljust(999) + b"\n" + b" " * 1001))
    with pytest.raises(TraceError, match="line 2: the line has more than 1000 bytes"):
        read_trace(str(path))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**NATIVE, "tokens": []}, "'tokens' is empty"),
        ({**NATIVE, "tokens": [1, 2**31]}, "found 2147483648 at position 1"),
        ({**NATIVE, "output_length": 3}, "output_length is 3, but there are 2 output_tokens"),
        ({**NATIVE, "salt": 5}, "'salt' must be Unicode text, found 5"),
        ({**NATIVE, "adapter_id": "\ud800b"}, "'adapter_id' must be Unicode text"),
        ({**NATIVE, "adapter_id": True}, "'adapter_id' must be an integer"),
        ({**NATIVE, "slat": "a"}, "unknown column 'slat'; the native format has tokens, "),
    ],
)
def test_a_broken_native_line_is_named_with_its_fault(row: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=f"line 2: .*{reason}"):
        read(tmp_path, NATIVE, row)


def test_a_first_line_without_known_columns_has_no_format(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 1: has neither a column 'tokens' nor 'hash_ids'"):
        read(tmp_path, {"prompt": "hello"})


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no request"):
        read(tmp_path, "\n\n")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(TraceError, match="cannot be read") as caught:
            read_trace(str(path))
        assert caught.value.path == str(path)
    torn = tmp_path / "torn.gz"
    packed = gzip.compress("".join(json.dumps({**MOONCAKE, "timestamp": n}) + "\n" for n in range(4_000)).encode())
    torn.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match=r"line \d+: cannot be read") as caught:
        read_trace(str(torn))
    assert caught.value.line > 1
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"tokens": [1], "salt": "\xe9"}\n')
    with pytest.raises(TraceError, match="line 1: not JSON: 'utf-8' codec"):
        read_trace(str(latin))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: read_trace("-", format="vllm"), "format 'vllm' is not one of auto, mooncake, qwen, native"),
        (lambda: read_trace("-", limit=0), "limit 0 is not at least 1"),
        (lambda: synthetic(0), "requests 0 is not at least 1"),
        (lambda: synthetic(1, seed=-1), "seed -1 is negative"),
        (lambda: expand_ids([1, 2], 33, 16), "2 ids of 16 tokens do not cover 33 tokens"),
        (lambda: next(play([], users=0)), "expected 1 user or more"),
        (lambda: ReplayConfig(LAYOUT, 0), "device_blocks 0 is not at least 1"),
        (lambda: ReplayConfig(LAYOUT, 4, 4, device="sim", store=MemoryStore(1)), "sim device"),
        (lambda: ReplayConfig(LAYOUT, 4, 0, store=MemoryStore(1)), "host_blocks 0"),
        (lambda: ReplayConfig(LAYOUT, 4, 4, store=MemoryStore(1), store_wait=0.0), "store_wait 0.0"),
    ],
)
def test_wrong_options_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
