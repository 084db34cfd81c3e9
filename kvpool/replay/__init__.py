"""Replaying request traces through a pool: readers, a synthetic workload, the replay itself and its verification."""

from kvpool.replay.content import Request as Request
from kvpool.replay.engine import Replay as Replay
from kvpool.replay.engine import ReplayConfig as ReplayConfig
from kvpool.replay.summary import Summary as Summary
from kvpool.replay.traces import Trace as Trace
from kvpool.replay.traces import TraceError as TraceError
from kvpool.replay.traces import read_trace as read_trace
from kvpool.replay.traces import stream_trace as stream_trace
from kvpool.replay.traces import synthetic as synthetic
from kvpool.replay.verifier import VerificationError as VerificationError
