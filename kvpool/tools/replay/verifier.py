"""Compares KV bytes wherever the pool guarantees them: at every reuse, copy between blocks, and release. A
WatchedDevice tells of the copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter_ns
from typing import Any

import numpy as np

from kvpool.common.arrays import Array, Int64s
from kvpool.common.arrays.layout import BlockLayout
from kvpool.device.base import NULL_STREAM, Device, Stream, WrappedDevice
from kvpool.device.regions import ALL_LAYERS, SOURCE, TARGET, TOKENS, Layers, Region
from kvpool.device.sim import SimDevice
from kvpool.errors import DeviceError, KVPoolError
from kvpool.tools.replay.content import Difference, KVBytes, States, ranges
from kvpool.tools.replay.summary import Verified

Enqueue = Callable[[Stream, Callable[[], None], Int64s, Int64s], None]
"""Enqueues a function on a stream. It reads and writes the tokens that are given in two arrays of rows
(block, first, end)."""


Places = tuple[Int64s, Int64s]
"""The block of each of some tokens, and its place in it."""


class VerificationError(KVPoolError, AssertionError):
    """A block's bytes are not those of its content.

    `block` is the block's id, `tier` is "device" or "host", and `token` is the token inside the block. `layer` and
    `plane` say where its bytes first differ; they are None if the block was never written.
    """

    def __init__(self, message: str, *, block: int, tier: str, token: int, layer: int | None, plane: int | None):
        super().__init__(message)
        self.block = block
        self.tier = tier
        self.token = token
        self.layer = layer
        self.plane = plane


class Verifier:
    """Keeps the expected bytes of every block, outside the pool. It learns only of writes and copies.

    A sequence's bytes follow from its own tokens. The bytes of a copy follow from the bytes that were written to its
    source. The verifier never asks kvpool for a block's content. Its state is ``uint64[blocks, tokens_per_block]``.
    Only `write` changes bytes of the pool. Thread-safe, for copies that other threads cause; only one
    thread may write and check sequences.

    Blocks that come from outside are compared as soon as they are on the host: `expect` says beforehand which content
    may come, and `loaded` finds which of it a block has.

    With `enqueue`, bytes are written and compared when the device gets to that work. The order of the calls determines
    the expected bytes. A difference that is found then is kept in `failure`, and `raise_failure` raises it.
    """

    def __init__(
        self,
        layout: BlockLayout,
        device_pool: Array,
        host_pool: Array,
        device_blocks: int,
        host_blocks: int,
        enqueue: Enqueue | None = None,
    ) -> None:
        self._enqueue, self._lock = enqueue, threading.RLock()
        self._expected: dict[bytes, States] | None = None
        self.context = "before the first request"
        self.failure: VerificationError | None = None
        self.verified = Verified()
        self._device_blocks, self._tokens_per_block = device_blocks, layout.tokens_per_block
        self._tiers = [("device", 0, KVBytes(layout, device_pool, layout.device_strides(device_blocks), device_blocks))]
        if host_blocks:
            host = KVBytes(layout, host_pool, layout.host_strides(host_blocks), host_blocks)
            self._tiers.append(("host", device_blocks, host))
        self._states = np.zeros((device_blocks + host_blocks, layout.tokens_per_block), dtype=np.uint64)
        self._written = np.zeros(self._states.shape, dtype=np.bool_)

    def write(self, blocks: Int64s, start: int, states: States, stream: Stream = NULL_STREAM) -> None:
        """Write tokens ``[start, start + len(states))`` of a sequence whose device blocks are `blocks`."""
        blocks, tokens = places = self._places(blocks, start, start + len(states))
        _, _, memory = self._tiers[0]
        with self._lock:
            self._states[places], self._written[places] = states, True
            self._launch(stream, lambda: memory.write(states, blocks, tokens), places, writes=True)

    def check(self, blocks: Int64s, states: States, complaint: str, stream: Stream = NULL_STREAM) -> None:
        """Raise `VerificationError`, with this complaint, unless the first ``len(states)`` tokens of a sequence are in
        `blocks`."""
        places = self._places(blocks, 0, len(states))
        with self._lock:
            self._launch(stream, self._check(places, states, lambda block: complaint), places)

    def copied(self, moves: Int64s, stream: Stream = NULL_STREAM) -> None:
        """Record copies that the device has just enqueued, and compare every target with its source's expected bytes.

        `moves` is ``int64[n, >=3]`` of source, target, tokens, as if made one after the other. A difference is kept in
        `failure`, since the caller is in the middle of the pool's own work, and `raise_failure` raises it.
        """
        with self._lock:
            made = moves[:, [SOURCE, TARGET, TOKENS]].tolist()
            for move in made:
                self._follow(*move)
            if self.failure is None:
                last = {target: (source, count) for source, target, count in made}
                counts = np.array([count for _, count in last.values()], np.int64)
                places = np.repeat(np.array([*last], np.int64), counts), ranges(np.zeros_like(counts), counts)
                complaint = "is not what the copy from block {} should leave"
                check = self._check(places, self._states[places], lambda block: complaint.format(last[block][0]))
                self._launch(stream, partial(self._keep, check), places)

    def expect(self, states: States) -> None:
        """From now on, the full blocks of a sequence with these token states may come to the host from outside, and
        those of no other."""
        with self._lock:
            full = len(states) // self._tokens_per_block
            grid = states[: full * self._tokens_per_block].reshape(full, -1)
            _, _, host = self._tiers[-1]
            self._expected = {host.first_lanes(row): row for row in grid}

    def loaded(self, blocks: Int64s) -> None:
        """Compare host blocks that have come from outside with what is expected, if `expect` was ever called. A
        difference is kept in `failure`."""
        tier, origin, host = self._tiers[-1]
        with self._lock:
            expected = self._expected
            if expected is None:
                return
            for block in blocks.tolist():
                states = expected.get(host.read_first_lanes(block - origin))
                difference = None if states is None else host.check(states[None], np.array([block - origin]))
                self._written[block] = states is not None and difference is None
                if states is None or difference is not None:
                    token = 0 if difference is None else difference.token
                    self._fail(block, tier, token, "what came from a store is no block of this prompt")
                else:
                    self._states[block] = states
                    self.verified.loaded_blocks += 1

    def raise_failure(self) -> None:
        """Raise the `VerificationError` that is kept in `failure`, if any."""
        if self.failure is not None:
            raise self.failure

    def _launch(self, stream: Stream, function: Callable[[], None], places: Places, writes: bool = False) -> None:
        """Have a function called that writes these tokens, or reads them."""
        blocks, tokens = places
        if self._enqueue is None or not len(blocks):
            function()
            return
        begins = np.append(True, (np.diff(blocks) != 0) | (np.diff(tokens) != 1))
        rows = np.stack([blocks[begins], tokens[begins], tokens[np.roll(begins, -1)] + 1], axis=1)
        reads, written = (rows[:0], rows) if writes else (rows, rows[:0])
        self._enqueue(stream, lambda: self._keep(function), reads, written)

    def _keep(self, function: Callable[[], None]) -> None:
        """Call a function, and keep its error in `failure`, since no caller could handle it."""
        try:
            function()
        except VerificationError as failure:
            self.failure = self.failure or failure

    def _places(self, blocks: Int64s, start: int, stop: int) -> Places:
        """Tokens ``[start, stop)`` of a sequence in `blocks`."""
        blocks_before, tokens = np.divmod(np.arange(start, stop), self._tokens_per_block)
        return blocks[blocks_before], tokens

    def _check(self, places: Places, states: States, complaint: Callable[[int], str]) -> Callable[[], None]:
        """A function that raises the first difference of tokens from their states, which it blames on the block."""
        context = self.context
        blocks, tokens = places

        def check() -> None:
            for tier, origin, memory in self._tiers:
                (mine,) = np.nonzero((blocks < self._device_blocks) == (tier == "device"))
                difference = memory.check(states[mine], blocks[mine] - origin, tokens[mine])
                if difference is not None:
                    block = int(blocks[mine[difference.row]])
                    raise _error(tier, block, complaint(block), context, difference)

        return check

    def _follow(self, source: int, target: int, count: int) -> None:
        """Copy the expected states from source to target, and note a copy of bytes that nobody wrote."""
        known = self._written[source, :count]
        if not known.all():
            tier = "device" if source < self._device_blocks else "host"
            self._fail(source, tier, int(known.argmin()), "was copied before its KV was written")
        self._states[target, :count] = self._states[source, :count]
        self._written[target, :count] |= known
        from_device, to_device = source < self._device_blocks, target < self._device_blocks
        if not to_device:
            if from_device:
                self.verified.offloaded_blocks += 1
        elif from_device or count < self._tokens_per_block:
            self.verified.partial_copies += 1
        else:
            self.verified.onboarded_blocks += 1

    def _fail(self, block: int, tier: str, token: int, complaint: str) -> None:
        """Keep the failure of a block that has no bytes to show."""
        self.failure = self.failure or _error(tier, block, complaint, self.context, token=token)


def _error(
    tier: str, block: int, complaint: str, context: str, difference: Difference | None = None, token: int = 0
) -> VerificationError:
    layer = plane = None
    if difference is not None:
        token, layer, plane = difference.token, difference.layer, difference.plane
        values = f"found {difference.found:#x}, expected {difference.expected:#x}"
        complaint += f" (layer {layer}, plane {plane}, head {difference.head}: {values})"
    message = f"{tier} block {block}, token {token}, {context}: {complaint}"
    return VerificationError(message, block=block, tier=tier, token=token, layer=layer, plane=plane)


class Image:
    """A copy in main memory of a device tier that NumPy cannot reach. Blocks are updated one by one.

    ``pool`` uint8[n] has ``get`` and ``set`` as CuPy's arrays do.
    """

    def __init__(self, layout: BlockLayout, pool: Any, blocks: int) -> None:
        self.array = np.zeros(layout.device_shape(blocks), layout.storage_dtype)
        self._pool, self._bytes, self._blocks = pool, self.array.reshape(-1).view(np.uint8), blocks
        strides = layout.device_strides(blocks)
        self._step, self._segment = strides.block, layout.segment_bytes
        self._offsets = [
            layer * strides.layer + plane * strides.plane
            for layer in range(layout.layers)
            for plane in range(layout.planes)
        ]

    def _spans(self, blocks: Int64s) -> Iterator[slice]:
        for block in np.unique(blocks[blocks < self._blocks]).tolist():
            for offset in self._offsets:
                start = offset + block * self._step
                yield slice(start, start + self._segment)

    def fetch(self, blocks: Int64s) -> None:
        """Copy blocks of the device tier into the image. Ids of the host tier are ignored."""
        for span in self._spans(blocks):
            self._bytes[span] = self._pool[span].get()

    def store(self, blocks: Int64s) -> None:
        """Copy blocks of the image to the device tier. Returns when the GPU has finished."""
        for span in self._spans(blocks):
            self._pool[span].set(self._bytes[span])


class WatchedDevice(WrappedDevice):
    """Forwards all calls to `inner`, measures the time of copies, and has `verifier` check every copy, if there is one.
    It is set later, since the pool must exist before a verifier can read it.

    `copy_ns` is the time of the inner device's copies. `away_ns` is the time of whole copy calls, with verification; a
    caller subtracts it to get its own time.
    """

    verifier: Verifier | None = None

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        self.copy_ns = self.away_ns = 0
        self._image: Image | None = None

    def launch(self, stream: Stream, function: Callable[[], None], reads: Int64s, writes: Int64s) -> None:
        """Have the engine call ``function`` after all work that is enqueued on ``stream``. ``reads`` and ``writes`` are
        the tokens that it may touch, as rows (block, first, end)."""
        if isinstance(self.inner, SimDevice):
            self.inner.launch(stream, function, reads=reads, writes=writes)
            return
        assert self._image is not None
        self.inner.synchronize(self.inner.record(stream))
        self._image.fetch(np.concatenate([reads[:, 0], writes[:, 0]]))
        function()
        self._image.store(writes[:, 0])
        self.inner.synchronize()

    def engine_pool(self, pool: Any) -> Array:
        """The device tier for an engine that runs on the CPU: the pool itself, or an image of it that ``launch``
        updates."""
        return pool if self._image is None else self._image.array

    def check(self) -> None:
        """Have a device that detects races report what it has found."""
        if isinstance(self.inner, SimDevice):
            self.inner.check()

    def bind(self, regions: Sequence[Region]) -> None:
        """Bind one region of one part, as every device does."""
        ((layout, device_pool, _),), device_blocks, _ = regions[0]
        self._image = None if isinstance(device_pool, np.ndarray) else Image(layout, device_pool, device_blocks)
        self.inner.bind(regions)

    def copy_blocks(self, moves: Int64s, stream: Stream = NULL_STREAM, layers: Layers = ALL_LAYERS) -> None:
        begin = perf_counter_ns()
        completed = 0
        try:
            self.inner.copy_blocks(moves, stream, layers)
            completed = len(moves)
        except DeviceError as error:
            completed = error.completed
            raise
        finally:
            self.copy_ns += perf_counter_ns() - begin
            if self.verifier is not None:
                self.verifier.copied(moves[:completed], stream)
            self.away_ns += perf_counter_ns() - begin

    @contextmanager
    def host_access(self, *, writes: Any = None, **others: Any) -> Iterator[Any]:
        with self.inner.host_access(writes=writes, **others) as access:
            yield access
        if self.verifier is not None and writes is not None:
            self.verifier.loaded(writes[:, 0])
