"""Streams that callers name, and which of them a pool can use."""

from __future__ import annotations

from typing import Any

from kvpool.device.base import NULL_STREAM, Stream, stream_argument
from kvpool.device.cuda.runtime import CAPTURING, INVALID_HANDLE, Calls, status_of

_LEGACY_STREAM, _PER_THREAD_STREAM = 1, 2


def own_name(stream: Stream) -> Stream:
    """The one name that each stream has here. Raises ValueError for a handle that can be no stream."""
    if stream.handle == _PER_THREAD_STREAM:
        raise ValueError(
            "stream: the per-thread default stream (2) is another one in every thread; create a stream and name that"
        )
    if stream.handle >= 1 << 63:
        raise ValueError(f"stream={stream.handle:#x}: no stream of the driver has such a handle")
    return NULL_STREAM if stream.handle == _LEGACY_STREAM else stream


def usable_stream(calls: Calls, stream: Any) -> Stream:
    """Return a stream, or raise as ``Device.as_stream`` says. A stream that is being captured is refused: the graph
    would repeat what the pool enqueues, and its events would pull the pool's own streams into the graph."""
    found = own_name(stream_argument(stream))
    with calls("cudaStreamIsCapturing") as runtime:
        try:
            capturing = runtime.streamIsCapturing(found.handle)
        except RuntimeError as error:
            if status_of(error) == INVALID_HANDLE:
                raise ValueError(
                    f"stream={stream!r}: it has been destroyed; accepted is a stream that lives"
                ) from error
            # A capture that has failed has no status. The default stream has a status that says so.
            if status_of(error) not in (None, *CAPTURING):
                raise
            capturing = True
    if capturing:
        raise ValueError(
            f"stream={stream!r}: it is being captured; call before the capture begins or behind its end, "
            "and capture what reads block tables, not what hands them over"
        )
    return found


def stream_exists(calls: Calls, stream: Stream) -> bool:
    """See ``Device.exists``."""
    with calls("cudaStreamIsCapturing") as runtime:
        try:
            runtime.streamIsCapturing(own_name(stream).handle)
        except RuntimeError as error:
            return status_of(error) != INVALID_HANDLE
    return True
