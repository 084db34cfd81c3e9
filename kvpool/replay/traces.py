"""Trace readers: Mooncake columns, the Qwen-Bailian variant, explicit tokens and agents' sessions, as checked
requests."""

from __future__ import annotations

import errno
import gzip
import lzma
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvpool.replay.columns import INT32_MAX, REQUIRED, Row, TraceError, parse
from kvpool.replay.sessions import PAUSE_MAX, USERS, AgentSession, play, read_session
from kvpool.replay.tokens import OUTPUT_STRIDE, Request

FORMATS = ("mooncake", "qwen", "native", "agents")
TOKENS_PER_ID = {"mooncake": 512, "qwen": 16}
NATIVE_COLUMNS = ("tokens", "output_tokens", "output_length", "salt", "adapter_id", "tenant", "timestamp")
_TICKS_PER_SECOND = {"mooncake": 1000, "qwen": 1}

LINE_BYTES_MAX = 256 << 20
"""A request of some ten million tokens."""
_PACKERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"\xfd7": lzma.open}
"""By the first two bytes of a compressed file."""


@dataclass(frozen=True, eq=False)
class Trace:
    """A trace in memory: its source, its format, and its requests in file order."""

    name: str
    format: str
    requests: list[Request]

    def cut(self, tokens: int) -> Trace:
        """The trace, with every request cut to at most `tokens` tokens."""
        return Trace(self.name, self.format, [request.cut(tokens) for request in self.requests])


def read_trace(
    path: str, *, format: str = "auto", limit: int | None = None, users: int = USERS, pause_max: float = PAUSE_MAX
) -> Trace:
    """Read a trace, plain or compressed (gzip, xz), from a path or, for ``-``, from standard input.

    Parameters
    ----------
    path
        File name, or ``-``. It has one request or one session a line. A folder has one session in each ``*.json``.
    format
        One of `FORMATS`, or "auto": the columns of the first request decide.
    limit
        Read this many requests at most. Later lines are not read.
    users
        How many users play the sessions of agents.
    pause_max
        The longest pause of such a user, in seconds.

    Raises
    ------
    TraceError
        The file cannot be read, has no request, or has a line that is wrong. The error names file, line and reason.
    """
    found = list(stream_trace(path, format=format, limit=limit, users=users, pause_max=pause_max))
    return Trace(_name(path), found[0][0], [request for _, request in found])


def stream_trace(
    path: str, *, format: str = "auto", limit: int | None = None, users: int = USERS, pause_max: float = PAUSE_MAX
) -> Iterator[tuple[str, Request]]:
    """Yield the format and the request of each line of a trace while it is read. Sessions are all read first, and their
    requests come in the order in which `play` makes them. Arguments and errors are those of `read_trace`."""
    if format != "auto" and format not in FORMATS:
        raise ValueError(f"format {format!r} is not one of auto, {', '.join(FORMATS)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit {limit} is not at least 1")
    rows, request = _lines(path), None
    for row in islice(rows, 1):
        format = _detect(row) if format == "auto" else format
        rows = chain([row], rows)
    for request in islice(_requests(rows, format, users, pause_max), limit):
        yield format, request
    if request is None:
        raise TraceError(_name(path), 0, "holds no request")


def read_sessions(path: str) -> list[AgentSession]:
    """Read the sessions of a trace of agents, for `play`. Raises TraceError."""
    return list(map(read_session, _lines(path)))


def _requests(rows: Iterator[Row], format: str, users: int, pause_max: float) -> Iterator[Request]:
    if format == "agents":
        return play(list(map(read_session, rows)), users, pause_max)
    read = _native_request if format == "native" else partial(_id_request, format)
    return map(read, rows, count())


def _name(path: str) -> str:
    return "<stdin>" if path == "-" else path


