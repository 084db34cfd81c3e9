"""The wire format: a small JSON header, checked when written and when read, with binary frames behind it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

VERSION = 1
KEY_BYTES = 16
HEADER_BYTES_MAX = 16_384
BLOCKS_MAX = 4_096
"""Blocks of one request, at most, whatever a server's limits are."""
_TEXT_MAX = 4_096
_INTEGER_MAX = (1 << 63) - 1


class Malformed(ValueError):
    """Bytes that are no message. ``id`` is the request they seem to belong to, 0 where nobody can tell."""

    def __init__(self, reason: str, id: int = 0) -> None:
        super().__init__(reason)
        self.id = id


@dataclass(frozen=True)
class Message:
    """``id`` is the number of the request that a message makes or answers: 1 or more, 0 in an answer to no known request."""

    id: int


@dataclass(frozen=True)
class Hello(Message):
    """Asks what a server has and accepts. ``layout`` and ``origin`` are fingerprints of the block layout and of the hash secret."""

    client: str
    layout: str
    origin: str
    transport: str


@dataclass(frozen=True)
class Get(Hello):
    """Asks for host blocks; a frame with 16 bytes for each key follows."""


@dataclass(frozen=True)
class Welcome(Message):
    """A server's limits, for each client. Frames of the transport follow."""

    block_bytes: int
    blocks_per_request: int
    requests: int
    bytes: int


@dataclass(frozen=True)
class Blocks(Message):
    """Which keys are there, "1" or "0" for each; the transport's frames follow.

    Unless ``done``, the blocks count only once ``Released`` has come: until then somebody may have taken the lease away.
    """

    found: str
    done: bool


@dataclass(frozen=True)
class Released(Message):
    """The blocks of this request stayed pinned until the transport had let go of them."""


@dataclass(frozen=True)
class Failed(Message):
    """The request failed: a word for programs, and the reason for people. Blocks that it brought are void."""

    code: str
    reason: str


_ACCEPTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": (f"an integer from 0 to {_INTEGER_MAX}", lambda value: type(value) is int and 0 <= value <= _INTEGER_MAX),
    "str": (f"a string of up to {_TEXT_MAX} characters", lambda value: type(value) is str and len(value) <= _TEXT_MAX),
    "bool": ("true or false", lambda value: type(value) is bool),
}
_KINDS: dict[str, type[Message]] = {kind.__name__.lower(): kind for kind in (Hello, Get, Welcome, Blocks, Released, Failed)}
_FIELDS = {kind: {field.name: _ACCEPTED[str(field.type)] for field in fields(kind)} for kind in _KINDS.values()}


def encode(message: Message) -> bytes:
    """The header of a message. Raises Malformed for a field that no reader would accept."""
    values = vars(message)
    _check(type(message), values)
    header = json.dumps({"v": VERSION, "kind": type(message).__name__.lower(), **values}).encode()
    if len(header) > HEADER_BYTES_MAX:
        raise Malformed(f"a header of {len(header)} bytes: accepted are up to {HEADER_BYTES_MAX}", message.id)
    return header


def decode(header: bytes | memoryview, accepted: tuple[type[Message], ...]) -> Any:
    """The message of a header, one of the ``accepted`` kinds. Raises Malformed for everything else."""
    if len(header) > HEADER_BYTES_MAX:
        raise Malformed(f"a header of {len(header)} bytes: accepted are up to {HEADER_BYTES_MAX}")
    try:
        values = json.loads(bytes(header))
    except (ValueError, RecursionError):
        raise Malformed("the header is not JSON") from None
    if not isinstance(values, dict):
        raise Malformed("the header is not a JSON object")
    version, kind = values.pop("v", None), values.pop("kind", None)
    if type(version) is not int or version != VERSION:
        raise Malformed(f"protocol version {version!r:.40}: spoken here is {VERSION}", _id_of(values))
    found = _KINDS.get(kind) if isinstance(kind, str) else None
    if found is None or found not in accepted:
        raise Malformed(f"kind {kind!r:.40}: accepted are {', '.join(one.__name__.lower() for one in accepted)}", _id_of(values))
    _check(found, values)
    return found(**values)


def _id_of(values: dict[str, Any]) -> int:
    id = values.get("id")
    return id if isinstance(id, int) and _ACCEPTED["int"][1](id) else 0


def _check(kind: type[Message], values: dict[str, Any]) -> None:
    """Raise Malformed unless the values are exactly the fields of this kind, each as its type wants it."""
    wanted = _FIELDS[kind]
    if values.keys() != wanted.keys():
        wrong = sorted(values.keys() ^ wanted.keys())
        raise Malformed(f"{kind.__name__.lower()}: the fields {wrong!r:.80} are missing or unknown", _id_of(values))
    for field, (description, accepts) in wanted.items():
        if not accepts(values[field]):
            reason = f"{kind.__name__.lower()}: {field}={values[field]!r:.40}: accepted is {description}"
            raise Malformed(reason, _id_of(values))
