"""Engines' paged memory in many layouts, seen as ``[planes, layers, blocks, tokens, heads, bytes]``, and what a host
block of it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvpool import PagedKV

AXES = "PLBTHD"
LAYOUTS = [
    "L | P B T H D",
    "L | P B H T D",
    "L | B P T H D",
    "| B L P T H D",
    "| B L P H T D",
    "P L | B T H D",
    "L | B T H P D",
    "L | B H T P D",
    "L | B T D",
    "L | B D",
    "P L | B H D",
]
SIZES = {"P": 2, "L": 3, "B": 9, "T": 4, "H": 2, "D": 5}
Allocate = Callable[[int], np.ndarray]


class Paged(NamedTuple):
    """``views`` has the same bytes as the cache, with all six axes."""

    cache: PagedKV
    arrays: list[np.ndarray]
    views: list[list[np.ndarray]]
    """[plane][layer]: [blocks, tokens, heads, bytes]"""
    heads_first: bool

    def image(self) -> np.ndarray:
        """A copy: [planes, layers, blocks, tokens, heads, bytes]."""
        return np.array([[view.copy() for view in layers] for layers in self.views])

    def fill(self, image: Any) -> None:
        for layers, values in zip(self.views, np.broadcast_to(image, self.image().shape), strict=True):
            for view, value in zip(layers, values, strict=True):
                view[...] = value


def paged(layout: str, allocate: Allocate | None = None, gap: int = 0, **sizes: int) -> Paged:
    """Zeroed memory in a layout. ``gap``: bytes between an array's blocks, which no copy may touch."""
    extents = SIZES | sizes
    lists, axes = (part.split() for part in layout.split("|"))
    take = allocate or (lambda nbytes: np.zeros(nbytes, np.uint8))
    arrays: list[np.ndarray] = []

    def leaf() -> np.ndarray:
        shape = [extents[axis] for axis in axes]
        at = axes.index("B")
        inner = int(np.prod(shape[at + 1 :]))
        outer = int(np.prod(shape[: at + 1]))
        flat = take(outer * (inner + gap)).reshape(*shape[: at + 1], inner + gap)
        arrays.append(flat)
        return flat[..., :inner].reshape(shape) if not gap else _strided(flat, shape, at)

    def build(left: list[str]) -> Any:
        return leaf() if not left else [build(left[1:]) for _ in range(extents[left[0]])]

    nested = build(lists)
    return Paged(PagedKV.of(nested, layout), arrays, _views(nested, lists, axes), _heads_first(axes))


def _strided(flat: np.ndarray, shape: list[int], at: int) -> np.ndarray:
    """The bytes in front of each gap in their own shape, in place."""
    inner = [1]
    for extent in shape[:at:-1]:
        inner.insert(0, inner[0] * extent)
    return np.lib.stride_tricks.as_strided(flat, shape, [*flat.strides[: at + 1], *inner[1:]])


def _heads_first(axes: list[str]) -> bool:
    return "H" in axes and "T" in axes and axes.index("H") < axes.index("T")


def _views(nested: Any, lists: list[str], axes: list[str]) -> list[list[np.ndarray]]:
    if not lists:
        return [list(plane) for plane in _whole(nested, axes)]
    if lists == ["L"]:
        layers = [_whole(array, axes) for array in nested]
        return [[layer[p, 0] for layer in layers] for p in range(len(layers[0]))]
    return [[_whole(array, axes)[0, 0] for array in plane] for plane in nested]


def _whole(array: np.ndarray, axes: list[str]) -> np.ndarray:
    """The same bytes with all six axes."""
    missing = [axis for axis in AXES if axis not in axes]
    order = missing + axes
    return array[(None,) * len(missing)].transpose([order.index(axis) for axis in AXES])


def host_image(paged: Paged, image: np.ndarray, blocks: list[int], per_host: int) -> np.ndarray:
    """uint8[host blocks, bytes]: what host blocks hold once engine blocks were copied there, zeros where none was."""
    planes, layers, _, tokens, heads, nbytes = image.shape
    count = -(-len(blocks) // per_host)
    parts = np.zeros((count, layers, planes, per_host, tokens, heads, nbytes), np.uint8)
    for i, block in enumerate(blocks):
        if block >= 0:
            parts[i // per_host, :, :, i % per_host] = image[:, :, block].swapaxes(0, 1)
    if paged.heads_first:
        parts = parts.swapaxes(4, 5)
    return np.ascontiguousarray(parts).reshape(count, -1)