def _lines(path: str) -> Iterator[Row]:
    """The objects of a trace: one a line, or one in each file of a folder."""
    folder = os.path.isdir(path)
    names = sorted(map(str, Path(path).glob("*.json"))) if folder else [path]
    if not names:
        raise TraceError(path, 0, "cannot be read: it is a folder without *.json")
    for place in names:
        name, line = _name(place), 0
        try:
            with _open(place) as stream:
                read = stream.read if folder else stream.readline
                for text in iter(partial(read, LINE_BYTES_MAX + 1), b""):
                    line += 1
                    if len(text) > LINE_BYTES_MAX:
                        raise TraceError(name, line, f"the line has more than {LINE_BYTES_MAX} bytes")
                    if not text.isspace():
                        yield parse(name, line, text)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise TraceError(name, line + 1 if line else 0, f"cannot be read: {reason}") from error


@contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    """Open a file for reading bytes, decompressed if its content is compressed. Standard input stays open."""
    if "\0" in path:
        # open() would raise a ValueError for it.
        raise OSError(errno.EINVAL, "a path cannot have a NUL character")
    file: Any = nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb")
    with file as stream:
        unpack = _PACKERS.get(stream.peek(2)[:2], nullcontext)
        with unpack(stream) as unpacked:
            yield unpacked


def _detect(row: Row) -> str:
    if "tokens" in row.columns:
        return "native"
    if "requests" in row.columns:
        return "agents"
    if "hash_ids" not in row.columns:
        raise row.error("has neither a column 'tokens' nor 'hash_ids' nor 'requests', so its format is unknown")
    return "qwen" if {"chat_id", "parent_chat_id", "turn"} & row.columns.keys() else "mooncake"


def _id_request(format: str, row: Row, index: int) -> Request:
    tokens_per_id = TOKENS_PER_ID[format]
    timestamp = row.seconds("timestamp", REQUIRED)
    input_length = row.integer("input_length", 1, INT32_MAX)
    output_length = row.integer("output_length", 0, OUTPUT_STRIDE)
    if format == "qwen":
        for column in ("chat_id", "parent_chat_id", "turn"):
            row.integer(column, -1, 2**63 - 1, default=0)
        row.text("type")
    # A larger id would wrap around, and give the tokens of another id.
    ids = row.integers("hash_ids", 2**64 // tokens_per_id - 1, np.uint64)
    if len(ids) * tokens_per_id < input_length:
        covered = f"{len(ids)} ids of {tokens_per_id} tokens cover {len(ids) * tokens_per_id} tokens"
        raise row.error(f"column 'hash_ids' is too short: {covered}, input_length is {input_length}")
    seconds = None if timestamp is None else timestamp / _TICKS_PER_SECOND[format]
    return Request(
        index,
        row.line,
        input_length,
        output_length,
        hash_ids=ids,
        tokens_per_id=tokens_per_id,
        tenant=row.text("tenant"),
        timestamp=seconds,
    )


def _native_request(row: Row, index: int) -> Request:
    unknown = sorted(row.columns.keys() - set(NATIVE_COLUMNS))
    if unknown:
        raise row.error(f"unknown column {unknown[0]!r}; the native format has {', '.join(NATIVE_COLUMNS)}")
    timestamp = row.seconds("timestamp", None)
    tokens = row.integers("tokens", INT32_MAX, np.int32)
    if not len(tokens):
        raise row.error("column 'tokens' is empty")
    outputs = None
    if "output_tokens" in row.columns:
        outputs = row.integers("output_tokens", INT32_MAX, np.int32)
        output_length = row.integer("output_length", 0, OUTPUT_STRIDE, default=len(outputs))
        if output_length != len(outputs):
            raise row.error(f"output_length is {output_length}, but there are {len(outputs)} output_tokens")
    else:
        output_length = row.integer("output_length", 0, OUTPUT_STRIDE, default=0)
    adapter_id = row.columns.get("adapter_id")
    if isinstance(adapter_id, str):
        adapter_id = row.text("adapter_id")
    elif adapter_id is not None:
        adapter_id = row.integer("adapter_id", 0, 2**63 - 1)
    return Request(
        index,
        row.line,
        len(tokens),
        output_length,
        tokens=tokens,
        outputs=outputs,
        salt=row.text("salt"),
        adapter_id=adapter_id,
        tenant=row.text("tenant"),
        timestamp=timestamp,
    )
