"""A layout says where every byte is, and refuses what cannot be a layout."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import numpy as np
import pytest

from kvpool.common.arrays.layout import PRESETS, BlockLayout

VARIANTS = list(product(["layer_first", "block_first"], ["NHD", "HND"], [1, 2]))
SIZES = {
    "uint8": 1,
    "int8": 1,
    "bool": 1,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "float64": 8,
    "int64": 8,
}


def make(**changes: Any) -> BlockLayout:
    arguments = {"layers": 3, "kv_heads": 2, "head_dim": 5, "tokens_per_block": 4} | changes
    return BlockLayout(**arguments)


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize(("order", "tokens", "planes"), VARIANTS)
def test_strides_and_shapes_agree_with_numpy(order: str, tokens: str, planes: int, dtype: str) -> None:
    layout = make(order=order, tokens=tokens, planes=planes, dtype=dtype)
    axes = {"NHD": "thd", "HND": "htd"}[tokens]
    for shape, strides, names in (
        (layout.device_shape(7), layout.device_strides(7), {"layer_first": "lpb", "block_first": "blp"}[order] + axes),
        (layout.host_shape(7), layout.host_strides(7), "blp" + axes),
    ):
        array = np.empty(shape, layout.storage_dtype)
        stride_of = dict(zip(names, array.strides, strict=True))
        extents = dict(zip(names, array.shape, strict=True))
        assert extents == {"b": 7, "l": 3, "p": planes, "t": 4, "h": 2, "d": 5}
        assert (stride_of["b"], stride_of["l"], stride_of["p"], stride_of["t"], stride_of["h"]) == strides
        assert stride_of["d"] == layout.itemsize
        assert array.nbytes == 7 * layout.block_bytes


@pytest.mark.parametrize(("dtype", "itemsize"), SIZES.items())
def test_sizes_follow_from_the_extents(dtype: str, itemsize: int) -> None:
    layout = make(dtype=dtype)
    assert layout.itemsize == itemsize
    assert layout.token_bytes == 3 * 2 * 2 * 5 * itemsize
    assert layout.segment_bytes == 4 * 2 * 5 * itemsize
    assert layout.block_bytes == 4 * layout.token_bytes == 6 * layout.segment_bytes


@pytest.mark.parametrize("order", ["layer_first", "block_first"])
def test_host_blocks_are_contiguous_and_empty_tiers_have_a_shape(order: str) -> None:
    layout = make(order=order)
    assert layout.host_strides(7).block == layout.block_bytes
    assert np.empty(layout.host_shape(0)).size == np.empty(layout.device_shape(0)).size == 0


@pytest.mark.parametrize(
    ("dtype", "name", "storage"),
    [
        ("float16", "float16", "float16"),
        (np.float32, "float32", "float32"),
        (np.dtype("int8"), "int8", "int8"),
        ("f2", "float16", "float16"),
        (float, "float64", "float64"),
        ("bfloat16", "bfloat16", "uint16"),
        ("float8_e4m3fn", "float8_e4m3fn", "uint8"),
        ("float8_e5m2", "float8_e5m2", "uint8"),
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


def test_a_layout_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().layers = 4  # type: ignore[misc]


# Bad input


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim", "tokens_per_block", "planes"])
@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-1, ValueError), (2**31, ValueError), (2**80, ValueError)]
    + [(value, TypeError) for value in (True, np.True_, 2.0, "2", None, [2])],
)
def test_bad_extent_is_named(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{name}: .*"):
        make(**{name: value})


def test_three_planes_are_refused() -> None:
    with pytest.raises(ValueError, match="planes: expected 1 to 2.*got 3"):
        make(planes=3)


@pytest.mark.parametrize(
    ("value", "error"),
    [("layerfirst", ValueError), ("", ValueError), ("NHD", ValueError), (None, TypeError), (1, TypeError)],
)
def test_bad_order_is_named(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="order: .*layer_first, block_first"):
        make(order=value)


@pytest.mark.parametrize(
    ("value", "error"), [("nhd", ValueError), ("", ValueError), (None, TypeError), (b"NHD", TypeError)]
)
def test_bad_token_order_is_named(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="tokens: .*NHD, HND"):
        make(tokens=value)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (name, ValueError)
        for name in (
            "",
            "fp16",
            "float8",
            "float4_e2m1fn",
            "complex64",
            "complex128",
            "S2",
            "V2",
            "datetime64[ns]",
            ">f4",
            "f4,f4",
            "(",
        )
    ]
    + [
        (object, ValueError),
        (np.dtype("O"), ValueError),
        (np.dtype([("a", "f4")]), ValueError),
        (None, TypeError),
        (3, TypeError),
        ([1], TypeError),
    ],
)
def test_bad_dtype_is_named(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="dtype: .*bfloat16"):
        make(dtype=value)


@pytest.mark.parametrize("method", ["device_shape", "host_shape", "device_strides", "host_strides"])
@pytest.mark.parametrize("order", ["layer_first", "block_first"])
@pytest.mark.parametrize(
    ("value", "error"), [(-1, ValueError), (2**31, ValueError), (True, TypeError), (1.0, TypeError), (None, TypeError)]
)
def test_bad_block_count_is_named(method: str, order: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="blocks: .*"):
        getattr(make(order=order), method)(value)


# Fingerprints


def test_fingerprint_changes_with_everything_that_decides_the_bytes_of_a_host_block() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"layers": 4},
        {"kv_heads": 3},
        {"head_dim": 6},
        {"tokens_per_block": 5},
        {"planes": 1},
    ]
    changes += [{"dtype": "bfloat16"}, {"dtype": "uint16"}, {"tokens": "HND"}]
    assert len({make(**change).fingerprint for change in changes}) == len(changes)


def test_fingerprint_ignores_what_only_the_device_tier_knows() -> None:
    assert make(order="block_first").fingerprint == make().fingerprint
    assert len(make().fingerprint) == 32
    assert int(make().fingerprint, 16) >= 0


# Presets


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    # Layers x planes x KV heads x head_dim x 2 bytes.
    [
        ("llama-3-8b", 32 * 2 * 8 * 128 * 2),
        ("llama-3-70b", 80 * 2 * 8 * 128 * 2),
        ("qwen3-8b", 36 * 2 * 8 * 128 * 2),
        ("qwen3-32b", 64 * 2 * 8 * 128 * 2),
        ("deepseek-v3", 61 * 1 * 1 * 576 * 2),
        ("gpt-oss-20b", 24 * 2 * 8 * 64 * 2),
        ("gpt-oss-120b", 36 * 2 * 8 * 64 * 2),
    ],
)
def test_presets_have_the_published_size(name: str, token_bytes: int) -> None:
    layout = BlockLayout.for_model(name, tokens_per_block=16)
    assert layout.token_bytes == token_bytes
    assert layout.dtype_name == "bfloat16"
    assert layout.tokens_per_block == 16
    assert BlockLayout.for_model(name, tokens_per_block=16, dtype="float8_e4m3fn").token_bytes == token_bytes // 2


def test_every_preset_is_tested_and_makes_a_layout_of_either_order() -> None:
    assert len(PRESETS) == 7
    for name in PRESETS:
        layout = BlockLayout.for_model(name, tokens_per_block=8, order="block_first", tokens="HND")
        assert (layout.order, layout.tokens) == ("block_first", "HND")


@pytest.mark.parametrize(
    ("name", "error"), [("gpt-2", ValueError), ("", ValueError), (None, TypeError), (8, TypeError)]
)
def test_unknown_model_is_named_with_the_known_ones(name: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="name: .*llama-3-8b"):
        BlockLayout.for_model(name, tokens_per_block=16)


# Layouts of a given size


@pytest.mark.parametrize(
    ("block_bytes", "tokens_per_block", "dtype", "layers", "planes"),
    [
        (4096, 16, "uint8", 2, 2),
        (4096, 16, "float64", 2, 2),
        (32, 16, "uint8", 2, 1),
        (16, 16, "uint8", 1, 1),
        (96, 16, "uint8", 2, 1),
        (12, 3, "uint8", 2, 2),
    ],
)
def test_block_has_exactly_the_bytes_asked_for(
    block_bytes: int, tokens_per_block: int, dtype: str, layers: int, planes: int
) -> None:
    layout = BlockLayout.of_block_bytes(block_bytes, tokens_per_block, dtype=dtype)
    assert layout.block_bytes == block_bytes
    assert (layout.layers, layout.planes, layout.tokens_per_block, layout.dtype_name) == (
        layers,
        planes,
        tokens_per_block,
        dtype,
    )


def test_layout_of_a_size_takes_the_other_choices_too() -> None:
    layout = BlockLayout.of_block_bytes(4096, 16, order="block_first", tokens="HND")
    assert (layout.order, layout.tokens) == ("block_first", "HND")


@pytest.mark.parametrize(
    ("block_bytes", "tokens_per_block", "dtype"),
    [(15, 16, "uint8"), (4095, 16, "uint8"), (16, 16, "float16"), (8, 16, "uint8")],
)
def test_impossible_block_size_says_why(block_bytes: int, tokens_per_block: int, dtype: str) -> None:
    with pytest.raises(
        ValueError,
        match=f"block_bytes: expected a multiple of tokens_per_block={tokens_per_block} .*, got {block_bytes}",
    ):
        BlockLayout.of_block_bytes(block_bytes, tokens_per_block, dtype=dtype)


@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-4096, ValueError), (2**63, ValueError), (4096.0, TypeError), (True, TypeError)],
)
def test_bad_block_size_is_named(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="block_bytes: .*"):
        BlockLayout.of_block_bytes(value, 16)
    with pytest.raises(error, match="tokens_per_block: .*"):
        BlockLayout.of_block_bytes(4096, value)
