"""Cutting block copies into fragments: contiguous bytes from one address to another, as few and as long as possible.
Kernels take them as rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from kvpool.common.arrays import Int64s
from kvpool.common.jit import jit
from kvpool.device.copy_plan import CopyPlan
from kvpool.device.cpu import locate, plan_of
from kvpool.device.launches import PIECE_WORDS
from kvpool.device.regions import BYTES, FROM, SOURCE, TARGET, TO, TOKENS

OFFLOAD, ONBOARD, WITHIN, INSIDE_HOST = "offload", "onboard", "within", "inside the host"
"""The directions of copies."""
_DIRECTION = {1: WITHIN, 2: OFFLOAD, 4: ONBOARD, 8: INSIDE_HOST}
_NO_CHUNKS = np.empty((0, 3), np.int64)
_ANY_LENGTH = 1 << 62


@jit
def _chunk(address: int, hosts: Any) -> tuple[int, bool]:
    """Bytes from an address to the end of its chunk, and whether it is the start of one, if it lies in a memory of
    ``hosts``."""
    for i in range(hosts.shape[0]):
        if hosts[i, 0] <= address < hosts[i, 1]:
            before = (address - hosts[i, 0]) % hosts[i, 2]
            return hosts[i, 2] - before, before == 0
    return _ANY_LENGTH, False


@jit
def _add(out: Any, cursor: Any, source: int, target: int, nbytes: int, hosts: Any) -> None:
    """Append bytes as a fragment, or to the last fragment if they follow it. ``cursor``: the fragments so far, and
    where the last one ends."""
    while nbytes > 0:
        source_room, source_begins = _chunk(source, hosts)
        target_room, target_begins = _chunk(target, hosts)
        part = min(nbytes, source_room, target_room)
        # A fragment must begin at the start of a chunk.
        begins = source_begins or target_begins
        if cursor[0] == 0 or begins or source != cursor[1] or target != cursor[2]:
            if cursor[0] < out.shape[0]:
                out[cursor[0], FROM], out[cursor[0], TO], out[cursor[0], BYTES] = source, target, 0
            cursor[0] += 1
        if cursor[0] <= out.shape[0]:
            out[cursor[0] - 1, BYTES] += part
        source, target, nbytes = source + part, target + part, nbytes - part
        cursor[1], cursor[2] = source, target


@jit
def _cut(copy_ops: Any, v: Any, hosts: Any, out: Any, cursor: Any) -> int:
    """Fill ``out`` as far as it goes. Returns how many fragments there are. ``v``: the vector of a plan."""
    plan, i = plan_of(v), 0
    while i < copy_ops.shape[0]:
        source = copy_ops[i, SOURCE]
        target = copy_ops[i, TARGET]
        tokens = copy_ops[i, TOKENS]
        from_address, s = locate(source, plan)
        to_address, t = locate(target, plan)
        from_host, to_host = source >= plan.device_blocks, target >= plan.device_blocks
        together = 1
        if tokens < plan.block_tokens:
            for a in range(plan.outer):
                for b in range(plan.inner):
                    begin = from_address + a * s.outer_stride + b * s.inner_stride
                    end = to_address + a * t.outer_stride + b * t.inner_stride
                    _add(out, cursor, begin, end, tokens * plan.token_bytes, hosts)
        else:
            # Neighbours in both tiers are cut together: first the same run of each block, then the next run. If the
            # runs of one block follow each other, they are cut block by block.
            while i + together < copy_ops.shape[0] and not (from_host and to_host):
                next_source, next_target = copy_ops[i + together, SOURCE], copy_ops[i + together, TARGET]
                in_row = next_source - source == next_target - target == together
                in_tiers = (next_source >= plan.device_blocks) == from_host and (
                    next_target >= plan.device_blocks
                ) == to_host
                if not (in_row and in_tiers and copy_ops[i + together, TOKENS] == plan.block_tokens):
                    break
                together += 1
            for run in range(plan.runs):
                for k in range(together):
                    begin = from_address + run * s.run_stride + k * s.block_stride
                    end = to_address + run * t.run_stride + k * t.block_stride
                    _add(out, cursor, begin, end, plan.run_bytes, hosts)
        i += together
    return cursor[0]


@jit
def _about(copy_ops: Any, v: Any) -> tuple[int, int, int]:
    """How many fragments copy ops of one direction are at most, but for ends of chunks, their tokens, and a bit for
    each direction that they have. They are as many as that where the copy ops rise or fall."""
    plan = plan_of(v)
    count = tokens = ways = 0
    before = False
    for i in range(copy_ops.shape[0]):
        source, s = locate(copy_ops[i, SOURCE], plan)
        target, t = locate(copy_ops[i, TARGET], plan)
        whole = copy_ops[i, TOKENS] == plan.block_tokens
        step = copy_ops[i, SOURCE] - copy_ops[i - before, SOURCE]
        in_row = step == copy_ops[i, TARGET] - copy_ops[i - before, TARGET] and abs(step) == 1
        if not (before and whole and in_row and s.block_stride == t.block_stride == plan.run_bytes):
            count += plan.runs if whole else plan.outer * plan.inner
        before = whole
        tokens += copy_ops[i, TOKENS]
        ways |= 1 << 2 * (copy_ops[i, SOURCE] >= plan.device_blocks) + (copy_ops[i, TARGET] >= plan.device_blocks)
    return count, tokens, ways


def cut(copy_ops: Int64s, plan: Int64s, hosts: Int64s = _NO_CHUNKS) -> Int64s:
    """The fragments int64[n, 3] of copy ops, by the vector of a plan. None crosses a chunk of a memory of ``hosts``,
    whose rows are its start, its end, and the bytes of a chunk."""
    return _written(_cut, copy_ops, plan, hosts)


def split(fragments: Int64s, hosts: Int64s) -> Int64s:
    """The same bytes in fragments that cross no chunk of these memories, as few as can be."""
    return _written(_split, fragments, hosts)


def _written(fill: Callable[..., int], *arguments: Any) -> Int64s:
    """The fragments that a jitted function writes. It is first called for their number."""
    count = fill(*arguments, np.empty((0, 3), np.int64), np.zeros(3, np.int64))
    out = np.empty((count, 3), np.int64)
    fill(*arguments, out, np.zeros(3, np.int64))
    return out


UNIT = 16
"""The widest word, and the unit of the distances between runs, in bytes."""
_DISTANCE_MAX = 1 << 32
_WORDS_MAX = 1 << 26
"""The most words of a row. Kernels count them in 32 bits."""


@jit
def _distance(run_bytes: int, distance: int) -> int:
    """A distance between runs in units, or -1 if it does not fit into a row."""
    possible = distance % UNIT == 0 and 0 <= distance // UNIT < _DISTANCE_MAX and run_bytes % UNIT == 0
    return distance // UNIT if possible else -1


@jit
def _put(rows: Any, i: int, source: int, target: int, run_bytes: int, runs: int, steps: Any) -> None:
    rows[i, 0], rows[i, 1] = source, target
    rows[i, 2], rows[i, 3] = runs << 32 | run_bytes, steps[1] << 32 | steps[0]


@jit
def tabulate_fragments(fragments: Any, words_max: int, rows: Any) -> Any:
    """Write the rows of fragments: how many, the words of the longest, and all bits of their numbers. A row has at most
    ``words_max`` words.

    Where both ends are equally far from the start of a word, the bytes before the first whole word and after the last
    one are rows of their own, so that the others go in whole words. Runs of equal length and distance share one.
    """
    count = most = said = 0
    # Of the row that is being made: the words and the runs so far, the bytes of a run, and the steps between runs.
    words = runs = run = 0
    steps = (0, 0)
    source_before = target_before = 0
    for i in range(fragments.shape[0]):
        source = fragments[i, FROM]
        target = fragments[i, TO]
        left = fragments[i, BYTES]
        while left > 0:
            part = left
            if (source - target) % UNIT == 0:
                if source % UNIT:
                    part = min(left, UNIT - source % UNIT)
                elif left > UNIT:
                    part = left - left % UNIT
            bits = source | target | part
            said |= bits
            width = UNIT if bits % UNIT == 0 else 4 if bits % 4 == 0 else 1
            part = min(part, words_max * width)
            apart = _distance(part, source - source_before), _distance(part, target - target_before)
            joins = part == run and width == UNIT and words + part // width <= words_max and min(apart) >= 0
            if joins and (runs == 1 or apart == steps):
                runs += 1
                words += part // width
                steps = apart
            else:
                count += 1
                runs = 1
                run = part
                words = part // width
                steps = (0, 0)
            first = source - (runs - 1) * steps[0] * UNIT, target - (runs - 1) * steps[1] * UNIT
            _put(rows, count - 1, first[0], first[1], run, runs, steps)
            most = max(most, words)
            source_before, target_before = source, target
            source += part
            target += part
            left -= part
    return count, most, said


@jit
def measured(fragments: Any, hosts: Any) -> tuple[int, int, bool, bool]:
    """Of fragments: all bytes, the most words of 16 bytes or of one that they have, and whether the source and the
    target of the first lie in a memory of ``hosts``."""
    nbytes = words = 0
    if not fragments.shape[0]:
        return nbytes, words, False, False
    for i in range(fragments.shape[0]):
        apart = (fragments[i, FROM] - fragments[i, TO]) % UNIT
        nbytes += fragments[i, BYTES]
        words += fragments[i, BYTES] if apart else fragments[i, BYTES] // UNIT + 2
    source, _ = _chunk(fragments[0, FROM], hosts)
    target, _ = _chunk(fragments[0, TO], hosts)
    return nbytes, words, source < _ANY_LENGTH, target < _ANY_LENGTH


def table_size(fragments: Int64s, words: int | None = None) -> tuple[int, int]:
    """The most words of a row, and the most rows, of fragments that do not depend on each other. ``words``: as in
    ``measured``, where that is known."""
    if words is None:
        words = measured(fragments, _NO_CHUNKS)[1]
    # A kernel looks at as many pieces of each row as the longest has.
    words_max = min(_WORDS_MAX, max(PIECE_WORDS, 2 * words // max(1, len(fragments))))
    return words_max, 3 * len(fragments) + words // words_max


@jit
def tabulate_blocks(copy_ops: Any, v: Any, rows: Any) -> Any:
    """Write a row for each whole block, and rows for the first tokens of others, as ``tabulate_fragments`` does."""
    plan, count, most = plan_of(v), 0, 0
    for i in range(copy_ops.shape[0]):
        source, s = locate(copy_ops[i, SOURCE], plan)
        target, t = locate(copy_ops[i, TARGET], plan)
        whole = copy_ops[i, TOKENS] == plan.block_tokens
        runs, run = (plan.runs, plan.run_bytes) if whole else (plan.inner, copy_ops[i, TOKENS] * plan.token_bytes)
        for a in range(1 if whole else plan.outer):
            apart = (s.run_stride, t.run_stride) if whole else (s.inner_stride, t.inner_stride)
            steps = _distance(run, apart[0]), _distance(run, apart[1])
            _put(rows, count, source + a * s.outer_stride, target + a * t.outer_stride, run, runs, steps)
            count, most = count + 1, max(most, runs * run // UNIT)
    return count, most


class Cutter:
    """Cuts batches of copy ops for one part. ``host`` has the chunks in which its host memory is registered, as rows
    that ``cut`` takes. No fragment crosses a chunk; a row for kernels may.

    ``plan`` is that of the part, ``vector`` the same as an array. ``token_bytes`` are all bytes of a token.
    ``in_words``: whether ``tabulate_blocks`` can write rows of all blocks and parts of blocks, in whole words.
    """

    def __init__(self, plan: CopyPlan, host: Int64s) -> None:
        self.plan, self.host, self.vector = plan, host, plan.vector()
        self.token_bytes = plan.outer * plan.inner * plan.token_bytes
        distances = [*plan.device[1:], *plan.host[1:]]
        lengths = plan.device.base, plan.host.base, plan.run_bytes, plan.token_bytes
        words = max(plan.runs * plan.run_bytes, plan.inner * plan.block_tokens * plan.token_bytes) // UNIT
        self.in_words = words <= _WORDS_MAX and min(_distance(0, n) for n in distances) >= 0
        self.in_words &= not any(n % UNIT for n in lengths)

    def about(self, copy_ops: Int64s) -> tuple[int, int, str]:
        """About how many fragments ``cut`` returns for copy ops of one direction, their bytes, and that direction; none
        if they have several. Sorts nothing: the fragments are fewer where neighbours are in no order."""
        count, tokens, ways = _about(copy_ops, self.vector)
        return count, tokens * self.token_bytes, _DIRECTION.get(ways, "")

    def cut(self, copy_ops: Int64s) -> Int64s:
        """Fragments int64[n, 3] (source address, target address, bytes) of copy ops, which are sorted first, so that
        neighbours follow each other. The copy ops have been checked."""
        sources = copy_ops[:, SOURCE]
        in_order = (sources[1:] >= sources[:-1]).all()
        return cut(copy_ops if in_order else copy_ops[np.argsort(sources)], self.vector, self.host)

    def room(self, count: int) -> int:
        """The most rows that ``tabulate_blocks`` writes for this many copy ops."""
        return count * max(1, self.plan.outer)


@jit
def _split(fragments: Any, hosts: Any, out: Any, cursor: Any) -> int:
    """Fill ``out`` as far as it goes; how many fragments there are."""
    for i in range(fragments.shape[0]):
        _add(out, cursor, fragments[i, FROM], fragments[i, TO], fragments[i, BYTES], hosts)
    return cursor[0]


def by_direction(copy_ops: Int64s, device_blocks: int) -> Iterator[tuple[str, Int64s]]:
    """The copy ops of each direction that has any."""
    ways = 1 << 2 * (copy_ops[:, SOURCE] >= device_blocks) + (copy_ops[:, TARGET] >= device_blocks)
    for way, direction in _DIRECTION.items():
        some = copy_ops[ways == way]
        if len(some):
            yield direction, some


def load_cutting(cutters: Iterable[Cutter]) -> None:
    """Compile what these cutters run, or load it from disk, so that the first copy does not."""
    copy_ops, fragments = np.zeros((0, 4), np.int64), np.zeros((0, 3), np.int64)
    measured(fragments, _NO_CHUNKS)
    for cutter in cutters:
        cutter.about(copy_ops), cutter.cut(copy_ops)
        split(fragments, cutter.host)
