"""What a PeerStore and a StoreServer say to each other: a header of kvpool.remote, followed by binary frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.remote.frames import HEADER_BYTES_MAX, Malformed, Message
from kvpool.stores.secrets import SharedSecret
from kvpool.stores.store import KEY_BYTES, OK, REFUSED, SEAL_BYTES, Bytes

KEYS_MAX = 4_096
"""The most keys of one call."""


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
    """One call of the store. A frame with the keys follows. ``wait_ms``: how long the caller waits for the answer."""

    wait_ms: int


@dataclass(frozen=True)
class StoreFind(StoreCall):
    """Answered by a frame of codes."""


@dataclass(frozen=True)
class StoreChange(StoreCall):
    """A call that saves or drops. ``session``: of the client, in hex. ``era``: how many drops it had begun then, with
    this one. What it has saved in an earlier era than that of a drop, and comes after it, is not kept: the client gave
    up waiting for it before it sent the drop."""

    session: str
    era: int


@dataclass(frozen=True)
class StoreForget(StoreChange):
    """Answered by ``StoreDone.count``: how many blocks were there."""


@dataclass(frozen=True)
class StoreClear(StoreChange):
    """Has no frame of keys. ``tag``: the beginning of tags, in hex. Answered by ``StoreDone.count``."""

    tag: str


@dataclass(frozen=True)
class StoreLoad(StoreCall):
    """Answered by three frames: codes, seals, and the bytes of the blocks whose code is OK, one after the other."""


@dataclass(frozen=True)
class StoreSave(StoreChange):
    """Two more frames follow: seals, and the bytes of the blocks. Answered by a frame of codes. ``tag``: in hex."""

    tag: str
    limit: int


@dataclass(frozen=True)
class StoreDone(Message):
    """The answer to a call."""

    count: int


CALLS = (StoreFind, StoreForget, StoreClear, StoreLoad, StoreSave)
DROPS = (StoreForget, StoreClear)


def password(secret: SharedSecret) -> str:
    """What clients with this secret show the server of a store before their first message."""
    return secret.derived(b"kvpool.storedoor").hex()


def frame_bytes_max(blocks: int, block_bytes: int) -> int:
    """The longest frame of a call of up to so many blocks."""
    return max(HEADER_BYTES_MAX, KEYS_MAX * KEY_BYTES, blocks * block_bytes)


def rows_of(frame: Any, count: int, width: int) -> Bytes:
    """A frame as uint8[count, width], without a copy. Raises Malformed for any other length."""
    if memoryview(frame).nbytes != count * width:
        raise Malformed(f"a frame of {memoryview(frame).nbytes} bytes: expected are {count} x {width}")
    return np.frombuffer(frame, np.uint8).reshape(count, width)


def codes_of(answer: Any, count: int) -> Bytes:
    """A copy of the codes that a store has answered. Raises Malformed for what no store answers."""
    codes = np.array(answer, np.uint8)
    if codes.shape != (count,) or (count and int(codes.max()) > REFUSED):
        raise Malformed(f"codes {answer!r:.80}: expected is one for each of {count} blocks")
    return codes


def only_codes(number: int, frames: Sequence[Any], count: int) -> Bytes:
    """Read the answer to ``StoreFind`` or ``StoreSave`` for so many keys. Raises Malformed, as those below."""
    frames_argument(frames, 1)
    return codes_of(np.frombuffer(frames[0], np.uint8), count)


def only_count(number: int, frames: Sequence[Any], count: int) -> int:
    """Read the answer to ``StoreForget``."""
    if number > count:
        raise Malformed(f"{number} of {count} keys")
    return any_count(number, frames, count)


def any_count(number: int, frames: Sequence[Any], count: int) -> int:
    """Read the answer to ``StoreClear``."""
    frames_argument(frames, 0)
    return number


def codes_seals_blocks(number: int, frames: Sequence[Any], count: int, block_bytes: int) -> tuple[Bytes, Bytes, Bytes]:
    """Read the answer to ``StoreLoad``: codes uint8[count], seals uint8[count, SEAL_BYTES], and the blocks that are OK,
    uint8[ok, block_bytes]."""
    frames_argument(frames, 3)
    codes = codes_of(np.frombuffer(frames[0], np.uint8), count)
    return codes, rows_of(frames[1], count, SEAL_BYTES), rows_of(frames[2], int((codes == OK).sum()), block_bytes)


def frames_argument(frames: Sequence[Any], count: int) -> None:
    """Raise Malformed unless there are so many frames behind a header."""
    if len(frames) != count:
        raise Malformed(f"{len(frames)} frames behind the header: expected are {count}")
