"""PagedKV: where the KV of every layer, plane, block, token and head lies, in the memory of any engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from kvpool.common.arrays import Array, Int64s
from kvpool.common.arrays.layout import BlockLayout, Tier
from kvpool.common.arrays.strided import AnyArray, Placed, StridedArray, as_strided, read_only

LAYOUTS: Mapping[str, str] = MappingProxyType(
    {
        "flashinfer": "L | B P T H D",
        "flashinfer_hnd": "L | B P H T D",
        "mla": "L | B T D",
        "mla_one_head": "L | B T 1 D",
        "mla_components": "L P | B T 1 D",
        "sglang": "P L | B H D",
        "sglang_mla": "L | B 1 D",
        "sglang_paged": "P L | B T H D",
        "tensorrt_llm": "| B L P H T D",
        "vllm_cross_layer": "| B L P T H D",
        "vllm_flash_attention": "L | P B T H D",
        "vllm_flash_attention_hnd": "L | P B H T D",
        "vllm_flash_attention_hnd_one": "L | P B H 1 T D",
        "vllm_fused": "L | B T H P D",
        "vllm_fused_hnd": "L | B H T P D",
        "vllm_packed": "L | B T H D",
        "vllm_packed_hnd": "L | B H T D",
        "vllm_pairs": "L P | B T H D",
    }
)
"""Layouts of engines by name. Before the bar: the nested lists, outermost first. After it: the axes of each array in
them.

