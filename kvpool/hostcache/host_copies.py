"""HostCopies: copies of KV between an engine's paged blocks and host blocks, on streams. Others decide what is
copied."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from kvpool.common.arguments import Ids, id_array, list_argument
from kvpool.common.arrays import Int64s
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.arrays.paged import PagedKV
from kvpool.common.arrays.strided import as_strided
from kvpool.common.jit import jit
from kvpool.common.process import Closing, Process
from kvpool.device import get_device
from kvpool.device.base import NULL_EVENT, Device, DeviceEvent, StreamLike
from kvpool.device.cuda import device_at
from kvpool.device.regions import ALL_LAYERS, BYTES, FROM, TO, Layers, Region
from kvpool.device.work import Fragments
from kvpool.errors import PoolClosed
from kvpool.hostcache.tier import HostSlots, HostTier, layout_of


@dataclass(slots=True, eq=False, repr=False)
class HostCopy:
    """One copy that was enqueued. ``HostCopies.copy_in`` and ``copy_out`` return it.

    Attributes
    ----------
    nbytes : int
        Bytes that are copied.
    fragments : int
        Number of contiguous pieces.
    layers : int
        Layers of its group.

    Notes
    -----
    Any thread may use it.
    """

    _copies: HostCopies
    _events: list[DeviceEvent]
    layers: int
    nbytes: int
    fragments: int

    @property
    def done(self) -> bool:
        """Whether the copy is done. Does not wait. Raises DeviceError where the device fails."""
        return self._copies.query(self._events[-1])

    def wait(self) -> None:
        """Wait until the copy is done.

        Raises
        ------
        DeviceError
            Where the device fails.
        """
        self._copies.synchronize(self._events[-1])

    def follow(self, stream: StreamLike, layer: int | None = None) -> None:
        """Have work that is enqueued on a stream from now on wait for the copy.

        Parameters
        ----------
        stream : Stream, int or stream of a package, or None
            The stream. None is the default stream of the device.
        layer : int, optional
            Wait only for the part of the copy that has this layer of the group. By default for all of it.

        Raises
        ------
        TypeError, ValueError
            For a bad argument.
        DeviceError, PoolClosed
            Where the device fails. After ``HostCopies.close``.

        Notes
        -----
        The caller does not wait.
        """
        last = self.layers - 1 if layer is None else integer_argument("layer", layer, 0, self.layers - 1)
        self._copies.hold_back(stream, self._events[Layers.that_has(last, self.layers, len(self._events))])


class HostPlace(NamedTuple):
    """Where the bytes of a cache lie in a host block that others have bytes in too.

    Attributes
    ----------
    first_byte : int
        The first byte in the block.
    layer_stride : int
        Bytes from one layer to the next.
    planes : tuple of (int, int, int)
        For each plane the offset in the layer, the stride of the engine's blocks, and that of tokens, in bytes. Heads
        follow each other.
    """

    first_byte: int
    layer_stride: int
    planes: tuple[tuple[int, int, int], ...]


class HostCopies(Closing):
    """Copies between an engine's paged memory and the blocks of a ``HostTier``. A context manager.

    Each worker has one. A group takes ``group_bytes[group]`` bytes of a host block: [layers, planes, blocks, tokens,
    heads, bytes] without gaps, or heads before tokens where the engine's memory has that order.

    Parameters
    ----------
    tier : HostTier
        The memory of the host blocks, made here or attached.
    caches : PagedKV or sequence of PagedKV
        The engine's memory, one for each group of layers. Groups may share memory.
    blocks_per_host_block : int, default 1
        Number of consecutive blocks of one group in a host block.
    first_byte : int, default 0
        Where in a host block this worker's bytes begin. Workers that share a tier have ranges of their own.
    places : sequence of HostPlace or None, optional
        A place for each cache, instead of ``first_byte``. The caller is responsible for bytes that two of them share.
    device : {"auto", "cpu", "cuda", "sim"} or Device, default "auto"
        "auto" is the GPU that has the memory of the caches, or "cpu". A ``kvpool.device.base.Device`` must not be used
        by anything else.

    Raises
    ------
    TypeError, ValueError
        For a bad argument; for a group that does not fit into a host block; for memory that the tier and a cache share.
    DeviceError, MemoryError
        Where the device fails, or does not pin the tier.

    Notes
    -----
    Any thread may call it. Nothing here checks whether a block may be read or written: lease host blocks that are read,
    reserve those that are written, and end both only when the copy is done. On a GPU and on "sim" copies run on two
    streams of their own, one for each direction.

    Examples
    --------
    >>> import numpy as np, kvpool
    >>> from kvpool.hostcache.host_copies import HostCopies
    >>> model = kvpool.ModelIdentity("tiny", "rev 1", "float16", "1 layer", "mine 1")
    >>> kv = [np.full((2, 8, 4, 1, 8), 3, np.float16)]  # planes, blocks, tokens, heads, elements
    >>> tier = kvpool.HostTier(4, 128, identity=model)
    >>> with HostCopies(tier, kvpool.PagedKV.of(kv, "vllm_flash_attention")) as copies:
    ...     copies.copy_in([5], [0]).wait()
    ...     print(float(tier.blocks[0].view(np.float16).min()))
    3.0
    """

    def __init__(
        self,
        tier: HostTier,
        caches: PagedKV | Sequence[PagedKV],
        *,
        blocks_per_host_block: int = 1,
        first_byte: int = 0,
        places: Sequence[HostPlace | None] = (),
        device: Literal["auto", "cpu", "cuda", "sim"] | Device = "auto",
    ) -> None:
        if not isinstance(tier, HostTier):
            raise TypeError(f"tier: expected a HostTier, got {tier!r:.80}")
        self.blocks_per_host_block = integer_argument("blocks_per_host_block", blocks_per_host_block, 1, 1 << 20)
        self.first_byte = integer_argument("first_byte", first_byte, 0, tier.block_bytes - 1)
        paged_caches = _caches(caches)
        cache_places = _places(places, paged_caches)
        self.tier = tier
        self._groups = [
            Pages(cache, self.blocks_per_host_block, self.first_byte, place)
            for cache, place in zip(paged_caches, cache_places, strict=True)
        ]
        self.group_bytes = tuple(pages.nbytes for pages in self._groups)
        _check_room(self._groups, tier)
        _check_apart(self._groups, tier)
        self._device, self._owned = _device(device, self._groups), not isinstance(device, Device)
        self._lock: AbstractContextManager[Any] = nullcontext() if self._device.synchronous else threading.Lock()
        self._forks = Process("HostCopies")
        self._forks.guard(self, "_lock")
        self._open, self._drained = True, False
        try:
            self._pinned = self._device.adopt(as_strided("tier", tier.flat), "host", pin=True)
            self._nothing = self._device.allocate(0, "device")
            region = Region.of(layout_of(tier.block_bytes), self._nothing, self._pinned, 0, tier.host_blocks)
            self._device.bind([region])
            names = {True: "copies in", False: "copies out"}
            self._streams = {
                into_host: self._device.create_stream(name, not into_host) for into_host, name in names.items()
            }
        except BaseException:
            self._close_device()
            raise

    def copy_in(
        self,
        blocks: Ids,
        host_blocks: HostSlots | Ids,
        *,
        skip_prefix_n_tokens: int = 0,
        n_tokens: int | None = None,
        stream: StreamLike = None,
        group: int = 0,
        layer_parts: int = 1,
    ) -> HostCopy:
        """Copy KV of the engine's blocks into host blocks.

        Parameters
        ----------
        blocks : int or sequence of int
            The engine's block ids, in the order of the prompt. A block below zero is left out.
        host_blocks : HostSlots, int or sequence of int
            Slots of the tier's cache, or ids. Engine block i is in host block ``i // blocks_per_host_block``. There are
            as many as that takes, each once.
        skip_prefix_n_tokens : int, default 0
            Tokens before this one are neither read nor written, nor are their blocks looked at. Tokens are counted over
            all blocks of the call.
        n_tokens : int, optional
            Tokens from this one on are neither read nor written. By default all are copied.
        stream : Stream, int or stream of a package, optional
            The engine's stream: the copy comes after everything that is enqueued there so far. On a CPU the copy is
            made by the caller, without the interpreter's lock, and is done when the call returns.
        group : int, default 0
            Index of the group of layers.
        layer_parts : int, default 1
            Number of parts of the layers that are copied one after the other. ``HostCopy.follow`` waits for one, so
            that the engine computes with the first layers while the others are copied.

        Returns
        -------
        HostCopy
            The copy.

        Raises
        ------
        TypeError, ValueError
            For a bad argument, before anything is copied; for slots of another cache.
        DeviceError, PoolClosed
            Where the device fails; any byte of the targets may have been written then. After ``close``.
        """
        return self._copy(True, blocks, host_blocks, skip_prefix_n_tokens, n_tokens, stream, group, layer_parts)

    def copy_out(
        self,
        blocks: Ids,
        host_blocks: HostSlots | Ids,
        *,
        skip_prefix_n_tokens: int = 0,
        n_tokens: int | None = None,
        stream: StreamLike = None,
        group: int = 0,
        layer_parts: int = 1,
    ) -> HostCopy:
        """Copy KV of host blocks into the engine's blocks.

        Parameters
        ----------
        blocks : int or sequence of int
            As in ``copy_in``.
        host_blocks : HostSlots, int or sequence of int
            As in ``copy_in``.
        skip_prefix_n_tokens : int, default 0
            As in ``copy_in``.
        n_tokens : int, optional
            As in ``copy_in``.
        stream : Stream, int or stream of a package, optional
            As in ``copy_in``.
        group : int, default 0
            As in ``copy_in``.
        layer_parts : int, default 1
            As in ``copy_in``.

        Returns
        -------
        HostCopy
            The copy.
        """
        return self._copy(False, blocks, host_blocks, skip_prefix_n_tokens, n_tokens, stream, group, layer_parts)

    def _copy(
        self,
        into_host: bool,
        blocks: Ids,
        host_blocks: HostSlots | Ids,
        skip: int,
        n_tokens: int | None,
        stream: StreamLike,
        group: int,
        layer_parts: int,
    ) -> HostCopy:
        pages = self._groups[integer_argument("group", group, 0, len(self._groups) - 1)]
        if not into_host and not pages.cache.writable:
            raise ValueError("caches: expected writable memory for copies out of the host, got read-only memory")
        block_ids, hosts = id_array("blocks", blocks), self._host_blocks(host_blocks)
        first, end = _tokens(skip, n_tokens, len(block_ids) * pages.cache.tokens_per_block)
        _check_blocks(block_ids, hosts, pages, self.tier.host_blocks, first, end, into_host)
        parts = min(integer_argument("layer_parts", layer_parts, 1, 1 << 16), pages.cache.layers)
        after = self._device.as_stream(stream)
        place = self.tier.flat.ctypes.data + pages.first_byte
        span = first, end, place, self.tier.block_bytes, into_host
        fragment_parts = [pages.fragments(block_ids, hosts, *span, Layers(part, parts)) for part in range(parts)]
        count = sum(map(len, fragment_parts))
        with self._lock:
            if not self._open:
                raise PoolClosed("the copies are closed")
            events = self._enqueue(fragment_parts, after, self._streams[into_host]) if count else [NULL_EVENT]
        nbytes = sum(int(fragments[:, BYTES].sum()) for fragments in fragment_parts)
        return HostCopy(self, events, pages.cache.layers, nbytes, count)

    def _enqueue(self, parts: list[Int64s], after: Any, stream: Any) -> list[DeviceEvent]:
        """Enqueue the fragments of each part after ``after``, with an event after each. The caller holds the lock."""
        device = self._device
        events = []
        device.wait(stream, device.record(after))
        for fragments in parts:
            device.enqueue(Fragments(fragments), stream)
            events.append(device.record(stream))
        return events

    def _host_blocks(self, host_blocks: HostSlots | Ids) -> Int64s:
        if not isinstance(host_blocks, HostSlots):
            return id_array("host_blocks", host_blocks)
        if host_blocks.fingerprint != self.tier.fingerprint:
            raise ValueError("host_blocks: expected slots of this tier's cache, got slots of another model or size")
        return id_array("host_blocks", host_blocks.blocks)

    # -- for HostCopy --------------------------------------------------------------------------

    def query(self, event: DeviceEvent) -> bool:
        """Return whether an event is complete.

        Parameters
        ----------
        event : DeviceEvent
            An event of this object's device.

        Returns
        -------
        bool
            Whether it is.
        """
        return event is NULL_EVENT or self._drained or self._device.query(event)

    def synchronize(self, event: DeviceEvent) -> None:
        """Return when an event is complete.

        Parameters
        ----------
        event : DeviceEvent
            An event of this object's device.
        """
        if event is not NULL_EVENT and not self._drained:
            self._device.synchronize(event)

    def hold_back(self, stream: StreamLike, event: DeviceEvent) -> None:
        """Have a stream wait for an event.

        Parameters
        ----------
        stream : Stream, int or stream of a package, or None
            The stream.
        event : DeviceEvent
            An event of this object's device.

        Raises
        ------
        PoolClosed
            After ``close``.
        """
        on = self._device.as_stream(stream)
        with self._lock:
            if not self._open:
                raise PoolClosed("the copies are closed")
            self._device.wait(on, event)

    # -- the end -----------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the copies were closed."""
        return not self._open

    def close(self) -> None:
        """Wait for all copies that were enqueued, and release the tier, which stays open.

        Closing twice has no further effect. A copy that another thread is making on a CPU continues.

        Raises
        ------
        DeviceError
            Where the device fails.
        """
        with self._lock:
            open_, self._open = self._open, False
        if open_:
            try:
                self._device.synchronize()
                self._drained = True
            finally:
                self._close_device()

    def _close_device(self) -> None:
        for memory in (getattr(self, "_pinned", None), getattr(self, "_nothing", None)):
            if memory is not None:
                self._device.free(memory)
        if self._owned:
            self._device.close()


