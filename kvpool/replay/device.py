"""Devices around a device: one that keeps the time of copies apart, and one that has their bytes verified."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt

from kvpool.device.base import NULL_STREAM, SOURCE, TARGET, TOKENS, Device, Stream
from kvpool.device.sim import SimDevice
from kvpool.device.wrapper import WrappedDevice
from kvpool.errors import DeviceError
from kvpool.layout import BlockLayout
from kvpool.replay.content import Ids
from kvpool.replay.verifier import Verifier


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

    def launch(self, stream: Stream, function: Callable[[], None], reads: Ids, writes: Ids) -> None:
        """Have the engine do something behind what is enqueued on ``stream``; the tokens that it may touch as rows (block, first, end)."""
        assert isinstance(self.inner, SimDevice)
        self.inner.launch(stream, function, reads=reads, writes=writes)

    def check(self) -> None:
        """Have a device that watches say what it has seen."""
        if isinstance(self.inner, SimDevice):
            self.inner.check()

    def bind(
        self,
        layout: BlockLayout,
        device_pool: npt.NDArray[np.uint8],
        host_pool: npt.NDArray[np.uint8],
        device_blocks: int,
        host_blocks: int,
    ) -> None:
        self._device_blocks, self._token_bytes = device_blocks, layout.token_bytes
        self.inner.bind(layout, device_pool, host_pool, device_blocks, host_blocks)

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
