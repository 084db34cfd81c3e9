"""KV bytes that identify their content. They are a function of the namespace and of all tokens up to their own, and do
not depend on kvpool's keys."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.arrays.layout import BlockLayout, BlockStrides
from kvpool.replay.tokens import Ids, mix

_DIGEST_BYTES = 16
_CHUNK_BYTES = 1 << 18
"""Scratch bytes per step over full blocks: small enough to stay in a core's cache."""

States = npt.NDArray[np.uint64]


def namespace_digest(salt: str | bytes | None = None, adapter_id: int | str | None = None) -> bytes:
    """Return the digest that stands for "everything before token 0" of a namespace."""
    parts = []
    for value in (salt, adapter_id):
        raw = value if isinstance(value, bytes) else str(value).encode()
        kind = b"none" if value is None else b"int" if isinstance(value, int) else b"text"
        parts.append(b"%s %d:%s" % (kind, len(raw), raw))
    return blake2b(b"".join(parts), digest_size=_DIGEST_BYTES).digest()


def token_states(
    tokens: npt.ArrayLike,
    tokens_per_block: int,
    *,
    salt: str | bytes | None = None,
    adapter_id: int | str | None = None,
) -> States:
    """Return ``uint64[len(tokens)]``: for each position, a hash of the namespace and of every token up to there.

    One digest per block covers everything before the block. Inside the block the value is extended token by token, for
    all blocks at once. A value does not depend on later tokens.
    """
    stream = np.ascontiguousarray(tokens, dtype="<i4")
    raw = stream.tobytes()
    width = 4 * tokens_per_block
    digest = namespace_digest(salt, adapter_id)
    seeds = bytearray()
    for start in range(0, len(raw), width):
        seeds += digest[:8]
        digest = blake2b(digest + raw[start : start + width], digest_size=_DIGEST_BYTES).digest()
    state = np.frombuffer(seeds, dtype="<u8").astype(np.uint64)
    grid = np.zeros((len(state), tokens_per_block), dtype=np.uint64)
    grid.reshape(-1)[: len(stream)] = stream.view("<u4")
    for position in range(tokens_per_block):
        state = mix(state ^ (grid[:, position] * np.uint64(0xD6E8FEB86659FD93)))
        grid[:, position] = state
    return grid.reshape(-1)[: len(stream)]


def names_of(keys: npt.NDArray[np.uint64]) -> list[bytes]:
    """Keys uint64[n, 2] as 16 bytes each."""
    return [key.tobytes() for key in keys]


class Difference(NamedTuple):
    """The first place where a pool's bytes are not the expected ones."""

    row: int
    """The index of the block or token among the arguments of the call."""
    token: int
    """The token inside the block."""
    layer: int
    plane: int
    head: int
    found: int
    expected: int


