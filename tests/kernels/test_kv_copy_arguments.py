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


def staging(*shape: int, dtype: Any = np.uint16) -> np.ndarray:
    return np.full(shape or (P, L, 4, H * D), 7, dtype)


REFUSED: list[tuple[str, str, list[Any]]] = [
    ("skip_prefix_n_tokens", "skip_prefix_n_tokens: ", [-1, 5, 1.0, True]),
    ("stream", "stream: ", ["0"]),
    ("thread_blocks", "thread_blocks: ", [0, "all"]),
    ("slot_mapping", r"slot_mapping: expected .* at least 4, got \[3\]", [np.arange(3)]),
    ("slot_mapping", "slot_mapping: ", [np.arange(4).reshape(2, 2), [0, 1, 2, 3]]),
    ("slot_mapping", "slot_mapping: expected contiguous slots", [np.arange(8)[::2]]),
    ("slot_mapping", "slot_mapping: expected int32 or int64", [np.arange(4, dtype=d) for d in ("f8", "i2", "u8")]),
    ("staging", "expected .*, got ", [staging(*shape) for shape in ((1, L, 4, H * D), (P, 2, 4, H * D), (P, L, 4))]),
    ("staging", "expected .*, got ", [staging(P, L, 4, H * D + 1), staging(P, L, 4, D, H), [staging(L, 4, H * D)]]),
    ("staging", "expected .*, got ", [staging(dtype=np.float32), [staging(L, n, H * D) for n in (4, 3)]]),
    ("staging", "expected contiguous elements of a head", [staging(P, L, 4, H * D, 2)[..., 0]]),
    ("staging", "elements overlap", [np.broadcast_to(staging(P, L, 1, H * D), (P, L, 4, H * D))]),
    ("staging", "must not be negative", [staging()[:, :, ::-1]]),
    ("staging", "(source|out): expected an array with .*, got NoneType", [None]),
]


@pytest.mark.parametrize("memory", ["host", "device"])
@pytest.mark.parametrize("call", [gather_kv, scatter_kv])
@pytest.mark.parametrize(("name", "message", "values"), REFUSED)
def test_a_wrong_argument_is_named_and_nothing_is_copied(
    call: Any, name: str, message: str, values: list[Any], memory: str
) -> None:
    launcher, before = ShimLauncher(), CACHE.buffer.copy()
    for value in values:
        options: dict[str, Any] = {"slot_mapping": SLOTS, "staging": staging(), name: value}
        arrays = [options.pop(array) for array in ("slot_mapping", "staging")]
        given = [as_memory(array, memory) if isinstance(array, np.ndarray) else array for array in arrays]
        with pytest.raises((TypeError, ValueError), match=message):
            call(CACHE.paged(memory), *given, launcher=launcher, **options)
    np.testing.assert_array_equal(CACHE.buffer, before)
    assert not launcher.launches


def test_memory_that_is_read_only_of_a_gpu_or_past_the_end_is_refused() -> None:
    before, first, host = CACHE.buffer.copy(), CACHE.paged(), staging()
    read_only, layer = staging(), np.zeros((4, 2, 8), np.uint16)
    read_only.flags.writeable = layer.flags.writeable = False
    cache, values = PagedKV.of([layer], "mla"), np.ones((1, 1, 4, 8), np.uint16)
    mixed = [staging(L, 4, H * D), as_memory(staging(L, 4, H * D))]
    refused: list[tuple[Any, Any, Any, Any, str]] = [
        (gather_kv, first, SLOTS, read_only, "out: it must not be written"),
        (scatter_kv, cache, SLOTS, values, "cache: it must not be written"),
        (gather_kv, first, as_memory(SLOTS), host, "slot_mapping: memory of a GPU"),
        (gather_kv, first, SLOTS, mixed, "out: all planes must be in one memory"),
        (gather_kv, np.zeros((2, 2)), SLOTS, host, "cache: expected a PagedKV, got ndarray"),
    ]
    past = r"slot_mapping\[2\]: expected slots of the cache from 0 to 19, got 20"
    refused += [(call, first, np.array([9, 1, 20, 3]), host, past) for call in (gather_kv, scatter_kv)]
    for call, paged, slots, staged, message in refused:
        with pytest.raises((TypeError, ValueError), match=message):
            call(paged, slots, staged)
    np.testing.assert_array_equal(CACHE.buffer, before)
    assert (host == 7).all()
    scatter_kv(CACHE.copy().paged(), SLOTS, read_only)
    gather_kv(cache, SLOTS, values)


