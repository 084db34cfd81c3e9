"""The shadow: what the pools, and the arrays beside them, should contain after declared operations only. Findings: the
failures so far, and how the pools differ from that."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvpool.arrays import Array, Bools, Int64s, Uint8s
from kvpool.arrays.strided import StridedArray
from kvpool.device.base import Layers, Part
from kvpool.device.copy_plan import Regions
from kvpool.device.cpu import HostPool
from kvpool.device.sim.order import (
    Access,
    AccessOrder,
    HostAccess,
    Race,
    RaceError,
    Rows,
    UndeclaredWrite,
    call_site,
    lines_of,
    rows_argument,
)

Piece = tuple[slice, slice, slice]
"""A part of a block: segments, runs of each, bytes of each run."""

_COMPARED_BYTES = 1 << 20
_NONE = np.empty((0, 2), np.int64)


class Mirror:
    """The pools of one part and its shadow, as views ``[blocks, segments, runs, bytes]``. Of the block ids of the pool,
    the region of the part has ``ids``: a range in each tier.

    A segment is one layer and plane of a block. A run is what is contiguous in it for the first n tokens, for any n.
    Copies are made on both sides. After other declared writes, the shadow takes the content of the pools. So the two
    sides differ where an undeclared write was made, also in the middle of a copy.
    """

    def __init__(self, part: Part, shadow: Part, ids: tuple[range, range]) -> None:
        layout, self.pools, self._shadows = part.layout, part[1:], shadow[1:]
        self.tokens = layout.tokens_per_block
        self._layout, self._ids = layout, ids
        row = layout.head_dim * layout.itemsize
        self._runs, self._unit = (1, layout.kv_heads * row) if layout.tokens == "NHD" else (layout.kv_heads, row)
        self._segments = layout.layers * layout.planes
        self._real = self._view(self.pools)
        self._shadow = self._view(self._shadows)

    def _view(self, pools: tuple[Uint8s, Uint8s]) -> tuple[Uint8s, Uint8s]:
        (device, host), (device_blocks, host_blocks) = pools, map(len, self._ids)
        inner = (self._runs, self.tokens * self._unit)
        if self._layout.order == "layer_first":
            device = device.reshape(self._segments, device_blocks, *inner).swapaxes(0, 1)
        else:
            device = device.reshape(device_blocks, self._segments, *inner)
        return device, host.reshape(host_blocks, self._segments, *inner)

    def _locate(self, block: int) -> tuple[int, int]:
        """The tier of a block, and its number in the tier."""
        tier = int(block >= self._ids[1].start)
        return tier, block - self._ids[tier].start

    def _mine(self, blocks: Int64s) -> Iterator[tuple[int, Int64s, Bools]]:
        """Of each tier that has some of these blocks: its number, their numbers in it, and which they are."""
        for tier, ids in enumerate(self._ids):
            which = (blocks >= ids.start) & (blocks < ids.stop)
            if which.any():
                yield tier, blocks[which] - ids.start, which

    def pieces(self, tokens: int, chunk_bytes: int, pieces_max: int, layers: range) -> list[Piece]:
        """Cut the first ``tokens`` tokens of some layers of a block into pieces of about ``chunk_bytes`` each, or
        larger ones where there would be too many."""
        run, planes = tokens * self._unit, self._layout.planes
        segment, segments = self._runs * run, range(layers.start * planes, layers.stop * planes)
        chunk = max(chunk_bytes, -(-len(segments) * segment // pieces_max))
        if chunk >= segment:
            step, end = chunk // segment, segments.stop
            return [(slice(s, min(s + step, end)), slice(None), slice(0, run)) for s in segments[::step]]
        # A run that does not fit in a chunk is cut. Otherwise a chunk takes as many runs as fit.
        runs, length = max(1, chunk // run), min(chunk, run)
        return [
            (slice(s, s + 1), slice(r, r + runs), slice(at, min(at + length, run)))
            for s in segments
            for r in range(0, self._runs, runs)
            for at in range(0, run, length)
        ]

    def copy_piece(self, source: int, target: int, piece: Piece) -> None:
        """Make one piece of a move, on both sides."""
        (source_tier, s), (target_tier, t) = self._locate(source), self._locate(target)
        for side in (self._real, self._shadow):
            side[target_tier][t][piece] = side[source_tier][s][piece]

    def adopt(self, rows: Int64s) -> None:
        """Accept the present content of the pools in these rows (block, first token, last token exclusive)."""
        for tier, blocks, which in self._mine(rows[:, 0]):
            ranges = rows[which, 1] * (self.tokens + 1) + rows[which, 2]
            for part in np.unique(ranges):
                first, last = divmod(int(part), self.tokens + 1)
                touched, ids = slice(first * self._unit, last * self._unit), blocks[ranges == part]
                self._shadow[tier][ids, :, :, touched] = self._real[tier][ids, :, :, touched]

    def differences(self) -> list[Int64s]:
        """Rows (block, token) of everything that differs."""
        found = []
        for tier, (real, shadow) in enumerate(zip(self.pools, self._shadows, strict=True)):
            if not np.array_equal(real, shadow):
                step = max(1, _COMPARED_BYTES // self._layout.block_bytes)
                places = np.arange(len(self._ids[tier]))
                found += [self._different(tier, places[b : b + step]) for b in range(0, len(places), step)]
        return found

    def differences_in(self, blocks: Int64s) -> list[Int64s]:
        """Rows (block, token) of what differs in some blocks."""
        return [self._different(tier, places) for tier, places, _ in self._mine(blocks)]

    def _different(self, tier: int, places: Int64s) -> Int64s:
        changed = (self._real[tier][places] != self._shadow[tier][places]).any(axis=(1, 2))
        found = np.argwhere(changed.reshape(len(changed), self.tokens, self._unit).any(axis=2))
        found[:, 0] = places[found[:, 0]] + self._ids[tier].start
        return found


class Mirrors:
    """The mirrors of all parts of all regions."""

    def __init__(self, regions: Regions) -> None:
        self.regions, self.nbytes = regions, sum(pool.nbytes for pool in regions.pools)
        shadows = [
            region._replace(
                parts=tuple(Part(layout, *(pool.copy() for pool in pools)) for layout, *pools in region.parts)
            )
            for region in regions.all
        ]
        self.real, self._shadow = HostPool(regions), HostPool(Regions(shadows))
        self._mirrors: list[list[Mirror]] = []
        for number, (region, shadow) in enumerate(zip(regions.all, shadows, strict=True)):
            device, host = regions.pool_ids.first(number)
            ids = range(device, device + region.device_blocks), range(host, host + region.host_blocks)
            pairs = zip(region.parts, shadow.parts, strict=True)
            self._mirrors.append([Mirror(*parts, ids) for parts in pairs])
        self._all = [mirror for mirrors in self._mirrors for mirror in mirrors]

    def copy(self, moves: Int64s, layers: Layers) -> None:
        """Make whole moves of some layers, on both sides."""
        self.real.copy_blocks(moves, layers)
        self._shadow.copy_blocks(moves, layers)

    def torn(self, move: Int64s, chunk_bytes: int, pieces_max: int, layers: Layers) -> list[Callable[[], None]]:
        """The pieces of a move, of about ``chunk_bytes`` or larger where there would be too many. They can be made in
        any order."""
        source, target, tokens, _ = move.tolist()
        number = int(self.regions.pool_ids.place(move[:1])[0][0])
        region, mirrors = self.regions.all[number], self._mirrors[number]
        pieces_max = max(1, pieces_max // len(mirrors))
        return [
            partial(mirror.copy_piece, source, target, piece)
            for part, own in region.parts_of(layers)
            for mirror in mirrors
            if mirror.pools[0] is part.device_pool
            for piece in mirror.pieces(tokens, chunk_bytes, pieces_max, own)
        ]

    def adopt(self, rows: Int64s) -> None:
        """Accept the present content of the pools in these rows (block, first token, last token exclusive)."""
        for mirror in self._all:
            mirror.adopt(rows)

    def differences(self) -> Int64s:
        """Rows (block, token) of everything that differs."""
        return np.concatenate([_NONE, *(rows for mirror in self._all for rows in mirror.differences())])

    def differences_in(self, blocks: Int64s) -> Int64s:
        """Rows (block, token) of what differs in some blocks."""
        return np.concatenate([_NONE, *(rows for mirror in self._all for rows in mirror.differences_in(blocks))])


class _Watched(NamedTuple):
    """An array, the content that it should have, and the range of its addresses."""

    array: Array
    shadow: Array
    begin: int
    end: int


class Arrays:
    """The arrays that some access has named. Each has a place with a number above all block ids. Rows name it like a
    block of ``tokens`` tokens.

    If arrays share bytes, an access to one is an access to all of them. Two halves of one array are separate if each is
    named by itself.
    """

    def __init__(self, blocks: int, tokens: int) -> None:
        self._blocks, self._tokens = blocks, tokens
        self._watched: list[_Watched | None] = []

    def rows(self, name: str, arrays: Sequence[Array]) -> Rows:
        """The places of arrays, which are watched from now on. Raises TypeError."""
        found: set[int] = set()
        for array in arrays:
            if not isinstance(array, np.ndarray):
                raise TypeError(f"{name}: arrays are needed, not {type(array).__name__}")
            begin, end = _extent(array)
            self._watch(array, begin, end)
            found.update(self._sharing(begin, end))
        return self._rows(sorted(found))

    def _sharing(self, begin: int, end: int) -> list[int]:
        """The numbers of the arrays that have some of these bytes."""
        return [
            i for i, other in enumerate(self._watched) if other is not None and other.begin < end and begin < other.end
        ]

    def everything(self) -> Rows:
        return self._rows(range(len(self._watched)))

    def _rows(self, numbers: Sequence[int]) -> Rows:
        return np.array([(self._blocks + i, 0, self._tokens) for i in numbers], np.int64).reshape(-1, 3)

    def _watch(self, array: Array, begin: int, end: int) -> None:
        if not any(other is not None and _same(other.array, array) for other in self._watched):
            self._watched.append(_Watched(array, array.copy(), begin, end))

    def forget(self, array: Array) -> None:
        """Stop watching memory. Its place stays, for accesses that were made before."""
        begin, end = _extent(array)
        for i, other in enumerate(self._watched):
            if other is not None and begin <= other.begin and other.end <= end:
                self._watched[i] = None

    def adopt(self, places: Int64s) -> None:
        """Accept the present content of these arrays, and of the arrays that share bytes with them, which may have been
        named later."""
        named = [self._watched[i] for i in (places - self._blocks).tolist()]
        for i in {i for one in named if one is not None for i in self._sharing(one.begin, one.end)}:
            if (watched := self._watched[i]) is not None:
                watched.shadow[...] = watched.array

    def differences(self) -> list[int]:
        """The places of arrays whose content is not what it should be."""
        wrong = []
        for i, watched in enumerate(self._watched):
            if watched is not None and watched.array.tobytes() != watched.shadow.tobytes():
                wrong.append(self._blocks + i)
        return wrong


def _extent(array: Array) -> tuple[int, int]:
    """The address of the first byte, and of the first byte after the array."""
    address = array.ctypes.data
    if array.size == 0:
        return address, address
    steps = [(count - 1) * stride for count, stride in zip(array.shape, array.strides, strict=True)]
    return address + sum(step for step in steps if step < 0), address + sum(
        step for step in steps if step > 0
    ) + array.itemsize


def _same(a: Array, b: Array) -> bool:
    return a.ctypes.data == b.ctypes.data and a.shape == b.shape and a.strides == b.strides and a.dtype == b.dtype


POISON = 0xA5
"""The byte that fills freed memory."""

COMPARE = ("auto", "all", "sample")
# Pools up to this size are compared whole after each operation; of larger ones, so many blocks.
_WHOLE_BYTES = 256 << 10
_SAMPLE = 4
_SAMPLED = "(of a pool of this size few blocks are compared after each operation: compare='all' finds the culprit)"


class Bound(NamedTuple):
    """The pool that the device serves, and the arrays outside it."""

    regions: Regions
    mirrors: Mirrors
    order: AccessOrder
    arrays: Arrays

    @classmethod
    def of(cls, regions: Regions) -> Bound:
        order = AccessOrder(regions.lengths, regions.layers)
        return cls(regions, Mirrors(regions), order, Arrays(regions.blocks, regions.width))

    def rows(self, names: tuple[str, str], rows: Any, arrays: Sequence[Array]) -> Rows:
        """Rows of blocks and the places of arrays, from two arguments with these names. Raises TypeError,
        ValueError."""
        found = rows_argument(names[0], rows, self.regions.lengths)
        return np.concatenate([found, self.arrays.rows(names[1], arrays)]) if len(arrays) else found

    def rows_of_memory(self, spans: Rows) -> Rows:
        """The places of bytes, int64[n, 2] of (address, bytes): whole blocks of the host tier, and arrays for all that
        is elsewhere, each as a whole."""
        found, elsewhere = [], []
        for address, nbytes in spans.tolist():
            blocks = self.regions.host_blocks_at(address, nbytes)
            if blocks is None:
                elsewhere.append(StridedArray(address, (nbytes,), 1, kind="u").host_view())
            else:
                found += [(block, 0, int(self.regions.lengths[block])) for block in blocks]
        rows = np.array(found, np.int64).reshape(-1, 3)
        return np.concatenate([rows, self.arrays.rows("fragments", elsewhere)]) if elsewhere else rows

    def everything(self) -> Rows:
        """Rows of all tokens of all blocks, and of all arrays."""
        blocks = np.arange(self.regions.blocks)
        whole = np.stack([blocks, np.zeros_like(blocks), self.regions.lengths], axis=1)
        return np.concatenate([whole, self.arrays.everything()])

    def adopt(self, rows: Rows) -> None:
        """Accept the present content of these rows."""
        is_array = rows[:, 0] >= self.regions.blocks
        self.mirrors.adopt(rows[~is_array])
        self.arrays.adopt(rows[is_array, 0])


class Findings:
    """Races, undeclared writes and errors of launched functions. Each is raised once. Takes no lock."""

    def __init__(self, mode: str, seed: int, schedule: Callable[[], str]) -> None:
        self.races: list[Race] = []
        self._mode, self._schedule = mode, schedule
        self._failures: list[Race | Exception] = []
        self._random = np.random.default_rng(seed)
        self._freed: list[tuple[Uint8s, Access]] = []
        self._last: Access | None = None
        self._lent: list[Uint8s] = []

    def note(self, found: Sequence[Race | Exception]) -> None:
        self._failures += found
        self.races += [race for race in found if isinstance(race, Race)]

    def freed(self, array: Uint8s, access: Access) -> None:
        """Fill memory that nobody may write any more with poison."""
        if self.poison(array):
            self._freed.append((array, access))

    def lent(self, array: Uint8s) -> Uint8s:
        """Note that the array is the caller's memory, which keeps its content when it is freed. Returns it."""
        self._lent.append(array)
        return array

    def poison(self, array: Uint8s) -> bool:
        """Overwrite memory that is freed. Returns False for memory of the caller."""
        kept = [other for other in self._lent if other is not array]
        if len(kept) == len(self._lent):
            array.fill(POISON)
            return True
        self._lent = kept
        return False

    def forget_freed(self) -> None:
        """Let go of the memory that was freed."""
        self._freed.clear()

    def entered(self, bound: Bound | None) -> None:
        """Called at the start of each call of the device, before it changes anything."""
        if bound is not None:
            self._adopt_open(bound)
            if self._whole(bound):
                self.compare(bound, None)

    def settle(self, bound: Bound | None, ended: deque[HostAccess]) -> None:
        """End the accesses of the host whose end came after the last call."""
        while ended:
            opened = ended.popleft()
            if bound is not None and opened in bound.order.open:
                self.entered(bound)
                bound.order.end(opened)

    def finished(self, bound: Bound, access: Access) -> None:
        """Called after an operation has been done."""
        if self._whole(bound):
            self.compare(bound, access)
        else:
            sample = self._random.integers(0, bound.regions.blocks, _SAMPLE)
            self._compare(bound, access, lambda: bound.mirrors.differences_in(sample))
        self._last = access

    def compare(self, bound: Bound | None, access: Access | None) -> None:
        """Compare everything, right after ``access``, or (None) at the start of the current call."""
        if bound is not None:
            self._compare(bound, access, bound.mirrors.differences)
            for place in bound.arrays.differences():
                self._undeclared(f"array {place - bound.regions.blocks + 1}", access, self._after())
                bound.arrays.adopt(np.array([place]))
        for array, freed in list(self._freed):
            if (array != POISON).any():
                self._freed = [kept for kept in self._freed if kept[0] is not array]
                self._undeclared(f"memory given back by {freed}", access)

    def _undeclared(
        self, what: str, access: Access | None, more: str = "", block: int = -1, tokens: Sequence[int] = ()
    ) -> None:
        moment = f"right after {access}" if access is not None else f"by the call at{lines_of(call_site())}"
        self.note([UndeclaredWrite(what, block, tokens, f"seen {moment}{more}", self._schedule())])

    def _after(self) -> str:
        return f"\n    after {self._last or 'nothing was done'}"

    def _whole(self, bound: Bound) -> bool:
        return self._mode == "all" or (self._mode == "auto" and bound.mirrors.nbytes <= _WHOLE_BYTES)

    def _compare(self, bound: Bound, access: Access | None, differences: Callable[[], Int64s]) -> None:
        self._adopt_open(bound)
        # Declared writes may have followed.
        cells = bound.order.not_open(differences())
        if not len(cells):
            return
        block = int(cells[0, 0])
        tokens = [int(token) for token in np.unique(cells[cells[:, 0] == block, 1])]
        others = len(np.unique(cells[:, 0])) - 1
        what = f"block {block} tokens {tokens}" + (f" and {others} more blocks" if others else "")
        more = self._after() if self._whole(bound) else f"{self._after()}\n    {_SAMPLED}"
        self._undeclared(what, access, more, block, tokens)
        bound.adopt(np.stack([cells[:, 0], cells[:, 1], cells[:, 1] + 1], axis=1))

    def _adopt_open(self, bound: Bound) -> None:
        """Accept whatever a thread of the host may be writing now."""
        for opened in bound.order.open:
            bound.adopt(opened.writes)

    def raise_first(self) -> None:
        """Raise the oldest failure, if there is one. All races are raised together, every other failure by itself."""
        if not self._failures:
            return
        first = self._failures[0]
        if not isinstance(first, Race):
            del self._failures[0]
            raise first
        races = [race for race in self._failures if isinstance(race, Race)]
        self._failures = [failure for failure in self._failures if not isinstance(failure, Race)]
        raise RaceError(races, self._schedule())
