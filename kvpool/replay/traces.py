"""Trace readers: Mooncake columns, the Qwen-Bailian variant and explicit tokens, as checked requests."""

from __future__ import annotations

import errno
import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from kvpool.replay.tokens import OUTPUT_STRIDE, Request

FORMATS = ("mooncake", "qwen", "native")
TOKENS_PER_ID = {"mooncake": 512, "qwen": 16}
NATIVE_COLUMNS = ("tokens", "output_tokens", "output_length", "salt", "adapter_id", "tenant", "timestamp")
_TICKS_PER_SECOND = {"mooncake": 1000, "qwen": 1}

LINE_BYTES_MAX = 256 << 20
"""A request of some ten million tokens."""
_GZIP_MAGIC = b"\x1f\x8b"
_INT32_MAX = 2**31 - 1
_TIMESTAMP_MAX = 2.0**63
_REQUIRED: Any = object()


class TraceError(ValueError):
    """A trace cannot be replayed. Attributes: `path`, `line` (from 1; 0 for the whole file) and `reason`."""

    def __init__(self, path: str, line: int, reason: str) -> None:
        self.path, self.line, self.reason = path, line, reason
        where = f"{path}, line {line}" if line else path
        super().__init__(f"{where}: {reason}")


@dataclass(frozen=True, eq=False)
class Trace:
    """A trace in memory: its source, its format, and its requests in file order."""

    name: str
    format: str
    requests: list[Request]

    def cut(self, tokens: int) -> Trace:
        """The trace, with every request cut to at most `tokens` tokens."""
        return Trace(self.name, self.format, [request.cut(tokens) for request in self.requests])


def read_trace(path: str, *, format: str = "auto", limit: int | None = None) -> Trace:
    """Read a jsonl trace, plain or gzip-compressed, from a path or, for ``-``, from standard input.

    Parameters
    ----------
    path
        File name, or ``-``.
    format
        One of `FORMATS`, or "auto": the columns of the first request decide.
    limit
        Read this many requests at most. Later lines are not read.

    Raises
    ------
    TraceError
        The file cannot be read, has no request, or has a line that is wrong. The error names file, line and reason.
    """
    found = list(stream_trace(path, format=format, limit=limit))
    return Trace(_name(path), found[0][0], [request for _, request in found])


def stream_trace(path: str, *, format: str = "auto", limit: int | None = None) -> Iterator[tuple[str, Request]]:
    """Yield the format and the request of each line of a trace while it is read. Arguments and errors are those of
    `read_trace`."""
    if format != "auto" and format not in FORMATS:
        raise ValueError(f"format {format!r} is not one of auto, {', '.join(FORMATS)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit {limit} is not at least 1")
    name = _name(path)
    line = count = 0
    try:
        with _open(path) as stream:
            for text in iter(partial(stream.readline, LINE_BYTES_MAX + 1), b""):
                line += 1
                if len(text) > LINE_BYTES_MAX:
                    raise TraceError(name, line, f"the line has more than {LINE_BYTES_MAX} bytes")
                if text.isspace():
                    continue
                row = _Row(name, line, _parse(name, line, text))
                if format == "auto":
                    format = _detect(row)
                yield format, _request(row, format, count)
                count += 1
                if count == limit:
                    break
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(name, line + 1 if line else 0, f"cannot be read: {reason}") from error
    if not count:
        raise TraceError(name, 0, "holds no request")


def _name(path: str) -> str:
    return "<stdin>" if path == "-" else path


@contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    """Open `path` for reading bytes, decompressed if its content is gzip. Standard input stays open."""
    if "\0" in path:
        # open() would raise a ValueError for it.
        raise OSError(errno.EINVAL, "a path cannot have a NUL character")
    stream: Any = sys.stdin.buffer if path == "-" else open(path, "rb")
    try:
        if stream.peek(2)[:2] == _GZIP_MAGIC:
            with gzip.GzipFile(fileobj=stream) as unpacked:
                yield unpacked  # type: ignore[misc]
        else:
            yield stream
    finally:
        if path != "-":
            stream.close()


