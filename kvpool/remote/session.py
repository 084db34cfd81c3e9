"""Messages on the wire, and their authentication.

A message is a small JSON header, whose fields are checked when it is read, and binary frames after it. A client first
sends a nonce. The server answers with a nonce of its own and with an authentication tag (HMAC-SHA256), whose key is
derived from the secret and both nonces. From then on, each message has such a tag. The two directions have different
keys, and a tag covers the number of its message, so a recorded message is not accepted again. Served blocks have a tag
of their ``Digest``, which is much faster than any hash of the standard library. The tag of the message covers it.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from kvpool.common.arrays.digest import Digest

VERSION = 5
KEY_BYTES = 16
HEADER_BYTES_MAX = 16_384
BLOCKS_MAX = 4_096
"""The most blocks of one request, and keys of one question, whatever a server's limits are."""
NUMBERS_MAX = 64
"""The most groups of layers of a pool that can be served."""
_TEXT_MAX = 4_096
_INTEGER_MAX = (1 << 63) - 1
MAGIC = b"kvpool wire "
NONCE_BYTES = TAG_BYTES = 16
NO_MAC = bytes(TAG_BYTES)
"""In the place of a seal, if there are no blocks."""
FRAMES_MAX = 8
"""The most frames of a message that are no blocks."""
PREFIX_BYTES = TAG_BYTES + 1 + TAG_BYTES
HEAD_BYTES_MAX = PREFIX_BYTES + HEADER_BYTES_MAX
"""The longest first frame: the tag, how many frames are no blocks, the seal of the blocks, and the header."""
_GREETING = MAGIC + bytes([VERSION])


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


_ACCEPTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("an integer of 63 bits", _is_int),
    "str": (f"up to {_TEXT_MAX} characters", lambda value: type(value) is str and len(value) <= _TEXT_MAX),
    "tuple[int, ...]": (
        f"up to {NUMBERS_MAX} integers of 63 bits",
        lambda value: type(value) is tuple and len(value) <= NUMBERS_MAX and all(map(_is_int, value)),
    ),
}


def encode(message: Message) -> bytes:
    """The header of a message, whose kind is the name of its class."""
    return json.dumps({"kind": type(message).__name__.lower(), **vars(message)}).encode()


def decode(header: bytes, accepted: tuple[type[Message], ...]) -> Any:
    """The message of a header, of one of the ``accepted`` kinds. Raises Malformed for everything else."""
    if len(header) > HEADER_BYTES_MAX:
        raise Malformed(f"header: expected up to {HEADER_BYTES_MAX} bytes, got {len(header)}")
    try:
        values = json.loads(header)
    except (ValueError, RecursionError):
        raise Malformed("the header is not JSON") from None
    if not isinstance(values, dict):
        raise Malformed("the header is not a JSON object")
    kind = values.pop("kind", None)
    message_type = next((candidate for candidate in accepted if candidate.__name__.lower() == kind), None)
    if message_type is None:
        names = ", ".join(candidate.__name__.lower() for candidate in accepted)
        raise Malformed(f"kind: expected one of {names}, got {kind!r:.40}", _id_of(values))
    values = {name: tuple(value) if type(value) is list else value for name, value in values.items()}
    _check(message_type, values)
    return message_type(**values)


def frames_argument(frames: list[Any], count: int) -> None:
    """Raise Malformed unless there are so many frames behind a header."""
    if len(frames) != count:
        raise Malformed(f"header: expected {count} frames after it, got {len(frames)}")


def _id_of(values: dict[str, Any]) -> int:
    return int(values["id"]) if _is_int(values.get("id")) else 0


def _check(kind: type[Message], values: dict[str, Any]) -> None:
    """Raise Malformed unless the values are exactly the fields of this kind, each of its type."""
    wanted = {field.name: _ACCEPTED[str(field.type)] for field in fields(kind)}
    if values.keys() != wanted.keys():
        wrong = sorted(values.keys() ^ wanted.keys())
        raise Malformed(f"{kind.__name__.lower()}: the fields {wrong!r:.80} are missing or unknown", _id_of(values))
    for name, (description, accepts) in wanted.items():
        if not accepts(values[name]):
            reason = f"{kind.__name__.lower()}.{name}: expected {description}, got {values[name]!r:.40}"
            raise Malformed(reason, _id_of(values))


# -- sessions ----------------------------------------------------------------------------------------------------


