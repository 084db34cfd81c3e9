"""What gather_kv and scatter_kv refuse, by name, with nothing copied and nothing launched."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np
import pytest

from kvpool import PagedKV, gather_kv, scatter_kv
from kvpool.device import launches as copies
from kvpool.device.launches import Grid, KvPlane, KvTokens
from kvpool.device.memory import StridedArray
from kvpool.errors import DeviceError
from tests.kernels.caches import Sizes, make_cache
from tests.kernels.shim import ShimLauncher
from tests.kernels.test_kv_copy import as_memory

CACHE = make_cache("sglang_paged", Sizes(), 2)
SLOTS = np.arange(4)
P, L, H, D = 2, 3, 2, 8
READ_ONLY = np.zeros((P, L, 4, H * D), np.uint16)
READ_ONLY.flags.writeable = False


def staging(*shape: int, dtype: Any = np.uint16) -> np.ndarray:
    return np.full(shape or (P, L, 4, H * D), 7, dtype)


@pytest.mark.parametrize("memory", ["host", "device"])
@pytest.mark.parametrize("call", [gather_kv, scatter_kv])
@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"skip_prefix_n_tokens": -1}, ValueError, "skip_prefix_n_tokens: expected 0 to 4.*got -1"),
        ({"skip_prefix_n_tokens": 5}, ValueError, "skip_prefix_n_tokens: expected 0 to 4.*got 5"),
        ({"skip_prefix_n_tokens": 1.0}, TypeError, "skip_prefix_n_tokens"),
        ({"skip_prefix_n_tokens": True}, TypeError, "skip_prefix_n_tokens"),
        ({"stream": "0"}, TypeError, "stream"),
        ({"thread_blocks": 0}, ValueError, "thread_blocks"),
        ({"thread_blocks": "all"}, TypeError, "thread_blocks"),
        ({"slots": np.arange(3)}, ValueError, "slot_mapping: expected .* at least 4, got \\[3\\]"),
        ({"slots": np.arange(4).reshape(2, 2)}, ValueError, "slot_mapping"),
        ({"slots": np.arange(8)[::2]}, ValueError, "slot_mapping: expected contiguous slots"),
        ({"slots": np.arange(4.0)}, TypeError, "slot_mapping: expected int32 or int64"),
        ({"slots": np.arange(4, dtype=np.int16)}, TypeError, "slot_mapping: expected int32 or int64"),
        ({"slots": np.arange(4, dtype=np.uint64)}, TypeError, "slot_mapping: expected int32 or int64"),
        ({"slots": [0, 1, 2, 3]}, TypeError, "slot_mapping"),
        ({"staging": staging(1, L, 4, H * D)}, ValueError, "expected .*, got "),
        ({"staging": staging(3, L, 4, H * D)}, ValueError, "expected .*, got "),
        ({"staging": staging(P, 2, 4, H * D)}, ValueError, "expected .*, got "),
        ({"staging": staging(P, L, 4, H * D + 1)}, ValueError, "expected .*, got "),
        ({"staging": staging(P, L, 4, H * D, dtype=np.float32)}, ValueError, "expected .*, got "),
        ({"staging": staging(P, L, 4, D, H)}, ValueError, "expected .*, got "),
        ({"staging": staging(P, L, 4)}, ValueError, "expected .*, got "),
        ({"staging": [staging(L, 4, H * D)]}, ValueError, "expected .*, got "),
        ({"staging": [staging(L, 4, H * D), staging(L, 3, H * D)]}, ValueError, "expected .*, got "),
        ({"staging": staging(P, L, 4, H * D, 2)[..., 0]}, ValueError, "expected contiguous elements of a head"),
        ({"staging": np.broadcast_to(staging(P, L, 1, H * D), (P, L, 4, H * D))}, ValueError, "elements overlap"),
        ({"staging": staging()[:, :, ::-1]}, ValueError, "must not be negative"),
        (
            {"staging": None},
            TypeError,
            "(source|out): expected an array with .*, got NoneType",
        ),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_is_copied(
    call: Any, changes: dict[str, Any], error: type[Exception], match: str, memory: str
) -> None:
    launcher, before = ShimLauncher(), CACHE.buffer.copy()
    rest = {"slots": SLOTS, "staging": staging(), **changes}
    slots, out = rest.pop("slots"), rest.pop("staging")
    if memory == "device":
        slots = as_memory(slots, memory) if isinstance(slots, np.ndarray) else slots
        out = as_memory(out, memory) if isinstance(out, np.ndarray) else out
    with pytest.raises(error, match=match):
        call(CACHE.paged(memory), slots, out, launcher=launcher, **rest)
    np.testing.assert_array_equal(CACHE.buffer, before)
    assert not launcher.launches


@pytest.mark.parametrize("call", [gather_kv, scatter_kv])
def test_a_slot_past_the_end_is_named_before_anything_is_copied(call: Any) -> None:
    out, before = staging(), CACHE.buffer.copy()
    with pytest.raises(ValueError, match=r"slot_mapping\[2\]: expected slots of the cache from 0 to 19, got 20"):
        call(CACHE.paged(), np.array([20, 1, 20, 3]), out, skip_prefix_n_tokens=1)
    np.testing.assert_array_equal(CACHE.buffer, before)
    assert (out == 7).all()


def test_what_must_not_be_written_is_not() -> None:
    with pytest.raises(ValueError, match="out: it must not be written"):
        gather_kv(CACHE.paged(), SLOTS, READ_ONLY)
    scatter_kv(CACHE.copy().paged(), SLOTS, READ_ONLY)
    array = np.zeros((4, 2, 8), np.uint16)
    array.flags.writeable = False
    cache = PagedKV.of([array], "mla")
    with pytest.raises(ValueError, match="cache: it must not be written"):
        scatter_kv(cache, SLOTS, np.ones((1, 1, 4, 8), np.uint16))
    gather_kv(cache, SLOTS, np.ones((1, 1, 4, 8), np.uint16))


def test_a_cache_that_is_none_is_named() -> None:
    with pytest.raises(TypeError, match="cache: expected a PagedKV, got ndarray"):
        gather_kv(np.zeros((2, 2)), SLOTS, staging())  # type: ignore[arg-type]


def test_memory_of_a_gpu_is_never_touched_by_the_host() -> None:
    with pytest.raises(ValueError, match="slot_mapping: memory of a GPU"):
        gather_kv(CACHE.paged(), as_memory(SLOTS, "device"), staging())
    mixed = [staging(L, 4, H * D), as_memory(staging(L, 4, H * D), "device")]
    with pytest.raises(ValueError, match="out: all planes must be in one memory"):
        gather_kv(CACHE.paged(), SLOTS, mixed)


def test_host_memory_that_kernels_cannot_reach_is_refused_before_the_launch() -> None:
    class Refusing(ShimLauncher):
        def device_addresses(self, addresses: np.ndarray) -> np.ndarray:
            raise ValueError(f"{addresses}: not pinned")

    launcher = Refusing()
    with pytest.raises(ValueError, match="not pinned"):
        gather_kv(CACHE.paged("device"), as_memory(SLOTS, "device"), staging(), launcher=launcher)
    with pytest.raises(ValueError, match="not pinned"):
        gather_kv(CACHE.paged(), as_memory(SLOTS, "device"), as_memory(staging(), "device"), launcher=launcher)
    assert not launcher.launches


def test_a_gpu_without_its_packages_is_said_to_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"needs CuPy.*\.\[cuda12\].* or .*\.\[cuda13\]"):
        gather_kv(CACHE.paged("device"), as_memory(SLOTS, "device"), as_memory(staging(), "device"))


def test_what_one_launch_cannot_count_is_refused() -> None:
    plane = KvPlane(32, 16, 0, 64, 0, 16, 0, 1, 16)
    for layers, slots, tokens in ((385, 8, 4), (1, 2**32, 4), (1, 8, 2**31)):
        with pytest.raises(ValueError, match="cache: "):
            which = KvTokens(64, 8, slots, tokens, 4)
            copies.kv_copy(np.full((1, layers), 64), [plane], which, gather=True, host=False, grid=Grid(1))


def test_shim_copies_as_many_layers_and_planes_as_one_launch_takes() -> None:
    cache, launcher = make_cache("sglang_paged", Sizes(L=192, B=2, T=2, H=1), 2), ShimLauncher()
    out, again = np.zeros((2, 192, 4, 8), np.uint16), np.zeros((2, 192, 4, 8), np.uint16)
    gather_kv(cache.paged("device"), as_memory(SLOTS, "device"), as_memory(out, "device"), launcher=launcher)
    gather_kv(cache.paged(), SLOTS, again)
    np.testing.assert_array_equal(out, again)
    assert again.any() and len(launcher.launches) == 1


def test_shim_offsets_are_64_bits_wide() -> None:
    # Two blocks 5 GiB apart, two layers 3 GiB apart: address space of which only the ends are touched.
    no_reserve = 0x4000
    try:
        space = mmap.mmap(-1, 12 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    except OSError as error:
        pytest.skip(f"12 GiB of address space are needed: {error}")
    memory = np.frombuffer(space, np.uint8)
    start = -memory.ctypes.data % 64
    base, stride, layer = memory.ctypes.data + start, 5 << 30, 3 << 30
    content = np.random.default_rng(0).integers(0, 256, (1, 2, 2, 16), dtype=np.uint8)
    slots = np.array([6, 1])

    def cache(memory_of: str) -> PagedKV:
        return PagedKV.of(
            StridedArray(base, (2, 2, 4, 16), 1, (layer, stride, 16, 1), memory_of, owner=memory), "| L B T D"
        )

    scatter_kv(cache("device"), as_memory(slots, "device"), as_memory(content, "device"), launcher=ShimLauncher())
    for i, (block, token) in enumerate(((1, 2), (0, 1))):
        for n in range(2):
            place = start + n * layer + block * stride + token * 16
            np.testing.assert_array_equal(memory[place : place + 16], content[0, n, i])
    # Staging as far apart, after the tokens of the cache.
    far = StridedArray(base + 1024, (1, 2, 2, 16), 1, (64, layer, stride, 1), "device", owner=memory)
    gather_kv(cache("device"), as_memory(slots, "device"), far, launcher=ShimLauncher())
    np.testing.assert_array_equal(
        np.lib.stride_tricks.as_strided(memory[start + 1024 :], far.shape, far.steps), content
    )
    back = np.zeros_like(content)
    gather_kv(cache("host"), slots, back)
    np.testing.assert_array_equal(back, content)


# -- memory that overlaps


def one_allocation() -> tuple[np.ndarray, PagedKV]:
    """Four planes of 3 layers with 40 tokens each: the cache has the first 24 of two planes."""
    whole = np.arange(4 * 3 * 40 * 2 * 8, dtype=np.uint16).reshape(4, 3, 10, 4, 2, 8)
    return whole, PagedKV.of(whole[:2, :, :6], "| P L B T H D")


def tokens_of(whole: np.ndarray, planes: Any, tokens: slice) -> np.ndarray:
    return whole.reshape(4, 3, 40, 2, 8)[planes, :, tokens]


@pytest.mark.parametrize("call", [gather_kv, scatter_kv])
def test_staging_that_shares_bytes_with_the_cache_is_refused(call: Any) -> None:
    whole, cache = one_allocation()
    before = whole.copy()
    name = "out" if call is gather_kv else "source"
    lists = [tokens_of(whole, 3, slice(0, 1)), tokens_of(whole, 0, slice(23, 24))]
    for bad in (tokens_of(whole, slice(0, 2), slice(0, 4)), tokens_of(whole, slice(1, 3), slice(23, 27)), lists):
        with pytest.raises(ValueError, match=f"{name}: it shares bytes with the cache"):
            call(cache, SLOTS, bad)
    np.testing.assert_array_equal(whole, before)


@pytest.mark.parametrize("call", [gather_kv, scatter_kv])
def test_staging_between_the_parts_of_a_cache_is_accepted(call: Any) -> None:
    for planes, tokens in ((slice(0, 2), slice(24, 28)), (slice(2, 4), slice(0, 4)), (slice(1, 3), slice(36, 40))):
        whole, cache = one_allocation()
        expected, part = whole.copy(), tokens_of(whole, planes, tokens)
        if call is gather_kv:
            tokens_of(expected, planes, tokens)[...] = tokens_of(expected, slice(0, 2), slice(0, 4))
        else:
            tokens_of(expected, slice(0, 2), slice(0, 4))[...] = tokens_of(expected, planes, tokens)
        call(cache, SLOTS, part)
        np.testing.assert_array_equal(whole, expected)


def test_planes_that_share_bytes_are_refused_where_they_are_written() -> None:
    _, cache = one_allocation()
    apart, row = np.zeros((2, L, 4, H, D), np.uint16), np.zeros((L, 5, H, D), np.uint16)
    interleaved = np.zeros((L, 4, 2, H, D), np.uint16)
    for good in ([apart[0], apart[1]], [interleaved[:, :, 0], interleaved[:, :, 1]]):
        gather_kv(cache, SLOTS, good)
    for bad in ([apart[0], apart[0]], [row[:, :4], row[:, 1:]]):
        with pytest.raises(ValueError, match="out, plane 0 and out, plane 1 share bytes"):
            gather_kv(cache, SLOTS, bad)
        assert not row.any()
        scatter_kv(cache, SLOTS, bad)