def _caches(caches: object) -> list[PagedKV]:
    cache_list = [caches] if isinstance(caches, PagedKV) else caches
    if (
        not isinstance(cache_list, (list, tuple))
        or not cache_list
        or not all(isinstance(cache, PagedKV) for cache in cache_list)
    ):
        raise TypeError(f"caches: expected a PagedKV or a list of them, got {caches!r:.80}")
    if len({cache.memory for cache in cache_list}) > 1:
        raise ValueError("caches: expected caches in one memory, got some on the host and some on a GPU")
    return list(cache_list)


def _places(places: object, caches: list[PagedKV]) -> Sequence[HostPlace | None]:
    """The place of each cache. No number in them is negative, so that all bytes are before the ends that are checked
    later. Raises TypeError, ValueError."""
    place_list = list_argument("places", places)
    if len(place_list) not in (0, len(caches)):
        raise ValueError(f"places: expected one for each of {len(caches)} caches, or none, got {places!r:.80}")
    for place, cache in zip(place_list, caches, strict=False):
        if place is None:
            continue
        if not isinstance(place, HostPlace):
            raise TypeError(f"places: expected HostPlace or None, got {place!r:.80}")
        planes = list_argument("places", place.planes)
        if [len(plane) for plane in planes] != [3] * len(cache.planes):
            raise ValueError(
                f"places: expected three numbers for each of {len(cache.planes)} planes, got {place!r:.80}"
            )
        for number in itertools.chain(place[:2], *planes):
            integer_argument("places", number, 0, 1 << 40)
    return place_list or [None] * len(caches)


