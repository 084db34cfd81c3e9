"""Devices around a device: one that keeps the time of copies apart, and one that has their bytes verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.device.base import NULL_STREAM, SOURCE, TARGET, TOKENS, Device, Region, Stream
from kvpool.device.sim import SimDevice
from kvpool.device.wrapper import WrappedDevice
from kvpool.errors import DeviceError
from kvpool.layout import BlockLayout
from kvpool.replay.content import Ids
from kvpool.replay.verifier import Verifier


class Image:
    """A copy in main memory of a device tier that NumPy cannot reach, brought up to date block by block.

    ``pool`` uint8[n] has ``get`` and ``set`` as CuPy's arrays do.
    """

    def __init__(self, layout: BlockLayout, pool: Any, blocks: int) -> None:
        self.array = np.zeros(layout.device_shape(blocks), layout.storage_dtype)
        self._pool, self._bytes, self._blocks = pool, self.array.reshape(-1).view(np.uint8), blocks
        strides = layout.device_strides(blocks)
        self._step, self._segment = strides.block, layout.segment_bytes
        self._offsets = [layer * strides.layer + plane * strides.plane for layer in range(layout.layers) for plane in range(layout.planes)]

    def _spans(self, blocks: Ids) -> Iterator[slice]:
        for block in np.unique(blocks[blocks < self._blocks]).tolist():
            for offset in self._offsets:
                start = offset + block * self._step
                yield slice(start, start + self._segment)

    def fetch(self, blocks: Ids) -> None:
        """Read blocks; ids of the host tier are left out."""
        for span in self._spans(blocks):
            self._bytes[span] = self._pool[span].get()

    def store(self, blocks: Ids) -> None:
        """Write blocks back; done when the GPU is."""
        for span in self._spans(blocks):
            self._pool[span].set(self._bytes[span])


class MeteredDevice(WrappedDevice):
    """Passes everything on to `inner`, and counts the bytes of copies and the time they take.

    `copy_ns` is spent in the inner device's copies, `away_ns` in everything that a copy call does, verification
    included: what a caller subtracts to get its own time. `copied_bytes` is ``[offload, onboard, on one tier]``.
    """

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        self.copy_ns = self.away_ns = 0
        self.copied_bytes = np.zeros(3, dtype=np.int64)
        self._device_blocks = self._token_bytes = 0
        self._image: Image | None = None

    def launch(self, stream: Stream, function: Callable[[], None], reads: Ids, writes: Ids) -> None:
        """Have the engine do something behind what is enqueued on ``stream``; the tokens that it may touch as rows (block, first, end)."""
        if isinstance(self.inner, SimDevice):
            self.inner.launch(stream, function, reads=reads, writes=writes)
            return
        assert self._image is not None
        self.inner.synchronize(self.inner.record(stream))
        self._image.fetch(np.concatenate([reads[:, 0], writes[:, 0]]))
        function()
        self._image.store(writes[:, 0])
        self.inner.synchronize()

    def engine_pool(self, pool: Any) -> npt.NDArray[Any]:
        """The device tier for an engine that runs on the CPU: the pool itself, or an image of it that ``launch`` keeps up with."""
        return pool if self._image is None else self._image.array

    def check(self) -> None:
        """Have a device that watches say what it has seen."""
        if isinstance(self.inner, SimDevice):
            self.inner.check()

    def bind(self, regions: Sequence[Region]) -> None:
        """As every device, but for one region of one part. Raises ValueError for more."""
        if len(regions) != 1 or len(regions[0].parts) != 1:
            raise ValueError(f"regions: {[len(region.parts) for region in regions]} parts; accepted is one region of one")
        ((layout, device_pool, _),), self._device_blocks, _ = regions[0]
        self._token_bytes = layout.token_bytes
        self._image = None if isinstance(device_pool, np.ndarray) else Image(layout, device_pool, self._device_blocks)
        self.inner.bind(regions)

    def copy_blocks(self, moves: npt.NDArray[np.int64], stream: Stream = NULL_STREAM) -> None:
        begin = perf_counter_ns()
        completed = 0
        try:
            self.inner.copy_blocks(moves, stream)
            completed = len(moves)
        except DeviceError as error:
            completed = error.completed
            raise
        finally:
            self.copy_ns += perf_counter_ns() - begin
            self._count(moves[:completed])
            self._done(moves[:completed], stream)
            self.away_ns += perf_counter_ns() - begin

    def _count(self, moves: npt.NDArray[np.int64]) -> None:
        from_device = moves[:, SOURCE] < self._device_blocks
        to_device = moves[:, TARGET] < self._device_blocks
        nbytes = moves[:, TOKENS] * self._token_bytes
        self.copied_bytes += (
            int(nbytes[from_device & ~to_device].sum()),
            int(nbytes[~from_device & to_device].sum()),
            int(nbytes[from_device == to_device].sum()),
        )

    def _done(self, moves: npt.NDArray[np.int64], stream: Stream) -> None:
        """Called with the moves that the device has taken."""


class VerifyingDevice(MeteredDevice):
    """Has every copy checked by `verifier`, once one is set: pools must exist before it can read them."""

    verifier: Verifier | None = None

    def _done(self, moves: npt.NDArray[np.int64], stream: Stream) -> None:
        if self.verifier is not None:
            self.verifier.copied(moves, stream)
