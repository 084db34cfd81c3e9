"""A layout says where every byte is, and refuses what cannot be a layout."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from kvpool.common.arrays.layout import PRESETS, BlockLayout

VARIANTS = list(product(["layer_first", "block_first"], ["NHD", "HND"], [1, 2]))


def make(**changes: Any) -> BlockLayout:
    arguments = {"layers": 3, "kv_heads": 2, "head_dim": 5, "tokens_per_block": 4} | changes
    return BlockLayout(**arguments)


@pytest.mark.parametrize(("dtype", "itemsize"), [("uint8", 1), ("bfloat16", 2), ("float32", 4), ("int64", 8)])
@pytest.mark.parametrize(("order", "tokens", "planes"), VARIANTS)
def test_strides_and_sizes_agree_with_numpy(order: str, tokens: str, planes: int, dtype: str, itemsize: int) -> None:
    layout = make(order=order, tokens=tokens, planes=planes, dtype=dtype)
    axes = {"NHD": "thd", "HND": "htd"}[tokens]
    for shape, strides, names in (
        (layout.device_shape(7), layout.device_strides(7), {"layer_first": "lpb", "block_first": "blp"}[order] + axes),
        (layout.host_shape(7), layout.host_strides(7), "blp" + axes),
    ):
        array = np.empty(shape, layout.storage_dtype)
        stride_of = dict(zip(names, array.strides, strict=True))
        assert dict(zip(names, array.shape, strict=True)) == {"b": 7, "l": 3, "p": planes, "t": 4, "h": 2, "d": 5}
        assert tuple(stride_of[name] for name in "blpth") == strides
        assert stride_of["d"] == layout.itemsize == itemsize
        assert array.nbytes == 7 * layout.block_bytes
    assert layout.block_bytes == 4 * layout.token_bytes == 3 * planes * layout.segment_bytes
    assert np.empty(layout.host_shape(0)).size == np.empty(layout.device_shape(0)).size == 0


@pytest.mark.parametrize(
    ("dtype", "name", "storage"),
    [
        (np.float32, "float32", "float32"),
        ("f2", "float16", "float16"),
        ("bfloat16", "bfloat16", "uint16"),
        ("float8_e4m3fn", "float8_e4m3fn", "uint8"),
    ],
)
def test_dtype_keeps_its_name_and_is_stored_by_its_bytes(dtype: Any, name: str, storage: str) -> None:
    layout = make(dtype=dtype)
    assert layout.dtype == layout.dtype_name == name
    assert layout.storage_dtype == np.dtype(storage)


def test_equal_layouts_are_equal_whatever_names_their_dtype() -> None:
    assert make(dtype=np.float16) == make(dtype="f2") == make()
    assert hash(make(dtype=np.float16)) == hash(make())
    assert len({make(), make(dtype="bfloat16"), make(layers=np.int64(3))}) == 2


def test_fingerprint_changes_with_everything_that_decides_the_bytes_of_a_host_block() -> None:
    extents = {"layers": 4, "kv_heads": 3, "head_dim": 6, "tokens_per_block": 5, "planes": 1}
    changes: list[dict[str, Any]] = [{}, *({name: value} for name, value in extents.items())]
    changes += [{"dtype": "bfloat16"}, {"dtype": "uint16"}, {"tokens": "HND"}]
    assert len({make(**change).fingerprint for change in changes}) == len(changes)
    assert make(order="block_first").fingerprint == make().fingerprint, "an order of the device tier alone"


# Layers x planes x KV heads x head_dim x 2 bytes.
TOKEN_BYTES = {
    "llama-3-8b": 32 * 2 * 8 * 128 * 2,
    "llama-3-70b": 80 * 2 * 8 * 128 * 2,
    "qwen3-8b": 36 * 2 * 8 * 128 * 2,
    "qwen3-32b": 64 * 2 * 8 * 128 * 2,
    "deepseek-v3": 61 * 1 * 1 * 576 * 2,
    "gpt-oss-20b": 24 * 2 * 8 * 64 * 2,
    "gpt-oss-120b": 36 * 2 * 8 * 64 * 2,
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_size(name: str) -> None:
    layout = BlockLayout.for_model(name, tokens_per_block=16, order="block_first", tokens="HND")
    assert (layout.token_bytes, layout.dtype_name, layout.tokens_per_block) == (TOKEN_BYTES[name], "bfloat16", 16)
    assert (layout.order, layout.tokens) == ("block_first", "HND")
    assert BlockLayout.for_model(name, tokens_per_block=16, dtype="float8_e4m3fn").token_bytes == TOKEN_BYTES[name] // 2


@pytest.mark.parametrize(
    ("block_bytes", "tokens_per_block", "dtype", "layers", "planes"),
    [(4096, 16, "float64", 2, 2), (32, 16, "uint8", 2, 1), (16, 16, "uint8", 1, 1), (12, 3, "uint8", 2, 2)],
)
def test_block_has_exactly_the_bytes_asked_for(
    block_bytes: int, tokens_per_block: int, dtype: str, layers: int, planes: int
) -> None:
    layout = BlockLayout.of_block_bytes(block_bytes, tokens_per_block, dtype=dtype)
    assert layout.block_bytes == block_bytes
    assert (layout.layers, layout.planes, layout.tokens_per_block) == (layers, planes, tokens_per_block)
    assert layout.dtype_name == dtype


# Bad input


def of_model(name: Any = "qwen3-8b", **options: Any) -> BlockLayout:
    return BlockLayout.for_model(name, tokens_per_block=16, **options)


def of_bytes(block_bytes: Any = 16, tokens_per_block: Any = 16, **options: Any) -> BlockLayout:
    return BlockLayout.of_block_bytes(block_bytes, tokens_per_block, **options)


EXTENTS = ("layers", "kv_heads", "head_dim", "tokens_per_block", "planes")
REFUSED: list[tuple[Callable[..., object], str, str, list[Any]]] = [
    *((make, name, f"{name}: ", [0, 2**31, True, 2.0, "2", None]) for name in EXTENTS),
    (make, "planes", "planes: expected 1 to 2.*got 3", [3]),
    (make, "order", "order: .*layer_first, block_first", ["layerfirst", "", None, 1]),
    (make, "tokens", "tokens: .*NHD, HND", ["nhd", "", None, b"NHD"]),
    (make, "dtype", "dtype: .*bfloat16", ["", "fp16", "float4_e2m1fn", "complex64", "S2", ">f4", "f4,f4", "("]),
    (make, "dtype", "dtype: .*bfloat16", [object, np.dtype([("a", "f4")]), None, 3]),
    *((getattr(make(), f"{tier}_shape"), "blocks", "blocks: ", [-1, 2**31, True, 1.0]) for tier in ("device", "host")),
    (make().device_strides, "blocks", "blocks: ", [-1]),
    (of_model, "name", "name: .*llama-3-8b", ["gpt-2", None, 8]),
    (of_bytes, "block_bytes", "block_bytes: expected ", [0, 15, 4095, 2**63, 4096.0, True]),
    (of_bytes, "tokens_per_block", "tokens_per_block: ", [0, 2**63, 16.0]),
    (of_bytes, "dtype", "block_bytes: expected a multiple of tokens_per_block=16 .*, got 16", ["float16"]),
]


@pytest.mark.parametrize(("build", "name", "message", "values"), REFUSED)
def test_what_cannot_be_a_layout_is_refused_by_name(
    build: Callable[..., object], name: str, message: str, values: list[Any]
) -> None:
    for value in values:
        with pytest.raises((TypeError, ValueError), match=message):
            build(**{name: value})
