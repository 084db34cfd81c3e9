"""Where a server may listen and a client may connect, and how each peer proves, before its first message, that it
may."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

_Z85_KEY = 40
_DOMAIN = b"kvpool"
"""ZeroMQ refuses everybody while no authenticator runs, but only if a domain is set and enforced."""
_USER = "kvpool"
_SILENT = logging.Logger("kvpool.remote.endpoints", logging.CRITICAL)
"""A logger of its own, which nobody configures."""


@dataclass(frozen=True)
class ServerKeys:
    """A server's CURVE key pair, and the public keys of the clients that it accepts, each 40 bytes of Z85
    (``zmq.curve_keypair()``)."""

    public: bytes
    secret: bytes = field(repr=False)
    clients: Sequence[bytes]

    def __post_init__(self) -> None:
        _check_keys("ServerKeys", public=self.public, secret=self.secret)
        # One key instead of a sequence of keys is a sequence of numbers. Numbers are no keys.
        for key in self.clients:
            _check_keys("ServerKeys", clients=key)

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Make ``socket`` speak CURVE as the server. An ``authenticator`` must run for its context."""
        _enforce(socket)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret

    def authenticator(self, context: zmq.Context[Any]) -> ThreadAuthenticator:
        """A started thread that accepts exactly ``clients``, for all sockets of the context. The caller stops it."""
        thread = _authenticator(context)
        thread.configure_curve_callback(domain=_DOMAIN.decode(), credentials_provider=_Allowed(self.clients))
        return thread


@dataclass(frozen=True)
class ServerPassword:
    """Used instead of CURVE keys on one machine: a password made from the pools' secret, so that nobody else can send a
    message.

    A peer that can send messages can do more than ask. It can take the name that ZeroMQ gives to the next client, which
    ends the process. It can take the name of a client that has gone, and get its answers. It can send a message that
    never ends.
    """

    password: str = field(repr=False)

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Make ``socket`` ask for the password. An ``authenticator`` must run for its context."""
        _enforce(socket)
        socket.plain_server = True

    def authenticator(self, context: zmq.Context[Any]) -> ThreadAuthenticator:
        """A started thread that accepts peers that have the password. The caller stops it."""
        thread = _authenticator(context)
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
    """A client's CURVE key pair, and the public key of the server that it trusts, each 40 bytes of Z85."""

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


def _authenticator(context: zmq.Context[Any]) -> ThreadAuthenticator:
    # At level DEBUG, pyzmq logs each password that a peer shows.
    thread = ThreadAuthenticator(context, log=_SILENT)
    thread.start()
    return thread


class _Allowed:
    def __init__(self, clients: Sequence[bytes]) -> None:
        self._clients = frozenset(clients)

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._clients


def check_endpoint(endpoint: Any, keys: ServerKeys | ClientKeys | None) -> str:
    """The endpoint, if it may be used with these keys. Raises TypeError or ValueError. Messages do not have the keys.

    ``inproc`` is not accepted. It would hand the pool's own memory to the reader, who would decide when it is released.
    """
    if not isinstance(endpoint, str):
        raise TypeError(f"endpoint={endpoint!r:.80}: accepted is a string")
    if keys is not None and not isinstance(keys, (ServerKeys, ClientKeys)):
        raise TypeError("keys: accepted are ServerKeys for a server, and ClientKeys for a client")
    scheme, _, rest = endpoint.partition("://")
    if scheme not in ("tcp", "ipc") or not rest or "\0" in rest:
        raise ValueError(f"endpoint={endpoint!r:.80}: accepted are tcp://HOST:PORT and ipc://PATH")
    if scheme == "tcp" and keys is None and not is_loopback(rest.rpartition(":")[0]):
        raise ValueError(
            f"endpoint={endpoint!r:.80}: without keys=, accepted are addresses of this machine, such as "
            "tcp://127.0.0.1:5555"
        )
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
        # The message does not have the value, which may be a secret.
        if not isinstance(key, bytes) or len(key) != _Z85_KEY:
            raise ValueError(f"{what}: {name}: accepted are {_Z85_KEY} bytes of Z85, as zmq.curve_keypair() gives them")
