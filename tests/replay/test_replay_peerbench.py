"""kvpool as an adapter of the peer benchmark finds what the benchmark's oracle finds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from asv_bench import peerbench_kvpool
from kvpool import BlockLayout
from kvpool.tools.replay import Replay, ReplayConfig, read_trace
from kvpool.tools.replay.engine import Admit, Append, Finish, schedule
from tests.data import CHATS


@pytest.mark.parametrize(("capacity", "variant"), [(4_000, ""), (15_000, ""), (4_000, "host=4000")])
def test_adapter_has_the_hits_of_a_replay(capacity: int, variant: str) -> None:
    """The adapter is driven as the harness drives it."""
    trace, adapter, hits = read_trace(str(CHATS), limit=60), peerbench_kvpool.make(variant), 0
    adapter.start(capacity, 16, 16)
    driven: dict[int, SimpleNamespace] = {}
    for step in schedule(trace.requests, device_blocks=capacity, active=16, tokens_per_block=16):
        if isinstance(step, Admit):
            request = SimpleNamespace(tokens=step.request.prompt(), out_tokens=step.request.output())
            driven[step.request.index] = request
            adapter.prepare(request)
            adapter.ingest(request)
            hits += adapter.admit(request)
        elif isinstance(step, Append):
            adapter.append_batch([(driven[request.index], start, count) for request, start, count in step.items])
        elif isinstance(step, Finish):
            adapter.finish(driven.pop(step.request.index))
    adapter.check()
    stats = adapter.stats()
    adapter.stop()
    config = ReplayConfig(
        BlockLayout.of_block_bytes(16, 16), capacity, adapter.host_blocks, active=16, partial=False, device="cpu"
    )
    with Replay(trace, config) as replay:
        summary = replay.run()
    assert not driven and hits == summary.hits.tokens > 0
    assert stats["offloaded_blocks"] == summary.blocks.offloaded and bool(variant) == bool(summary.blocks.offloaded)
