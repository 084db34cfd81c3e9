"""Where a server may listen and a client may connect, and how each peer shows, before its first message, that it may be there."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

_Z85_KEY = 40
_DOMAIN = b"kvpool"
"""Only with a domain that is enforced does ZeroMQ refuse everybody when nobody is there to ask."""
_USER = "kvpool"


@dataclass(frozen=True)
class ServerKeys:
    """A server's CURVE key pair and the public keys of the clients that it lets in, each 40 bytes of Z85 (``zmq.curve_keypair()``)."""

    public: bytes
    secret: bytes = field(repr=False)
    clients: Sequence[bytes]

    def __post_init__(self) -> None:
        _check_keys("ServerKeys", public=self.public, secret=self.secret)
        # One key in place of a sequence is a sequence of numbers, which are no keys.
        for key in self.clients:
            _check_keys("ServerKeys", clients=key)

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Have ``socket`` speak CURVE as the server; somebody must run an ``authenticator`` for its context."""
        _enforce(socket)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret

    def authenticator(self, context: zmq.Context[Any]) -> ThreadAuthenticator:
        """A started thread that lets exactly ``clients`` in, for all sockets of the context; the caller stops it."""
        thread = ThreadAuthenticator(context)
        thread.start()
        thread.configure_curve_callback(domain=_DOMAIN.decode(), credentials_provider=_Allowed(self.clients))
        return thread


@dataclass(frozen=True)
class ServerPassword:
    """What stands for CURVE keys on this machine: a password made of the pools' secret, so that nobody else gets as far as a message.

    Whoever gets that far can do more than ask: name itself as ZeroMQ names the next client, which ends the process, or as one that has
    gone, whose answers it is sent then; and send a message that never ends.
    """

    password: str = field(repr=False)

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Have ``socket`` ask for the password; somebody must run an ``authenticator`` for its context."""
        _enforce(socket)
        socket.plain_server = True

    def authenticator(self, context: zmq.Context[Any]) -> ThreadAuthenticator:
        """A started thread that lets those in who have the password; the caller stops it."""
        thread = ThreadAuthenticator(context)
        thread.start()
        thread.configure_plain(domain=_DOMAIN.decode(), passwords={_USER: self.password})
        return thread


@dataclass(frozen=True)
class ClientPassword:
    """The password of a ``ServerPassword``."""

    password: str = field(repr=False)

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        socket.plain_username, socket.plain_password = _USER.encode(), self.password.encode()


@dataclass(frozen=True)
class ClientKeys:
    """A client's CURVE key pair and the public key of the server that it trusts, each 40 bytes of Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes

    def __post_init__(self) -> None:
        _check_keys("ClientKeys", public=self.public, secret=self.secret, server=self.server)

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_serverkey = self.server
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret


def _enforce(socket: zmq.Socket[bytes]) -> None:
    socket.zap_domain = _DOMAIN
    socket.zap_enforce_domain = True


class _Allowed:
    def __init__(self, clients: Sequence[bytes]) -> None:
        self._clients = frozenset(clients)

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._clients


def check_endpoint(endpoint: Any, keys: ServerKeys | ClientKeys | None) -> str:
    """The endpoint, if it may be used with these keys. Raises TypeError or ValueError.

    ``inproc`` is not accepted: it would hand the pool's own memory to the reader, who decides when it is released.
    """
    if not isinstance(endpoint, str):
        raise TypeError(f"endpoint={endpoint!r:.80}: accepted is a string")
    scheme, _, rest = endpoint.partition("://")
    if scheme not in ("tcp", "ipc") or not rest:
        raise ValueError(f"endpoint={endpoint!r:.80}: accepted are tcp://HOST:PORT and ipc://PATH")
    if scheme == "tcp" and keys is None and not is_loopback(rest.rpartition(":")[0]):
        raise ValueError(f"endpoint={endpoint!r:.80}: without keys=, accepted are addresses of this machine, such as tcp://127.0.0.1:5555")
    return endpoint


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _check_keys(what: str, **keys: Any) -> None:
    for name, key in keys.items():
        # The value is not in the message: it may be a secret.
        if not isinstance(key, bytes) or len(key) != _Z85_KEY:
            raise ValueError(f"{what}: {name}: accepted are {_Z85_KEY} bytes of Z85, as zmq.curve_keypair() gives them")