def _parse(name: str, line: int, text: bytes) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except UnicodeDecodeError as error:
        raise TraceError(name, line, f"not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise TraceError(name, line, f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(name, line, f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise TraceError(name, line, f"a JSON object is expected, found {_kind(row)}")
    return row


def _detect(row: _Row) -> str:
    if "tokens" in row.columns:
        return "native"
    if "hash_ids" not in row.columns:
        raise row.error("has neither a column 'tokens' nor 'hash_ids', so its format is unknown")
    return "qwen" if {"chat_id", "parent_chat_id", "turn"} & row.columns.keys() else "mooncake"


def _request(row: _Row, format: str, index: int) -> Request:
    return _native_request(row, index) if format == "native" else _id_request(row, format, index)


def _id_request(row: _Row, format: str, index: int) -> Request:
    tokens_per_id = TOKENS_PER_ID[format]
    timestamp = row.timestamp(_REQUIRED)
    input_length = row.integer("input_length", 1, _INT32_MAX)
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


def _native_request(row: _Row, index: int) -> Request:
    unknown = sorted(row.columns.keys() - set(NATIVE_COLUMNS))
    if unknown:
        raise row.error(f"unknown column {unknown[0]!r}; the native format has {', '.join(NATIVE_COLUMNS)}")
    timestamp = row.timestamp(None)
    tokens = row.integers("tokens", _INT32_MAX, np.int32)
    if not len(tokens):
        raise row.error("column 'tokens' is empty")
    outputs = None
    if "output_tokens" in row.columns:
        outputs = row.integers("output_tokens", _INT32_MAX, np.int32)
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


@dataclass(frozen=True)
class _Row:
    """The columns of one line. Every accessor checks type and range, and names a wrong column in its error."""

    path: str
    line: int
    columns: dict[str, Any]

    def error(self, reason: str) -> TraceError:
        return TraceError(self.path, self.line, reason)

    def integer(self, column: str, lowest: int, highest: int, *, default: Any = _REQUIRED) -> int:
        value = self._value(column, default)
        if type(value) is not int:
            raise self.error(f"column {column!r} must be an integer, found {_kind(value)}")
        if not lowest <= value <= highest:
            raise self.error(f"column {column!r} must be within {lowest}..{highest}, found {value}")
        return value

    def integers(self, column: str, highest: int, dtype: type) -> npt.NDArray[Any]:
        values = self._value(column, _REQUIRED)
        if type(values) is not list:
            raise self.error(f"column {column!r} must be a list of integers, found {_kind(values)}")
        if set(map(type, values)) - {int}:
            at = next(i for i, value in enumerate(values) if type(value) is not int)
            raise self.error(f"column {column!r} must hold integers, found {_kind(values[at])} at position {at}")
        if values and not 0 <= min(values) <= max(values) <= highest:
            at = next(i for i, value in enumerate(values) if not 0 <= value <= highest)
            raise self.error(f"column {column!r} must hold 0..{highest}, found {values[at]} at position {at}")
        return np.array(values, dtype=dtype)

    def text(self, column: str) -> str | None:
        value = self.columns.get(column)
        if value is not None and not isinstance(value, str):
            raise self.error(f"column {column!r} must be a string, found {_kind(value)}")
        if value is not None and not value.isascii() and any("\ud800" <= one <= "\udfff" for one in value):
            raise self.error(f"column {column!r} must be Unicode text, found {_kind(value)}, with half a character")
        return value

    def timestamp(self, default: Any) -> float | None:
        """The time of arrival. The replay ignores it: requests run in file order, as fast as possible."""
        value = self._value("timestamp", default)
        if value is None and default is None:
            return None
        if type(value) not in (int, float):
            raise self.error(f"column 'timestamp' must be a number, found {_kind(value)}")
        if not 0 <= value <= _TIMESTAMP_MAX:
            raise self.error(f"column 'timestamp' must be finite and not negative, found {_kind(value)}")
        return float(value)

    def _value(self, column: str, default: Any) -> Any:
        value = self.columns.get(column, default)
        if value is _REQUIRED:
            raise self.error(f"column {column!r} is missing")
        return value


def _kind(value: Any) -> str:
    """Describe a JSON value for a message: its kind, and the value if it is short."""
    names = {bool: "the boolean", int: "the integer", float: "the number", str: "the string"}
    if type(value) in names:
        text = json.dumps(value)
        return f"{names[type(value)]} {text if len(text) <= 40 else text[:37] + '...'}"
    return "a list" if type(value) is list else "an object" if type(value) is dict else "null"
