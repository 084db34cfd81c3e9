"""PeerStore: keeps blocks in another process, which serves a store of its own with a StoreServer. What they say to each
other are messages of kvpool.remote, followed by binary frames."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

try:
    import zmq
except ModuleNotFoundError as error:
    raise ImportError('PeerStore needs pyzmq: pip install ".[remote]"') from error

from kvpool.common.arguments import number_argument
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.process import stays_here
from kvpool.remote.connection import Connection, RemoteError, Stop, Stopped, never
from kvpool.remote.connections import end, new_context
from kvpool.remote.listener import ClientKeys, ClientSecret, check_endpoint
from kvpool.remote.session import Malformed, Message, Received, frames_argument
from kvpool.storage.backends.shared_secret import SharedSecret
from kvpool.storage.store import (
    ABSENT,
    CANCELLED,
    EPOCH_BYTES,
    KEY_BYTES,
    MAC_BYTES,
    OK,
    REFUSED,
    TAG_BYTES,
    Bytes,
    Rows,
    Space,
    Store,
    parts,
)

CALL_BYTES_MAX = 4 << 20
"""The most bytes of blocks that this client sends or takes in one call, if a block is not larger."""
_log = logging.getLogger(__name__)
KEYS_MAX = 4_096
"""The most keys of one call."""
DROPS = ("forget", "clear")
EPOCHS = ("epoch", "renew")
CALLS = ("find", "load", "save", *DROPS, *EPOCHS)


@dataclass(frozen=True)
class StoreHello(Message):
    """Asks for blocks of this size, in bytes."""

    block_bytes: int


@dataclass(frozen=True)
class StoreWelcome(Message):
    """How many blocks one call may save or load."""

    blocks_per_call: int


@dataclass(frozen=True)
class StoreCall(Message):
    """One call of the store. A frame with the keys follows, but for "clear", "epoch" and "renew". For "save" follow
    MACs, and the blocks.

    ``call``: one of CALLS. ``wait_ms``: how long the caller waits for the answer. ``tag``: of "save", or the beginning
    of tags of a call without keys, in hex. ``limit``: of "save". ``session``: of the client, in hex. ``era``: how many
    drops it had begun then, with this one. What it has saved in an earlier era than that of a drop, and comes after it,
    is not kept: the client gave up waiting for it before it sent the drop.
    """

    call: str
    wait_ms: int
    session: str = ""
    era: int = 0
    tag: str = ""
    limit: int = 0


@dataclass(frozen=True)
class StoreDone(Message):
    """The answer to a call. ``count``: how many blocks were dropped. ``holds``, ``capacity``: blocks that the server's
    store has and can have, 0 if it does not say it.

    After "find" and "save" follows a frame of codes. After "load" follow codes, MACs, and the blocks whose code is OK,
    one after the other. After "epoch", and "renew", which begins one, it follows as a frame; ``count`` is 0 if the
    store has none."""

    count: int
    holds: int = 0
    capacity: int = 0


def wire_key(secret: SharedSecret) -> bytes:
    """By what clients with this secret and the server of their store know each other."""
    return secret.derived(b"kvpool.storedoor")


def frame_bytes_max(blocks: int, block_bytes: int) -> int:
    """The longest frame of a call of up to so many blocks."""
    return max(KEYS_MAX * KEY_BYTES, blocks * block_bytes)


def rows_of(frames: Sequence[Any], count: int, width: int) -> Bytes:
    """The only frame as uint8[count, width], without a copy. Raises Malformed for any other length or number."""
    sizes = [memoryview(frame).nbytes for frame in frames]
    if sizes != [count * width]:
        raise Malformed(f"frames of {sizes!r:.80} bytes: expected is one of {count} x {width}")
    return np.frombuffer(frames[0], np.uint8).reshape(count, width)


def codes_of(answer: Any, count: int) -> Bytes:
    """A copy of the codes that a store has answered. Raises Malformed for what no store answers."""
    codes = np.array(answer, np.uint8)
    if codes.shape != (count,) or (count and int(codes.max()) > REFUSED):
        raise Malformed(f"codes {answer!r:.80}: expected is one for each of {count} blocks")
    return codes


class Refusal(ValueError):
    """The server has blocks of another size."""


class PeerStore(Store):
    """A ``Store`` in another process: see ``StoreServer``.

    Parameters
    ----------
    endpoint : str
        The server's ``endpoint``. Other machines only with ``keys``.
    secret : bytes, optional
        What all clients of this content share, 32 bytes. Keys and MACs are made from it.
    secret_file : str or PathLike, optional
        A file with 64 hex digits that only its owner may read, instead of ``secret``. One of them is needed.
    keys : ClientKeys, optional
        CURVE keys of this client and of the server. The server then needs no secret.
    timeout : float, default 5.0
        Seconds that one call may take, 0.001 to 600.
    connections : int, default 2
        Number of calls at a time, 1 to 64, each on a connection of its own.

    Raises
    ------
    TypeError, ValueError
        For a bad argument. ``open`` raises ValueError if the server has blocks of another size.
    OSError
        For a file that cannot be read, and from a call that fails. ``open`` raises PermissionError if the server
        refuses the credentials.
    ImportError
        Without pyzmq.

    Notes
    -----
    A connection that fails is dropped, with everything that may still arrive on it. The next call makes a new one.
    ``open`` needs no server: without one it logs a warning, and calls fail until there is one.

    Any thread may call it; each connection is used by one thread at a time. All calls raise ForkedProcess in a child of
    ``os.fork()``.
    """

    name = "peer"
    clears_prefix = TAG_BYTES

    def __init__(
        self,
        endpoint: str,
        *,
        secret: bytes | None = None,
        secret_file: str | os.PathLike[str] | None = None,
        keys: ClientKeys | None = None,
        timeout: float = 5.0,
        connections: int = 2,
    ) -> None:
        self._endpoint = check_endpoint(endpoint, keys)
        self._secret = SharedSecret(secret, secret_file)
        self._credentials = keys or ClientSecret(wire_key(self._secret))
        self._timeout_ms = round(1e3 * number_argument("timeout", timeout, 1e-3, 600.0))
        self.threads = integer_argument("connections", connections, 1, 64)
        self._lock = threading.Lock()
        stays_here(self)
        self._context: zmq.Context[Any] | None = None
        self._idle: list[Connection] = []
        self._made = self._busy = self._failed = self._era = 0
        self._session, self._filled = os.urandom(16).hex(), (0, 0)

    @property
    def secret(self) -> bytes:
        """What keys and MACs are made from, 32 bytes: the same for all clients with this secret."""
        return self._secret.derived(b"kvpool.storeseal")

    def __repr__(self) -> str:
        return f"PeerStore({self._endpoint!r})"

    # -- the store ---------------------------------------------------------------------------------

    def open(self, space: Space) -> bytes:
        self._memory, self._block_bytes = space.memory, space.block_bytes
        self._most = max(1, CALL_BYTES_MAX // space.block_bytes)
        self._context = new_context()
        try:
            with self._connection():
                pass
        except (Refusal, PermissionError):
            self.close()
            raise
        except OSError as error:
            _log.warning("the store is not there, and is asked again by each call: %s", error)
        return self.secret

    def epoch(self, model: bytes, new: bool) -> bytes | None:
        """Return the epoch that the server's store keeps.

        Parameters
        ----------
        model : bytes
            The first MODEL_BYTES of the model's tags.
        new : bool
            Whether a new epoch begins.

        Returns
        -------
        bytes or None
            As for ``Store.epoch``.

        Raises
        ------
        Malformed
            For an answer of another form, which ends the connection and becomes a ConnectionError.
        """
        with self._connection() as link:
            answer = self._call(link, "renew" if new else "epoch", tag=model.hex())
            frames_argument([*answer.frames, *answer.blocks], 1)
            epoch = bytes(answer.frames[0])
            if len(epoch) not in (0, EPOCH_BYTES):
                raise Malformed(f"an epoch of {len(epoch)} bytes")
            return epoch if answer.message.count else None

    def find(self, keys: Bytes) -> Bytes:
        codes = np.full(len(keys), ABSENT, np.uint8)
        for part in parts(len(keys), KEYS_MAX):
            with self._connection() as link:
                codes[part] = _codes(self._call(link, "find", [keys[part]]), len(keys[part]))
        return codes

    def save(self, keys: Bytes, rows: Rows, macs: Bytes, tag: bytes, limit: int, stop: Stop) -> Bytes:
        codes = np.full(len(keys), CANCELLED, np.uint8)
        with suppress(Stopped):
            for part in parts(len(keys), self._blocks_per_call(stop)):
                with self._connection(stop) as link:
                    # A copy: what is under way may outlive the call, and the rows may change then.
                    blocks, of_save = [self._memory[rows[part]]], {"tag": tag.hex(), "limit": limit, **self._now()}
                    answer = self._call(link, "save", [keys[part], macs[part]], blocks, stop, **of_save)
                    codes[part] = _codes(answer, len(keys[part]))
        return codes

    def load(self, keys: Bytes, rows: Rows, stop: Stop) -> tuple[Bytes, Bytes]:
        codes, macs = np.full(len(keys), CANCELLED, np.uint8), np.zeros((len(keys), MAC_BYTES), np.uint8)
        with suppress(Stopped):
            for part in parts(len(keys), self._blocks_per_call(stop)):
                with self._connection(stop) as link:
                    answer = self._call(link, "load", [keys[part]], stop=stop)
                    frames_argument(answer.frames, 2)
                    part_codes = codes_of(np.frombuffer(answer.frames[0], np.uint8), len(keys[part]))
                    sealed = rows_of(answer.frames[1:], len(part_codes), MAC_BYTES)
                    blocks = rows_of(answer.blocks, int((part_codes == OK).sum()), self._block_bytes)
                    if not link.verify_mac(answer.blocks, answer.mac):
                        raise Malformed("blocks that do not fit their seal")
                codes[part], macs[part] = part_codes, sealed
                self._memory[rows[part][part_codes == OK]] = blocks
        return codes, macs

    def forget(self, keys: Bytes) -> int:
        era, dropped = self._now(drops=1), 0
        for part in parts(len(keys), KEYS_MAX):
            with self._connection() as link:
                count = _count(self._call(link, "forget", [keys[part]], **era))
                if count > len(keys[part]):
                    raise Malformed(f"{count} of {len(keys[part])} keys")
            dropped += count
        return dropped

    def clear(self, tag: bytes) -> int:
        with self._connection() as link:
            return _count(self._call(link, "clear", tag=tag.hex(), **self._now(drops=1)))

    def stats(self) -> dict[str, int]:
        """Return figures of the connections, and ``blocks`` and ``capacity`` of the server's store.

        Returns
        -------
        dict of str to int
            Those of the server's store are as its last answer has reported them.
        """
        with self._lock:
            open_now = len(self._idle) + self._busy
            figures = {"connections": open_now, "connected": self._made, "failed_calls": self._failed}
            if self._filled[1]:
                figures |= {"blocks": self._filled[0], "capacity": self._filled[1]}
            return figures

    def close(self) -> None:
        """Disconnect. Content stays with the server."""
        with self._lock:
            connections, self._idle = self._idle, []
            context, self._context = self._context, None
        for connection in connections:
            connection.close()
        if context is not None:
            end(context)

    # -- connections -------------------------------------------------------------------------------

    def _call(
        self,
        link: Connection,
        call: str,
        frames: Sequence[Any] = (),
        blocks: Sequence[Any] = (),
        stop: Stop = never,
        **fields: Any,
    ) -> Received:
        """Make one call. Returns its answer."""
        answer = link.ask(StoreCall(link.number(), call, link.timeout_ms, **fields), frames, StoreDone, stop, blocks)
        self._filled = answer.message.holds, answer.message.capacity
        return answer

    def _now(self, drops: int = 0) -> dict[str, Any]:
        """The era of a call. What was saved before a drop, and reaches the server later, is not kept there."""
        with self._lock:
            self._era += drops
            return {"session": self._session, "era": self._era}

    def _blocks_per_call(self, stop: Stop) -> int:
        with self._connection(stop) as link:
            return min(int(link.welcome.blocks_per_call), self._most)

    @contextmanager
    def _connection(self, stop: Stop = never) -> Iterator[Connection]:
        """A connection that nobody else uses meanwhile. An error ends it."""
        link = self._taken()
        try:
            if link.welcome is None:
                most = link.greet(StoreHello(0, self._block_bytes), StoreWelcome, stop).message.blocks_per_call
                if not 1 <= most <= KEYS_MAX:
                    raise Malformed(f"calls of {most} blocks")
                with self._lock:
                    self._made += 1
            yield link
        except BaseException as error:
            with self._lock:
                self._busy -= 1
                if not isinstance(error, Stopped):
                    self._failed += 1
            link.close()
            if isinstance(error, Malformed):
                raise ConnectionError(f"{self._endpoint} sent {error}") from None
            if isinstance(error, RemoteError) and not isinstance(error, OSError):
                kinds = {"credentials": PermissionError, "impostor": PermissionError, "size": Refusal}
                raise kinds.get(error.code, ConnectionError)(f"{self._endpoint}: {error.reason}") from None
            raise
        with self._lock:
            self._busy -= 1
            self._idle.append(link)

    def _taken(self) -> Connection:
        """An idle connection that has not ended, or else a new one."""
        with self._lock:
            if self._context is None:
                raise ValueError(f"store: expected one that is open, got {self!r}, which is not")
            link = None
            while self._idle and link is None:
                link = self._idle.pop()
                if link.ended():
                    link.close()
                    link = None
            link = link or Connection(
                self._context,
                self._endpoint,
                self._credentials,
                timeout_ms=self._timeout_ms,
                frame_bytes=frame_bytes_max(self._most, self._block_bytes),
                messages=1,
            )
            self._busy += 1
            return link


def _codes(answer: Received, count: int) -> Bytes:
    frames_argument([*answer.frames, *answer.blocks], 1)
    return codes_of(np.frombuffer(answer.frames[0], np.uint8), count)


def _count(answer: Received) -> int:
    frames_argument([*answer.frames, *answer.blocks], 0)
    return int(answer.message.count)
