"""kvpool's stores as a secondary tier below vLLM's own CPU tier, in a real vLLM: tokens are those of a run without
offload, and chunks that the CPU tier has evicted come from the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: python -m tests.engines build, then python -m tests.engines test")

from tests.engines.serve import BLOCK
from tests.engines.test_vllm_engine import Runs, answers, differing, waves

SHORT = waves(more=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    vllm_runs = Runs(tmp_path_factory.mktemp("vllm-tier"))
    yield vllm_runs
    vllm_runs.close()


def tiered(store: str, **more: Any) -> dict[str, Any]:
    tier = {
        "type": "KVPoolSecondaryTier",
        "module_path": "kvpool.integrations.vllm.secondary_tier",
        "stores": store,
        **more,
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.engines.cpu_tiers",
            "cpu_bytes_to_use": 1000 << 10,
            "secondary_tiers": [tier],
        },
    }


def test_chunks_that_the_cpu_tier_has_evicted_come_from_the_store(runs: Runs, tmp_path: Path) -> None:
    tier_transfer = tiered(f"disk:{tmp_path}/store?capacity=64MiB", weights="random 0")
    same = {"transfer": tier_transfer, "environment": {"PYTHONHASHSEED": "7"}, "folder": str(tmp_path)}
    loaded = runs.run("tiny", {}, waves=SHORT, **same)
    assert differing(runs.run("tiny", None, waves=SHORT), loaded) == {}
    read = [
        value for name, value in loaded["counters"].items() if name.startswith("vllm:kv_offload_tiering_read_bytes")
    ]
    assert sum(read) > 0, loaded["counters"]
    assert [answers(loaded)[f"again-{number}"]["cached"] for number in range(3)] == [15 * BLOCK] * 3
    warm = runs.run("tiny", {}, waves=SHORT[:2], **same)
    assert differing(runs.run("tiny", None, waves=SHORT), warm) == {}
    assert answers(warm)["first-0"]["cached"] == 15 * BLOCK
