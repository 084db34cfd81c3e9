"""Requests of a trace, their tokens, which are pure functions of ids and positions, and KV bytes that identify their
content. The bytes are a function of the namespace and of all tokens up to their own, and do not depend on kvpool's
keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.common.arrays import Array, Int32s, Int64s, Uint64s
from kvpool.common.arrays.layout import BlockLayout, BlockStrides
from kvpool.common.jit import jit

VOCABULARY = 128_000
OUTPUT_ORIGIN = 1 << 50
OUTPUT_STRIDE = 1 << 20
"""The distance between the counters of two requests' outputs. Longer outputs would repeat those of other requests."""

Progress: TypeAlias = Callable[[int], bool | None]
"""Called with the number of requests just done, such as ``update`` of a bar of tqdm."""


def ranges(starts: Int64s, counts: Int64s) -> Int64s:
    """Return ``[starts[0], starts[0] + counts[0])``, then the next range, and so on, as one array."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - ends + counts, counts)


def mix(counters: Uint64s) -> Uint64s:
    """Return the splitmix64 value of each counter (uint64, any shape). The argument is not changed."""
    x = counters + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


mixed = jit(mix)
"""A 64-bit number scrambled, one to one."""


def _tokens_at(counters: Uint64s) -> Int32s:
    return (mix(counters) % np.uint64(VOCABULARY)).astype(np.int32)


def expand_ids(hash_ids: npt.ArrayLike, length: int, tokens_per_id: int) -> Int32s:
    """Return the ``int32[length]`` prompt that ``hash_ids`` stand for, `tokens_per_id` tokens each.

    Raises
    ------
    ValueError
        The ids cover fewer than `length` tokens.
    """
    ids: Uint64s = np.ascontiguousarray(hash_ids, dtype=np.uint64)
    if ids.size * tokens_per_id < length:
        raise ValueError(f"{ids.size} ids of {tokens_per_id} tokens do not cover {length} tokens")
    place: Uint64s = np.arange(tokens_per_id, dtype=np.uint64)
    counters: Uint64s = ids[:, None] * np.uint64(tokens_per_id) + place
    return _tokens_at(counters.reshape(-1)[:length])


def expand_output(index: int, length: int) -> Int32s:
    """Return the ``int32[length]`` output of request `index`. Each request has a different output."""
    origin = OUTPUT_ORIGIN + index * OUTPUT_STRIDE
    return _tokens_at(np.arange(origin, origin + length, dtype=np.uint64))


@dataclass(frozen=True, eq=False)
class Request:
    """One request of a trace.

    Parameters
    ----------
    index : int
        Counts requests from 0, and seeds the output.
    line : int
        Its line in the file, from 1. 0 without a file.
    input_length : int
        Tokens of the prompt.
    output_length : int
        Tokens of the answer.
    hash_ids : numpy.ndarray of uint64, shape (n,), or None, default None
        Ids of which each stands for ``tokens_per_id`` tokens of the prompt.
    tokens_per_id : int, default 0
        Tokens of an id.
    tokens : numpy.ndarray of int32, shape (input_length,), or None, default None
        The prompt itself, instead of ids.
    outputs : numpy.ndarray of int32, shape (output_length,), or None, default None
        The answer. None if the trace gives only its length.
    salt : str or None, default None
        The salt of its namespace.
    adapter_id : int, str or None, default None
        The adapter of its namespace.
    tenant : str or None, default None
        The owner of the request, if the trace names one. It separates figures, but not content.
    timestamp : float or None, default None
        The time of arrival in seconds.
    seconds : float or None, default None
        How long it runs, if that is known. It is released when the first request comes that arrives later.
    stop : str, default ""
        Why the model stopped, if the trace has it.
    returns : float or None, default None
        The arrival of the next request of its session, if sessions are played; infinite if there is none.
    session : int or None, default None
        The number of its session, if sessions are played.
    file : str, default ""
        Its file, if the trace is a folder.
    """

    index: int
    line: int
    input_length: int
    output_length: int
    hash_ids: Uint64s | None = None
    tokens_per_id: int = 0
    tokens: Int32s | None = None
    outputs: Int32s | None = None
    salt: str | None = None
    adapter_id: int | str | None = None
    tenant: str | None = None
    timestamp: float | None = None
    seconds: float | None = None
    stop: str = ""
    returns: float | None = None
    session: int | None = None
    file: str = ""

    @property
    def name(self) -> str:
        """The name of this request in messages."""
        place = self.file or f"line {self.line}"
        return f"request {self.index} ({place})" if self.line else f"request {self.index}"

    @property
    def arrival_ms(self) -> int:
        """The time of arrival in milliseconds. Without a timestamp, one request comes each second."""
        return int(1000 * (self.index if self.timestamp is None else self.timestamp))

    @property
    def length(self) -> int:
        """Tokens of the prompt and the answer together."""
        return self.input_length + self.output_length

    def cut(self, tokens: int) -> Request:
        """Return the request, cut to a number of tokens.

        Parameters
        ----------
        tokens : int
            Its answer is cut to half of them, and its prompt to the rest, if these are longer.

        Returns
        -------
        Request
            A request of at most so many tokens.
        """
        output_length = min(self.output_length, tokens // 2)
        input_length = min(self.input_length, tokens - output_length)
        return replace(
            self,
            input_length=input_length,
            output_length=output_length,
            tokens=None if self.tokens is None else self.tokens[:input_length],
            outputs=None if self.outputs is None else self.outputs[:output_length],
        )

    def prompt(self) -> Int32s:
        """Return the tokens of the prompt.

        Returns
        -------
        numpy.ndarray of int32, shape (input_length,)
            Those of the trace, or those that its ids stand for.
        """
        if self.tokens is not None:
            return self.tokens
        assert self.hash_ids is not None
        return expand_ids(self.hash_ids, self.input_length, self.tokens_per_id)

    def output(self) -> Int32s:
        """Return the tokens of the answer.

        Returns
        -------
        numpy.ndarray of int32, shape (output_length,)
            Those of the trace, or others that no other request has.
        """
        if self.outputs is not None:
            return self.outputs
        return expand_output(self.index, self.output_length)


# -- bytes ---------------------------------------------------------------------------------------

_DIGEST_BYTES = 16
_CHUNK_BYTES = 1 << 18
"""What is read or written of a plane at once: little enough to stay in a core's cache."""

