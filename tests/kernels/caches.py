"""Paged caches in the layouts of the engines, laid out here by hand, with bytes around and between them that nobody may
touch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from kvpool import PagedKV
from kvpool.common.arrays.strided import StridedArray

# The axes of the nested lists and of each array, as the engines document their shapes.
AXES = {
    "vllm_cross_layer": ("", "BLPTHD"),
    "vllm_flash_attention": ("L", "PBTHD"),
    "flashinfer": ("L", "BPTHD"),
    "mla": ("L", "BTD"),
    "sglang": ("PL", "BHD"),
    "sglang_mla": ("L", "B1D"),
    "vllm_flash_attention_hnd": ("L", "PBHTD"),
    "flashinfer_hnd": ("L", "BPHTD"),
    "tensorrt_llm": ("", "BLPHTD"),
    "sglang_paged": ("PL", "BTHD"),
    "vllm_fused_hnd": ("L", "BHTPD"),
    "vllm_fused": ("L", "BTHPD"),
    "vllm_packed_hnd": ("L", "BHTD"),
    "vllm_packed": ("L", "BTHD"),
    "vllm_flash_attention_hnd_one": ("L", "PBH1TD"),
    "vllm_pairs": ("LP", "BTHD"),
    "mla_components": ("LP", "BT1D"),
    "mla_one_head": ("L", "BT1D"),
    "| L P B T H D": ("", "LPBTHD"),
    "| L P B H T D": ("", "LPBHTD"),
    "| T H B L P D": ("", "THBLPD"),
}
GUARD = 64


class Sizes(NamedTuple):
    """Extents of a cache."""

    P: int = 2
    L: int = 3
    B: int = 5
    T: int = 4
    H: int = 2
    D: int = 8


@dataclass
class Cache:
    """Arrays in one buffer. ``places`` are (offset, shape, strides) of each array by (plane, layer) of its first
    element."""

    name: str
    sizes: Sizes
    dtype: np.dtype[Any]
    buffer: np.ndarray
    places: dict[tuple[int, int], tuple[int, tuple[int, ...], tuple[int, ...]]]

    def copy(self) -> Cache:
        return replace(self, buffer=aligned(self.buffer))

    def arrays(self, memory: str = "host") -> Any:
        """The nested lists that an engine would give."""
        lists, _ = AXES[self.name]
        base = self.buffer.ctypes.data

        def array(place: tuple[int, int]) -> Any:
            offset, shape, strides = self.places[place]
            return StridedArray(base + offset, shape, self.dtype.itemsize, strides, memory, owner=self.buffer)

        extents = [getattr(self.sizes, axis) for axis in lists]
        if not lists:
            return array((0, 0))
        if len(lists) == 1:
            return [array((i, 0) if lists == "P" else (0, i)) for i in range(extents[0])]
        return [[array((i, j) if lists == "PL" else (j, i)) for j in range(extents[1])] for i in range(extents[0])]

    def paged(self, memory: str = "host") -> PagedKV:
        return PagedKV.of(self.arrays(memory), self.name)

    def views(self) -> list[list[np.ndarray]]:
        """[planes][layers] of views [blocks, tokens, heads, head_dim]."""
        lists, axes = AXES[self.name]
        result = []
        for p in range(self.sizes.P):
            row = []
            for layer in range(self.sizes.L):
                offset, shape, strides = self.places[p if "P" in lists else 0, layer if "L" in lists else 0]
                view = np.ndarray(shape, self.dtype, self.buffer.data, offset, strides)
                index = {"P": p, "L": layer, "1": 0}
                view = view[tuple(index.get(axis, slice(None)) for axis in axes)]
                left = [axis for axis in axes if axis in "BTHD"]
                view = view[(..., *[None for axis in "BTHD" if axis not in left])]
                left += [axis for axis in "BTHD" if axis not in left]
                row.append(view.transpose([left.index(axis) for axis in "BTHD"]))
            result.append(row)
        return result


def aligned(content: np.ndarray) -> np.ndarray:
    """A copy of bytes that starts at a multiple of 64."""
    raw = np.empty(content.size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    raw[start : start + content.size] = content
    return raw[start : start + content.size]


def sizes_of(name: str, sizes: Sizes) -> Sizes:
    """The sizes with 1 for axes that the layout does not have."""
    axes = "".join(AXES[name])
    return Sizes(*(extent if axis in axes else 1 for axis, extent in zip("PLBTHD", sizes, strict=True)))


def make_cache(name: str, sizes: Sizes, itemsize: int, padding: int = 0, seed: int = 0) -> Cache:
    """A cache full of random bytes; ``padding`` elements follow each block."""
    sizes = sizes_of(name, sizes)
    lists, axes = AXES[name]
    shape = tuple(getattr(sizes, axis) if axis != "1" else 1 for axis in axes)
    strides, step = [], itemsize
    for axis, extent in zip(reversed(axes), reversed(shape), strict=True):
        step += padding * itemsize if axis == "B" else 0
        strides.insert(0, step)
        step *= extent
    nbytes = -(-(step + GUARD) // 16) * 16
    planes, layers = (getattr(sizes, axis) if axis in lists else 1 for axis in "PL")
    places = {
        (p, i): (GUARD + (p * layers + i) * nbytes, shape, tuple(strides)) for p in range(planes) for i in range(layers)
    }
    content = np.random.default_rng(seed).integers(0, 256, GUARD + prod((planes, layers)) * nbytes, dtype=np.uint8)
    return Cache(name, sizes, np.dtype(f"u{itemsize}"), aligned(content), places)
