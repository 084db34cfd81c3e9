"""Replays: the control plane of whole workloads, their hits, and their memory."""

from __future__ import annotations

import os

from kvpool.common.arrays.layout import BlockLayout
from kvpool.tools.replay import Replay, ReplayConfig, Summary, Trace, read_trace, synthetic
from kvpool.tools.replay.traces import DEVICE_BLOCKS, HOST_BLOCKS


class SyntheticReplay:
    """Chats with shared system prompts through two tiers, 16 tokens and 4 KiB a block."""

    params = [[0, HOST_BLOCKS], [False, True]]
    param_names = ["host_blocks", "partial"]
    requests = 600
    number = 1
    repeat = 3
    rounds = 1
    warmup_time = 0.0
    timeout = 300

    def setup(self, host_blocks: int, partial: bool) -> None:
        self.trace = synthetic(self.requests)
        self.config = ReplayConfig(
            BlockLayout.of_block_bytes(4096, 16), DEVICE_BLOCKS, host_blocks, partial=partial, device="cpu"
        )

    def _run(self) -> Summary:
        with Replay(self.trace, self.config) as replay:
            return replay.run()

    def time_replay(self, host_blocks: int, partial: bool) -> None:
        self._run()

    def peakmem_replay(self, host_blocks: int, partial: bool) -> None:
        self._run()

    def track_control_plane(self, host_blocks: int, partial: bool) -> float:
        return sum(self._run().control_us_per_request.values())

    track_control_plane.unit = "us/request"  # type: ignore[attr-defined]

    def track_hit_tokens(self, host_blocks: int, partial: bool) -> int:
        return self._run().hits.tokens

    track_hit_tokens.unit = "tokens"  # type: ignore[attr-defined]


class TraceReplay:
    """The first 1,000 requests of conversation_trace.jsonl in the folder that KVPOOL_TRACES, of the environment, names;
    no host tier, no partial reuse."""

    params = [50_000, 400_000]
    param_names = ["device_blocks"]
    requests = 1_000
    timeout = 600

    def setup(self, device_blocks: int) -> None:
        folder = os.environ.get("KVPOOL_TRACES")
        if not folder:
            raise NotImplementedError("KVPOOL_TRACES names no folder of recorded traces")
        path = os.path.join(folder, "conversation_trace.jsonl")
        self.trace: Trace = read_trace(path, limit=self.requests)
        self.config = ReplayConfig(BlockLayout.of_block_bytes(16, 16), device_blocks, partial=False, device="cpu")

    def track_control_plane(self, device_blocks: int) -> float:
        with Replay(self.trace, self.config) as replay:
            return sum(replay.run().control_us_per_request.values())

    track_control_plane.unit = "us/request"  # type: ignore[attr-defined]
