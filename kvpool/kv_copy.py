"""gather_kv and scatter_kv: tokens between a paged KV cache and contiguous staging, every layer and plane in one call."""

from __future__ import annotations

import importlib
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.device.base import stream_argument
from kvpool.device.block_copy import AHEAD, CACHED_BYTES_MAX, LINE, fence, memcpy, stream_run
from kvpool.jit import jit
from kvpool.kernels import copies
from kvpool.kernels.copies import KvPlane, KvTokens
from kvpool.kernels.launch import Launcher
from kvpool.kv_layout import PagedKV, Plane, check_strides, share_bytes, span_of
from kvpool.layout import integer_argument
from kvpool.strided import StridedArray, as_strided


def gather_kv(
    cache: PagedKV, slot_mapping: Any, out: Any, *, skip_prefix_n_tokens: int = 0, stream: Any = None,
    thread_blocks: int | None = None, launcher: Launcher | None = None,
) -> None:  # fmt: skip
    """Copy tokens out of a paged cache into ``out``.

    Parameters
    ----------
    cache
        Where the paged memory lies; kvpool need not own it.
    slot_mapping
        int32 or int64 [at least n], contiguous: token ``t`` lies in slot ``slot_mapping[t]``, a negative one means that it is left out.
        On a GPU, memory of the device or a NumPy array, which is copied.
    out
        [planes, layers, n, heads * head_dim] or [planes, layers, n, heads, head_dim], any strides with contiguous heads, so that a
        transposed view serves another order; or a list with an array [layers, n, ...] for each plane. It says what n is. Only the
        bytes of its last axes count, not their type. Memory of the device or pinned memory where the cache is the device's.
    skip_prefix_n_tokens
        Tokens before it are neither read nor written, nor are their slots looked at; 0 to n.
    stream
        Where the copy is enqueued: anything that ``Device.as_stream`` takes. Both memories must be usable there, and stay until it is
        done. Host memory is copied before the call returns.
    thread_blocks
        The most that the kernel may use; by default few where a bus is the limit, else all that fit.
    launcher
        What runs kernels; by default the ``cuda`` device's.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong type, shape, size or place, before anything is copied; for planes of ``out`` that share bytes, and for
        staging that shares some with the cache. A slot past the end of the cache is an error
        where the slots are read by the host. A GPU reads them later, and leaves such tokens out.
    DeviceError
        Where the device fails.

    Notes
    -----
    Changes nothing but ``out``. Thread-safe as long as nobody writes what it reads. Of tokens with one slot in ``scatter_kv``, the host
    keeps the last; a GPU any, even in parts.
    """
    _copy(cache, slot_mapping, "out", out, skip_prefix_n_tokens, stream, thread_blocks, launcher)


def scatter_kv(
    cache: PagedKV, slot_mapping: Any, source: Any, *, skip_prefix_n_tokens: int = 0, stream: Any = None,
    thread_blocks: int | None = None, launcher: Launcher | None = None,
) -> None:  # fmt: skip
    """Copy tokens from ``source`` into a paged cache. Everything else is as in ``gather_kv``."""
    _copy(cache, slot_mapping, "source", source, skip_prefix_n_tokens, stream, thread_blocks, launcher)


class _Staging(NamedTuple):
    """Checked staging: one row for each plane of address, layer, token and head stride."""

    rows: list[tuple[int, int, int, int]]
    tokens: int
    memory: str


def _copy(
    cache: Any, slot_mapping: Any, name: str, staging: Any, skip: Any, stream: Any, thread_blocks: Any, launcher: Launcher | None
) -> None:
    gather = name == "out"
    if not isinstance(cache, PagedKV):
        raise TypeError(f"cache: a PagedKV is needed, not {type(cache).__name__}")
    found = _staging_argument(name, staging, cache, gather)
    if found.tokens:
        _check_apart(name, found, cache, gather)
    slots = _slots_argument(slot_mapping, found.tokens)
    skip = integer_argument("skip_prefix_n_tokens", skip, 0, found.tokens)
    handle = stream_argument(stream).handle
    if thread_blocks is not None:
        thread_blocks = integer_argument("thread_blocks", thread_blocks, 1, 65535)
    if not (gather or cache.writable):
        raise ValueError("cache: it must not be written")
    on_gpu = "device" in (cache.memory, found.memory)
    if not on_gpu and slots.memory == "device":
        raise ValueError("slot_mapping: memory of a GPU, while cache and staging are the host's")
    if skip == found.tokens:
        return
    planes = [
        KvPlane(p.block_stride, p.token_stride, p.head_stride, base + skip * token, layer, token, head, p.heads, p.run_bytes)
        for p, (base, layer, token, head) in zip(cache.planes, found.rows, strict=True)
    ]
    if on_gpu:
        tokens = skip, found.tokens
        _launch(cache, planes, found.memory, slots, tokens, gather, handle, thread_blocks, launcher or _cuda_launcher())
    else:
        wanted = np.ascontiguousarray(slots.host_view()[skip : found.tokens], dtype=np.int64)
        _check_slots(wanted, skip, cache.slots)
        table = np.array([plane.merged() for plane in planes], dtype=np.int64)
        nbytes = cache.layers * len(wanted) * sum(plane.heads * plane.run_bytes for plane in planes)
        _copy_tokens(cache.bases, table, wanted, cache.tokens_per_block, gather, nbytes > CACHED_BYTES_MAX)


