"""What is said on the wire, and how both ends know that the other one has said it. Before that: where a server may
listen and a client may connect, and by what the door knows a client.

A message is a small JSON header, whose fields are checked when it is written and when it is read, and binary frames
behind it. A client greets with a nonce. The server answers with one of its own, and with a tag under a key that is
derived from the secret and both nonces. Only then does the client say anything, under such a tag of its own. The two
directions have different keys, and tags count messages, so nothing that was recorded counts again. Tags are
HMAC-SHA256. Blocks are sealed when they are served, with BLAKE3, which is ten times as fast as any hash of the standard
library. The seal is under the tag.
"""

from __future__ import annotations

import fcntl
import hmac
import ipaddress
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields
from errno import EADDRINUSE
from socket import AF_UNIX, socket
from typing import Any, ClassVar, NamedTuple

import zmq
from zmq.utils import z85

from kvpool.entry.arguments import text_argument

_Z85_KEY = 40
_PASS_NS = 60_000_000_000
"""How old the pass of a client may be."""
_LOCK_TRIES = 200
"""Of 10 ms. Who waits longer for the lock of a folder goes on without it."""


@dataclass(frozen=True)
class ServerKeys:
    """A server's CURVE key pair, and the public keys of the clients that it accepts, each 40 bytes of Z85
    (``zmq.curve_keypair()``)."""

    public: bytes
    secret: bytes = field(repr=False)
    clients: Sequence[bytes]
    wire_key: ClassVar[bytes] = b""

    def __post_init__(self) -> None:
        _check_keys("ServerKeys", public=self.public, secret=self.secret)
        # One key instead of a sequence of keys is a sequence of numbers. Numbers are no keys.
        for key in self.clients:
            _check_keys("ServerKeys", clients=key)

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Make ``socket`` speak CURVE as the server."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret

    def admits(self, credentials: Sequence[bytes]) -> bool:
        """Whether a peer with this public key may connect."""
        return len(credentials) == 1 and z85.encode(credentials[0]) in self.clients


@dataclass(frozen=True)
class ClientKeys:
    """A client's CURVE key pair, and the public key of the server that it trusts, each 40 bytes of Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes
    wire_key: ClassVar[bytes] = b""

    def __post_init__(self) -> None:
        _check_keys("ClientKeys", public=self.public, secret=self.secret, server=self.server)

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_serverkey = self.server
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret


class ServerSecret:
    """Used instead of CURVE keys on one machine: peers show a pass made from the secret before ZeroMQ takes a message
    of theirs. Without it a peer could take the name that ZeroMQ gives to the next client, which ends the process.

    A pass has the time of the machine, and is of use once. Whoever takes the port of a server that has ended, and so
    sees the passes of its clients, gets in nowhere with them: they are older than the server that comes next.
    """

    def __init__(self, key: bytes) -> None:
        self.wire_key, self._start = key, time.monotonic_ns()
        self._seen: dict[bytes, int] = {}

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        socket.plain_server = True

    def admits(self, credentials: Sequence[bytes]) -> bool:
        """Whether a peer with this pass may connect, now and not again."""
        now = time.monotonic_ns()
        self._seen = {name: made for name, made in self._seen.items() if made > now - _PASS_NS}
        if len(credentials) != 2:
            return False
        name, proof = credentials
        if not hmac.compare_digest(proof, _proof(self.wire_key, name)):
            return False
        made = int(name.partition(b" ")[0])
        if not max(self._start, now - _PASS_NS) < made <= now or name in self._seen:
            return False
        self._seen[name] = made
        return True


class ClientSecret:
    """The secret of a ``ServerSecret``."""

    def __init__(self, key: bytes) -> None:
        self.wire_key = key

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Give ``socket`` a pass for one connection, which it makes now."""
        name = f"{time.monotonic_ns()} {secrets.token_hex(16)}".encode()
        socket.plain_username, socket.plain_password = name, _proof(self.wire_key, name)


ServerDoor = ServerKeys | ServerSecret
ClientDoor = ClientKeys | ClientSecret


def _proof(key: bytes, name: bytes) -> bytes:
    return hmac.new(key, b"pass " + name, "sha256").hexdigest().encode()


def check_endpoint(endpoint: Any, keys: ServerKeys | ClientKeys | None) -> str:
    """The endpoint, if it may be used with these keys. Raises TypeError or ValueError. Messages do not have the keys.

    ``inproc`` is not accepted. It would hand the pool's own memory to the reader, who would decide when it is released.
    """
    if keys is not None and not isinstance(keys, (ServerKeys, ClientKeys)):
        raise TypeError("keys: accepted are ServerKeys for a server, and ClientKeys for a client")
    return endpoint_argument("endpoint", endpoint, "" if keys else "keys=")