class Received(NamedTuple):
    """A message of the other end. ``frames`` are as it sent them; ``blocks`` are so only if they fit the ``seal``."""

    message: Any
    frames: list[memoryview]
    blocks: list[memoryview]
    mac: bytes


class Session:
    """One end of a connection. ``seal`` and ``verify_mac`` are for any thread, all else is for one.

    ``key``: what both ends know. It is empty where CURVE has proved already who they are.
    """

    def __init__(self, key: bytes, nonces: bytes, serves: bool) -> None:
        client, server, self._blocks, digests = (
            hmac.digest(key, purpose + nonces, "sha256") for purpose in (b"client", b"server", b"blocks", b"digests")
        )
        self._digest = Digest(digests)
        self._mine, self._theirs = (server, client) if serves else (client, server)
        self._sent = self._received = 0
        self.proof = _tag(server, 0, b"greeting", [])
        """What only a server that knows the key can say."""

    def pack(
        self, header: bytes, frames: Sequence[Any] = (), blocks: Sequence[Any] = (), mac: bytes = NO_MAC
    ) -> list[Any]:
        """The frames of the next message, whose ``header`` is encoded. ``sent`` must be called when it is on its
        way."""
        head = bytes([len(frames)]) + mac + header
        return [_tag(self._mine, self._sent, head, frames) + head, *frames, *blocks]

    def sent(self) -> None:
        self._sent += 1

    def unpack(self, received: Sequence[memoryview], accepted: tuple[type[Message], ...]) -> Received:
        """The next message of the other end. Raises Malformed."""
        if received[0].nbytes < PREFIX_BYTES:
            raise Malformed(f"a first frame of {received[0].nbytes} bytes")
        first = bytes(received[0])
        tag, head, count = first[:TAG_BYTES], first[TAG_BYTES:], first[TAG_BYTES]
        frames = list(received[1 : 1 + min(count, FRAMES_MAX)])
        if not hmac.compare_digest(tag, _tag(self._theirs, self._received, head, frames)):
            raise Malformed("a message without the tag of this connection")
        self._received += 1
        message = decode(first[PREFIX_BYTES:], accepted)
        return Received(message, frames, list(received[1 + len(frames) :]), head[1 : 1 + TAG_BYTES])

    def mac(self, blocks: Sequence[Any]) -> bytes:
        """The seal of blocks: buffers that follow each other. The interpreter's lock is not held while they are
        hashed."""
        digest = self._digest.of(blocks)
        return hmac.digest(self._blocks, digest, "sha256")[:TAG_BYTES]

    def verify_mac(self, blocks: Sequence[Any], mac: bytes) -> bool:
        """Whether blocks are those that the other end has sealed."""
        return hmac.compare_digest(self.mac(blocks), mac)


def greeting() -> bytes:
    """The first message of a client: its nonce."""
    return _GREETING + secrets.token_bytes(NONCE_BYTES)


def answered(key: bytes, greeted: bytes) -> tuple[Session | None, bytes]:
    """The server's end of a new connection, and its answer to a client's greeting. None if that is no greeting: then
    the answer says what is spoken here."""
    if not greeted.startswith(_GREETING) or len(greeted) != len(_GREETING) + NONCE_BYTES:
        return None, _GREETING
    nonce = secrets.token_bytes(NONCE_BYTES)
    session = Session(key, greeted[len(_GREETING) :] + nonce, True)
    return session, _GREETING + nonce + session.proof


def begun(key: bytes, greeted: bytes, answer: bytes) -> Session | None:
    """The client's end of a new connection, or None if the answer proves nothing. Raises Malformed for what is no
    answer."""
    if not answer.startswith(MAGIC) or len(answer) == len(MAGIC):
        raise Malformed(f"no answer to a greeting of protocol version {VERSION}")
    if answer[len(MAGIC)] != VERSION:
        raise Malformed(f"protocol version {answer[len(MAGIC)]}: spoken here is {VERSION}")
    nonce, proof = answer[len(_GREETING) :][:NONCE_BYTES], answer[len(_GREETING) + NONCE_BYTES :]
    session = Session(key, greeted[len(_GREETING) :] + nonce, False)
    return session if hmac.compare_digest(proof, session.proof) else None


def _tag(key: bytes, number: int, head: bytes, frames: Sequence[Any]) -> bytes:
    sizes = [len(head), *(memoryview(frame).nbytes for frame in frames)]
    lengths = b"".join(size.to_bytes(8, "big") for size in (number, *sizes))
    return hmac.digest(key, b"".join([lengths, head, *frames]), "sha256")[:TAG_BYTES]
