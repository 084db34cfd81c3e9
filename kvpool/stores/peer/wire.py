"""What a PeerStore and a StoreServer say to each other: messages of kvpool.remote, followed by binary frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.remote.session import Malformed, Message
from kvpool.stores.seals import SharedSecret
from kvpool.stores.store import KEY_BYTES, REFUSED, Bytes

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
    seals, and the blocks.

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

    After "find" and "save" follows a frame of codes. After "load" follow codes, seals, and the blocks whose code is OK,
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
