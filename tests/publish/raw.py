"""A peer that speaks ZMTP 3 byte by byte, and so can say what ZeroMQ never says."""

from __future__ import annotations

import socket
import struct

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def connected(endpoint: str) -> socket.socket:
    """A connection without a word."""
    if endpoint.startswith("ipc://"):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(600)
        connection.connect(endpoint.removeprefix("ipc://"))
        return connection
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=600)


def frame(content: bytes, flags: int = 0) -> bytes:
    head = bytes([flags, len(content)]) if len(content) < 256 else struct.pack(">BQ", flags | 2, len(content))
    return head + content


def command(name: bytes, content: bytes) -> bytes:
    return frame(bytes([len(name)]) + name + content, 4)


def ready(kind: bytes, identity: bytes | None = None) -> bytes:
    names = [(b"Socket-Type", kind)] + ([] if identity is None else [(b"Identity", identity)])
    return command(b"READY", b"".join(bytes([len(n)]) + n + struct.pack(">I", len(v)) + v for n, v in names))


def read(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = peer.recv(count - len(data))
        assert more, f"the connection has ended after {data!r}"
        data += more
    return data


def read_frame(peer: socket.socket) -> tuple[int, bytes]:
    """The flags of the next frame, and its content."""
    flags, length = read(peer, 2)
    if flags & 2:
        length = struct.unpack(">Q", bytes([length]) + read(peer, 7))[0]
    return flags, read(peer, length)


def let_in(endpoint: str, kind: bytes = b"DEALER", identity: bytes | None = None) -> socket.socket:
    """A connection after its handshake."""
    peer = connected(endpoint)
    peer.sendall(GREETING + ready(kind, identity))
    read(peer, len(GREETING))
    assert b"READY" in read_frame(peer)[1]
    return peer


def is_ended(peer: socket.socket) -> bool:
    """Whether the other end closes a connection within 600 s."""
    try:
        while peer.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def goes_on(peer: socket.socket, content: bytes, times: int, seconds: float = 600) -> bool:
    """Whether all of this can be sent, each part within this time."""
    peer.settimeout(seconds)
    try:
        for _ in range(times):
            peer.sendall(content)
    except OSError:
        return False
    finally:
        peer.settimeout(600)
    return True