def _check_room(groups: list[Pages], tier: HostTier) -> None:
    for group, pages in enumerate(groups):
        if pages.first_byte + pages.nbytes > tier.block_bytes:
            room = f"{tier.block_bytes - pages.first_byte} bytes of a host block from first_byte {pages.first_byte} on"
            raise ValueError(f"caches[{group}]: expected up to the {room}, got {pages.nbytes}")


def _check_apart(groups: list[Pages], tier: HostTier) -> None:
    start, end = tier.flat.ctypes.data, tier.flat.ctypes.data + tier.flat.nbytes
    for group, pages in enumerate(groups):
        cache = pages.cache
        spans = np.array([[plane.span(cache.blocks, cache.tokens_per_block)] for plane in cache.planes])
        if cache.memory == "host" and ((cache.bases < end) & (start < cache.bases + spans)).any():
            raise ValueError(f"caches[{group}]: expected memory of its own, got some of the tier's")


def _device(device: Any, groups: list[Pages]) -> Device:
    if device == "auto":
        cache = groups[0].cache
        return device_at(int(cache.bases[0, 0])) if cache.memory == "device" else get_device("cpu")
    chosen = get_device(device)
    memory = groups[0].cache.memory
    if memory == "device" and chosen.name != "cuda":
        raise ValueError(f"device: expected 'auto' or 'cuda' for caches in memory of a GPU, got {device!r:.80}")
    return chosen


