"""HostCopies: copies of KV between an engine's paged blocks and host blocks, on streams. Others decide what is
copied."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvpool.arrays.layout import integer_argument
from kvpool.arrays.paged import PagedKV, span_of
from kvpool.arrays.strided import as_strided
from kvpool.device import get_device
from kvpool.device.base import BYTES, NULL_EVENT, Device, Event, Region
from kvpool.device.cuda import device_at
from kvpool.device.work import Fragments
from kvpool.entry.arguments import id_array
from kvpool.entry.process import Process
from kvpool.errors import PoolClosed
from kvpool.hostcache.host_leases import HostSlots
from kvpool.hostcache.pages import Pages
from kvpool.hostcache.tier import HostTier, layout_of

if TYPE_CHECKING:
    from typing_extensions import Self

Int64s = npt.NDArray[np.int64]


class HostCopy:
    """One copy that was enqueued. ``nbytes`` and ``fragments`` are its bytes, and the number of pieces. Thread-safe."""

    __slots__ = ("_copies", "_event", "fragments", "nbytes")

    def __init__(self, copies: HostCopies, event: Event, nbytes: int, fragments: int) -> None:
        self._copies, self._event = copies, event
        self.nbytes, self.fragments = nbytes, fragments

    @property
    def done(self) -> bool:
        """Whether the copy is done. Does not wait. Raises DeviceError."""
        return self._copies.query(self._event)

    def wait(self) -> None:
        """Wait until the copy is done. Raises DeviceError."""
        self._copies.synchronize(self._event)

    def follow(self, stream: object) -> None:
        """Have work that is enqueued on ``stream`` from now on wait for the copy. The caller does not wait. Raises
        TypeError, ValueError, DeviceError, PoolClosed."""
        self._copies.hold_back(stream, self._event)


class HostCopies:
    """Copies between an engine's paged memory and the blocks of a ``HostTier``. Each worker has one.

    Parameters
    ----------
    tier
        The memory of the host blocks, made here or attached.
    caches
        The engine's memory: a PagedKV, or one for each group of layers. Groups may share memory.
    blocks_per_host_block
        How many blocks of one group a host block holds, one after the other in the prompt.
    first_byte
        Where in a host block this worker's bytes begin. Workers that share a tier have ranges of their own.
    device
        "auto": the GPU that has the memory of the caches, or "cpu". Or "cpu", "cuda", "sim", or a
        ``kvpool.device.base.Device`` that serves nobody else.

    A group takes ``group_bytes[group]`` bytes of a host block: [layers, planes, blocks, tokens, heads, bytes] without
    gaps, or heads before tokens where the engine has them so.

    Raises
    ------
    TypeError, ValueError
        For a bad argument; for a group that does not fit into a host block; for memory that the tier and a cache share.
    DeviceError, MemoryError
        Where the device fails, or does not pin the tier.

    Notes
    -----
    Thread-safe. Nothing here knows whether a block may be read or written: lease host blocks that are read, reserve
    those that are written, and end both only when the copy is done. On a GPU and on "sim" copies run on two streams
    of their own, one for each direction.
    """

    def __init__(
        self, tier: HostTier, caches: PagedKV | Sequence[PagedKV], *, blocks_per_host_block: int = 1,
        first_byte: int = 0, device: str | Device = "auto",
    ) -> None:  # fmt: skip
        if not isinstance(tier, HostTier):
            raise TypeError(f"tier={tier!r:.80}: accepted is a HostTier")
        self.blocks_per_host_block = integer_argument("blocks_per_host_block", blocks_per_host_block, 1, 1 << 20)
        self.first_byte = integer_argument("first_byte", first_byte, 0, tier.block_bytes - 1)
        self.tier, self._groups = tier, [Pages(one, self.blocks_per_host_block) for one in _caches(caches)]
        self.group_bytes = tuple(pages.nbytes for pages in self._groups)
        _check_room(self.group_bytes, tier, self.first_byte)
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
        self, blocks: object, host_blocks: object, *, skip_prefix_n_tokens: int = 0, n_tokens: int | None = None,
        stream: object = None, group: int = 0,
    ) -> HostCopy:  # fmt: skip
        """Copy KV of the engine's blocks into host blocks.

        Parameters
        ----------
        blocks
            The engine's block ids, in the order of the prompt. A block below zero is left out.
        host_blocks
            A ``HostSlots`` of the tier's cache, or the ids. Engine block i is in host block
            ``i // blocks_per_host_block``; there are as many as that takes, each once.
        skip_prefix_n_tokens, n_tokens
            Tokens before the first, and from the second on (default: none), are neither read nor written, nor are their
            blocks looked at. Tokens are counted over all blocks of the call.
        stream
            The engine's: the copy comes after all that is enqueued there so far. On a CPU the copy is made by the
            caller, without the interpreter's lock, and is done when the call returns.
        group
            Index of the group of layers.

        Raises
        ------
        TypeError, ValueError
            For a bad argument, before anything is copied; for slots of another cache.
        DeviceError, PoolClosed
            Where the device fails; any byte of the targets may have been written then. After ``close``.
        """
        return self._copy(True, blocks, host_blocks, skip_prefix_n_tokens, n_tokens, stream, group)

    def copy_out(
        self, blocks: object, host_blocks: object, *, skip_prefix_n_tokens: int = 0, n_tokens: int | None = None,
        stream: object = None, group: int = 0,
    ) -> HostCopy:  # fmt: skip
        """Copy KV of host blocks into the engine's blocks. Everything else is as in ``copy_in``."""
        return self._copy(False, blocks, host_blocks, skip_prefix_n_tokens, n_tokens, stream, group)

    def _copy(
        self, into_host: bool, blocks: object, host_blocks: object, skip: object, n_tokens: object, stream: object,
        group: object,
    ) -> HostCopy:  # fmt: skip
        pages = self._groups[integer_argument("group", group, 0, len(self._groups) - 1)]
        if not into_host and not pages.cache.writable:
            raise ValueError("caches: this one must not be written")
        own, hosts = id_array("blocks", blocks), self._host_blocks(host_blocks)
        first, end = _tokens(skip, n_tokens, len(own) * pages.cache.tokens_per_block)
        _check_blocks(own, hosts, pages, self.tier.host_blocks, first, end, into_host)
        after = self._device.as_stream(stream)
        flat = self.tier.flat
        place = flat.ctypes.data + self.first_byte
        fragments = pages.fragments(own, hosts, first, end, place, self.tier.block_bytes, into_host)
        with self._lock:
            if not self._open:
                raise PoolClosed("the copies are closed")
            event = self._enqueue(fragments, after, self._streams[into_host]) if len(fragments) else NULL_EVENT
        return HostCopy(self, event, int(fragments[:, BYTES].sum()), len(fragments))

    def _enqueue(self, fragments: Int64s, after: Any, stream: Any) -> Event:
        """Enqueue fragments after ``after``. The caller holds the lock."""
        device = self._device
        device.wait(stream, device.record(after))
        device.enqueue(Fragments(fragments), stream)
        return device.record(stream)

    def _host_blocks(self, host_blocks: object) -> Int64s:
        if not isinstance(host_blocks, HostSlots):
            return id_array("host_blocks", host_blocks)
        if host_blocks.fingerprint != self.tier.fingerprint:
            raise ValueError("host_blocks: these slots are of another model, or of a cache of another size")
        return id_array("host_blocks", host_blocks.blocks)

    # -- what a HostCopy asks --------------------------------------------------------------------------

    def query(self, event: Event) -> bool:
        """Whether an event is complete."""
        return event is NULL_EVENT or self._drained or self._device.query(event)

    def synchronize(self, event: Event) -> None:
        """Return when an event is complete."""
        if event is not NULL_EVENT and not self._drained:
            self._device.synchronize(event)

    def hold_back(self, stream: object, event: Event) -> None:
        """Have a stream wait for an event."""
        on = self._device.as_stream(stream)
        with self._lock:
            if not self._open:
                raise PoolClosed("the copies are closed")
            self._device.wait(on, event)

    # -- the end -----------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return not self._open

    def close(self) -> None:
        """Wait for all copies that were enqueued, and let go of the tier, which stays open. Closing twice is fine.

        A copy that another thread is making on a CPU goes on. Raises DeviceError.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _caches(caches: object) -> list[PagedKV]:
    found = [caches] if isinstance(caches, PagedKV) else caches
    if not isinstance(found, (list, tuple)) or not found or not all(isinstance(one, PagedKV) for one in found):
        raise TypeError(f"caches={caches!r:.80}: accepted are a PagedKV and a list of them")
    if len({one.memory for one in found}) > 1:
        raise ValueError("caches: accepted are caches in one memory")
    return list(found)


def _check_room(sizes: tuple[int, ...], tier: HostTier, first_byte: int) -> None:
    for group, nbytes in enumerate(sizes):
        if first_byte + nbytes > tier.block_bytes:
            room = f"first_byte={first_byte}, and a host block has {tier.block_bytes} bytes"
            raise ValueError(f"caches[{group}] takes {nbytes} bytes of a host block: {room}")


def _check_apart(groups: list[Pages], tier: HostTier) -> None:
    start, end = tier.flat.ctypes.data, tier.flat.ctypes.data + tier.flat.nbytes
    for group, pages in enumerate(groups):
        cache = pages.cache
        spans = np.array([[span_of(plane, cache.blocks, cache.tokens_per_block)] for plane in cache.planes])
        if cache.memory == "host" and ((cache.bases < end) & (start < cache.bases + spans)).any():
            raise ValueError(f"caches[{group}] and the tier share bytes: accepted is memory of its own for each")


def _device(device: Any, groups: list[Pages]) -> Device:
    if device == "auto":
        cache = groups[0].cache
        return device_at(int(cache.bases[0, 0])) if cache.memory == "device" else get_device("cpu")
    found = get_device(device)
    memory = groups[0].cache.memory
    if memory == "device" and found.name != "cuda":
        raise ValueError(f"device={device!r:.80}: the caches are memory of a GPU; accepted are 'auto' and 'cuda'")
    return found


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
        raise ValueError(
            f"host_blocks has {len(hosts)} entries: accepted are exactly {needed} for {len(blocks)} blocks"
        )
    width = pages.cache.tokens_per_block
    used = blocks[first // width : -(-end // width)]
    _check_ids("blocks", used[used >= 0], pages.cache.blocks, not into_host)
    width *= pages.blocks
    _check_ids("host_blocks", hosts[first // width : -(-end // width)], host_count, into_host)


def _check_ids(name: str, ids: Int64s, count: int, written_once: bool) -> None:
    """Raise ValueError for ids that are no blocks, and for targets that are named twice."""
    if not len(ids):
        return
    if ids.min() < 0 or ids.max() >= count:
        wrong = int(ids[(ids < 0) | (ids >= count)][0])
        raise ValueError(f"{name}: {wrong} is no block; accepted are 0 to {count - 1}")
    if written_once and len(set(ids.tolist())) != len(ids):
        raise ValueError(f"{name}: a block that is written is named twice")
