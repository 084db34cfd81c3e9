"""gather_kv and scatter_kv: copy tokens between a paged KV cache and contiguous staging, every layer and plane in one
call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvpool.common.arrays import Array
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.arrays.paged import PagedKV, check_strides, share_bytes, sharing
from kvpool.common.arrays.strided import AnyArray, StridedArray, as_strided
from kvpool.common.jit import jit
from kvpool.common.jit.intrinsics import memcpy
from kvpool.device.base import StreamLike, stream_argument
from kvpool.device.copy_plan import CACHED_BYTES_MAX
from kvpool.device.cpu import AHEAD, fence, stream_bytes
from kvpool.device.cuda import launcher_at
from kvpool.device.launches import KvPlane, KvTokens, Launcher, kv_copy, kv_kernel

Buffers: TypeAlias = "AnyArray | Sequence[AnyArray] | StagingBuffers"


class StagingBuffers(tuple[Any, ...]):
    """Several buffers for one ``gather_kv`` or ``scatter_kv``, such as the chunks of a prompt.

    Parameters
    ----------
    iterable : iterable of arrays
        Each is what those calls take alone. All lie in one memory. The tokens of the second follow those of the first.
    """

    __slots__ = ()


def gather_kv(
    cache: PagedKV,
    slot_mapping: AnyArray,
    out: Buffers,
    *,
    skip_prefix_n_tokens: int = 0,
    stream: StreamLike = None,
    thread_blocks: int | None = None,
    launcher: Launcher | None = None,
) -> None:
    """Copy tokens out of a paged cache into ``out``.

    Parameters
    ----------
    cache : PagedKV
        Where the paged memory is. Any engine's cache will do.
    slot_mapping : array of int32 or int64[n or more]
        Contiguous. Token ``t`` is in slot ``slot_mapping[t]``; a negative slot leaves the
        token out. On a GPU: device memory, or a NumPy array, which is copied.
    out : array, list of arrays, or StagingBuffers
        Shaped [planes, layers, n, heads * head_dim] or [planes, layers, n, heads, head_dim], or a list with an array
        [layers, n, ...] for each plane. n is the number of tokens. Heads are contiguous; other strides are free, so a
        transposed view gives another order. Only the bytes of the last axes count, not their type. If the cache is in
        device memory: device memory or pinned memory. Or ``StagingBuffers`` of several, whose tokens follow each
        other; n is of all.
    skip_prefix_n_tokens : int, default 0
        Tokens before it are neither read nor written, nor are their slots looked at; 0 to n. With ``StagingBuffers``,
        tokens of all of them are counted.
    stream : Stream, int, or stream of another package, optional
        Where the copy is enqueued: anything that ``Device.as_stream`` takes. Both memories must be usable there, and
        stay until it is done. Host memory is copied before the call returns.
    thread_blocks : int, optional
        The most thread blocks that the kernel may use. By default few where a bus is the limit, else all that fit.
    launcher : Launcher, optional
        What runs kernels. By default the ``cuda`` device's, on the GPU that has the memory, whichever GPU is current.

    Raises
    ------
    TypeError, ValueError
        Before anything is copied: for an argument of the wrong type, shape, size or place, for planes of ``out`` that
        share bytes, and for staging that shares bytes with the cache. A slot past the end of the cache is an error
        where the host reads the slots. A GPU reads them later, and leaves such tokens out.
    DeviceError
        Where the device fails.

    Notes
    -----
    Changes nothing but ``out``. Thread-safe as long as its input is not written. If several tokens have one slot in
    ``scatter_kv``, the host keeps the last of them; a GPU keeps any, even parts of several.
    """
    _copy(cache, slot_mapping, "out", out, skip_prefix_n_tokens, stream, thread_blocks, launcher)


def scatter_kv(
    cache: PagedKV,
    slot_mapping: AnyArray,
    source: Buffers,
    *,
    skip_prefix_n_tokens: int = 0,
    stream: StreamLike = None,
    thread_blocks: int | None = None,
    launcher: Launcher | None = None,
) -> None:
    """Copy tokens from ``source`` into a paged cache.

    Parameters
    ----------
    cache : PagedKV
        Where the paged memory is. It must be writable.
    slot_mapping : array of int32 or int64[n or more]
        As for ``gather_kv``.
    source : array, list of arrays, or StagingBuffers
        As ``out`` of ``gather_kv``.
    skip_prefix_n_tokens : int, default 0
        As for ``gather_kv``.
    stream : Stream, int, or stream of another package, optional
        As for ``gather_kv``.
    thread_blocks : int, optional
        As for ``gather_kv``.
    launcher : Launcher, optional
        As for ``gather_kv``.

    Raises
    ------
    TypeError, ValueError, DeviceError
        As ``gather_kv`` does.

    Notes
    -----
    Changes nothing but the cache. Thread-safe as long as its input is not written.
    """
    _copy(cache, slot_mapping, "source", source, skip_prefix_n_tokens, stream, thread_blocks, launcher)


class _Staging(NamedTuple):
    """Checked staging. Each plane has a row: address, and the strides of layer, token and head."""

    rows: list[tuple[int, int, int, int]]
    tokens: int
    memory: str

    def arrays(self, cache: PagedKV) -> Iterator[tuple[int, int, Array]]:
        """The address, the number and the bytes of each plane. In these, layers take the place of blocks."""
        for p, (address, layer, token, head) in enumerate(self.rows if self.tokens else ()):
            layered = cache.planes[p]._replace(block_stride=layer, token_stride=token, head_stride=head)
            yield address, p, layered.at(address, cache.layers, self.tokens)


def _copy(
    cache: Any,
    slot_mapping: Any,
    name: str,
    staging: Any,
    skip: Any,
    stream: Any,
    thread_blocks: Any,
    launcher: Launcher | None,
) -> None:
    gather = name == "out"
    if not isinstance(cache, PagedKV):
        raise TypeError(f"cache: expected a PagedKV, got {type(cache).__name__}")
    stagings = _stagings_argument(name, staging, cache, gather)
    total = sum(item.tokens for item in stagings)
    slots = _slots_argument(slot_mapping, total)
    skip = integer_argument("skip_prefix_n_tokens", skip, 0, total)
    stream_argument(stream)
    if thread_blocks is not None:
        thread_blocks = integer_argument("thread_blocks", thread_blocks, 1, 65535)
    if not (gather or cache.writable):
        raise ValueError("cache: it must not be written")
    on_gpu = "device" in (cache.memory, stagings[0].memory)
    if not on_gpu and slots.memory == "device":
        raise ValueError("slot_mapping: memory of a GPU, while cache and staging are the host's")
    if skip == total:
        return
    pieces = list(_pieces(cache, stagings, skip))
    if on_gpu:
        address = int(cache.bases[0, 0]) if cache.memory == "device" else stagings[0].rows[0][0]
        to = launcher or launcher_at(address)
        # Slots of the host are uploaded. A graph would repeat the upload, and events of a capture cannot be queried.
        handle = to.stream(stream, captured=slots.memory == "device")
        _launch(cache, pieces, stagings[0].memory, slots, (skip, total), gather, handle, thread_blocks, to)
        return
    wanted = _private_slots(slots, skip, total, cache.slots).astype(np.int64, copy=False)
    nbytes = cache.layers * len(wanted) * sum(plane.heads * plane.run_bytes for plane in cache.planes)
    for planes, first, end in pieces:
        table = np.array([plane.merged() for plane in planes], dtype=np.int64)
        piece_slots = wanted[first - skip : end - skip]
        _copy_tokens(cache.bases, table, piece_slots, cache.tokens_per_block, gather, nbytes > CACHED_BYTES_MAX)


def _pieces(cache: PagedKV, stagings: list[_Staging], skip: int) -> Iterator[tuple[list[KvPlane], int, int]]:
    """What is copied of each staging: its planes, from the first token to copy on, and which of all tokens those
    are."""
    begin = 0
    for staging in stagings:
        first, end = max(skip, begin), begin + staging.tokens
        if first < end:
            planes = [
                KvPlane(*p[:3], base + (first - begin) * token, layer, token, head, p.heads, p.run_bytes)
                for p, (base, layer, token, head) in zip(cache.planes, staging.rows, strict=True)
            ]
            yield planes, first, end
        begin = end


def _stagings_argument(name: str, staging: Any, cache: PagedKV, gather: bool) -> list[_Staging]:
    """The staging, or each of ``StagingBuffers``, checked by itself and against the others."""
    several = isinstance(staging, StagingBuffers)
    names = [f"{name}[{i}]" for i in range(len(staging))] if several else [name]
    if not names:
        raise ValueError(f"{name}: expected one buffer or more, got none")
    checked = [
        _staging_argument(label, item, cache, gather)
        for label, item in zip(names, staging if several else [staging], strict=True)
    ]
    planes = [
        (address, label, p, array)
        for label, item in zip(names, checked, strict=True)
        for address, p, array in item.arrays(cache)
    ]
    for _, label, _, array in planes:
        if _is_inside(array, cache):
            raise ValueError(f"{label}: it shares bytes with the cache")
    if len({item.memory for item in checked}) > 1:
        raise ValueError(f"{name}: all stagings must be in one memory")
    both = sharing((address, f"{label}, plane {p}", array) for address, label, p, array in planes) if gather else None
    if both is not None:
        raise ValueError(f"{' and '.join(sorted(both))} share bytes")
    return checked


def _staging_argument(name: str, staging: Any, cache: PagedKV, gather: bool) -> _Staging:
    """Where each plane of the staging lies. Raises if its shape or strides do not fit the cache."""
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
        token_shape = *shape[2:-1], shape[-1] * array.itemsize
        if len(shape) not in (3, 4) or shape[0] != cache.layers or token_shape != inner:
            break
        if shape[-1] > 1 and steps[-1] != array.itemsize:
            raise ValueError(f"{name}: expected contiguous elements of a head, got {steps[-1]} bytes between them")
        head_stride = steps[2] if split else plane.run_bytes
        rows.append((array.address, steps[0], steps[1], head_stride if plane.heads > 1 else 0))
    lengths = {array.shape[1] for array in arrays}
    if len(rows) != len(cache.planes) or len(arrays) != len(rows) or len(lengths) != 1:
        needed = (
            f"[{len(cache.planes)}, {cache.layers}, tokens, heads * head_dim] or [..., heads, head_dim] with rows of "
            + ", ".join(f"{plane.heads} * {plane.run_bytes} bytes" for plane in cache.planes)
        )
        raise ValueError(f"{name}: expected {needed}, got {[(array.shape, array.itemsize) for array in whole]}")
    tokens = arrays[0].shape[1]
    for array in whole if tokens else ():
        check_strides(name, array)
    if len({array.memory for array in arrays}) != 1:
        raise ValueError(f"{name}: all planes must be in one memory")
    if gather and not all(array.writable for array in arrays):
        raise ValueError(f"{name}: it must not be written")
    return _Staging(rows, tokens, arrays[0].memory)


def _is_inside(array: Array, cache: PagedKV) -> bool:
    """Whether a plane of a staging shares bytes with the cache."""
    return np.may_share_memory(array, cache.extent) and any(
        share_bytes(array, plane.at(base, cache.blocks, cache.tokens_per_block))
        for row, plane in zip(cache.bases.tolist(), cache.planes, strict=True)
        for base in row
    )


def _index(array: StridedArray, index: int) -> StridedArray:
    """One plane of an array."""
    address = array.address + index * array.steps[0]
    return replace(array, address=address, shape=array.shape[1:], strides=array.steps[1:])


def _slots_argument(slot_mapping: Any, tokens: int) -> StridedArray:
    slots = as_strided("slot_mapping", slot_mapping)
    if slots.kind != "i" or slots.itemsize not in (4, 8):
        raise TypeError(f"slot_mapping: expected int32 or int64, got {slots.kind}{8 * slots.itemsize}")
    if len(slots.shape) != 1 or slots.shape[0] < tokens:
        raise ValueError(f"slot_mapping: expected shape [n] with n at least {tokens}, got {list(slots.shape)}")
    if slots.shape[0] > 1 and slots.steps[0] != slots.itemsize:
        raise ValueError(f"slot_mapping: expected contiguous slots, got {slots.steps[0]} bytes from one to the next")
    return slots


def _private_slots(slots: StridedArray, first: int, end: int, count: int) -> Array:
    """A copy of some slots, so that they cannot change between their check and the copy of the KV. Raises ValueError
    unless all are below ``count``."""
    private = np.array(slots.host_view()[first:end])
    if private.max() >= count:
        bad = int(np.argmax(private >= count))
        raise ValueError(
            f"slot_mapping[{first + bad}]: expected slots of the cache from 0 to {count - 1}, got {private[bad]}"
        )
    return private


def load_kernel(cache: PagedKV, launcher: Launcher | None = None) -> None:
    """Compile what copies the tokens of a cache on a GPU, to and from staging without gaps. Without this, the first
    copy does. Raises DeviceError."""
    if cache.memory == "device":
        planes = [
            KvPlane(*plane[:3], 0, 0, plane.heads * plane.run_bytes, plane.run_bytes, plane.heads, plane.run_bytes)
            for plane in cache.planes
        ]
        to = launcher or launcher_at(int(cache.bases[0, 0]))
        to.load("kv_copy.cu", kv_kernel(cache.bases, [plane.merged() for plane in planes]))


def _launch(
    cache: PagedKV,
    pieces: list[tuple[list[KvPlane], int, int]],
    staging_memory: str,
    slots: StridedArray,
    tokens: tuple[int, int],
    gather: bool,
    stream: int,
    thread_blocks: int | None,
    launcher: Launcher,
) -> None:
    """Enqueue the copies of the pieces, which are of the tokens [first, end)."""
    first, end = tokens
    bases = cache.bases
    if cache.memory == "host":
        bases = launcher.device_addresses(bases)
    if staging_memory == "host":
        pieces = [(_reached(launcher, planes), begin, stop) for planes, begin, stop in pieces]
    address = slots.address + first * slots.itemsize
    host = "host" in (cache.memory, staging_memory)
    uploaded: AbstractContextManager[int] = nullcontext(address)
    if slots.memory == "host":
        wanted = _private_slots(slots, first, end, cache.slots)
        uploaded = launcher.uploaded(wanted, stream, host=host)
    with uploaded as address:
        for planes, begin, stop in pieces:
            piece_address = address + (begin - first) * slots.itemsize
            which = KvTokens(piece_address, slots.itemsize, cache.slots, stop - begin, cache.tokens_per_block)
            launch = kv_copy(bases, planes, which, gather=gather, host=host, grid=launcher.grid, chosen=thread_blocks)
            launcher.launch(launch, stream)


def _reached(launcher: Launcher, planes: list[KvPlane]) -> list[KvPlane]:
    """The planes with the addresses at which kernels reach their staging."""
    places = launcher.device_addresses(np.array([plane.staging for plane in planes], np.int64))
    return [plane._replace(staging=int(place)) for plane, place in zip(planes, places, strict=True)]


@jit
def _copy_tokens(bases: Any, planes: Any, slots: Any, tokens_per_block: int, gather: bool, streaming: bool) -> None:
    """The copy on the CPU. ``planes`` int64[planes, 9] has rows as in KvPlane. ``slots`` are checked."""
    for p in range(bases.shape[0]):
        token_stride, head_stride, heads, run = planes[p, 1], planes[p, 2], planes[p, 7], planes[p, 8]
        staging_token, staging_head = planes[p, 5], planes[p, 6]
        gap = planes[p, 0] - tokens_per_block * token_stride
        joined = heads == 1 and token_stride == staging_token == run
        # How many tokens ahead of the copy the source is fetched.
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
    """How many tokens, from the first one on, have slots that follow each other without a gap. The first has a slot."""
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
            stream_bytes(target, source, ahead, run)
        else:
            memcpy(target, source, run)
        target += target_stride
        source += source_stride
        ahead += source_stride
