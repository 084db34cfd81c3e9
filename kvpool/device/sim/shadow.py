"""The shadow: what the pools, and the arrays beside them, should contain after declared operations only. Findings: the
failures so far, and how the pools differ from that."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arrays import Array, Int64s, Uint8s
from kvpool.common.arrays.layout import BlockLayout, Tier
from kvpool.common.arrays.strided import StridedArray
from kvpool.device.base import TIERS
from kvpool.device.cpu import HostPool
from kvpool.device.fragments import cut
from kvpool.device.regions import BYTES, FROM, TO, Layers, Part, Regions
from kvpool.device.sim.order import (
    NO_ROWS,
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

_NONE = np.empty((0, 2), np.int64)


class Watched(NamedTuple):
    """Memory of the blocks with these ids, and the content that it should have: uint8[blocks, tokens, ...].

    Memory outside the pools is one block of one token; ``array`` is what was named.
    """

    ids: range
    real: Uint8s
    shadow: Uint8s
    array: Array

    def places(self, blocks: Int64s) -> Int64s:
        """Where some of these blocks are, of those that are here."""
        return blocks[(blocks >= self.ids.start) & (blocks < self.ids.stop)] - self.ids.start

    def adopt(self, first: int, last: int, blocks: Int64s) -> None:
        """Accept the present content of these tokens of blocks."""
        places = self.places(blocks)
        if len(places):
            self.shadow[places, first:last] = self.real[places, first:last]

    def differences(self, blocks: Int64s | None) -> Int64s:
        """Rows (block, token) of what differs, in some blocks or in all."""
        places = None if blocks is None else self.places(blocks)
        real, shadow = (side if places is None else side[places] for side in (self.real, self.shadow))
        if np.array_equal(real, shadow):
            return _NONE
        cells = np.argwhere((real != shadow).any(axis=tuple(range(2, real.ndim))))
        cells[:, 0] = (cells[:, 0] if places is None else places[cells[:, 0]]) + self.ids.start
        return cells


def _by_token(memory: Uint8s, layout: BlockLayout, tier: Tier, blocks: int) -> Uint8s:
    """A tier of a part as uint8[blocks, tokens, ...]."""
    array, axes = memory.reshape(*layout.tier_shape(tier, blocks), layout.itemsize), layout.axes(tier)
    return np.moveaxis(array, (axes.index("B"), axes.index("T")), (0, 1))


class Shadow:
    """The pool that the device serves, the arrays outside it that some access has named, and what all of it should
    contain.

    Copies are made on both sides. After other declared writes, the shadow takes the content of the memory. So the two
    sides differ where an undeclared write was made, also in the middle of a copy.

    An array has a number above all block ids, and rows name it like a block. If arrays share bytes, an access to one is
    an access to all of them. Two halves of one array are separate if each is named by itself.
    """

    def __init__(self, regions: Regions) -> None:
        self.regions, self.nbytes = regions, sum(pool.nbytes for pool in regions.pools)
        self.order = AccessOrder(regions.lengths, regions.layers)
        twins = [
            region._replace(
                parts=tuple(Part(layout, *(pool.copy() for pool in pools)) for layout, *pools in region.parts)
            )
            for region in regions.all
        ]
        self.real, self._twin = HostPool(regions), HostPool(Regions(twins))
        self._pools: list[Watched] = []
        for number, (region, twin) in enumerate(zip(regions.all, twins, strict=True)):
            tiers = [*zip(TIERS, regions.pool_ids.first(number), region[1:], strict=True)]
            for part, other in zip(region.parts, twin.parts, strict=True):
                for (tier, first, blocks), *pools in zip(tiers, part[1:], other[1:], strict=True):
                    real, shadow = (_by_token(pool, part.layout, tier, blocks) for pool in pools)
                    self._pools.append(Watched(range(first, first + blocks), real, shadow, pools[0]))
        self._outside: list[Watched | None] = []

    # -- copies ----------------------------------------------------------------------------------

    def copy(self, copy_ops: Int64s, layers: Layers) -> None:
        """Make whole copy ops of some layers, on both sides."""
        self.real.copy_blocks(copy_ops, layers)
        self._twin.copy_blocks(copy_ops, layers)

    def torn(self, copy_op: Int64s, chunk_bytes: int, pieces_max: int, layers: Layers) -> list[Callable[[], None]]:
        """The pieces of a copy op, of about ``chunk_bytes`` or larger where there would be too many. They can be made
        in any order."""
        real, twin = (
            _chunks(
                np.concatenate([NO_ROWS, *(cut(*pair) for pair in side.planned(copy_op[None], layers))]), chunk_bytes
            )
            for side in (self.real, self._twin)
        )
        pieces = min(pieces_max, max(1, -(-int(real[:, BYTES].sum()) // chunk_bytes)))
        return [
            partial(self._copy_fragments, *rows)
            for rows in zip(np.array_split(real, pieces), np.array_split(twin, pieces), strict=True)
        ]

    def _copy_fragments(self, real: Int64s, twin: Int64s) -> None:
        self.real.copy_fragments(real)
        self._twin.copy_fragments(twin)

    # -- rows ------------------------------------------------------------------------------------

    def rows(self, names: tuple[str, str], rows: Any, arrays: Sequence[Array]) -> Rows:
        """Rows of blocks and the places of arrays, from two arguments with these names. The arrays are watched from now
        on. Raises TypeError, ValueError."""
        parts, places = [rows_argument(names[0], rows, self.regions.lengths)], set[int]()
        for array in arrays:
            if not isinstance(array, np.ndarray):
                raise TypeError(f"{names[1]}: expected arrays, got {type(array).__name__}")
            if not any(_same(other.array, array) for other in self._sharing(array)):
                place = self.regions.blocks + len(self._outside)
                memory = StridedArray(
                    array.ctypes.data, (1, 1, *array.shape, array.itemsize), 1, (0, 0, *array.strides, 1), kind="u"
                ).host_view()
                self._outside.append(Watched(range(place, place + 1), memory, memory.copy(), array))
            places.update(other.ids.start for other in self._sharing(array))
        return np.concatenate([*parts, self._whole(sorted(places))])

    def rows_of_memory(self, spans: Rows) -> Rows:
        """The places of bytes, int64[n, 2] of (address, bytes): whole blocks of the host tier, and arrays for all that
        is elsewhere, each as a whole."""
        rows, elsewhere = [], []
        for address, nbytes in spans.tolist():
            blocks = self.regions.host_blocks_at(address, nbytes)
            if blocks is None:
                elsewhere.append(StridedArray(address, (nbytes,), 1, kind="u").host_view())
            else:
                rows += [(block, 0, int(self.regions.lengths[block])) for block in blocks]
        return np.concatenate([np.array(rows, np.int64).reshape(-1, 3), self.rows(("", "fragments"), None, elsewhere)])

    def everything(self) -> Rows:
        """Rows of all tokens of all blocks, and of all arrays."""
        blocks = np.arange(self.regions.blocks)
        whole = np.stack([blocks, np.zeros_like(blocks), self.regions.lengths], axis=1)
        return np.concatenate([whole, self._whole(range(len(blocks), len(blocks) + len(self._outside)))])

    def _whole(self, places: Sequence[int]) -> Rows:
        return np.array([(place, 0, self.regions.width) for place in places], np.int64).reshape(-1, 3)

    def _sharing(self, array: Array) -> list[Watched]:
        """The arrays that have some of these bytes."""
        return [other for other in self._outside if other is not None and np.may_share_memory(other.array, array)]

    # -- contents --------------------------------------------------------------------------------

    def forget(self, array: Array) -> None:
        """Stop watching memory. Its place stays, for accesses that were made before."""
        for other in self._sharing(array):
            self._outside[other.ids.start - self.regions.blocks] = None

    def adopt(self, rows: Rows) -> None:
        """Accept the present content of these rows, and of the arrays that share bytes with them, which may have been
        named later."""
        ranges = rows[:, 1] * (self.regions.width + 1) + rows[:, 2]
        for part in np.unique(ranges).tolist():
            first, last = divmod(part, self.regions.width + 1)
            for watched in self._pools:
                watched.adopt(first, last, rows[ranges == part, 0])
        for place in rows[rows[:, 0] >= self.regions.blocks, 0].tolist():
            named = self._outside[place - self.regions.blocks]
            for other in () if named is None else self._sharing(named.array):
                other.shadow[...] = other.real

    def differences(self, blocks: Int64s | None = None) -> Int64s:
        """Rows (block, token) of what differs, in some blocks or in everything."""
        watched = [*self._pools, *filter(None, self._outside)]
        return np.concatenate([area.differences(blocks) for area in watched])


def _chunks(rows: Int64s, chunk_bytes: int) -> Int64s:
    """The same bytes in fragments of at most ``chunk_bytes``."""
    counts = -(-rows[:, BYTES] // chunk_bytes)
    chunks = rows.repeat(counts, axis=0)
    begin = chunk_bytes * (np.arange(len(chunks)) - (counts.cumsum() - counts).repeat(counts))
    chunks[:, [FROM, TO]] += begin[:, None]
    chunks[:, BYTES] = np.minimum(chunks[:, BYTES] - begin, chunk_bytes)
    return chunks


def _same(a: Array, b: Array) -> bool:
    return a.ctypes.data == b.ctypes.data and a.shape == b.shape and a.strides == b.strides and a.dtype == b.dtype


POISON = 0xA5
"""The byte that fills freed memory."""

COMPARE = ("auto", "all", "sample")
# Pools up to this size are compared whole after each operation; in larger ones, this many blocks are.
_WHOLE_BYTES = 256 << 10
_SAMPLE = 4
_SAMPLED = "(of a pool of this size few blocks are compared after each operation: compare='all' finds the culprit)"


class Findings:
    """Races, undeclared writes and errors of launched functions. Each is raised once. Takes no lock."""

    def __init__(self, mode: str, seed: int, schedule: Callable[[], str]) -> None:
        self.races: list[Race] = []
        self._mode, self._schedule = mode, schedule
        self._failures: list[Race | Exception] = []
        self._random = np.random.default_rng(seed)
        self.freed: list[tuple[Uint8s, Access]] = []
        """Memory that was given back, full of poison, and by what."""
        self._last: Access | None = None

    def note(self, failures: Sequence[Race | Exception]) -> None:
        self._failures += failures
        self.races += [race for race in failures if isinstance(race, Race)]

    def entered(self, bound: Shadow | None) -> None:
        """Called at the start of each call of the device, before it changes anything."""
        if bound is not None:
            self._adopt_open(bound)
            if self._whole(bound):
                self.compare(bound, None)

    def settle(self, bound: Shadow | None, ended: deque[HostAccess]) -> None:
        """End the accesses of the host whose end came after the last call."""
        while ended:
            opened = ended.popleft()
            if bound is not None and opened in bound.order.open:
                self.entered(bound)
                bound.order.end(opened)

    def finished(self, bound: Shadow, access: Access) -> None:
        """Called after an operation has been done."""
        if self._whole(bound):
            self.compare(bound, access)
        else:
            sample = self._random.integers(0, bound.regions.blocks, _SAMPLE)
            self._compare(bound, access, lambda: bound.differences(sample))
        self._last = access

    def compare(self, bound: Shadow | None, access: Access | None) -> None:
        """Compare everything, right after ``access``, or (None) at the start of the current call."""
        if bound is not None:
            self._compare(bound, access, bound.differences)
        for array, freed in list(self.freed):
            if (array != POISON).any():
                self.freed = [kept for kept in self.freed if kept[0] is not array]
                self._undeclared(f"memory given back by {freed}", access)

    def _undeclared(
        self, what: str, access: Access | None, more: str = "", block: int = -1, tokens: Sequence[int] = ()
    ) -> None:
        moment = f"right after {access}" if access is not None else f"by the call at{lines_of(call_site())}"
        self.note([UndeclaredWrite(what, block, tokens, f"seen {moment}{more}", self._schedule())])

    def _after(self) -> str:
        return f"\n    after {self._last or 'nothing was done'}"

    def _whole(self, bound: Shadow) -> bool:
        return self._mode == "all" or (self._mode == "auto" and bound.nbytes <= _WHOLE_BYTES)

    def _compare(self, bound: Shadow, access: Access | None, differences: Callable[[], Int64s]) -> None:
        self._adopt_open(bound)
        # Declared writes may have followed.
        cells = bound.order.not_open(differences())
        bound.adopt(np.stack([cells[:, 0], cells[:, 1], cells[:, 1] + 1], axis=1))
        outside = cells[:, 0] >= bound.regions.blocks
        for place in cells[outside, 0].tolist():
            self._undeclared(f"array {place - bound.regions.blocks + 1}", access, self._after())
        cells = cells[~outside]
        if len(cells):
            block = int(cells[0, 0])
            tokens = np.unique(cells[cells[:, 0] == block, 1]).tolist()
            others = len(np.unique(cells[:, 0])) - 1
            what = f"block {block} tokens {tokens}" + (f" and {others} more blocks" if others else "")
            more = self._after() if self._whole(bound) else f"{self._after()}\n    {_SAMPLED}"
            self._undeclared(what, access, more, block, tokens)

    def _adopt_open(self, bound: Shadow) -> None:
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