def _tokens(skip: object, n_tokens: object, most: int) -> tuple[int, int]:
    """The first token, and the end; 0 and 0 where there is none between them, so that no block is looked at."""
    end = most if n_tokens is None else integer_argument("n_tokens", n_tokens, 0, most)
    first = integer_argument("skip_prefix_n_tokens", skip, 0, end)
    return (first, end) if first < end else (0, 0)


def _check_blocks(
    blocks: Int64s, hosts: Int64s, pages: Pages, host_count: int, first: int, end: int, into_host: bool
) -> None:
    """Raise ValueError unless all ids that the copy reads are blocks."""
    needed = -(-len(blocks) // pages.blocks)
    if len(hosts) != needed:
        raise ValueError(f"host_blocks: expected {needed} for the {len(blocks)} of blocks, got {len(hosts)}")
    width = pages.cache.tokens_per_block
    copied_blocks = blocks[first // width : -(-end // width)]
    _check_ids("blocks", copied_blocks[copied_blocks >= 0], pages.cache.blocks, not into_host)
    width *= pages.blocks
    _check_ids("host_blocks", hosts[first // width : -(-end // width)], host_count, into_host)


def _check_ids(name: str, ids: Int64s, count: int, written_once: bool) -> None:
    """Raise ValueError for ids that are not blocks, and for targets that are named twice."""
    if not len(ids):
        return
    if ids.min() < 0 or ids.max() >= count:
        wrong = int(ids[(ids < 0) | (ids >= count)][0])
        raise ValueError(f"{name}: expected blocks from 0 to {count - 1}, got {wrong}")
    if written_once and len(set(ids.tolist())) != len(ids):
        raise ValueError(f"{name}: expected different blocks to write, got one twice")


# -- where the bytes of an engine's blocks lie in a host block, and the fragments of a copy --------------

# Columns of the table of planes: strides in the engine's memory, extents, and offset and strides in a host block.
_BLOCK, _TOKEN, _HEAD, _HEADS, _RUN, _OFFSET, _HOST_BLOCK, _HOST_TOKEN, _HOST_HEAD = range(9)


class Span(NamedTuple):
    """The bytes of blocks that a copy concerns, for jitted code."""

    tokens_per_block: int
    blocks_per_host_block: int
    first_token: int
    end_token: int
    host: int
    """Address of the first byte of the first host block."""
    host_stride: int
    layer_stride: int
    """In a host block."""
    into_host: bool


class Pages:
    """One group of layers of an engine. A host block has ``blocks_per_host_block`` of its blocks.

    They lie there without gaps: [layers, planes, blocks, tokens, heads, bytes], or heads before tokens if the engine
    has that order; or as ``place`` says. ``nbytes`` is the size of all that is between the first and the last byte.
    """

    def __init__(self, cache: PagedKV, blocks_per_host_block: int, first_byte: int, place: HostPlace | None) -> None:
        self.cache, self.blocks = cache, blocks_per_host_block
        rows, offset = [], 0
        for index, plane in enumerate(cache.planes):
            tokens, heads, run = cache.tokens_per_block, plane.heads, plane.run_bytes
            inner = (heads * run, run) if plane.token_stride >= plane.head_stride else (run, tokens * run)
            host = offset, tokens * heads * run, *inner
            if place is not None:
                host = *place.planes[index], run
            offset += blocks_per_host_block * tokens * heads * run
            if plane.head_stride == host[-1] == run:  # heads follow each other in both memories
                heads, run = 1, heads * run
            rows.append((plane.block_stride, plane.token_stride, plane.head_stride, heads, run, *host))
        self._planes = np.array(rows, np.int64)
        self.first_byte, self._layer_bytes, self.nbytes = first_byte, offset, cache.layers * offset
        if place is not None:
            self.first_byte, self._layer_bytes = place.first_byte, place.layer_stride
            last = self._planes[:, [_OFFSET, _HOST_BLOCK, _HOST_TOKEN]] @ [1, self.blocks - 1, tokens - 1]
            ends = last + self._planes[:, _HEADS] * self._planes[:, _RUN]
            self.nbytes = (cache.layers - 1) * self._layer_bytes + int(ends.max())
        in_pieces = (self._planes[:, [_TOKEN, _HOST_TOKEN]] != self._planes[:, [_RUN]]).any(axis=1)
        self._pieces = cache.layers * int((self._planes[:, _HEADS] * np.where(in_pieces, tokens, 1)).sum())
        """The most fragments of a block, as ``_add_block`` adds them."""

    def fragments(
        self,
        blocks: Int64s,
        host_blocks: Int64s,
        first: int,
        end: int,
        host: int,
        host_stride: int,
        into_host: bool,
        layers: Layers = ALL_LAYERS,
    ) -> Int64s:
        """Fragments int64[n, 3] of the tokens [first, end) in some layers, as few as possible.

        Engine block i, of ``blocks``, is in ``host_blocks[i // blocks_per_host_block]``. A block below zero is left
        out. ``host`` is the address of the first byte of the group in the first host block. All ids have been checked.
        """
        layer_range, step = layers.of(self.cache.layers), self._layer_bytes
        bases = np.ascontiguousarray(self.cache.bases[:, layer_range.start : layer_range.stop])
        place = host + layer_range.start * step
        span = Span(self.cache.tokens_per_block, self.blocks, first, end, place, host_stride, step, into_host)
        out, cursor = np.empty((len(blocks) * self._pieces, 3), np.int64), np.zeros(3, np.int64)
        return out[: _cut(bases, self._planes, blocks, host_blocks, span, out, cursor)]


@jit
def _add(out: Any, cursor: Any, engine: int, host: int, nbytes: int, into_host: bool) -> None:
    """Append bytes as a fragment, or to the last fragment if they follow it. ``cursor``: the number of fragments, and
    where the last one ends."""
    source, target = (engine, host) if into_host else (host, engine)
    n = cursor[0]
    if n == 0 or source != cursor[1] or target != cursor[2]:
        if n == out.shape[0]:
            raise RuntimeError("more fragments than blocks can have")
        out[n, FROM], out[n, TO], out[n, BYTES] = source, target, 0
        n += 1
        cursor[0] = n
    out[n - 1, BYTES] += nbytes
    cursor[1], cursor[2] = source + nbytes, target + nbytes


@jit
def _cut(bases: Any, planes: Any, blocks: Any, host_blocks: Any, span: Any, out: Any, cursor: Any) -> int:
    """Fill ``out``, in the order of the host's bytes. Returns how many fragments there are."""
    width, per_host = span.tokens_per_block, span.blocks_per_host_block
    first_block, end_block = span.first_token // width, -(-span.end_token // width)
    for k in range(first_block // per_host, -(-end_block // per_host)):
        begin, end = max(first_block, k * per_host), min(end_block, (k + 1) * per_host)
        for layer in range(bases.shape[1]):
            for p in range(bases.shape[0]):
                host = span.host + host_blocks[k] * span.host_stride + layer * span.layer_stride + planes[p, _OFFSET]
                for i in range(begin, end):
                    if blocks[i] >= 0:
                        tokens = max(span.first_token - i * width, 0), min(span.end_token - i * width, width)
                        engine = bases[p, layer] + blocks[i] * planes[p, _BLOCK]
                        place = host + (i - k * per_host) * planes[p, _HOST_BLOCK]
                        _add_block(out, cursor, engine, place, planes[p], tokens, span.into_host)
    return cursor[0]


@jit
def _add_block(out: Any, cursor: Any, engine: int, host: int, plane: Any, tokens: Any, into_host: bool) -> None:
    """Add some tokens of one plane of a block, in the order of the host's bytes."""
    first, end = tokens
    run, heads, head, host_head = plane[_RUN], plane[_HEADS], plane[_HEAD], plane[_HOST_HEAD]
    token, host_token = plane[_TOKEN], plane[_HOST_TOKEN]
    if token == host_token == run:  # tokens follow each other in both memories: the usual case, without the loops below
        for h in range(heads):
            source, target = engine + h * head + first * run, host + h * host_head + first * run
            _add(out, cursor, source, target, (end - first) * run, into_host)
        return
    outer, inner = (first, end, token, host_token), (0, heads, head, host_head)
    if host_head > host_token:
        outer, inner = inner, outer
    for i in range(outer[0], outer[1]):
        for j in range(inner[0], inner[1]):
            source, target = engine + i * outer[2] + j * inner[2], host + i * outer[3] + j * inner[3]
            _add(out, cursor, source, target, run, into_host)
