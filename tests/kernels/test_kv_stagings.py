"""Several stagings in one call are one staging that was cut: the slots and the skipped prefix run over all of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvpool import StagingBuffers, gather_kv, scatter_kv
from tests.kernels.caches import Sizes, make_cache
from tests.kernels.shim import ShimLauncher
from tests.kernels.test_kv_copy import as_memory, reference_copy, slots_for, staging_for
from tests.kernels.test_kv_copy import options as options


def cut(staging: np.ndarray, ends: list[int]) -> list[np.ndarray]:
    """Memory of its own for the tokens up to each end."""
    return [np.ascontiguousarray(staging[:, :, first:end]) for first, end in pairwise([0, *ends])]


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("name", ["vllm_flash_attention", "flashinfer_hnd", "mla", "vllm_fused"])
def test_the_skip_is_exact_to_the_token_over_all_stagings(name: str, gather: bool, options: dict[str, Any]) -> None:
    random, memory, call = np.random.default_rng(4), options.pop("memory"), gather_kv if gather else scatter_kv
    for skip in range(12):
        cache = make_cache(name, Sizes(), 2)
        slots, whole = slots_for(cache, 11, random), staging_for(cache, 11, random)
        slots[:skip] = 10**6  # invalid slots, which a skip must not check
        parts = cut(whole, [4, 4, 5, 11])
        expected_cache, expected = cache.copy(), whole.copy()
        reference_copy(gather, expected_cache, slots, expected, skip)
        buffers = StagingBuffers([as_memory(part, memory) for part in parts])
        call(cache.paged(memory), as_memory(slots, memory), buffers, skip_prefix_n_tokens=skip, **options)
        np.testing.assert_array_equal(cache.buffer, expected_cache.buffer)
        np.testing.assert_array_equal(np.concatenate(parts, axis=2), expected)


def test_each_staging_may_be_planes_and_have_strides_of_its_own() -> None:
    random = np.random.default_rng(5)
    cache = make_cache("vllm_flash_attention", Sizes(), 2)
    slots, first = slots_for(cache, 7, random), staging_for(cache, 3, random, "tokens first")
    second = staging_for(cache, 4, random, "heads apart")
    expected = [first.copy(), second.copy()]
    for part, part_slots in zip(expected, (slots[:3], slots[3:]), strict=True):
        reference_copy(True, cache, part_slots, part, 0)
    gather_kv(cache.paged("host"), slots, StagingBuffers([first, list(second)]))
    np.testing.assert_array_equal(first, expected[0])
    np.testing.assert_array_equal(second, expected[1])


def test_slots_that_the_host_has_are_uploaded_once() -> None:
    cache, launcher = make_cache("mla", Sizes(), 2), ShimLauncher()
    parts = cut(staging_for(cache, 6, np.random.default_rng(0)), [2, 6])
    buffers = StagingBuffers([as_memory(part, "device") for part in parts])
    gather_kv(cache.paged("device"), np.arange(6), buffers, launcher=launcher)
    assert len(launcher.launches) == 2


@pytest.mark.parametrize("gather", [True, False])
def test_bad_stagings_are_named_and_nothing_is_copied(gather: bool) -> None:
    cache = make_cache("vllm_flash_attention", Sizes(), 2)
    first, other = cut(staging_for(cache, 8, np.random.default_rng(0)), [4, 8])
    before, slots = cache.buffer.copy(), np.arange(8)
    call, name = (gather_kv, "out") if gather else (scatter_kv, "source")
    refused: list[tuple[list[Any], dict[str, Any], str]] = [
        ([], {}, f"{name}: expected one buffer or more, got none"),
        ([first, other[:, :1]], {}, rf"{name}\[1\]"),
        ([first, None], {}, rf"{name}\[1\]"),
        ([first, as_memory(other)], {}, "one memory"),
        ([first, StagingBuffers([other])], {}, rf"{name}\[1\]"),
        ([first, other], {"slot_mapping": slots[:7]}, "n at least 8"),
        ([first, other], {"skip_prefix_n_tokens": 9}, "skip_prefix_n_tokens: expected 0 to 8.*got 9"),
    ]
    for buffers, changes, message in refused:
        with pytest.raises((TypeError, ValueError), match=message):
            call(cache.paged(), **{name: StagingBuffers(buffers), "slot_mapping": slots} | changes)
    np.testing.assert_array_equal(cache.buffer, before)


def test_stagings_that_are_written_share_no_bytes() -> None:
    cache = make_cache("vllm_flash_attention", Sizes(), 2)
    whole = staging_for(cache, 8, np.random.default_rng(0), "tokens first")
    views, slots = [whole[:, :, :5], whole[:, :, 5:]], np.arange(8)
    gather_kv(cache.paged("host"), slots, StagingBuffers(views))
    overlapping = StagingBuffers([whole[:, :, :5], whole[:, :, 4:7]])
    with pytest.raises(ValueError, match=r"out\[0\], plane . and out\[1\], plane . share bytes"):
        gather_kv(cache.paged("host"), slots, overlapping)
    scatter_kv(cache.paged("host"), slots, overlapping)
