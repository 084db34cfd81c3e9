"""Messages: a small JSON header, whose fields are checked when it is written and when it is read, and binary frames
behind it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

VERSION = 3
KEY_BYTES = 16
HEADER_BYTES_MAX = 16_384
BLOCKS_MAX = 4_096
"""The most blocks of one request, and keys of one question, whatever a server's limits are."""
NUMBERS_MAX = 64
"""The most groups of layers of a pool that can be served."""
_TEXT_MAX = 4_096
_INTEGER_MAX = (1 << 63) - 1


class Malformed(ValueError):
    """Bytes that are no message. ``id`` is the request they seem to belong to, 0 if nobody can tell."""

    def __init__(self, reason: str, id: int = 0) -> None:
        super().__init__(reason)
        self.id = id


@dataclass(frozen=True)
class Message:
    """``id`` is the number of the request that a message makes or answers. It is at least 1, or 0 in an answer to no
    known request."""

    id: int


@dataclass(frozen=True)
class Failed(Message):
    """The request failed: a word for programs, and the reason for people."""

    code: str
    reason: str


@dataclass(frozen=True)
class Hello(Message):
    """Asks what a server has and accepts. ``layout`` and ``origin`` are fingerprints of the block layout and of the
    hash secret. ``client`` names the owner of leases."""

    client: str
    layout: str
    origin: str
    transport: str


@dataclass(frozen=True)
class Welcome(Message):
    """A server's limits for each client. Frames of the transport follow."""

    block_bytes: tuple[int, ...]
    """For each group of layers, 0 if the group is not served."""
    blocks_per_request: int
    requests: int
    bytes: int


@dataclass(frozen=True)
class Get(Message):
    """Asks for host blocks of one group of layers. A frame with 16 bytes for each key follows."""

    group: int


@dataclass(frozen=True)
class Find(Message):
    """Asks which blocks are on the host. A frame with 16 bytes for each key follows."""


@dataclass(frozen=True)
class Found(Message):
    """Which groups have the keys of a ``Find`` on the host now. A frame follows with a bit for each group and key,
    group after group. The first bit of a byte is its highest."""


@dataclass(frozen=True)
class Blocks(Message):
    """Which keys are there, "1" or "0" for each. The blocks follow, or what the transport needs to read them."""

    found: str


def _is_int(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _INTEGER_MAX


_INTEGER = f"an integer from 0 to {_INTEGER_MAX}"
_ACCEPTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": (_INTEGER, _is_int),
    "str": (f"a string of up to {_TEXT_MAX} characters", lambda value: type(value) is str and len(value) <= _TEXT_MAX),
    "tuple[int, ...]": (
        f"up to {NUMBERS_MAX} times {_INTEGER}",
        lambda value: type(value) is tuple and len(value) <= NUMBERS_MAX and all(map(_is_int, value)),
    ),
}


def encode(message: Message) -> bytes:
    """The header of a message, whose kind is the name of its class.

    Raises Malformed for a field that no reader would accept.
    """
    values = vars(message)
    _check(type(message), values)
    header = json.dumps({"kind": type(message).__name__.lower(), **values}).encode()
    if len(header) > HEADER_BYTES_MAX:
        raise Malformed(f"a header of {len(header)} bytes: accepted are up to {HEADER_BYTES_MAX}", message.id)
    return header


def decode(header: bytes, accepted: tuple[type[Message], ...]) -> Any:
    """The message of a header, of one of the ``accepted`` kinds. Raises Malformed for everything else."""
    if len(header) > HEADER_BYTES_MAX:
        raise Malformed(f"a header of {len(header)} bytes: accepted are up to {HEADER_BYTES_MAX}")
    try:
        values = json.loads(header)
    except (ValueError, RecursionError):
        raise Malformed("the header is not JSON") from None
    if not isinstance(values, dict):
        raise Malformed("the header is not a JSON object")
    kind = values.pop("kind", None)
    found = next((one for one in accepted if one.__name__.lower() == kind), None)
    if found is None:
        names = ", ".join(one.__name__.lower() for one in accepted)
        raise Malformed(f"kind {kind!r:.40}: accepted are {names}", _id_of(values))
    values = {name: tuple(value) if type(value) is list else value for name, value in values.items()}
    _check(found, values)
    return found(**values)


def frames_argument(frames: list[Any], count: int) -> None:
    """Raise Malformed unless there are so many frames behind a header."""
    if len(frames) != count:
        raise Malformed(f"{len(frames)} frames behind the header: accepted are {count}")


def _id_of(values: dict[str, Any]) -> int:
    return int(values["id"]) if _is_int(values.get("id")) else 0


def _check(kind: type[Message], values: dict[str, Any]) -> None:
    """Raise Malformed unless the values are exactly the fields of this kind, each of its type."""
    wanted = {field.name: _ACCEPTED[str(field.type)] for field in fields(kind)}
    if values.keys() != wanted.keys():
        wrong = sorted(values.keys() ^ wanted.keys())
        raise Malformed(f"{kind.__name__.lower()}: the fields {wrong!r:.80} are missing or unknown", _id_of(values))
    for field, (description, accepts) in wanted.items():
        if not accepts(values[field]):
            reason = f"{kind.__name__.lower()}: {field}={values[field]!r:.40}: accepted is {description}"
            raise Malformed(reason, _id_of(values))
