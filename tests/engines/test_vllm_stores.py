"""A real vLLM with stores below kvpool's host tier: what was evicted from the host comes back, an engine that was
killed is warm when it is started again, and the tokens are those of a run without offload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: python -m tests.engines build, then python -m tests.engines test")

from tests.engines.serve import BLOCK
from tests.engines.test_vllm_engine import Runs, answers, counted, differing, waves

SEED = {"PYTHONHASHSEED": "7"}
LITTLE = "1000KiB"
"""Host memory for two of the three prompts."""
LONG, SHORT = waves(more=False), waves(prompts=2, more=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    vllm_runs = Runs(tmp_path_factory.mktemp("vllm-stores"))
    yield vllm_runs
    vllm_runs.close()


def disk(folder: Path) -> dict[str, Any]:
    return {"stores": [f"disk:{folder}/store?capacity=64MiB"], "weights": "random 0"}


@pytest.mark.parametrize("processes", [False, True], ids=["in one process", "engine core in a process"])
def test_what_the_host_has_evicted_comes_back_from_a_store(runs: Runs, processes: bool) -> None:
    options = {"host_bytes": LITTLE, "stores": ["memory:?capacity=64MiB"], "weights": "random 0"}
    loaded = runs.run("tiny", options, processes=processes, waves=LONG)
    assert differing(runs.run("tiny", None, waves=LONG), loaded) == {}
    assert counted(loaded, "evicted_chunks") > 0 and counted(loaded, "failed_loads") == 0
    assert counted(loaded, "store_saved_chunks") > 0
    assert counted(loaded, "store_loaded_chunks") > 0
    assert loaded["compiled"] == []
    assert [answers(loaded)[f"again-{n}"]["cached"] for n in range(3)] == [15 * BLOCK] * 3


def test_where_loads_are_weighed_against_computing_tokens_are_the_same(runs: Runs) -> None:
    options = {"host_bytes": LITTLE, "stores": ["memory:?capacity=64MiB"], "weights": "random 0", "load": "faster"}
    loaded = runs.run("tiny", options, waves=LONG)
    assert differing(runs.run("tiny", None, waves=LONG), loaded) == {}
    assert counted(loaded, "failed_loads") == 0
    assert counted(loaded, "store_loaded_chunks") + counted(loaded, "store_missed_chunks") > 0, "it was decided"


def test_an_engine_that_was_killed_is_warm_when_it_is_started_again(runs: Runs, tmp_path: Path) -> None:
    again = [wave for wave in SHORT if "first" in wave[0]["name"]]
    dies = [{**SHORT[0][0], "name": "dies", "new": 40, "die": 20}]
    same = {"environment": SEED, "folder": str(tmp_path)}
    killed = runs.run("tiny", disk(tmp_path), waves=[*again, dies], **same)
    assert "failed" in killed
    warm = runs.run("tiny", disk(tmp_path), waves=again, **same)
    assert differing(runs.run("tiny", None, waves=LONG), warm) == {}
    assert answers(warm)["first-0"]["cached"] == 15 * BLOCK
    assert counted(warm, "store_loaded_chunks") > 0 and counted(warm, "failed_loads") == 0
    other = runs.run("tiny", disk(tmp_path) | {"weights": "random 1"}, waves=again[:1], **same)
    assert answers(other)["first-0"]["cached"] == 0, "other weights find nothing"


@pytest.mark.parametrize("workers", [(1, 2), (2, 1)])
def test_what_some_workers_have_saved_others_load_in_the_canonical_layout(
    runs: Runs, tmp_path: Path, workers: tuple[int, int]
) -> None:
    extra, folder = disk(tmp_path) | {"canonical_layout": True}, str(tmp_path)
    pair = [
        runs.run(
            "tiny",
            extra,
            waves=SHORT[:1],
            processes=True,
            environment=SEED,
            folder=folder,
            engine={"tensor_parallel_size": count},
        )
        for count in workers
    ]
    assert [answers(run)["first-0"]["cached"] for run in pair] == [0, 15 * BLOCK]
    assert differing(runs.run("tiny", None, waves=LONG), pair[1]) == {}


def test_a_prompt_that_no_store_has_does_not_wait_for_other_requests(runs: Runs) -> None:
    """The answer of the stores holds for the request that asked, also where it is older than ``retry_seconds`` when the
    request is looked at again."""
    options = {"stores": ["memory:?capacity=64MiB"], "retry_seconds": 1e-6}
    long = {"name": "long", "tokens": LONG[0][0]["tokens"][:64], "new": 60}
    cold = {"name": "cold", "tokens": LONG[2][0]["tokens"][:100], "new": 4, "at": 5}
    run = runs.run("tiny", options | {"weights": "random 0"}, waves=[[long, cold]])
    assert answers(run)["cold"]["step"] - 5 <= 4
    assert answers(run)["long"]["step"] < 5
