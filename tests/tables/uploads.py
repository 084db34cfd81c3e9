"""The three forms in which block tables are handed over, and a device that hands over late, or refuses to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvpool import KVCacheManager
from kvpool.device import CpuDevice
from kvpool.device.base import NULL_STREAM, DeviceEvent, Stream, WrappedDevice
from kvpool.device.work import StagedVectors, Work
from kvpool.errors import DeviceError
from steps import GARBAGE, arrays, check, expected
from tests import debug


class Form(NamedTuple):
    """``targets`` makes arrays for that many sequences and blocks (of one token each, at most), ``call`` hands over to
    them, ``check`` compares them with the host's tables of the same sequences."""

    targets: Callable[[int, int], Any]
    call: Callable[[KVCacheManager, Any, Any], None]
    check: Callable[[KVCacheManager, Any, list[int]], None]


def vectors(*sizes: int) -> list[np.ndarray]:
    return [np.full(size, GARBAGE, np.int32) for size in sizes]


def _dense(cache: KVCacheManager, out: Any, ids: list[int]) -> None:
    np.testing.assert_array_equal(out[: len(ids)], cache.block_table(ids).dense(out.shape[1]))


def _csr(cache: KVCacheManager, out: Any, ids: list[int]) -> None:
    for uploaded, part in zip(out, cache.block_table(ids).csr(), strict=True):
        np.testing.assert_array_equal(uploaded[: len(part)], part)
        assert (uploaded[len(part) :] == GARBAGE).all()


def _step(cache: KVCacheManager, out: Any, ids: list[int]) -> None:
    check(out, expected(cache, ids, [0] * len(ids), cache.sequence_length(ids).tolist()))


FORMS = {
    "dense": Form(
        lambda n, blocks: np.full((n, blocks), GARBAGE, np.int32),
        lambda cache, out, ids: cache.tables.copy_batch_block_offsets(out, ids),
        _dense,
    ),
    "csr": Form(
        lambda n, blocks: vectors(n + 1, n * blocks, n),
        lambda cache, out, ids: cache.tables.copy_batch_block_csr(*out, ids),
        _csr,
    ),
    "step": Form(
        lambda n, blocks: arrays(n, 4 * n * blocks, blocks, n * blocks),
        lambda cache, out, ids: cache.tables.copy_step_tables(out, ids),
        _step,
    ),
}


HOST_STEP = FORMS["step"]._replace(call=lambda cache, out, ids: cache.tables.step_tables(ids, out=out))


def picture(cache: KVCacheManager) -> tuple[bytes, int, int]:
    """All that a refused call may not change."""
    return debug.dump(cache.core.tokens), cache.core.transfer._decided, len(cache._staging._retained)


class Late(WrappedDevice):
    """Stages at once; events are complete when a test says so. ``refusals`` uploads are refused, those of vectors
    half done."""

    def __init__(self) -> None:
        super().__init__(CpuDevice())
        self.synchronous, self.done, self.refusals = False, set[DeviceEvent](), 0

    def enqueue(self, work: Work, stream: Stream = NULL_STREAM) -> None:
        self.refusals -= 1
        if self.refusals >= 0:
            if isinstance(work, StagedVectors):
                super().enqueue(work._replace(pieces=work.pieces[:1]), stream)
            raise DeviceError("staging refused")
        super().enqueue(work, stream)

    def record(self, stream: Stream) -> DeviceEvent:
        return DeviceEvent()

    def query(self, event: DeviceEvent) -> bool:
        return event in self.done

    def synchronize(self, event: DeviceEvent | None = None) -> None:
        pass
