"""Trace readers: Mooncake columns, the Qwen-Bailian variant, explicit tokens and agents' sessions, as checked
requests; and a seeded synthetic workload: chats of several turns over a few shared system prompts."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, islice, pairwise
from pathlib import Path
from random import Random
from typing import Any, BinaryIO

import numpy as np

from kvpool.common.arrays import Array, Int32s, Int64s
from kvpool.tools.replay.content import OUTPUT_STRIDE, Request, expand_output
from kvpool.tools.replay.sessions import AgentSession, Turn, play

INT32_MAX = 2**31 - 1
REQUIRED: Any = object()
_NUMBER_MAX = 2.0**63
_HALF = re.compile("[\ud800-\udfff]").search
_CALL_SECONDS, _CALL_SECONDS_MAX = 6.5, 300.0
"""How long a request of a session takes if nothing is said, and at most."""
_PROMPT_MAX, _IDS_MAX = 10_000_000, 1 << 24
"""The most tokens of a session's prompt, and the most ids of the prompts of one session together."""
_PACKED = ("t", "in", "out", "stop", "api_time", "think_time", "agent", "from", "keep", "runs")
"""The columns of a request of a session that is written as a list."""
FORMATS = ("mooncake", "qwen", "native", "agents")
_IDS = {"mooncake": (512, 1000), "qwen": (16, 1)}
"""How many tokens an id has, and how many units of its times a second has."""
NATIVE_COLUMNS = ("tokens", "output_tokens", "output_length", "salt", "adapter_id", "tenant", "timestamp")

LINE_BYTES_MAX = 256 << 20
"""A request of some ten million tokens."""
_PACKERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"\xfd7": lzma.open}
"""By the first two bytes of a compressed file."""


class TraceError(ValueError):
    """Raised for a trace that cannot be read.

    Attributes
    ----------
    path : str
        The file.
    line : int
        From 1; 0 for the whole file.
    reason : str
        What is wrong.
    """

    def __init__(self, path: str, line: int, reason: str) -> None:
        self.path, self.line, self.reason = path, line, reason
        where = f"{path}, line {line}" if line else path
        super().__init__(f"{where}: {reason}")


