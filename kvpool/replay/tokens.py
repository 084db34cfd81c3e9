"""Requests of a trace, and their tokens, which are pure functions of ids and positions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

VOCABULARY = 128_000
OUTPUT_ORIGIN = 1 << 50
OUTPUT_STRIDE = 1 << 20
"""The distance between the counters of two requests' outputs. Longer outputs would repeat those of other requests."""

Ids = npt.NDArray[np.int64]


def ranges(starts: Ids, counts: Ids) -> Ids:
    """Return ``[starts[0], starts[0] + counts[0])``, then the next range, and so on, as one array."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - ends + counts, counts)


def mix(counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the splitmix64 value of each counter (uint64, any shape). The argument is not changed."""
    x = counters + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _tokens_at(counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
    return (mix(counters) % np.uint64(VOCABULARY)).astype(np.int32)


def expand_ids(hash_ids: npt.ArrayLike, length: int, tokens_per_id: int) -> npt.NDArray[np.int32]:
    """Return the ``int32[length]`` prompt that ``hash_ids`` stand for, `tokens_per_id` tokens each.

    Raises
    ------
    ValueError
        The ids cover fewer than `length` tokens.
    """
    ids: npt.NDArray[np.uint64] = np.asarray(hash_ids, dtype=np.uint64)
    if ids.size * tokens_per_id < length:
        raise ValueError(f"{ids.size} ids of {tokens_per_id} tokens do not cover {length} tokens")
    ids = ids[: -(-length // tokens_per_id)]
    counters = np.add.outer(ids * np.uint64(tokens_per_id), np.arange(tokens_per_id, dtype=np.uint64))
    return np.ascontiguousarray(_tokens_at(counters.reshape(-1)[:length]))


def expand_output(index: int, length: int) -> npt.NDArray[np.int32]:
    """Return the ``int32[length]`` output of request `index`. Each request has a different output."""
    origin = OUTPUT_ORIGIN + index * OUTPUT_STRIDE
    return _tokens_at(np.arange(origin, origin + length, dtype=np.uint64))


@dataclass(frozen=True, eq=False)
class Request:
    """One request of a trace: lengths in tokens, and either ids to expand or explicit tokens.

    `index` counts requests from 0 and seeds the output. `line` counts lines of the file from 1; it is 0 if there is no
    file. `outputs` is None if the trace gives only the length of the answer.
    """

    index: int
    line: int
    input_length: int
    output_length: int
    hash_ids: npt.NDArray[np.uint64] | None = None
    tokens_per_id: int = 0
    tokens: npt.NDArray[np.int32] | None = None
    outputs: npt.NDArray[np.int32] | None = None
    salt: str | None = None
    adapter_id: int | str | None = None
    tenant: str | None = None
    """The owner of the request, if the trace names one. It separates figures, but not content."""
    timestamp: float | None = None
    """The time of arrival in seconds."""
    seconds: float | None = None
    """How long it runs, if that is known. It is released when the first request comes that arrives later."""
    stop: str = ""
    """Why the model stopped, if the trace says it."""
    returns: float | None = None
    """The arrival of the next request of its session, if sessions are played; infinite if there is none."""

    @property
    def name(self) -> str:
        """The name of this request in messages."""
        return f"request {self.index} (line {self.line})" if self.line else f"request {self.index}"

    @property
    def length(self) -> int:
        """Tokens of the prompt and the answer together."""
        return self.input_length + self.output_length

    def cut(self, tokens: int) -> Request:
        """The request, cut to `tokens`: its answer to half of them and its prompt to the rest, if these are longer."""
        output_length = min(self.output_length, tokens // 2)
        input_length = min(self.input_length, tokens - output_length)
        return replace(
            self,
            input_length=input_length,
            output_length=output_length,
            tokens=None if self.tokens is None else self.tokens[:input_length],
            outputs=None if self.outputs is None else self.outputs[:output_length],
        )

    def prompt(self) -> npt.NDArray[np.int32]:
        """Return the prompt, ``int32[input_length]``."""
        if self.tokens is not None:
            return self.tokens
        assert self.hash_ids is not None
        return expand_ids(self.hash_ids, self.input_length, self.tokens_per_id)

    def output(self) -> npt.NDArray[np.int32]:
        """Return the answer, ``int32[output_length]``."""
        if self.outputs is not None:
            return self.outputs
        return expand_output(self.index, self.output_length)