def _staging_argument(name: str, staging: Any, cache: PagedKV, gather: bool) -> _Staging:
    """Where each plane of the staging lies, once its shape and strides are found to fit the cache."""
    if isinstance(staging, (list, tuple)):
        arrays = [as_strided(f"{name}[{p}]", array) for p, array in enumerate(staging)]
        whole = arrays
    else:
        array = as_strided(name, staging)
        whole = [array]
        arrays = [_index(array, p) for p in range(array.shape[0])] if len(array.shape) in (4, 5) else []
    rows = []
    for p, array in enumerate(arrays[: len(cache.planes)]):
        plane, shape, steps = cache.planes[p], array.shape, array.steps
        split = len(shape) == 4
        inner = (plane.heads, plane.run_bytes) if split else (plane.heads * plane.run_bytes,)
        if len(shape) not in (3, 4) or shape[0] != cache.layers or (*shape[2:-1], shape[-1] * array.itemsize) != inner:
            break
        if shape[-1] > 1 and steps[-1] != array.itemsize:
            raise ValueError(f"{name}: the elements of a head must be contiguous, not {steps[-1]} bytes apart")
        head_stride = steps[2] if split else plane.run_bytes
        rows.append((array.address, steps[0], steps[1], head_stride if plane.heads > 1 else 0))
    if len(rows) != len(cache.planes) or len(arrays) != len(rows) or len({array.shape[1] for array in arrays}) != 1:
        needed = f"[{len(cache.planes)}, {cache.layers}, tokens, heads * head_dim] or [..., heads, head_dim] with rows of " + ", ".join(
            f"{plane.heads} * {plane.run_bytes} bytes" for plane in cache.planes
        )
        raise ValueError(f"{name}: {needed} is needed, not {[(array.shape, array.itemsize) for array in whole]}")
    tokens = arrays[0].shape[1]
    for array in whole if tokens else ():
        check_strides(name, array)
    if len({array.memory for array in arrays}) != 1:
        raise ValueError(f"{name}: all planes must be in one memory")
    if gather and not all(array.writable for array in arrays):
        raise ValueError(f"{name}: it must not be written")
    return _Staging(rows, tokens, arrays[0].memory)


def _check_apart(name: str, staging: _Staging, cache: PagedKV, gather: bool) -> None:
    """Raise ValueError where planes that are written share bytes, or where staging shares some with the cache."""
    extents, (begin, end) = (cache.layers, staging.tokens), cache.extent
    # Layers take the place of blocks.
    planes = [
        Plane(layer, token, head, plane.heads, plane.run_bytes)
        for (_, layer, token, head), plane in zip(staging.rows, cache.planes, strict=True)
    ]
    bases = [row[0] for row in staging.rows]
    for p, q in combinations(range(len(planes)), 2) if gather else ():
        if share_bytes(bases[p], planes[p], extents, bases[q], planes[q], extents):
            raise ValueError(f"{name}: planes {p} and {q} share bytes")
    for base, plane in zip(bases, planes, strict=True):
        if base < end and begin < base + span_of(plane, *extents):
            layers, inside = base + plane.block_stride * np.arange(cache.layers), (1, staging.tokens)
            paged = cache.blocks, cache.tokens_per_block
            if any(share_bytes(layers, plane, inside, row, other, paged) for row, other in zip(cache.bases, cache.planes, strict=True)):
                raise ValueError(f"{name}: it shares bytes with the cache")


def _index(array: StridedArray, index: int) -> StridedArray:
    """One plane of an array."""
    address = array.address + index * array.steps[0]
    return StridedArray(address, array.shape[1:], array.itemsize, array.steps[1:], array.memory, array.kind, array.writable, array.owner)


def _slots_argument(slot_mapping: Any, tokens: int) -> StridedArray:
    slots = as_strided("slot_mapping", slot_mapping)
    if slots.kind != "i" or slots.itemsize not in (4, 8):
        raise TypeError(f"slot_mapping: int32 or int64 is needed, not {slots.kind}{8 * slots.itemsize}")
    if len(slots.shape) != 1 or slots.shape[0] < tokens:
        raise ValueError(f"slot_mapping: shape [n] with n at least {tokens} is needed, not {list(slots.shape)}")
    if slots.shape[0] > 1 and slots.steps[0] != slots.itemsize:
        raise ValueError(f"slot_mapping: it must be contiguous, not {slots.steps[0]} bytes from one slot to the next")
    return slots


