"""The wire format: a small JSON header, checked when it is written and when it is read, followed by binary frames."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

VERSION = 2
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
class Hello(Message):
    """Asks what a server has and accepts. ``layout`` and ``origin`` are fingerprints of the block layout and of the
    hash secret."""

    client: str
    layout: str
    origin: str
    transport: str


@dataclass(frozen=True)
class Get(Hello):
    """Asks for host blocks of one group of layers. A frame with 16 bytes for each key follows."""

    group: int


@dataclass(frozen=True)
class Find(Hello):
    """Asks which blocks are on the host. A frame with 16 bytes for each key follows."""


@dataclass(frozen=True)
class Welcome(Message):
    """A server's limits for each client. Frames of the transport follow."""

    block_bytes: tuple[int, ...]
    """For each group of layers, 0 if the group is not served."""
    blocks_per_request: int
    requests: int
    bytes: int


@dataclass(frozen=True)
class Found(Message):
    """Which groups have the keys of a ``Find`` on the host now. A frame follows with a bit for each group and key,
    group after group. The first bit of a byte is its highest."""


@dataclass(frozen=True)
class Blocks(Message):
    """Which keys are there, "1" or "0" for each. The frames of the transport follow.

    Unless ``done``, the blocks are valid only after ``Released`` has come: until then somebody may have revoked the
    lease.
    """

    found: str
    done: bool


@dataclass(frozen=True)
class Released(Message):
    """The blocks of this request stayed pinned until the transport had let go of them."""


@dataclass(frozen=True)
class Failed(Message):
    """The request failed: a word for programs, and the reason for people. Its blocks are void."""

    code: str
    reason: str


_ACCEPTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": (f"an integer from 0 to {_INTEGER_MAX}", lambda value: type(value) is int and 0 <= value <= _INTEGER_MAX),
    "str": (f"a string of up to {_TEXT_MAX} characters", lambda value: type(value) is str and len(value) <= _TEXT_MAX),
    "bool": ("true or false", lambda value: type(value) is bool),
    "tuple[int, ...]": (
        f"up to {NUMBERS_MAX} integers from 0 to {_INTEGER_MAX}",
        lambda value: (
            type(value) is tuple
            and len(value) <= NUMBERS_MAX
            and all(type(one) is int and 0 <= one <= _INTEGER_MAX for one in value)
        ),
    ),
}


def encode(message: Message) -> bytes:
    """The header of a message, whose kind is the name of its class.

    Raises Malformed for a field that no reader would accept.
    """
    values = vars(message)
    _check(type(message), values)
    header = json.dumps({"v": VERSION, "kind": type(message).__name__.lower(), **values}).encode()
    if len(header) > HEADER_BYTES_MAX:
        raise Malformed(f"a header of {len(header)} bytes: accepted are up to {HEADER_BYTES_MAX}", message.id)
    return header


def decode(header: bytes | memoryview, accepted: tuple[type[Message], ...]) -> Any:
    """The message of a header, of one of the ``accepted`` kinds. Raises Malformed for everything else."""
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
    found = next((one for one in accepted if one.__name__.lower() == kind), None)
    if found is None:
        raise Malformed(
            f"kind {kind!r:.40}: accepted are {', '.join(one.__name__.lower() for one in accepted)}", _id_of(values)
        )
    values = {name: tuple(value) if type(value) is list else value for name, value in values.items()}
    _check(found, values)
    return found(**values)


def _fields(kind: type[Message]) -> dict[str, tuple[str, Callable[[Any], bool]]]:
    """What is accepted in each field of a kind of message."""
    return {field.name: _ACCEPTED[str(field.type)] for field in fields(kind)}


def _id_of(values: dict[str, Any]) -> int:
    id = values.get("id")
    return id if isinstance(id, int) and _ACCEPTED["int"][1](id) else 0


def _check(kind: type[Message], values: dict[str, Any]) -> None:
    """Raise Malformed unless the values are exactly the fields of this kind, each of its type."""
    wanted = _fields(kind)
    if values.keys() != wanted.keys():
        wrong = sorted(values.keys() ^ wanted.keys())
        raise Malformed(f"{kind.__name__.lower()}: the fields {wrong!r:.80} are missing or unknown", _id_of(values))
    for field, (description, accepts) in wanted.items():
        if not accepts(values[field]):
            reason = f"{kind.__name__.lower()}: {field}={values[field]!r:.40}: accepted is {description}"
            raise Malformed(reason, _id_of(values))
