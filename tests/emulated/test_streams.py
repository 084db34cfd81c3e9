"""Streams that cannot be used: each call that names one says so before anything is decided, and the pool goes on."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from kvpool import KVCacheManager
from kvpool.common.arrays.layout import BlockLayout
from kvpool.device.base import Stream
from kvpool.device.cuda import CudaDevice
from tests import debug
from tests.emulated import lab
from tests.emulated.lab import Driver

pytestmark = pytest.mark.gpu
LAYOUT = BlockLayout(2, 2, 16, 4)


def picture(cache: KVCacheManager) -> tuple[bytes, int]:
    return debug.dump(cache.core.tokens), cache.core.transfer._decided


@contextmanager
def unusable(driver: Driver, stream: Stream, fault: str) -> Iterator[None]:
    """A stream is captured inside the context, or destroyed from now on."""
    driver.cuStreamSynchronize(stream.handle)
    if fault == "captured":
        driver.cuStreamBeginCapture_v2(stream.handle, lab.RELAXED)
        yield
        driver.cuStreamEndCapture(stream.handle, ctypes.byref(ctypes.c_size_t()))
    else:
        driver.cuStreamDestroy_v2(stream.handle)
        yield


def refused(cache: KVCacheManager, fault: str, *calls: Callable[[], object]) -> None:
    for call in calls:
        before = picture(cache)
        with pytest.raises(ValueError, match=f"stream: .*{fault}.*"):
            call()
        assert picture(cache) == before


@pytest.mark.parametrize("fault", ["captured", "destroyed"])
def test_a_stream_that_cannot_be_used_is_refused_and_nothing_is_changed(driver: Driver, fault: str) -> None:
    with KVCacheManager(LAYOUT, device_blocks=6, host_blocks=4, device="cuda", max_sequences=4) as cache:
        good, bad = Stream(driver.stream()), Stream(driver.stream())
        sequence = cache.add_sequence(list(range(9)), stream=good)
        with unusable(driver, bad, fault):
            refused(
                cache,
                fault,
                lambda: cache.add_sequence([1, 2, 3], stream=bad),
                lambda: cache.append_tokens(sequence, [5], stream=bad),
                lambda: cache.commit(sequence, stream=bad),
                lambda: cache.imports.reserve([9] * 8, stream=bad),
                lambda: cache.pin(cache.block_keys([7] * 8).keys, stream=bad),
                lambda: cache.release(sequence, stream=bad),
            )
        cache.commit(sequence, stream=good)
        cache.release(sequence, stream=good)
        cache.verify()


@pytest.mark.parametrize("fault", ["captured", "destroyed"])
def test_sequences_of_a_stream_that_cannot_be_used_go_on_on_another(driver: Driver, fault: str) -> None:
    with KVCacheManager(LAYOUT, device_blocks=6, host_blocks=4, device="cuda", max_sequences=4) as cache:
        good, bad = Stream(driver.stream()), Stream(driver.stream())
        sequence = cache.add_sequence(list(range(9)), stream=bad)
        cache.commit(sequence)
        with unusable(driver, bad, fault):
            refused(
                cache,
                fault,
                lambda: cache.append_tokens(sequence, [5]),
                lambda: cache.commit(sequence),
                lambda: cache.release(sequence),
            )
        cache.append_tokens(sequence, [5, 6, 7, 8], stream=good)
        cache.commit(sequence, stream=good)
        cache.release(sequence, stream=good)
        again = cache.add_sequence(list(range(100, 124)), stream=good)
        cache.release(again, stream=good)
        cache.verify()


def test_a_device_waits_for_its_streams_while_another_thread_adds_one(driver: Driver) -> None:
    device = CudaDevice()

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        """Add a stream at every line of an iteration, where another thread could."""
        if frame.f_code.co_name == "<genexpr>":
            device.create_stream("another")
        return trace

    device.create_stream("first")
    before, sys_trace = len(device._streams.own), sys.gettrace()
    sys.settrace(trace)
    try:
        device.synchronize()
    finally:
        sys.settrace(sys_trace)
    assert len(device._streams.own) > before
    device.close()
