"""WatchedDevice: another device, whose copies are measured and verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.arrays.layout import BlockLayout
from kvpool.device.base import NULL_STREAM, SOURCE, TARGET, TOKENS, Device, Region, Stream
from kvpool.device.sim import SimDevice
from kvpool.device.wrapper import WrappedDevice
from kvpool.errors import DeviceError
from kvpool.replay.tokens import Ids
from kvpool.replay.verifier import Verifier


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

    def _spans(self, blocks: Ids) -> Iterator[slice]:
        for block in np.unique(blocks[blocks < self._blocks]).tolist():
            for offset in self._offsets:
                start = offset + block * self._step
                yield slice(start, start + self._segment)

    def fetch(self, blocks: Ids) -> None:
        """Copy blocks of the device tier into the image. Ids of the host tier are ignored."""
        for span in self._spans(blocks):
            self._bytes[span] = self._pool[span].get()

    def store(self, blocks: Ids) -> None:
        """Copy blocks of the image to the device tier. Returns when the GPU has finished."""
        for span in self._spans(blocks):
            self._pool[span].set(self._bytes[span])


class WatchedDevice(WrappedDevice):
    """Forwards all calls to `inner`, counts the bytes of copies and the time they take, and has `verifier` check every
    copy, if there is one. It is set later, since the pool must exist before a verifier can read it.

    `copy_ns` is the time of the inner device's copies. `away_ns` is the time of whole copy calls, with verification; a
    caller subtracts it to get its own time. `copied_bytes` is ``[offload, onboard, inside a tier]``.
    """

    verifier: Verifier | None = None

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        self.copy_ns = self.away_ns = 0
        self.copied_bytes = np.zeros(3, dtype=np.int64)
        self._device_blocks = self._token_bytes = 0
        self._image: Image | None = None

    def launch(self, stream: Stream, function: Callable[[], None], reads: Ids, writes: Ids) -> None:
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

    def engine_pool(self, pool: Any) -> npt.NDArray[Any]:
        """The device tier for an engine that runs on the CPU: the pool itself, or an image of it that ``launch``
        updates."""
        return pool if self._image is None else self._image.array

    def check(self) -> None:
        """Have a device that detects races report what it has found."""
        if isinstance(self.inner, SimDevice):
            self.inner.check()

    def bind(self, regions: Sequence[Region]) -> None:
        """Bind one region of one part, as every device does. Raises ValueError for more than one."""
        if len(regions) != 1 or len(regions[0].parts) != 1:
            raise ValueError(
                f"regions: {[len(region.parts) for region in regions]} parts; accepted is one region of one"
            )
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
            if self.verifier is not None:
                self.verifier.copied(moves[:completed], stream)
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

    @contextmanager
    def host_access(
        self, *, reads: Any = None, writes: Any = None, loads: Sequence[npt.NDArray[Any]] = (),
        stores: Sequence[npt.NDArray[Any]] = (), outside: bool = False,
    ) -> Iterator[Any]:  # fmt: skip
        with self.inner.host_access(reads=reads, writes=writes, loads=loads, stores=stores, outside=outside) as access:
            yield access
        if self.verifier is not None and writes is not None:
            self.verifier.loaded(writes[:, 0])
