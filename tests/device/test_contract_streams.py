"""What every device promises about streams and events."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.arrays.layout import BlockLayout
from kvpool.device.base import NULL_EVENT, NULL_STREAM, Device, Stream
from tests.device import reference
from tests.device.pools import as_moves, images, make_pools, random_moves, seen

FORMS: dict[str, Callable[[int], Any]] = {
    "None": lambda handle: None,
    "0": lambda handle: 0,
    "an int": int,
    "a NumPy int": np.int64,
    "the null stream": lambda handle: NULL_STREAM,
    "a Stream": Stream,
    "the protocol": lambda handle: SimpleNamespace(__cuda_stream__=lambda: (0, handle)),
    "the protocol as an attribute": lambda handle: SimpleNamespace(__cuda_stream__=(0, handle)),
    "cuda_stream": lambda handle: SimpleNamespace(cuda_stream=handle),
    "ptr": lambda handle: SimpleNamespace(ptr=handle),
}


@pytest.mark.parametrize("form", FORMS)
def test_streams_of_every_form_are_accepted_by_as_stream_and_copies(
    device: Device, layout: BlockLayout, form: str
) -> None:
    make_pools(device, layout)
    # CUDA knows only streams that somebody has made.
    handle = device.create_stream("any").handle if device.name == "cuda" else 7
    found = device.as_stream(FORMS[form](handle))
    assert isinstance(found, Stream) and found.handle in (0, handle)
    assert device.as_stream(found) == found
    device.copy_blocks(as_moves((0, 1, 4)), found)
    device.synchronize()


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (True, TypeError),
        (np.True_, TypeError),
        (1.0, TypeError),
        ("0", TypeError),
        (object(), TypeError),
        (SimpleNamespace(ptr=None), TypeError),
        (SimpleNamespace(cuda_stream=True), TypeError),
        (SimpleNamespace(__cuda_stream__=7), TypeError),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 1, 2)), TypeError),
        (-1, ValueError),
        (2**64, ValueError),
        (SimpleNamespace(ptr=-1), ValueError),
    ],
)
def test_what_is_no_stream_is_refused_by_name(device: Device, stream: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="stream="):
        device.as_stream(stream)


def test_work_on_one_stream_is_done_in_the_order_of_the_calls(device: Device, layout: BlockLayout) -> None:
    pools = make_pools(device, layout)
    expected = images(pools)
    random, stream = np.random.default_rng(5), device.create_stream("copies")
    for _ in range(30):
        moves = random_moves(layout, random)
        reference.copy_blocks(layout, *expected, moves)
        device.copy_blocks(moves, stream)
    device.synchronize()
    np.testing.assert_array_equal(seen(pools.device_pool), expected[0])
    np.testing.assert_array_equal(pools.host_pool, expected[1])


def test_work_behind_a_wait_comes_after_what_the_event_was_recorded_behind(device: Device, layout: BlockLayout) -> None:
    pools = make_pools(device, layout)
    expected = images(pools)
    random, streams = np.random.default_rng(6), [device.create_stream(name) for name in "abc"]
    event = NULL_EVENT
    for i in range(30):
        moves = random_moves(layout, random)
        reference.copy_blocks(layout, *expected, moves)
        device.wait(streams[i % 3], event)
        device.copy_blocks(moves, streams[i % 3])
        event = device.record(streams[i % 3])
    device.synchronize()
    np.testing.assert_array_equal(seen(pools.device_pool), expected[0])
    np.testing.assert_array_equal(pools.host_pool, expected[1])


def test_what_is_before_an_event_is_done_when_synchronize_returns_or_query_says_so(
    device: Device, layout: BlockLayout
) -> None:
    pools = make_pools(device, layout)
    first, second = (seen(pools.device_pool)[:, :, block].copy() for block in (0, 1))
    stream = device.create_stream("copies")
    device.copy_blocks(as_moves((0, 8, 4)), stream)
    event = device.record(stream)
    device.synchronize(event)
    assert device.query(event)
    np.testing.assert_array_equal(reference.block_view(layout, *images(pools), 8), first)
    device.copy_blocks(as_moves((1, 9, 4)), stream)
    event = device.record(stream)
    while not device.query(event):
        pass
    np.testing.assert_array_equal(reference.block_view(layout, *images(pools), 9), second)
    device.synchronize()


def test_the_null_event_is_complete_and_holds_nothing_back(device: Device, layout: BlockLayout) -> None:
    make_pools(device, layout)
    assert device.query(NULL_EVENT)
    device.synchronize(NULL_EVENT)
    device.wait(NULL_STREAM, NULL_EVENT)
    device.copy_blocks(as_moves((0, 8, 4)))
    device.synchronize()


def test_the_caller_may_use_its_moves_again_at_once(device: Device, layout: BlockLayout) -> None:
    pools = make_pools(device, layout)
    first = seen(pools.device_pool)[:, :, 0].copy()
    moves = as_moves((0, 8, 4))
    device.copy_blocks(moves)
    moves[0] = (1, 9, 1, 0)
    device.synchronize()
    np.testing.assert_array_equal(reference.block_view(layout, *images(pools), 8), first)
