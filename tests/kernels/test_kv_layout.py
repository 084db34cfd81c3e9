"""PagedKV: every layout of the engines, and what is refused, with the reason."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from kvpool import BlockLayout, PagedKV
from kvpool.device.memory import StridedArray


def test_views_of_one_array_that_interleave_are_accepted() -> None:
    both = [np.zeros((4, 2, 3, 2, 8), np.float16) for _ in range(3)]
    paged = PagedKV.of([[layer[:, p] for layer in both] for p in range(2)], "P L | B T H D")
    assert paged.bases.tolist() == PagedKV.of(both, "flashinfer").bases.tolist()
    assert paged.planes == PagedKV.of(both, "flashinfer").planes
    # So are values and scales of one block, which lie apart by other strides.
    block = np.zeros((4, 8 * 132), np.uint8)
    PagedKV.of([[block[:, : 8 * 128].reshape(4, 8, 128)], [block[:, 8 * 128 :].reshape(4, 8, 4)]], "P L | B T D")


def test_heads_with_padded_blocks_are_not_ambiguous() -> None:
    blocks, tokens, heads, dim = 7, 8, 128, 256
    step = tokens * heads * 2 * dim * 2 + 16
    whole = np.zeros(blocks * step, np.uint8).view(np.float16)
    strides = (step, heads * 4 * dim, 4 * dim, 2 * dim, 2)
    PagedKV.of([as_strided(whole, (blocks, tokens, heads, 2, dim), strides)], "vllm_fused")


def test_layers_and_planes_that_share_bytes_are_found_exactly() -> None:
    seed = 5
    print(f"seed {seed}")
    random, outcomes = np.random.default_rng(seed), set()
    for _ in range(600):
        same = bool(random.random() < 0.5)
        shapes = [(int(random.integers(1, 4)), int(random.integers(1, 3)), int(random.integers(1, 3)))] * 2
        first = _nested(shapes[0], random)
        arrays, places = [], []
        for shape, strides in zip(shapes, (first, first if same else _nested(shapes[1], random)), strict=True):
            base = 64 + int(random.integers(0, 40))
            arrays.append([StridedArray(base, (*shape, 1), 1, (*strides, 1))])
            places.append({base + int(np.dot(index, strides)) for index in np.ndindex(*shape)})
        apart = not places[0] & places[1]
        outcomes.add((same, apart))
        with nullcontext() if apart else pytest.raises(ValueError, match="share bytes"):
            PagedKV.of(arrays, "P L | B T H D")
    assert len(outcomes) == 4, outcomes


def _nested(shape: tuple[int, ...], random: np.random.Generator) -> tuple[int, ...]:
    """Strides of an array of bytes in which no two elements meet, axes in any order, with gaps."""
    stride, step = [0] * len(shape), 1
    for axis in random.permutation(len(shape)):
        stride[axis] = step + int(random.integers(0, 5))
        step = stride[axis] * (shape[axis] - 1) + step
    return tuple(stride)


RAW = np.zeros(4096, np.uint8)
NO_LAYOUTS = ["vllm", "", "L | B T H", "L B T H D", "X | B D", "L | B B D", "L | L B D", "L | B T Q D"]


def raw(
    shape: tuple[int, ...] = (4, 2, 8),
    strides: tuple[int, ...] | None = None,
    shift: int = 0,
    itemsize: int = 2,
    **options: Any,
) -> StridedArray:
    base = -(-RAW.ctypes.data // 16) * 16
    return StridedArray(base + shift, shape, itemsize, strides, **options)


@pytest.mark.parametrize(
    ("arrays", "layout", "match"),
    [
        ([raw(strides=(-32, 16, 2))], "mla", "must not be negative"),
        ([raw(strides=(32, 0, 2))], "mla", "elements overlap"),
        ([raw(strides=(32, 14, 2))], "mla", "elements overlap: 14 bytes .* 16 are taken"),
        ([raw(strides=(33, 16, 2))], "mla", "multiples of 2 bytes"),
        ([raw(shift=1)], "mla", "multiples of 2 bytes"),
        ([raw(strides=(128, 64, 4))], "mla", "expected contiguous"),
        ([raw((4, 0, 8))], "mla", "no elements"),
        ([StridedArray(0, (4, 2, 8), 2)], "mla", "no elements"),
        ([StridedArray(2**63 - 64, (4, 2, 8), 2)], "mla", "pass the end of memory"),
        ([raw((4, 2, 1, 8))], "mla", r"arrays: expected 3 axes \(B T D\), got .* of plane, layer \(0, 0\)"),
        ([raw((4, 2, 2, 8))], "mla_one_head", "expected 1 where"),
        ([raw(), raw()], "mla", "two layers share bytes, in plane 0"),
        ([raw(), raw((4, 2, 4), shift=512)], "mla", "plane 0: layer 1 has"),
        ([raw(), raw((3, 2, 8), shift=512)], "mla", r"\(blocks, tokens\): .* has \(3, 2\)"),
        ([raw(), raw((4, 2, 16), shift=512, itemsize=1)], "mla", "itemsize"),
        ([raw(), raw(shift=512, memory="device")], "mla", "memory"),
        ([[raw()], [raw(shift=16)]], "P L | B T D", "planes 0 and 1 share bytes"),
        ([[raw()], [raw(shift=512)] * 2], "P L | B T D", "lists of one length"),
        ([[raw(shift=512 * p)] for p in range(5)], "P L | B T D", "arrays: expected up to 4 planes, got 5"),
        ([raw((4, 8 * 132))], "dsa_indexer", "not affine: a block holds the values of all its tokens .* 'P L | B T D'"),
        *(([raw((2, 2, 2, 2))], layout, "layout: .*vllm_flash_attention") for layout in NO_LAYOUTS),
        *((arrays, "mla", "a list along L") for arrays in (np.zeros((2, 4, 2, 8)), [], "ab")),
        ([raw((2, 2))], None, "layout: "),
        ([None], "mla", r"arrays\[0\]"),
    ],
)
def test_arrays_that_fit_no_cache_are_refused_with_the_reason(arrays: Any, layout: str, match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        PagedKV.of(arrays, layout)


def test_a_pool_of_another_shape_is_named() -> None:
    layout = BlockLayout(2, 3, 8, 4)
    for pool in (
        np.zeros((2, 2, 5, 4, 3, 7), np.float16),
        np.zeros((2, 2, 5, 4, 3, 8), np.float32),
        np.zeros(960, np.float16),
    ):
        with pytest.raises(ValueError, match="pool: expected shape"):
            PagedKV.of_pool(layout, pool)
    with pytest.raises(ValueError, match="tier: .*'gpu'"):
        PagedKV.of_pool(layout, np.zeros(layout.device_shape(5), np.float16), "gpu")