States = Uint64s


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


def names_of(keys: Uint64s) -> list[bytes]:
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
    """

    def __init__(self, layout: BlockLayout, pool: Array, strides: BlockStrides, blocks: int) -> None:
        head_bytes = layout.head_dim * layout.itemsize
        lane = np.dtype(f"u{next(width for width in (8, 4, 2, 1) if head_bytes % width == 0)}")
        raw = pool.reshape(-1).view(np.uint8).view(lane)
        self._lane, heads, lanes = lane, layout.kv_heads, head_bytes // lane.itemsize
        shape = layout.layers, layout.planes, blocks, layout.tokens_per_block, heads, lanes
        steps = strides.layer, strides.plane, strides.block, strides.token, strides.head, lane.itemsize
        self._planes = np.lib.stride_tricks.as_strided(raw, shape, steps)
        """[layers, planes, blocks, tokens, heads, lanes]."""
        counters = np.arange(1, layout.layers * layout.planes * heads * lanes + 1, dtype=np.uint64)
        constants = mix(counters * np.uint64(0x9FB21C651E98DF25)).astype(lane)
        self._constants = constants.reshape(layout.layers, layout.planes, heads, lanes)
        self._tokens = max(1, _CHUNK_BYTES // (heads * head_bytes))
        """How many tokens of a plane are read or written at once."""

    def first_lanes(self, states: States) -> bytes:
        """The first lane of each token of a block with these token states, uint64[tokens_per_block]."""
        return (states.astype(self._lane) ^ self._constants[0, 0, 0, 0]).tobytes()

    def read_first_lanes(self, block: int) -> bytes:
        """The first lane of each token of a block, as it is."""
        return self._planes[0, 0, block, :, 0, 0].tobytes()

    def _chunks(self, states: States, places: tuple[Int64s, ...]) -> Iterator[tuple[int, tuple[Int64s, ...], Array]]:
        """Cut places into parts of a bounded size: the first row of each, the places, and their states as lanes."""
        rows = max(1, self._tokens // states[:1].size) if len(states) else 1
        for start in range(0, len(states), rows):
            part = slice(start, start + rows)
            yield start, tuple(axis[part] for axis in places), states[part].astype(self._lane)[..., None, None]

    def write(self, states: States, *places: Int64s) -> None:
        """Write full blocks: ``states[i]`` are the token states of block ``places[0][i]``. Or tokens: ``states[i]`` is
        that of token ``places[1][i]`` of the block. No place may be named twice."""
        for _, part, values in self._chunks(states, places):
            for at in np.ndindex(self._planes.shape[:2]):
                self._planes[at][part] = values ^ self._constants[at]

    def check(self, states: States, *places: Int64s) -> Difference | None:
        """Compare full blocks, or tokens, with their states, as ``write`` takes them."""
        for start, part, values in self._chunks(states, places):
            for layer, plane in np.ndindex(self._planes.shape[:2]):
                actual, expected = self._planes[layer, plane][part], values ^ self._constants[layer, plane]
                if not np.array_equal(actual, expected):
                    at = tuple(np.argwhere(actual != expected)[0].tolist())
                    row = start + at[0]
                    token = int(places[1][row]) if len(places) > 1 else at[1]
                    return Difference(row, token, layer, plane, at[-2], int(actual[at]), int(expected[at]))
        return None
