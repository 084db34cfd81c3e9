"""gather_kv and scatter_kv against the plain reference: on the CPU, and as the CUDA kernel run by the shim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvpool import PagedKV, gather_kv, scatter_kv
from kvpool.common.arrays.layout import BlockLayout
from kvpool.common.arrays.paged import LAYOUTS
from kvpool.common.arrays.strided import StridedArray, as_strided
from kvpool.device import CpuDevice
from kvpool.device import launches as copies
from kvpool.device.launches import Grid
from kvpool.device.memory import kv_copy
from tests.device import reference
from tests.device.pools import DEVICE_BLOCKS, make_pools
from tests.kernels.caches import AXES, Cache, Sizes, aligned, make_cache
from tests.kernels.shim import ShimLauncher

SIZES = [Sizes(), Sizes(2, 2, 4, 3, 3, 5), Sizes(2, 1, 3, 16, 1, 64), Sizes(2, 2, 3, 2, 5, 1)]
Copy = Callable[..., None]


def slots_for(cache: Cache, tokens: int, random: np.random.Generator, dtype: Any = np.int64) -> np.ndarray:
    """Different slots in any order, some of them negative."""
    slots = random.permutation(cache.sizes.B * cache.sizes.T)[:tokens].astype(dtype)
    slots[random.random(tokens) < 0.2] = random.choice([-1, -7])
    return slots


def reference_copy(gather: bool, cache: Cache, slots: np.ndarray, staging: np.ndarray, skip: int) -> None:
    """The reference, plane by plane and layer by layer, since these need not lie in one array."""
    call = reference.gather_kv if gather else reference.scatter_kv
    for p, row in enumerate(cache.views()):
        for i, view in enumerate(row):
            call(view[None, None], slots, staging[p : p + 1, i : i + 1], skip)


def staging_for(cache: Cache, tokens: int, random: np.random.Generator, order: str = "plain") -> np.ndarray:
    """[planes, layers, tokens, heads, head_dim] of random bytes: in C order, token first, or with heads apart."""
    plain = (cache.sizes.P, cache.sizes.L, tokens, cache.sizes.H, cache.sizes.D)
    axes = {"plain": (0, 1, 2, 3, 4), "tokens first": (2, 1, 0, 3, 4), "heads apart": (3, 0, 1, 2, 4)}[order]
    content = random.integers(0, 256, int(np.prod(plain)) * cache.dtype.itemsize, dtype=np.uint8)
    values = aligned(content).view(cache.dtype).reshape([plain[axis] for axis in axes])
    return values.transpose(np.argsort(axes))


def as_memory(array: np.ndarray, memory: str = "device") -> StridedArray:
    """The same bytes, said to be memory of a GPU where they are to be copied by a kernel."""
    return replace(as_strided("array", array), memory=memory)


def shim_gather(cache: Cache, slots: Any, staging: np.ndarray, launcher: ShimLauncher, **options: Any) -> None:
    """Gather by the kernel, all in memory of a GPU, or ``slots`` in that of the host where they are a list."""
    where = np.array(slots) if isinstance(slots, list) else as_memory(slots)
    gather_kv(cache.paged("device"), where, as_memory(staging), launcher=launcher, **options)


def check(
    cache: Cache,
    slots: np.ndarray,
    staging: np.ndarray,
    skip: int,
    *,
    gather: bool,
    memory: str,
    flat: bool = False,
    **options: Any,
) -> None:
    """One copy; every byte of both buffers is compared, so that nothing else is touched."""
    expected_cache, expected = cache.copy(), staging.copy()
    reference_copy(gather, expected_cache, slots, expected, skip)
    staged: Any = staging.reshape(*staging.shape[:3], -1) if flat else staging
    assert np.shares_memory(staged, staging)
    call: Copy = gather_kv if gather else scatter_kv
    call(cache.paged(memory), as_memory(slots, memory), as_memory(staged, memory), skip_prefix_n_tokens=skip, **options)
    np.testing.assert_array_equal(cache.buffer, expected_cache.buffer)
    np.testing.assert_array_equal(staging, expected)


@pytest.fixture(params=["cpu", "cpu, around the caches", "shim", "shim, few threads"])
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """How to copy. Few threads go around several times, as in large copies."""
    if request.param.startswith("cpu"):
        if request.param != "cpu":
            monkeypatch.setattr(kv_copy, "CACHED_BYTES_MAX", -1)
        return {"memory": "host"}
    if request.param == "shim, few threads":
        monkeypatch.setattr(copies, "THREADS", 32)
    return {"memory": "device", "launcher": ShimLauncher(Grid(1)), "thread_blocks": 3}


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("name", sorted({*AXES, *LAYOUTS}))
def test_every_layout_is_copied_as_the_reference_does(name: str, itemsize: int, options: dict[str, Any]) -> None:
    random = np.random.default_rng(itemsize)
    for number, sizes in enumerate(SIZES):
        cache = make_cache(name, sizes, itemsize, padding=number % 3, seed=number)
        tokens = int(random.integers(1, min(13, cache.sizes.B * cache.sizes.T) + 1))
        for gather in (True, False):
            order = ["plain", "tokens first", "heads apart"][int(random.integers(3))]
            slots = slots_for(cache, tokens, random, [np.int32, np.int64][number % 2])
            staging, skip = staging_for(cache, tokens, random, order), int(random.integers(0, tokens + 1))
            check(cache, slots, staging, skip, gather=gather, flat=order != "heads apart", **options)


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("padding", [0, 1])
def test_tokens_that_follow_each_other_are_copied_like_any_others(
    padding: int, gather: bool, options: dict[str, Any]
) -> None:
    """Runs inside and across blocks, broken off by ends, tokens that are left out, repeated and out of order; short and
    long ones."""
    for seed, sizes in enumerate((Sizes(), Sizes(B=12, T=16, H=4, D=48))):
        print("seed", seed)
        random = np.random.default_rng(seed)
        cache = make_cache("vllm_flash_attention", sizes, 2, padding=padding, seed=seed)
        end = cache.sizes.B * cache.sizes.T
        runs: list[np.ndarray] = []
        for _ in range(6):
            first = int(random.integers(0, end))
            runs += [
                np.arange(first, min(end, first + int(random.integers(1, end)))),
                np.arange(-int(random.integers(1, 4)), 3),
            ]
        slots = np.concatenate(runs)
        check(cache, slots, staging_for(cache, len(slots), random), 2, gather=True, **options)
        # Among tokens with one slot, only the host decides which stays.
        each = slots.copy()
        if options["memory"] == "device":
            each[np.setdiff1d(np.arange(len(slots)), np.unique(slots, return_index=True)[1])] = -1
        check(cache, each, staging_for(cache, len(slots), random), 0, gather=gather, **options)


def test_shim_moves_words_as_wide_as_everything_divides() -> None:
    launcher = ShimLauncher()
    for name, sizes, itemsize, padding, width in [
        ("flashinfer", Sizes(), 2, 0, 16),
        ("flashinfer_hnd", Sizes(), 2, 0, 16),
        ("flashinfer", Sizes(), 2, 4, 8),
        ("flashinfer", Sizes(), 2, 2, 4),
        ("flashinfer_hnd", Sizes(D=6), 2, 0, 4),
        # Heads that follow each other on both sides are one run.
        ("flashinfer", Sizes(D=4), 2, 0, 16),
        ("flashinfer_hnd", Sizes(D=4), 2, 0, 8),
        ("flashinfer_hnd", Sizes(D=7), 2, 0, 2),
        ("flashinfer_hnd", Sizes(D=7), 1, 0, 1),
    ]:
        cache = make_cache(name, sizes, itemsize, padding)
        staging = staging_for(cache, 3, np.random.default_rng(0))
        check(cache, np.arange(3), staging, 0, gather=True, memory="device", launcher=launcher)
        assert launcher.launches[-1].kernel == f"kv_copy_{width}", (name, sizes, itemsize, padding)


def test_shim_leaves_out_slots_past_the_end_that_only_the_gpu_can_see() -> None:
    """Those that the host sees are refused, and uploaded otherwise."""
    cache, launcher = make_cache("sglang_paged", Sizes(), 2), ShimLauncher()
    for slots, skip in ((np.array([3, 20, 2**62, 4]), 0), ([99, 1, -1, 4], 1), ([3] * 4, 4)):
        staging = staging_for(cache, 4, np.random.default_rng(0))
        before, expected = cache.buffer.copy(), staging.copy()
        reference_copy(True, cache, np.where(np.array(slots) < 20, slots, -1), expected, skip)
        shim_gather(cache, slots, staging, launcher, skip_prefix_n_tokens=skip)
        np.testing.assert_array_equal(staging, expected)
        np.testing.assert_array_equal(cache.buffer, before)
    with pytest.raises(ValueError, match=r"slot_mapping\[3\]: .*20"):
        shim_gather(cache, [3, 1, -1, 20], staging, launcher)
    shim_gather(cache, np.arange(3), staging[:, :, :0], launcher)
    assert len(launcher.launches) == 2, "none where all tokens are skipped, or there are none"


def test_shim_copies_between_a_gpu_and_pinned_host_memory_with_few_thread_blocks() -> None:
    launcher = ShimLauncher(Grid(132))
    cache = make_cache("sglang_paged", Sizes(B=40, T=16, H=8, D=64), 2)
    staging, slots = staging_for(cache, 600, np.random.default_rng(0)), np.arange(600)
    for paged, other in (("device", "host"), ("host", "device")):
        expected = staging.copy()
        reference_copy(True, cache, slots, expected, 0)
        staging[:] = 0
        gather_kv(cache.paged(paged), as_memory(slots), as_memory(staging, other), launcher=launcher)
        np.testing.assert_array_equal(staging, expected)
    shim_gather(cache, slots, staging, launcher)
    shim_gather(cache, slots, staging, launcher, thread_blocks=5)
    assert [launch.thread_blocks for launch in launcher.launches] == [8, 8, 57, 5]


def test_shim_threads_load_a_slot_once_and_walk_the_layers_with_it() -> None:
    cache = make_cache("sglang_paged", Sizes(P=2, L=32, B=8, T=16, H=8, D=64), 2)
    permuted = np.random.default_rng(0).permutation(128)[:100]
    for thread_blocks, chunks, slots in ((1, 1, permuted), (4, 2, permuted), (400, 8, permuted.astype(np.int32))):
        launcher = ShimLauncher(Grid(132))
        staging = staging_for(cache, 100, np.random.default_rng(1))
        check(cache, slots, staging, 0, gather=True, memory="device", launcher=launcher, thread_blocks=thread_blocks)
        words = 8 * 64 * 2 // 16
        assert launcher.table_loads == 2 * 100 * words * chunks * slots.itemsize // 4, (
            "planes, tokens, words, chunks of layers where threads are many, words of a slot"
        )


def test_planes_of_different_widths_are_one_launch(options: dict[str, Any]) -> None:
    """Values and scales of quantized keys in one block: not affine as one plane, but as two."""
    B, T, L, widths = 4, 8, 2, (128, 4)
    memory, launcher, slots = options.pop("memory"), options.get("launcher"), np.array([31, 0, -1, 9, 8])
    blocks = np.random.default_rng(1).integers(0, 256, (L, B, T * sum(widths)), dtype=np.uint8)
    parts = zip(np.split(blocks, [T * widths[0]], axis=2), widths, strict=True)
    planes = [part.reshape(L, B, T, width) for part, width in parts]
    cache = PagedKV.of([[as_memory(view, memory) for view in plane] for plane in planes], "P L | B T D")
    out = [np.zeros((L, 5, width), np.uint8) for width in widths]
    staged = [as_memory(plane, memory) for plane in out]
    gather_kv(cache, as_memory(slots, memory), staged, skip_prefix_n_tokens=1, **options)
    for actual, plane, width in zip(out, planes, widths, strict=True):
        expected = plane.reshape(L, B * T, width)[:, slots]
        expected[:, [0, 2]] = 0  # skipped, and without a slot
        np.testing.assert_array_equal(actual, expected)
    assert launcher is None or len(launcher.launches) == 1


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("order", ["layer_first", "block_first"])
@pytest.mark.parametrize("tokens", ["NHD", "HND"])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_tiers_of_a_pool_are_gathered_and_scattered_on_the_cpu(order: str, tokens: str, tier: str, planes: int) -> None:
    layout = BlockLayout(2, 3, 8, 4, dtype="uint16", order=order, tokens=tokens, planes=planes)
    pools, slots = make_pools(CpuDevice(), layout), np.array([17, -1, 5])
    memory, first = (pools.device_pool, 0) if tier == "device" else (pools.host_pool, DEVICE_BLOCKS)
    cache = PagedKV.of_pool(layout, memory, tier)
    assert cache.writable and not cache.bases.flags.writeable

    def token(slot: int) -> np.ndarray:
        """[planes, layers, heads * head_dim] of a token."""
        view = reference.block_view(layout, pools.device_pool, pools.host_pool, first + slot // 4)
        return view[:, :, slot % 4].swapaxes(0, 1).reshape(planes, 2, 24)

    out = np.zeros((planes, 2, 3, 24), np.uint16)
    gather_kv(cache, slots, out)
    np.testing.assert_array_equal(out, np.stack([token(17), np.zeros_like(out[:, :, 0]), token(5)], axis=2))
    before = memory.copy()
    scatter_kv(cache, np.array([18, 3, 4]), out, skip_prefix_n_tokens=2)
    np.testing.assert_array_equal(token(4), token(5))
    assert (memory != before).sum() <= planes * 2 * 24