def test_host_memory_that_kernels_cannot_reach_is_refused_before_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(ShimLauncher):
        def device_addresses(self, addresses: np.ndarray) -> np.ndarray:
            raise ValueError(f"{addresses}: not pinned")

    launcher = Refusing()
    for paged, staged in ((CACHE.paged("device"), staging()), (CACHE.paged(), as_memory(staging()))):
        with pytest.raises(ValueError, match="not pinned"):
            gather_kv(paged, as_memory(SLOTS), staged, launcher=launcher)
    assert not launcher.launches
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"needs CuPy.*\.\[cuda12\].* or .*\.\[cuda13\]"):
        gather_kv(CACHE.paged("device"), as_memory(SLOTS), as_memory(staging()))


def test_shim_copies_as_many_layers_and_planes_as_one_launch_takes_and_more_are_refused() -> None:
    cache, launcher = make_cache("sglang_paged", Sizes(L=192, B=2, T=2, H=1), 2), ShimLauncher()
    out, again = np.zeros((2, 192, 4, 8), np.uint16), np.zeros((2, 192, 4, 8), np.uint16)
    gather_kv(cache.paged("device"), as_memory(SLOTS), as_memory(out), launcher=launcher)
    gather_kv(cache.paged(), SLOTS, again)
    np.testing.assert_array_equal(out, again)
    assert again.any() and len(launcher.launches) == 1
    plane = KvPlane(32, 16, 0, 64, 0, 16, 0, 1, 16)
    for layers, slots, tokens in ((385, 8, 4), (1, 2**32, 4), (1, 8, 2**31)):
        with pytest.raises(ValueError, match="cache: "):
            which = KvTokens(64, 8, slots, tokens, 4)
            copies.kv_copy(np.full((1, layers), 64), [plane], which, gather=True, host=False, grid=Grid(1))


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

    scatter_kv(cache("device"), as_memory(slots), as_memory(content), launcher=ShimLauncher())
    for i, (block, token) in enumerate(((1, 2), (0, 1))):
        for n in range(2):
            place = start + n * layer + block * stride + token * 16
            np.testing.assert_array_equal(memory[place : place + 16], content[0, n, i])
    # Staging as far apart, after the tokens of the cache.
    far = StridedArray(base + 1024, (1, 2, 2, 16), 1, (64, layer, stride, 1), "device", owner=memory)
    gather_kv(cache("device"), as_memory(slots), far, launcher=ShimLauncher())
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


def tokens_of(whole: np.ndarray, planes: Any, first: int, end: int) -> np.ndarray:
    return whole.reshape(4, 3, 40, 2, 8)[planes, :, first:end]


@pytest.mark.parametrize("call", [gather_kv, scatter_kv])
def test_staging_that_shares_bytes_with_the_cache_is_refused(call: Any) -> None:
    whole, cache = one_allocation()
    before = whole.copy()
    name = "out" if call is gather_kv else "source"
    lists = [tokens_of(whole, 3, 0, 1), tokens_of(whole, 0, 23, 24)]
    for bad in (tokens_of(whole, slice(0, 2), 0, 4), tokens_of(whole, slice(1, 3), 23, 27), lists):
        with pytest.raises(ValueError, match=f"{name}: it shares bytes with the cache"):
            call(cache, SLOTS, bad)
    np.testing.assert_array_equal(whole, before)


@pytest.mark.parametrize("call", [gather_kv, scatter_kv])
@pytest.mark.parametrize(("plane", "first"), [(0, 24), (2, 0), (1, 36)])
def test_staging_between_the_parts_of_a_cache_is_accepted(call: Any, plane: int, first: int) -> None:
    whole, cache = one_allocation()
    expected, place = whole.copy(), (slice(plane, plane + 2), first, first + 4)
    cached, staged = tokens_of(expected, slice(0, 2), 0, 4), tokens_of(expected, *place)
    target, source = (staged, cached) if call is gather_kv else (cached, staged)
    target[...] = source
    call(cache, SLOTS, tokens_of(whole, *place))
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