def endpoint_argument(name: str, endpoint: object, needs: str = "") -> str:
    """An endpoint of ZeroMQ. ``needs``: the argument without which only this machine may connect. Raises TypeError,
    ValueError."""
    endpoint = text_argument(name, endpoint)
    scheme, _, rest = endpoint.partition("://")
    if scheme not in ("tcp", "ipc") or not rest or "\0" in rest:
        raise ValueError(f"{name}={endpoint!r:.80}: accepted are tcp://HOST:PORT and ipc://PATH")
    if scheme == "tcp" and needs and not is_loopback(rest.rpartition(":")[0]):
        raise ValueError(
            f"{name}={endpoint!r:.80}: without {needs}, accepted are addresses of this machine, such as "
            "tcp://127.0.0.1:5555"
        )
    return endpoint


@contextmanager
def binding(endpoint: str) -> Iterator[None]:
    """While this process begins to listen at an endpoint that is free: ``check_free``. Of two that take one ``ipc``
    path at the same instant, the second waits until the first listens: each locks the folder."""
    path = endpoint.removeprefix("ipc://")
    with ExitStack() as stack:
        with suppress(OSError):  # A folder that is not there: the bind says so.
            folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, folder)
            for _ in range(0 if path == endpoint else _LOCK_TRIES):
                with suppress(BlockingIOError):
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # A child that is forked meanwhile has the folder open too, and closing it would not end the lock.
                    stack.callback(fcntl.flock, folder, fcntl.LOCK_UN)
                    break
                time.sleep(0.01)
        check_free(endpoint)
        yield


def check_free(endpoint: str) -> None:
    """Raise zmq.ZMQError if somebody listens at an ``ipc`` endpoint, or a file is there: ZeroMQ would take its place
    without a word. A socket at which nobody listens was left by a process that was killed."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or not os.path.lexists(path):
        return
    if stat.S_ISSOCK(os.lstat(path).st_mode):
        with socket(AF_UNIX) as probe, suppress(BlockingIOError, PermissionError):
            probe.setblocking(False)
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                return
    raise zmq.ZMQError(EADDRINUSE, f"{path}: a server listens there, or it is no socket")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _check_keys(what: str, **keys: Any) -> None:
    for name, key in keys.items():
        # The message does not have the value, which may be a secret.
        if not isinstance(key, bytes) or len(key) != _Z85_KEY:
            raise ValueError(f"{what}: {name}: accepted are {_Z85_KEY} bytes of Z85, as zmq.curve_keypair() gives them")


VERSION = 4
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
UNSEALED = bytes(TAG_BYTES)
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
    for name, (description, accepts) in wanted.items():
        if not accepts(values[name]):
            reason = f"{kind.__name__.lower()}: {name}={values[name]!r:.40}: accepted is {description}"
            raise Malformed(reason, _id_of(values))


# -- sessions ----------------------------------------------------------------------------------------------------


class Received(NamedTuple):
    """A message of the other end. ``frames`` are as it sent them; ``blocks`` are so only if they fit the ``seal``."""

    message: Any
    frames: list[memoryview]
    blocks: list[memoryview]
    seal: bytes


class Session:
    """One end of a connection. ``seal`` and ``is_sealed`` are for any thread, all else is for one.

    ``key``: what both ends know. It is empty where CURVE has proved already who they are.
    """

    def __init__(self, key: bytes, nonces: bytes, serves: bool) -> None:
        client, server, self._blocks = (
            hmac.digest(key, purpose + nonces, "sha256") for purpose in (b"client", b"server", b"blocks")
        )
        self._mine, self._theirs = (server, client) if serves else (client, server)
        self._sent = self._received = 0
        self.proof = _tag(server, 0, b"greeting", [])
        """What only a server that knows the key can say."""

    def pack(
        self, header: bytes, frames: Sequence[Any] = (), blocks: Sequence[Any] = (), seal: bytes = UNSEALED
    ) -> list[Any]:
        """The frames of the next message, whose ``header`` is encoded. ``sent`` must be called when it is on its
        way."""
        head = bytes([len(frames)]) + seal + header
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

    def seal(self, blocks: Iterable[Any]) -> bytes:
        """The seal of blocks: buffers that follow each other. The interpreter's lock is not held while they are
        hashed."""
        from blake3 import blake3

        hashed = blake3(key=self._blocks)
        for block in blocks:
            hashed.update(block)
        return hashed.digest(TAG_BYTES)

    def is_sealed(self, blocks: Iterable[Any], seal: bytes) -> bool:
        """Whether blocks are those that the other end has sealed."""
        return hmac.compare_digest(self.seal(blocks), seal)


def check_library() -> None:
    """Raise ImportError, which names the extra, if the library for seals is missing."""
    try:
        import blake3  # noqa: F401
    except ImportError as error:
        raise ImportError('kvpool.remote needs blake3: pip install ".[remote]"') from error


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