L is layers, P planes (K and V), B blocks, T the tokens of a block, H heads, D the elements of a head, 1 an axis of one.
An axis that is not named has one element. SGLang's pools have an axis of token slots: that is B with one token in each
block. The packed layouts hold K and V of a head side by side, which is one plane with heads of twice the size.
"""

_NOT_AFFINE: Mapping[str, str] = MappingProxyType(
    {
        "dsa_indexer": (
            "a block holds the values of all its tokens and behind them all their scales, so that no stride leads from "
            "the bytes of a "
            "token to those of the next. Values and scales are two planes with strides of their own: pass [values, "
            "scales], lists of "
            "views [blocks, tokens, bytes] of the same memory, with the axes 'P L | B T D'"
        )
    }
)
PLANES_MAX = 4
_SEARCHED = 100_000
Name = TypeVar("Name")
NestedArrays: TypeAlias = "AnyArray | Sequence[AnyArray] | Sequence[Sequence[AnyArray]]"
"""An array, or lists of arrays along layers, planes, or both."""


class Plane(NamedTuple):
    """One plane of a paged cache, the same in every layer.

    Attributes
    ----------
    block_stride, token_stride, head_stride : int
        Bytes from one block, token or head to the next, 0 along an axis of one element.
    heads : int
        Number of heads.
    run_bytes : int
        Contiguous bytes of one head of one token.
    """

    block_stride: int
    token_stride: int
    head_stride: int
    heads: int
    run_bytes: int

    def span(self, blocks: int, tokens: int) -> int:
        """Return the bytes from the first byte of the first block to the end of the last block.

        Parameters
        ----------
        blocks : int
            Number of blocks, 1 or more.
        tokens : int
            Tokens of a block.

        Returns
        -------
        int
            Bytes, gaps included.
        """
        steps = zip(self[:3], (blocks, tokens, self.heads), strict=True)
        return sum(step * (extent - 1) for step, extent in steps) + self.run_bytes

    def at(self, address: int, blocks: int, tokens: int) -> Array:
        """Return a view of the bytes of blocks, which shows where they lie and is not to be read.

        Parameters
        ----------
        address : int
            Address of the first block.
        blocks : int
            Number of blocks.
        tokens : int
            Tokens of a block.

        Returns
        -------
        ndarray of uint8[blocks, tokens, heads, run_bytes]
            It does not keep the memory alive.
        """
        shape = blocks, tokens, self.heads, self.run_bytes
        where = {"version": 3, "shape": shape, "strides": (*self[:3], 1), "typestr": "|u1", "data": (address, True)}
        return np.asarray(SimpleNamespace(__array_interface__=where))


@dataclass(frozen=True, eq=False)
class PagedKV(Placed):
    """The memory of a paged KV cache that kvpool or an engine owns. Made by ``of`` and ``of_pool``, which check it.

    The byte ``i`` of a head lies at ``bases[plane, layer] + block * block_stride + token * token_stride + head *
    head_stride + i``, with the strides of its plane.

    Attributes
    ----------
    bases : ndarray of int64[planes, layers]
        Addresses of block 0, token 0, head 0. Read-only.
    planes : tuple of Plane
        Strides and extents, one for each plane.
    blocks : int
        Number of blocks.
    tokens_per_block : int
        A slot mapping names token ``slot % tokens_per_block`` of block ``slot // tokens_per_block``.
    memory : {"host", "device"}
        Which processor reads it without a copy. Pinned memory is host memory.
    writable : bool
        Whether all of it may be written.
    owner : object
        Keeps the memory alive.

    Notes
    -----
    Immutable, and safe to share between threads. It keeps alive the arrays that it was made of.

    Examples
    --------
    >>> import kvpool, numpy as np
    >>> # each: K and V, blocks, tokens, heads, head_dim
    >>> layers = [np.zeros((2, 8, 4, 2, 16), np.float16) for _ in range(3)]
    >>> cache = kvpool.PagedKV.of(layers, "L | P B T H D")  # or by name: "vllm_flash_attention"
    >>> cache.layers, cache.blocks, cache.tokens_per_block, cache.planes[0].block_stride
    (3, 8, 4, 256)
    """

    bases: Int64s
    planes: tuple[Plane, ...]
    blocks: int
    tokens_per_block: int
    memory: Tier
    writable: bool
    owner: object = field(default=None, repr=False)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.bases.shape[1])

    @property
    def slots(self) -> int:
        """Number of tokens that fit in."""
        return self.blocks * self.tokens_per_block

    @cached_property
    def extent(self) -> Array:
        """All bytes from the first one to the last one, as an array that is not read."""
        spans = [plane.span(self.blocks, self.tokens_per_block) for plane in self.planes]
        begin, end = int(self.bases.min()), int((self.bases.max(axis=1) + spans).max())
        return Plane(0, 0, 0, 1, end - begin).at(begin, 1, 1)

    @classmethod
    def of(cls, arrays: NestedArrays, layout: str) -> PagedKV:
        """Describe the cache in one array, or in nested lists of arrays, as the layout says.

        Parameters
        ----------
        arrays : array, or lists of arrays
            Anything that ``as_strided`` takes: arrays of any package, raw pointers as StridedArray. Any strides, gaps
            between blocks too, as long as the elements of a head are contiguous. All elements have the same size; the
            extents of H and D may differ from plane to plane where planes are lists.
        layout : str
            A name in ``LAYOUTS``, or axes in the same notation.

        Returns
        -------
        PagedKV
            The description. Nothing is copied.

        Raises
        ------
        TypeError, ValueError
            For items that are not arrays, or do not fit the layout or each other; strides that are negative, overlap or
            break the alignment of the elements; and layouts in which no stride leads from one token to the next.
        """
        lists, axes = _parse(layout)
        leaves = _leaves(arrays, lists, axes)
        by_leaf = {place: _components(place, leaf, axes) for place, leaf in leaves.items()}
        flat = {place: component for components in by_leaf.values() for place, component in components.items()}
        layers, planes = (1 + max(place[axis] for place in flat) for axis in (1, 0))
        if planes > PLANES_MAX:
            raise ValueError(f"arrays: expected up to {PLANES_MAX} planes, got {planes}")
        strides = tuple(
            _same(f"plane {p}", {f"layer {i}": flat[p, i].plane for i in range(layers)}) for p in range(planes)
        )
        blocks, tokens = _same(
            "arrays: (blocks, tokens)", {f"plane {p}, layer {i}": flat[p, i].extents for p, i in flat}
        )
        _same("arrays: itemsize", {str(place): leaf.itemsize for place, leaf in leaves.items()})
        memory = _same("arrays: memory", {str(place): leaf.memory for place, leaf in leaves.items()})
        bases = np.array([[flat[p, i].base for i in range(layers)] for p in range(planes)], dtype=np.int64)
        _check_apart(bases, strides, blocks, tokens)
        owner = tuple(leaves.values())
        return cls(read_only(bases), strides, blocks, tokens, memory, all(leaf.writable for leaf in owner), owner)

    @classmethod
    def of_pool(cls, layout: BlockLayout, pool: AnyArray, tier: Tier = "device") -> PagedKV:
        """Describe a tier of a kvpool pool.

        Parameters
        ----------
        layout : BlockLayout
            The pool's layout.
        pool : array
            Shaped ``layout.device_shape(n)``, or ``layout.host_shape(n)`` for tier ``"host"``.
        tier : {"device", "host"}, default "device"
            The tier.

        Returns
        -------
        PagedKV
            The description. Nothing is copied.

        Raises
        ------
        TypeError, ValueError
            As ``of`` does, and for a pool of another shape or item size.
        """
        if tier not in ("device", "host"):
            raise ValueError(f"tier: expected 'device' or 'host', got {tier!r:.80}")
        array = as_strided("pool", pool)
        blocks = array.shape[layout.axes(tier).index("B")] if len(array.shape) == 6 else 0
        shape = layout.tier_shape(tier, blocks)
        if array.shape != shape or array.itemsize != layout.itemsize:
            raise ValueError(
                f"pool: expected shape {shape} with items of {layout.itemsize} bytes, got {array.shape} with "
                f"{array.itemsize} bytes"
            )
        return cls.of(array, f"| {' '.join(layout.axes(tier))}")


class _Component(NamedTuple):
    """One plane of one layer."""

    base: int
    plane: Plane
    extents: tuple[int, int]


def _parse(layout: Any) -> tuple[list[str], list[str]]:
    """The names of the nested lists, and of the axes of each array."""
    if not isinstance(layout, str):
        raise TypeError(f"layout: expected a name of LAYOUTS or axes, got {layout!r:.80}")
    if layout in _NOT_AFFINE:
        raise ValueError(f"layout: expected an affine one, got {layout!r}: {_NOT_AFFINE[layout]}")
    text = LAYOUTS.get(layout, layout)
    lists, bar, axes = (part.split() if part != "|" else part for part in text.partition("|"))
    named = [axis for axis in [*lists, *axes] if axis != "1"]
    right = (
        set(lists) <= {"L", "P"}
        and set(axes) <= set("LPBTHD1")
        and {"B", "D"} <= set(axes)
        and len(named) == len(set(named))
    )
    if not bar or not right:
        raise ValueError(
            f"layout: expected a name ({', '.join(LAYOUTS)}), or axes such as 'L | P B T H D' (before the bar L or P, "
            f"after it L P B T H D 1 in any order, B and D always, each once), got {layout!r:.80}"
        )
    return list(lists), list(axes)


def _leaves(arrays: Any, lists: list[str], axes: list[str]) -> dict[tuple[int, int], StridedArray]:
    """The arrays by (plane, layer). An index is 0 if the array itself has that axis."""
    leaves: dict[tuple[int, int], StridedArray] = {}

    def walk(item: Any, depth: int, place: tuple[int, int], name: str) -> None:
        if depth == len(lists):
            leaves[place] = as_strided(name, item)
            return
        if not isinstance(item, (list, tuple)) or not item:
            raise TypeError(
                f"{name}: expected a list along {lists[depth]}, as in the layout, got {type(item).__name__}"
            )
        for index, inner in enumerate(item):
            inside = (index, place[1]) if lists[depth] == "P" else (place[0], index)
            walk(inner, depth + 1, inside, f"{name}[{index}]")

    walk(arrays, 0, (0, 0), "arrays")
    planes, layers = (1 + max(place[axis] for place in leaves) for axis in (0, 1))
    if len(leaves) != planes * layers:
        raise ValueError("arrays: expected lists of one length on each level, got several lengths")
    for place, array in leaves.items():
        if len(array.shape) != len(axes):
            raise ValueError(
                f"arrays: expected {len(axes)} axes ({' '.join(axes)}), got shape {array.shape} of plane, layer {place}"
            )
    return leaves


def _components(place: tuple[int, int], array: StridedArray, axes: list[str]) -> dict[tuple[int, int], _Component]:
    """Every plane of every layer inside one array, with its strides checked."""
    name = f"arrays: plane {place[0]}, layer {place[1]}"
    extent = dict.fromkeys("LPBTHD1", 1) | {axis: n for axis, n in zip(axes, array.shape, strict=True) if axis != "1"}
    step = dict.fromkeys("LPBTHD", 0) | {
        axis: s for axis, s, n in zip(axes, array.steps, array.shape, strict=True) if n > 1
    }
    if any(n != 1 for axis, n in zip(axes, array.shape, strict=True) if axis == "1"):
        raise ValueError(f"{name}: expected 1 where the axes {' '.join(axes)} say so, got shape {array.shape}")
    check_strides(name, array)
    if extent["D"] > 1 and step["D"] != array.itemsize:
        raise ValueError(f"{name}: expected contiguous elements of a head, got {step['D']} bytes between them")
    plane = Plane(step["B"], step["T"], step["H"], extent["H"], extent["D"] * array.itemsize)
    extents = extent["B"], extent["T"]
    return {
        (place[0] + p, place[1] + i): _Component(array.address + p * step["P"] + i * step["L"], plane, extents)
        for p in range(extent["P"])
        for i in range(extent["L"])
    }


def check_strides(name: str, array: StridedArray) -> None:
    """Raise ValueError for an array without elements, or one whose elements overlap, are misaligned, or lie before the
    first."""
    if 0 in array.shape or not array.address:
        raise ValueError(f"{name}: shape {array.shape} at address {array.address} has no elements")
    steps = sorted((step, extent) for step, extent in zip(array.steps, array.shape, strict=True) if extent > 1)
    alignment = array.itemsize & -array.itemsize
    if array.address % alignment or any(step % alignment for step, _ in steps):
        raise ValueError(
            f"{name}: expected an address and strides that are multiples of {alignment} bytes, got {array.address}, "
            f"{array.steps}"
        )
    if steps and steps[0][0] < 0:
        raise ValueError(f"{name}: strides {array.steps} must not be negative")
    span = array.itemsize
    for step, extent in steps:
        if step < span:
            raise ValueError(
                f"{name}: elements overlap: {step} bytes along one axis, {span} are taken by the axes inside it"
            )
        span += step * (extent - 1)
    if array.address + span > 2**63 - 1:
        raise ValueError(f"{name}: address {array.address} and {span} bytes pass the end of memory")


def _same(name: str, values: dict[str, Any]) -> Any:
    """The value that all places have. Raises ValueError if they differ."""
    (first_place, first), *rest = values.items()
    for place, value in rest:
        if value != first:
            raise ValueError(f"{name}: {place} has {value}, {first_place} has {first}")
    return first


def _check_apart(bases: Int64s, planes: tuple[Plane, ...], blocks: int, tokens: int) -> None:
    """Raise ValueError if two layers or planes share bytes. Each has been checked alone."""
    names = sharing(
        (base, p, planes[p].at(base, blocks, tokens)) for p, row in enumerate(bases.tolist()) for base in row
    )
    if names is not None:
        p, q = sorted(names)
        raise ValueError(
            f"arrays: two layers share bytes, in plane {p}" if p == q else f"arrays: planes {p} and {q} share bytes"
        )


def sharing(arrays: Iterable[tuple[int, Name, Array]]) -> tuple[Name, Name] | None:
    """The names of two arrays that share a byte, if there are any. Each is given with its address, which is that of its
    first byte."""
    near: list[tuple[Name, Array]] = []
    for _, name, array in sorted(arrays, key=itemgetter(0)):
        near = [entry for entry in near if np.may_share_memory(entry[1], array)]
        for other, memory in near:
            if share_bytes(memory, array):
                return other, name
        near.append((name, array))
    return None


def share_bytes(array: Array, other: Array) -> bool:
    """Whether two arrays share a byte. A doubt, where NumPy would search for long, counts as sharing."""
    return np.may_share_memory(array, other, max_work=_SEARCHED)  # type: ignore[arg-type]
