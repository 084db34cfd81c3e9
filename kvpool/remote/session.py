"""What both ends of a connection know after they have proved to each other that they know a secret.

A client greets with a nonce. The server answers with one of its own, and with a tag under a key that is derived from
the secret and both nonces. Only then does the client say anything, under such a tag of its own. The two directions have
different keys, and tags count messages, so nothing that was recorded counts again. Tags are HMAC-SHA256. Blocks are
sealed when they are served, with BLAKE3, which is ten times as fast as any hash of the standard library. The seal is
under the tag.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvpool.remote.frames import HEADER_BYTES_MAX, VERSION, Malformed, Message, decode

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
        raise ImportError("kvpool.remote needs blake3: pip install 'kvpool[remote]'") from error


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
