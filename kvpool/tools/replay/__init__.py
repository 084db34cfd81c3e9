"""Replaying request traces through a pool: readers, a synthetic workload, the replay itself and its verification."""

from kvpool.tools.replay.content import Request
from kvpool.tools.replay.engine import Replay, ReplayConfig
from kvpool.tools.replay.summary import Summary
from kvpool.tools.replay.traces import Trace, TraceError, read_trace, stream_trace, synthetic
from kvpool.tools.replay.verifier import VerificationError

__all__ = [
    "Replay",
    "ReplayConfig",
    "Request",
    "Summary",
    "Trace",
    "TraceError",
    "VerificationError",
    "read_trace",
    "stream_trace",
    "synthetic",
]