class KVBytes:
    """Reads and writes whole tokens of one tier, for every layer, plane and head, as lanes of up to 8 bytes.

    A lane of a token is the token's state xor a constant of (layer, plane, head, lane). So a comparison finds content
    in the wrong block, or at the wrong token, layer, plane or head.

    Parameters
    ----------
    layout
        Shapes of a block.
    pool
        The tier's array, contiguous; written in place.
    strides
        Byte strides of that array: ``layout.device_strides(blocks)`` or ``layout.host_strides(blocks)``.
    blocks
        Blocks in the tier. Ids in the methods count from 0 inside the tier.

    Not thread-safe: the scratch buffer is shared by all calls.
    """

    def __init__(self, layout: BlockLayout, pool: npt.NDArray[Any], strides: BlockStrides, blocks: int) -> None:
        head_bytes = layout.head_dim * layout.itemsize
        lane = np.dtype(f"u{next(width for width in (8, 4, 2, 1) if head_bytes % width == 0)}")
        raw = pool.reshape(-1).view(np.uint8).view(lane)
        if not np.may_share_memory(raw, pool):
            raise ValueError("pool is not contiguous, a view of its bytes is needed")
        self._shape = (layout.tokens_per_block, layout.kv_heads, head_bytes // lane.itemsize)
        self._lane, self._planes_per_layer = lane, layout.planes
        tokens, heads, lanes = self._shape
        self._heads_first = strides.head > strides.token
        self._flat: list[npt.NDArray[Any]] = []
        self._by_token: list[npt.NDArray[Any]] = []
        for plane in range(layout.layers * layout.planes):
            offset = plane // layout.planes * strides.layer + plane % layout.planes * strides.plane
            base = raw[offset // lane.itemsize :]
            self._flat.append(_strided(base, (blocks, tokens * heads * lanes), (strides.block, lane.itemsize)))
            by_token = (strides.block, strides.token, strides.head, lane.itemsize)
            self._by_token.append(_strided(base, (blocks, *self._shape), by_token))
        counters = np.arange(1, len(self._flat) * heads * lanes + 1, dtype=np.uint64)
        self._constants = mix(counters * np.uint64(0x9FB21C651E98DF25)).astype(lane).reshape(-1, heads, lanes)
        self._flat_constants = [self._spread(constants) for constants in self._constants]
        self._rows = max(1, _CHUNK_BYTES // (tokens * heads * head_bytes))
        self._scratch = np.empty((self._rows, tokens * heads * lanes), dtype=lane)

    def write_blocks(self, blocks: Ids, states: States) -> None:
        """Write full blocks: ``states[i]`` are the token states of ``blocks[i]``. No block may be named twice."""
        for start in range(0, len(blocks), self._rows):
            ids = blocks[start : start + self._rows]
            wide = self._widen(states[start : start + self._rows])
            target = self._scratch[: len(ids)]
            for plane, constants in zip(self._flat, self._flat_constants, strict=True):
                np.bitwise_xor(wide, constants, out=target)
                plane[ids] = target

    def check_blocks(self, blocks: Ids, states: States) -> Difference | None:
        """Compare full blocks with ``states[i]``, the token states that ``blocks[i]`` should hold."""
        for start in range(0, len(blocks), self._rows):
            ids = blocks[start : start + self._rows]
            wide = self._widen(states[start : start + self._rows])
            for plane, constants in zip(self._flat, self._flat_constants, strict=True):
                # np.take would first copy the whole plane if its blocks are not contiguous.
                found = plane[ids]
                np.bitwise_xor(found, constants, out=found)
                if not np.array_equal(found, wide):
                    break
            else:
                continue
            tokens = np.tile(np.arange(self._shape[0]), len(ids))
            rows = np.repeat(np.arange(len(ids)), self._shape[0])
            difference = self.check_tokens(ids[rows], tokens, states[start : start + len(ids)].reshape(-1))
            assert difference is not None
            return difference._replace(row=start + int(rows[difference.row]))
        return None

    def write_tokens(self, blocks: Ids, tokens: Ids, states: States) -> None:
        """Write token ``tokens[i]`` of ``blocks[i]``, whose state is ``states[i]``. No token may be named twice."""
        values = states.astype(self._lane)[:, None, None]
        for plane, constants in zip(self._by_token, self._constants, strict=True):
            plane[blocks, tokens] = values ^ constants

    def check_tokens(self, blocks: Ids, tokens: Ids, states: States) -> Difference | None:
        """Compare token ``tokens[i]`` of ``blocks[i]`` with ``states[i]``."""
        values = states.astype(self._lane)[:, None, None]
        for number, (plane, constants) in enumerate(zip(self._by_token, self._constants, strict=True)):
            found = plane[blocks, tokens]
            expected = values ^ constants
            if not np.array_equal(found, expected):
                row, head, lane = (int(i) for i in np.argwhere(found != expected)[0])
                layer, of_layer = divmod(number, self._planes_per_layer)
                values_there = int(found[row, head, lane]), int(expected[row, head, lane])
                return Difference(row, int(tokens[row]), layer, of_layer, head, *values_there)
        return None

    def first_lanes(self, states: States) -> bytes:
        """The first lane of each token of a block with these token states, uint64[tokens_per_block]."""
        return (states.astype(self._lane) ^ self._constants[0, 0, 0]).tobytes()

    def read_first_lanes(self, block: int) -> bytes:
        """The first lane of each token of a block, as it is."""
        return self._by_token[0][block, :, 0, 0].tobytes()

    def _spread(self, constants: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Repeat ``constants[head, lane]`` for every token, in the order in which a block stores them."""
        if self._heads_first:
            return np.repeat(constants[:, None, :], self._shape[0], axis=1).reshape(-1)
        return np.tile(constants.reshape(-1), self._shape[0])

    def _widen(self, states: States) -> npt.NDArray[Any]:
        """Repeat each token's state for all its lanes of a plane, in the order in which a block stores them."""
        _, heads, lanes = self._shape
        narrow = states.astype(self._lane, copy=False)
        if self._heads_first:
            return np.tile(np.repeat(narrow, lanes, axis=1), (1, heads))
        return np.repeat(narrow, heads * lanes, axis=1)


def _strided(base: npt.NDArray[Any], shape: tuple[int, ...], strides: tuple[int, ...]) -> npt.NDArray[Any]:
    return np.lib.stride_tricks.as_strided(base, shape, strides)
