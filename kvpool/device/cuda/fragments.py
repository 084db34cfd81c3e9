"""Cutting block copies into fragments: contiguous bytes from one address to another, as few and as long as possible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.device.base import BYTES, FROM, SOURCE, TARGET, TO, TOKENS
from kvpool.device.block_copy import Plan
from kvpool.device.cuda.calibration import OFFLOAD, ONBOARD, WITHIN
from kvpool.jit import jit

INSIDE_HOST = "inside the host"


@jit
def _room(address: int, start: int, end: int, chunk: int) -> int:
    """Bytes from an address to the end of its chunk, if the range from start to end is cut into chunks."""
    if start <= address < end:
        return chunk - (address - start) % chunk
    return chunk


@jit
def _add(out: Any, cursor: Any, source: int, target: int, nbytes: int, host: Any) -> None:
    """Append bytes as a fragment, or to the last fragment if they follow it. ``cursor``: the fragments so far, and
    where the last one ends."""
    while nbytes > 0:
        source_room, target_room = _room(source, host[0], host[1], host[2]), _room(target, host[0], host[1], host[2])
        part = min(nbytes, source_room, target_room)
        # A fragment must begin at the start of a chunk.
        begins = (
            source_room == host[2]
            and host[0] <= source < host[1]
            or target_room == host[2]
            and host[0] <= target < host[1]
        )
        if cursor[0] == 0 or begins or source != cursor[1] or target != cursor[2]:
            if cursor[0] < out.shape[0]:
                out[cursor[0], FROM], out[cursor[0], TO], out[cursor[0], BYTES] = source, target, 0
            cursor[0] += 1
        if cursor[0] <= out.shape[0]:
            out[cursor[0] - 1, BYTES] += part
        source, target, nbytes = source + part, target + part, nbytes - part
        cursor[1], cursor[2] = source, target


@jit
def _cut(moves: Any, v: Any, host: Any, out: Any, cursor: Any) -> int:
    """Fill ``out`` as far as it goes. Returns how many fragments there are. ``v``: the vector of a plan."""
    device_blocks, block_tokens, runs, run_bytes, outer, inner, token_bytes = (
        v[10],
        v[12],
        v[14],
        v[15],
        v[16],
        v[17],
        v[18],
    )
    i = 0
    while i < moves.shape[0]:
        source, target, tokens = moves[i, SOURCE], moves[i, TARGET], moves[i, TOKENS]
        s, t = (5 if source >= device_blocks else 0), (5 if target >= device_blocks else 0)
        from_address = v[s] + (source - (device_blocks if s else 0)) * v[s + 1]
        to_address = v[t] + (target - (device_blocks if t else 0)) * v[t + 1]
        together = 1
        if tokens < block_tokens:
            for a in range(outer):
                for b in range(inner):
                    begin, end = from_address + a * v[s + 3] + b * v[s + 4], to_address + a * v[t + 3] + b * v[t + 4]
                    _add(out, cursor, begin, end, tokens * token_bytes, host)
        else:
            # Neighbours in both tiers are cut together: first the same run of each block, then the next run. If the
            # runs of one block follow each other, they are cut block by block.
            while i + together < moves.shape[0] and not (s and t):
                next_source, next_target = moves[i + together, SOURCE], moves[i + together, TARGET]
                if (
                    next_source != source + together
                    or next_target != target + together
                    or moves[i + together, TOKENS] != block_tokens
                ):
                    break
                if (next_source >= device_blocks) != (s > 0) or (next_target >= device_blocks) != (t > 0):
                    break
                together += 1
            for run in range(runs):
                for k in range(together):
                    begin, end = (
                        from_address + run * v[s + 2] + k * v[s + 1],
                        to_address + run * v[t + 2] + k * v[t + 1],
                    )
                    _add(out, cursor, begin, end, run_bytes, host)
        i += together
    return cursor[0]


class Cutter:
    """Cuts batches of moves for one part. Host memory is registered in chunks of ``chunk_bytes``, and no fragment
    crosses a chunk.

    ``vector`` is that of the part's plan, ``block_tokens`` the tokens of a block, ``token_bytes`` all bytes of a token.
    """

    def __init__(self, plan: Plan, host_bytes: int, chunk_bytes: int) -> None:
        self.vector, self.block_tokens, self.token_bytes = (
            plan.vector(),
            plan.block_tokens,
            plan.outer * plan.inner * plan.token_bytes,
        )
        self._host = np.array([plan.host.base, plan.host.base + host_bytes, chunk_bytes], np.int64)

    def order(self, moves: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The same moves, sorted so that neighbours follow each other."""
        return moves[np.argsort(moves[:, SOURCE], kind="stable")]

    def count(self, moves: npt.NDArray[np.int64]) -> int:
        """How many fragments ``cut`` returns for ordered moves."""
        return int(_cut(moves, self.vector, self._host, np.empty((0, 3), np.int64), np.zeros(3, np.int64)))

    def cut(self, moves: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
        """Fragments int64[count, 3] (source address, target address, bytes) of ordered moves. The moves have been
        checked."""
        out = np.empty((count, 3), np.int64)
        _cut(moves, self.vector, self._host, out, np.zeros(3, np.int64))
        return out

    def split(self, fragments: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The same bytes in fragments that cross no chunk, as few as can be."""
        count = _split(fragments, self._host, np.empty((0, 3), np.int64), np.zeros(3, np.int64))
        out = np.empty((count, 3), np.int64)
        _split(fragments, self._host, out, np.zeros(3, np.int64))
        return out


@jit
def _split(fragments: Any, host: Any, out: Any, cursor: Any) -> int:
    """Fill ``out`` as far as it goes; how many fragments there are."""
    for i in range(fragments.shape[0]):
        _add(out, cursor, fragments[i, FROM], fragments[i, TO], fragments[i, BYTES], host)
    return cursor[0]


def by_direction(moves: npt.NDArray[np.int64], device_blocks: int) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
    """The moves of each direction that has any."""
    source, target = moves[:, SOURCE] >= device_blocks, moves[:, TARGET] >= device_blocks
    sides = (
        (OFFLOAD, ~source & target),
        (ONBOARD, source & ~target),
        (WITHIN, ~source & ~target),
        (INSIDE_HOST, source & target),
    )
    for direction, which in sides:
        if which.any():
            yield direction, moves if which.all() else moves[which]
