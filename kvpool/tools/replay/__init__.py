"""Replaying request traces through a pool: readers, a synthetic workload, the replay itself and its verification."""

from kvpool.tools.replay.content import Request as Request
from kvpool.tools.replay.engine import Replay as Replay
from kvpool.tools.replay.engine import ReplayConfig as ReplayConfig
from kvpool.tools.replay.summary import Summary as Summary
from kvpool.tools.replay.traces import Trace as Trace
from kvpool.tools.replay.traces import TraceError as TraceError
from kvpool.tools.replay.traces import read_trace as read_trace
from kvpool.tools.replay.traces import stream_trace as stream_trace
from kvpool.tools.replay.traces import synthetic as synthetic
from kvpool.tools.replay.verifier import VerificationError as VerificationError