def parse(path: str, line: int, text: bytes) -> Row:
    """The columns of an object that begins in this line. Raises TraceError."""
    try:
        columns = json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(
            path, line + error.lineno - 1, f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise TraceError(path, line, f"not JSON: {error}") from error
    if not isinstance(columns, dict):
        raise TraceError(path, line, f"a JSON object is expected, found {_kind(columns)}")
    return Row(path, line, columns)


@dataclass(frozen=True)
class Row:
    """The columns of one line. Every accessor checks type and range, and names a wrong column in its error."""

    path: str
    line: int
    columns: dict[str, Any] = field(repr=False)
    place: str = ""
    """Of an object inside the line: which one."""
    file: str = ""
    """Of a trace that is a folder: its file."""

    def error(self, reason: str) -> TraceError:
        return TraceError(self.path, self.line, f"{self.place}{reason}")

    def part(self, name: str, columns: Any) -> Row:
        """The columns of an object inside this one."""
        inner = Row(self.path, self.line, columns, f"{self.place}{name}: ")
        if type(columns) is not dict:
            raise inner.error(f"a JSON object is expected, found {_kind(columns)}")
        return inner

    def value(self, column: str, accepted: str, fits: Callable[[Any], bool], default: Any = REQUIRED) -> Any:
        """The value of a column: the default if it has none, else one that ``fits``, which are those ``accepted``."""
        value = self.columns.get(column, default)
        if value is REQUIRED:
            raise self.error(f"column {column!r} is missing")
        if value is not default and not fits(value):
            raise self.error(f"column {column!r} must be {accepted}, found {_kind(value)}")
        return value

    def integer(self, column: str, lowest: int, highest: int, default: Any = REQUIRED) -> int:
        accepted = f"an integer within {lowest}..{highest}"
        return self.value(column, accepted, lambda value: type(value) is int and lowest <= value <= highest, default)

    def integers(self, column: str, highest: int, dtype: type) -> Array:
        values = self.items(column)
        if values and not (set(map(type, values)) == {int} and 0 <= min(values) <= max(values) <= highest):
            wrong = (at for at, value in enumerate(values) if type(value) is not int or not 0 <= value <= highest)
            place = next(wrong)
            got = f"found {_kind(values[place])} at position {place}"
            raise self.error(f"column {column!r} must hold integers within 0..{highest}, {got}")
        return np.array(values, dtype=dtype)

    def items(self, column: str, length: int = 0) -> list[Any]:
        """A list of anything, or of lists that are ``length`` long."""
        accepted = f"a list of lists of {length}" if length else "a list"

        def fits(values: Any) -> bool:
            return type(values) is list and (
                not length or all(type(item) is list and len(item) == length for item in values)
            )

        return self.value(column, accepted, fits)

    def text(self, column: str) -> str | None:
        return self.value(column, "Unicode text", lambda value: type(value) is str and not _HALF(value), None)

    def seconds(self, column: str, default: Any = REQUIRED) -> Any:
        """A time, in the unit of the trace. It may be null where the default is None."""
        accepted = "a finite number of at least 0"
        return self.value(
            column, accepted, lambda value: type(value) in (int, float) and 0 <= value <= _NUMBER_MAX, default
        )


def _kind(value: Any) -> str:
    """A JSON value for a message, or what kind it is if it is long."""
    text = json.dumps(value) if type(value) not in (list, dict) else "a list" if type(value) is list else "an object"
    return text if len(text) <= 40 else text[:37] + "..."


# -- files ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Trace:
    """A trace in memory.

    Parameters
    ----------
    name : str
        Its source.
    format : str
        Its format.
    requests : list of Request
        Its requests in the order of the file, or in which users make them.
    """

    name: str
    format: str
    requests: list[Request]

    def cut(self, tokens: int) -> Trace:
        """Return the trace with every request cut.

        Parameters
        ----------
        tokens : int
            The most tokens of a request.

        Returns
        -------
        Trace
            Another trace of the same name.
        """
        return Trace(self.name, self.format, [request.cut(tokens) for request in self.requests])


def read_trace(
    path: str,
    *,
    format: str = "auto",
    limit: int | None = None,
    users: int | None = None,
    pause_max: float | None = None,
) -> Trace:
    """Read a trace, plain or compressed (gzip, xz), from a path or, for ``-``, from standard input.

    Parameters
    ----------
    path : str
        File name, or ``-``. It has one request or one session a line. A folder has one session in each ``*.json``.
    format : {"auto", "mooncake", "qwen", "native", "agents"}, default "auto"
        With ``"auto"``, the columns of the first request decide.
    limit : int or None, default None
        Read this many requests at most. Later lines are not read.
    users : int or None, default None
        How many users play the sessions of agents (None: 32).
    pause_max : float or None, default None
        The longest pause of such a user, in seconds (None: 60).

    Returns
    -------
    Trace
        At least one request.

    Raises
    ------
    ValueError
        For an unknown format or a limit below 1.
    TraceError
        The file cannot be read, has no request, or has a line that is wrong. The error names file, line and reason.
        Or it has no sessions, although ``users`` or ``pause_max`` says how they are played.
    """
    pairs = list(stream_trace(path, format=format, limit=limit, users=users, pause_max=pause_max))
    return Trace(_name(path), pairs[0][0], [request for _, request in pairs])


def stream_trace(
    path: str,
    *,
    format: str = "auto",
    limit: int | None = None,
    users: int | None = None,
    pause_max: float | None = None,
) -> Iterator[tuple[str, Request]]:
    """Yield the requests of a trace while it is read.

    Parameters
    ----------
    path : str
        As for `read_trace`.
    format : {"auto", "mooncake", "qwen", "native", "agents"}, default "auto"
        As for `read_trace`.
    limit : int or None, default None
        As for `read_trace`.
    users : int or None, default None
        As for `read_trace`.
    pause_max : float or None, default None
        As for `read_trace`.

    Yields
    ------
    tuple of str and Request
        The format, and a request. Sessions are all read first, and their requests come in the order in which users make
        them.

    Raises
    ------
    ValueError, TraceError
        As by `read_trace`.
    """
    if format != "auto" and format not in FORMATS:
        raise ValueError(f"format {format!r} is not one of auto, {', '.join(FORMATS)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit {limit} is not at least 1")
    rows, request = _lines(path), None
    for row in islice(rows, 1):
        format = _detect(row) if format == "auto" else format
        rows = chain([row], rows)
    options = {name: value for name, value in (("users", users), ("pause_max", pause_max)) if value is not None}
    if options and format not in ("agents", "auto"):
        named = ", ".join(f"{name} {value}" for name, value in options.items())
        reason = f"{named}: expected a trace with sessions of agents, got requests ({format})"
        raise TraceError(_name(path), 0, reason)
    for request in islice(_requests(rows, format, options), limit):
        yield format, request
    if request is None:
        raise TraceError(_name(path), 0, "holds no request")


def read_sessions(path: str) -> list[AgentSession]:
    """Read the sessions of a trace of agents, for `play`. Raises TraceError."""
    return [read_session(row) for row in _lines(path)]


def _requests(rows: Iterator[Row], format: str, rules: dict[str, Any]) -> Iterator[Request]:
    if format == "agents":
        return play([read_session(row) for row in rows], **rules)
    read = _native_request if format == "native" else partial(_id_request, format)
    return map(read, rows, count())


def _name(path: str) -> str:
    return "<stdin>" if path == "-" else path


def _lines(path: str) -> Iterator[Row]:
    """The objects of a trace: one a line, or one in each file of a folder."""
    folder = os.path.isdir(path)
    names = sorted(map(str, Path(path).glob("*.json"))) if folder else [path]
    if not names or "\0" in path:
        reason = "it is a folder without *.json" if folder else "a path cannot have a NUL character"
        raise TraceError(path, 0, f"cannot be read: {reason}")
    for place in names:
        name, line = _name(place), 0
        try:
            with _open(place) as stream:
                read = stream.read if folder else stream.readline
                for text in iter(partial(read, LINE_BYTES_MAX + 1), b""):
                    line += 1
                    if text.strip() == b"{":  # one object over many lines
                        text += stream.read(LINE_BYTES_MAX)
                    if len(text) > LINE_BYTES_MAX:
                        raise TraceError(name, line, f"the line has more than {LINE_BYTES_MAX} bytes")
                    if not text.isspace():
                        yield replace(parse(name, line, text), file=name if folder else "")
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise TraceError(name, line + 1 if line else 0, f"cannot be read: {reason}") from error


@contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    """Open a file for reading bytes, decompressed if its content is compressed. Standard input stays open."""
    file: Any = nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb")
    with file as stream, _PACKERS.get(stream.peek(2)[:2], nullcontext)(stream) as unpacked:
        yield unpacked


# -- requests ------------------------------------------------------------------------------------


def _detect(row: Row) -> str:
    if "tokens" in row.columns:
        return "native"
    if "requests" in row.columns:
        return "agents"
    if "hash_ids" not in row.columns:
        raise row.error("has neither a column 'tokens' nor 'hash_ids' nor 'requests', so its format is unknown")
    return "qwen" if {"chat_id", "parent_chat_id", "turn"} & row.columns.keys() else "mooncake"


def _id_request(format: str, row: Row, index: int) -> Request:
    tokens_per_id, ticks = _IDS[format]
    timestamp = row.seconds("timestamp") / ticks
    input_length = row.integer("input_length", 1, INT32_MAX)
    output_length = row.integer("output_length", 0, OUTPUT_STRIDE)
    # A larger id would wrap around, and give the tokens of another id.
    ids = row.integers("hash_ids", 2**64 // tokens_per_id - 1, np.uint64)
    if len(ids) * tokens_per_id < input_length:
        covered = f"{len(ids)} ids of {tokens_per_id} tokens cover {len(ids) * tokens_per_id} tokens"
        raise row.error(f"column 'hash_ids' is too short: {covered}, input_length is {input_length}")
    request = Request(index, row.line, input_length, output_length, hash_ids=ids, tokens_per_id=tokens_per_id)
    return replace(request, tenant=row.text("tenant"), timestamp=timestamp, file=row.file)


def _native_request(row: Row, index: int) -> Request:
    unknown = sorted(row.columns.keys() - set(NATIVE_COLUMNS))
    if unknown:
        raise row.error(f"unknown column {unknown[0]!r}; the native format has {', '.join(NATIVE_COLUMNS)}")
    tokens = row.integers("tokens", INT32_MAX, np.int32)
    if not len(tokens):
        raise row.error("column 'tokens' is empty")
    outputs = row.integers("output_tokens", INT32_MAX, np.int32) if "output_tokens" in row.columns else None
    output_length = row.integer("output_length", 0, OUTPUT_STRIDE, default=0 if outputs is None else len(outputs))
    if outputs is not None and output_length != len(outputs):
        raise row.error(f"output_length is {output_length}, but there are {len(outputs)} output_tokens")
    named = row.columns.get("adapter_id")
    text = named is None or type(named) is str
    return Request(
        index,
        row.line,
        len(tokens),
        output_length,
        tokens=tokens,
        outputs=outputs,
        salt=row.text("salt"),
        adapter_id=row.text("adapter_id") if text else row.integer("adapter_id", 0, 2**63 - 1),
        tenant=row.text("tenant"),
        timestamp=row.seconds("timestamp", None),
        file=row.file,
    )


def read_session(row: Row) -> AgentSession:
    """Read a session in either format: packed into a line (``session``, ``block``), or as it was recorded (``id``,
    ``block_size``). Raises TraceError."""
    packed = "session" in row.columns
    tokens_per_id = row.integer("block" if packed else "block_size", 1, 1 << 20)
    row.value("hash_id_scope", "'local': the ids of a session are its own", "local".__eq__, "local")
    turns: list[Turn] = []
    counts: list[int] = []
    for part in _packed(row) if packed else _recorded(row):
        source, keep, runs = _shared(part, counts) if packed else (-1, 0, _runs(part))
        counts.append(keep + int(runs[:, 1].sum()))
        turn = _turn(part, source, keep, runs)
        lacking = -(-turn.input_length // tokens_per_id) - counts[-1]
        if not 0 <= lacking <= 1:
            covered = f"{counts[-1]} ids of {tokens_per_id} tokens for {turn.input_length} tokens"
            raise part.error(
                f"hash_ids: expected one for each block, or for each but a last one that is not full, got {covered}"
            )
        if sum(counts) > _IDS_MAX:
            raise part.error(f"the prompts of the session have more than {_IDS_MAX} ids together")
        turns.append(turn)
    if any(later.begin < turn.begin for turn, later in pairwise(turns)):
        raise row.error("column 'requests' must be in the order of 't'")
    highest = max((int(turn.runs.sum(axis=1).max(initial=0)) for turn in turns), default=0)
    return AgentSession(row.line, tokens_per_id, turns, highest, row.file)


def _turn(part: Row, source: int, keep: int, runs: Int64s) -> Turn:
    asked = part.seconds("api_time", None)
    return Turn(
        begin=part.seconds("t"),
        input_length=part.integer("in", 1, _PROMPT_MAX),
        output_length=part.integer("out", 0, OUTPUT_STRIDE),
        seconds=min(_CALL_SECONDS if asked is None else asked, _CALL_SECONDS_MAX),
        pause=part.seconds("think_time", None) or 0.0,
        stop=part.text("stop") or "",
        source=source,
        keep=keep,
        runs=runs,
    )


def _packed(row: Row) -> Iterator[Row]:
    for place, values in enumerate(row.items("requests", len(_PACKED))):
        yield row.part(f"request {place}", dict(zip(_PACKED, values, strict=True)))


def _shared(part: Row, counts: list[int]) -> tuple[int, int, Int64s]:
    """Which ids a packed request shares with an earlier one, and the runs that follow."""
    source = part.integer("from", -1, len(counts) - 1)
    keep = part.integer("keep", 0, counts[source] if source >= 0 else 0)
    flat = replace(part, columns={"runs": [number for run in part.items("runs", 2) for number in run]})
    return source, keep, flat.integers("runs", INT32_MAX, np.int64).reshape(-1, 2)


def _recorded(row: Row) -> list[Row]:
    """All requests, those of sub-agents too, in order of time."""
    recorded, pending = list[Row](), [row]
    while pending:
        part = pending.pop()
        if part is row or "requests" in part.columns:
            inner = enumerate(part.items("requests"))
            pending += [part.part(f"request {place}", columns) for place, columns in inner][::-1]
        else:
            recorded.append(part)
    return sorted(recorded, key=lambda part: part.seconds("t"))


def _runs(part: Row) -> Int64s:
    """The ids of a recorded request as runs."""
    ids = part.integers("hash_ids", INT32_MAX, np.int64)
    firsts = np.flatnonzero(np.diff(ids, prepend=-2) != 1)
    return np.stack([ids[firsts], np.diff(firsts, append=len(ids))], axis=1)


REQUESTS = 600
DEVICE_BLOCKS = 1_500
HOST_BLOCKS = 3_000
"""The default workload overflows tiers of these sizes, so that a run shows every kind of move."""

_SYSTEM_PROMPTS = (330, 760, 1_200, 2_050)
_TENANTS = (None, None, None, "tenant-a", "tenant-b")
_OPEN_CHATS = 24
_CONTEXT = 12_000
_CONTINUES, _RETRIES, _ADAPTED = 0.8, 0.1, 0.2
_SYSTEM_STREAM, _USER_STREAM, _ANSWER_STREAM = 1 << 22, 2 << 22, 3 << 22


@dataclass(eq=False)
class _Chat:
    salt: str | None
    adapter_id: int | None
    history: Int32s
    """All tokens before the next question."""
    last: tuple[Int32s, Int32s] | None = None
    """The tokens before the last question, and that question."""


def synthetic(requests: int = REQUESTS, *, seed: int = 0) -> Trace:
    """Return a generated trace, the same for the same arguments on every machine.

    Parameters
    ----------
    requests : int, default 600
        How many requests, at least 1.
    seed : int, default 0
        At least 0.

    Returns
    -------
    Trace
        Requests with explicit tokens.

    Raises
    ------
    ValueError
        For an argument out of range.

    Notes
    -----
    A chat starts with one of a few system prompts. Each turn repeats everything before it, including the model's
    answers, and adds a question. Now and then a question is asked again with another ending. Some tenants have a salt,
    and some chats have an adapter.
    """
    if requests < 1:
        raise ValueError(f"requests {requests} is not at least 1")
    if seed < 0:
        raise ValueError(f"seed {seed} is negative")
    random = Random(seed)
    base = (seed % 256) << 24
    chats: list[_Chat] = []
    result: list[Request] = []
    for index in range(requests):
        if chats and random.random() < _CONTINUES:
            chat = chats[int(random.random() * len(chats))]
        else:
            chat = _new_chat(random, base)
            chats.append(chat)
            if len(chats) > _OPEN_CHATS:
                chats.pop(0)
        prompt = _ask(chat, random, base | _USER_STREAM | index)
        answer = expand_output(base | _ANSWER_STREAM | index, 16 + int(random.expovariate(1 / 180)))
        request = Request(index, 0, len(prompt), len(answer), tokens=prompt, outputs=answer)
        result.append(replace(request, salt=chat.salt, adapter_id=chat.adapter_id))
        chat.history = np.concatenate([prompt, answer])
        if len(chat.history) > _CONTEXT:
            chats.remove(chat)
    return Trace(f"synthetic workload, seed {seed}", "generated", result)


def _new_chat(random: Random, base: int) -> _Chat:
    salt = _TENANTS[int(random.random() * len(_TENANTS))]
    adapter_id = 1 if random.random() < _ADAPTED else None
    system = int(random.random() * len(_SYSTEM_PROMPTS))
    return _Chat(salt, adapter_id, expand_output(base | _SYSTEM_STREAM | system, _SYSTEM_PROMPTS[system]))


def _ask(chat: _Chat, random: Random, stream: int) -> Int32s:
    """Return the chat's next prompt: a new question, or the last one again with another ending."""
    if chat.last is not None and random.random() < _RETRIES:
        before, question = chat.last
        kept = len(question) - 1 - int(random.random() * (len(question) // 2))
        question = np.concatenate([question[:kept], expand_output(stream, 8)])
    else:
        before, question = chat.history, expand_output(stream, 8 + int(random.expovariate(1 / 140)))
    chat.last = before, question
    return np.concatenate([before, question])