def _check_slots(slots: npt.NDArray[np.int64], skip: int, end: int) -> None:
    if slots.max() >= end:
        bad = int(np.argmax(slots >= end))
        raise ValueError(f"slot_mapping[{skip + bad}]={slots[bad]}: the cache has slots 0 to {end - 1}")


def _cuda_launcher() -> Launcher:
    """The launcher of the only module that may import a driver package; imported when the first launch needs it."""
    try:
        module = importlib.import_module("kvpool.device.cuda")
    except ImportError as error:
        raise ImportError("memory of a GPU needs the extra 'cuda12' or 'cuda13' of kvpool") from error
    found: Launcher = module.launcher()
    return found


def _launch(
    cache: PagedKV, planes: list[KvPlane], staging_memory: str, slots: StridedArray, tokens: tuple[int, int], gather: bool, stream: int,
    thread_blocks: int | None, launcher: Launcher,
) -> None:  # fmt: skip
    """Enqueue the copy of the tokens from the first to before the second number, whose staging the planes point to."""
    first, end = tokens
    bases = cache.bases
    if cache.memory == "host":
        bases = np.vectorize(launcher.device_address, otypes=[np.int64])(bases)
    if staging_memory == "host":
        planes = [plane._replace(staging=launcher.device_address(plane.staging)) for plane in planes]
    address = slots.address + first * slots.itemsize
    if slots.memory == "host":
        wanted = np.ascontiguousarray(slots.host_view()[first:end])
        _check_slots(wanted, first, cache.slots)
        address = launcher.upload(wanted, stream)
    which = KvTokens(address, slots.itemsize, cache.slots, end - first, cache.tokens_per_block)
    host = "host" in (cache.memory, staging_memory)
    launch = copies.kv_copy(
        bases, planes, which, gather=gather, host=host, multiprocessors=launcher.multiprocessors, chosen=thread_blocks
    )  # fmt: skip
    launcher.launch(launch, stream)


@jit
def _copy_tokens(bases: Any, planes: Any, slots: Any, tokens_per_block: int, gather: bool, streaming: bool) -> None:
    """The copy on the CPU. ``planes`` int64[planes, 9] has rows as in KvPlane, ``slots`` are checked."""
    for p in range(bases.shape[0]):
        token_stride, head_stride, heads, run = planes[p, 1], planes[p, 2], planes[p, 7], planes[p, 8]
        staging_token, staging_head = planes[p, 5], planes[p, 6]
        gap = planes[p, 0] - tokens_per_block * token_stride
        joined = heads == 1 and token_stride == staging_token == run
        # So many tokens later is what is fetched meanwhile.
        later = max(1, AHEAD // (heads * run))
        for layer in range(bases.shape[1]):
            base, t = bases[p, layer], 0
            while t < slots.shape[0]:
                if slots[t] < 0:
                    t += 1
                    continue
                count = _joined_tokens(slots, t, tokens_per_block, gap == 0) if joined else 1
                paged = base + slots[t] * token_stride + slots[t] // tokens_per_block * gap
                staging = planes[p, 3] + layer * planes[p, 4] + t * staging_token
                if gather:
                    slot = max(slots[min(t + later, slots.shape[0] - 1)], 0)
                    ahead = base + slot * token_stride + slot // tokens_per_block * gap
                    _copy_heads(staging, staging_head, paged, head_stride, ahead, heads, count * run, streaming)
                else:
                    ahead = staging + later * staging_token
                    _copy_heads(paged, head_stride, staging, staging_head, ahead, heads, count * run, streaming)
                t += count
    if streaming:
        fence()


@jit
def _joined_tokens(slots: Any, first: int, tokens_per_block: int, blocks_joined: bool) -> int:
    """How many tokens from the first one on, which is not left out, have slots that follow each other without a gap."""
    count = 1
    while first + count < slots.shape[0] and slots[first + count] == slots[first] + count:
        if not blocks_joined and slots[first + count] % tokens_per_block == 0:
            break
        count += 1
    return count


@jit
def _copy_heads(
    target: int, target_stride: int, source: int, source_stride: int, ahead: int, heads: int, run: int, streaming: bool
) -> None:
    for _ in range(heads):
        if streaming:
            _stream(target, source, ahead, run)
        else:
            memcpy(target, source, run)
        target += target_stride
        source += source_stride
        ahead += source_stride


@jit
def _stream(target: int, source: int, ahead: int, nbytes: int) -> None:
    """Copy around the caches, but for the lines at both ends of the target that are not its own."""
    head = min(-target % LINE, nbytes)
    lines = (nbytes - head) // LINE * LINE
    memcpy(target, source, head)
    # A long run looks ahead inside itself, and only from its end into another one.
    within = max(0, lines - AHEAD)
    stream_run(target + head, source + head, source + head + AHEAD, within)
    stream_run(target + head + within, source + head + within, ahead, lines - within)
    memcpy(target + head + lines, source + head + lines, nbytes - head - lines)
