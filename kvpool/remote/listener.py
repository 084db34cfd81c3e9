"""Where a server may listen and a client may connect, and how a server knows its clients: by CURVE keys, or by a token
made from a secret."""

from __future__ import annotations

import fcntl
import hmac
import ipaddress
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from errno import EADDRINUSE
from socket import AF_UNIX, socket
from typing import Any, ClassVar

import zmq
from zmq.utils import z85

from kvpool.common.arguments import text_argument

_Z85_KEY = 40
_PASS_NS = 60_000_000_000
"""How old the pass of a client may be."""
_LOCK_TRIES = 200
"""Of 10 ms. Who waits longer for the lock of a folder goes on without it."""


@dataclass(frozen=True)
class ServerKeys:
    """A server's CURVE key pair, and the public keys of the clients that it accepts.

    Parameters
    ----------
    public, secret : bytes
        40 bytes of Z85 each, as ``zmq.curve_keypair()`` returns them.
    clients : sequence of bytes
        The public key of each client.

    Raises
    ------
    ValueError
        For a key that is not 40 bytes of Z85.
    """

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
        """Return whether a peer with this public key may connect.

        Parameters
        ----------
        credentials : sequence of bytes
            The public key alone, 32 bytes.

        Returns
        -------
        bool
            Whether it is that of one of ``clients``.
        """
        return len(credentials) == 1 and z85.encode(credentials[0]) in self.clients


@dataclass(frozen=True)
class ClientKeys:
    """A client's CURVE key pair, and the public key of the server that it trusts.

    Parameters
    ----------
    public, secret : bytes
        40 bytes of Z85 each, as ``zmq.curve_keypair()`` returns them.
    server : bytes
        The public key of the server.

    Raises
    ------
    ValueError
        For a key that is not 40 bytes of Z85.
    """

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
        now_ns = time.monotonic_ns()
        self._seen = {name: made for name, made in self._seen.items() if made > now_ns - _PASS_NS}
        if len(credentials) != 2:
            return False
        name, proof = credentials
        if not hmac.compare_digest(proof, _proof(self.wire_key, name)):
            return False
        made = int(name.partition(b" ")[0])
        if not max(self._start, now_ns - _PASS_NS) < made <= now_ns or name in self._seen:
            return False
        self._seen[name] = made
        return True


class ClientSecret:
    """The secret of a ``ServerSecret``."""

    def __init__(self, key: bytes) -> None:
        self.wire_key = key

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Give ``socket`` a token for one connection, which it makes now."""
        name = f"{time.monotonic_ns()} {secrets.token_hex(16)}".encode()
        socket.plain_username, socket.plain_password = name, _proof(self.wire_key, name)


ServerCredentials = ServerKeys | ServerSecret
ClientCredentials = ClientKeys | ClientSecret


def _proof(key: bytes, name: bytes) -> bytes:
    return hmac.new(key, b"pass " + name, "sha256").hexdigest().encode()


def check_endpoint(endpoint: Any, keys: ServerKeys | ClientKeys | None) -> str:
    """The endpoint, if it may be used with these keys. Raises TypeError or ValueError. Messages do not have the keys.

    ``inproc`` is not accepted. It would hand the pool's own memory to the reader, who would decide when it is released.
    """
    if keys is not None and not isinstance(keys, (ServerKeys, ClientKeys)):
        raise TypeError(f"keys: expected ServerKeys for a server or ClientKeys for a client, got {type(keys).__name__}")
    return endpoint_argument("endpoint", endpoint, "" if keys else "keys=")


def endpoint_argument(name: str, endpoint: object, needs: str = "") -> str:
    """An endpoint of ZeroMQ. ``needs``: the argument without which only this machine may connect. Raises TypeError,
    ValueError."""
    endpoint = text_argument(name, endpoint)
    scheme, _, rest = endpoint.partition("://")
    if scheme not in ("tcp", "ipc") or not rest or "\0" in rest:
        raise ValueError(f"{name}: expected tcp://HOST:PORT or ipc://PATH, got {endpoint!r:.80}")
    if scheme == "tcp" and needs and not is_loopback(rest.rpartition(":")[0]):
        raise ValueError(
            f"{name}: expected an address of this machine, such as tcp://127.0.0.1:5555, without {needs}, got "
            f"{endpoint!r:.80}"
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
            raise ValueError(
                f"{what}.{name}: expected {_Z85_KEY} bytes of Z85, as zmq.curve_keypair() gives them, got another value"
            )
