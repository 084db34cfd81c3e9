"""A real vLLM with kvpool's host tier says what it says without one: the same tokens, and the same logprobs.

vLLM's own cache is cut to a few blocks, so that what a prompt repeats comes from the host tier. Logprobs are compared,
as a wrong block moves few tokens. Prompts that share a part of another follow it: attention does not see the order of
full blocks, so that swapped ones are found only when a prompt has one of them and not the other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: python -m tests.engines build, then python -m tests.engines test")

from tests.engines.serve import BLOCK, transfer

FAR = 1e-3
"""Logprobs of two runs that are further apart than this come from other bytes: rounding alone moves them by 1e-5."""
VOCABULARY = 512
OWN_BLOCKS = {"tiny": 20, "windowed": 44, "hybrid": 44}
TURN, PROMPTS = 7 * BLOCK + 5, 3


def tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(2, VOCABULARY) for _ in range(count)]


def waves(prompts: int = PROMPTS, more: bool = True) -> list[Any]:
    """Prompts that share a beginning, twice, each followed by one that shares a part of it. With ``more``: turns of a
    conversation; several at once, of which some are aborted; and what is left after a reset."""
    random, batches = Random(5), []
    shared = tokens(random, 4 * BLOCK)
    shared_prompts = [shared + tokens(random, 11 * BLOCK) for _ in range(PROMPTS)]

    def wave(*requests: tuple[str, list[int], dict[str, Any]]) -> None:
        batches.append([{"name": name, "tokens": prompt, "new": 6, **rest} for name, prompt, rest in requests])

    for time in ("first", "again"):
        for number, prompt in enumerate(shared_prompts[:prompts]):
            wave((f"{time}-{number}", prompt, {}))
            part = (5 + number) * BLOCK
            wave((f"{time}-{number}-part", prompt[:part] + prompt[part + BLOCK : part : -1], {}))
    if more:
        converse(wave, random, shared_prompts)
        serve_at_once(wave, random, shared_prompts)
        batches.append("reset")
        for name, number in (("after-reset", 0), ("after-reset-other", 1), ("after-reset-again", 0)):
            wave((name, shared_prompts[number], {}))
    return batches


def converse(wave: Any, random: Random, prompts: list[list[int]]) -> None:
    """Three turns, each with all that was said before, and other prompts between them."""
    wave(("talk", tokens(random, TURN), {"new": 2 * BLOCK}))
    for turn in range(2):
        wave((f"between-{turn}", prompts[turn], {}))
        wave((f"talk-{turn}", tokens(random, BLOCK + 3), {"after": f"talk-{turn - 1}" if turn else "talk"}))


def serve_at_once(wave: Any, random: Random, prompts: list[list[int]]) -> None:
    """Several requests in a batch, which share prompts; and such that are aborted after some steps."""
    wave(
        ("at-once-0", prompts[0][: 6 * BLOCK], {}),
        ("at-once-1", prompts[1][: 5 * BLOCK + 9], {}),
        ("at-once-2", prompts[1][: 5 * BLOCK + 9], {}),
        ("at-once-3", tokens(random, 3 * BLOCK), {}),
    )
    for steps in (1, 2, 4):
        wave(
            (f"aborted-{steps}", prompts[2][: 8 * BLOCK], {"abort": steps, "new": 40}),
            (f"beside-{steps}", prompts[0][: 3 * BLOCK + 1] + tokens(random, 9), {}),
        )


class Runs:
    """Each run of the engine, once for all tests that look at it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.found = folder, {}
        command = [sys.executable, "-m", "tests.engines.server"]
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def close(self) -> None:
        self.server.kill()
        self.server.communicate()

    def run(
        self, shape: str, extra: dict[str, Any] | None, *, engine: dict[str, Any] | None = None, **more: Any
    ) -> Any:
        """The answers and counters of a run; ``extra`` are the plug-in's options, None for no offload. AssertionError
        if it fails."""
        script = {"shape": shape, "engine": engine or {}, "transfer": None, "processes": False, "waves": waves()} | more
        options = {
            "max_model_len": 18 * BLOCK,
            "max_num_batched_tokens": 5 * BLOCK,
            "num_gpu_blocks_override": OWN_BLOCKS[shape],
        }
        if extra is None:
            options |= {
                "enable_prefix_caching": False,
                "num_gpu_blocks_override": 400,
                "max_num_batched_tokens": 64 * BLOCK,
            }
        elif script["transfer"] is None:
            script["transfer"] = transfer(extra)
        script["engine"] = options | script["engine"]
        text = json.dumps(script)
        if text not in self.found:
            self.found[text] = self._serve(text)
        return self.found[text]

    def _serve(self, script: str) -> Any:
        assert self.server.stdin is not None and self.server.stdout is not None
        number = len(self.found)
        files = [self.folder / f"{name}-{number}.json" for name in ("script", "answers")]
        files[0].write_text(script, encoding="utf-8")
        self.server.stdin.write(json.dumps([str(file) for file in files]) + "\n")
        self.server.stdin.flush()
        if int(self.server.stdout.readline()) or not files[1].exists():
            return {"failed": Path(f"{files[1]}.log").read_text(encoding="utf-8")[-20000:]}
        return json.loads(files[1].read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    server_runs = Runs(tmp_path_factory.mktemp("vllm"))
    yield server_runs
    server_runs.close()


def answers(run: Any) -> dict[str, Any]:
    assert "failed" not in run, run["failed"]
    return {name: answer for wave in run["waves"] for name, answer in wave.items()}


def differing(computed: Any, loaded: Any) -> dict[str, str]:
    """The requests to which two runs say other tokens, or give them other logprobs; with the largest distance of
    logprobs."""
    wanted, got = answers(computed), answers(loaded)
    differences = {}
    for name in [name for name in got if not name.startswith("aborted")]:
        answer = got[name]
        far = max(abs(a - b) for a, b in zip(answer["logprobs"], wanted[name]["logprobs"], strict=True))
        if answer["tokens"] != wanted[name]["tokens"] or far > FAR:
            differences[name] = f"{far:.1e}"
    assert "first-0" in got
    return differences


def counted(run: Any, name: str) -> float:
    return run["counters"].get(f"vllm:kvpool_{name}", 0)


WAYS = {
    "in one process": ("tiny", {}, {}),
    "under vLLM's own connector": ("tiny", {}, {"transfer": transfer({}, recovers=False)}),
    "engine core in a process": ("tiny", {}, {"processes": True}),
    "two workers": (
        "tiny",
        {},
        {"processes": True, "engine": {"tensor_parallel_size": 2}, "waves": waves(prompts=2, more=False)},
    ),
    "canonical layout, two workers": (
        "tiny",
        {"canonical_layout": True},
        {"processes": True, "engine": {"tensor_parallel_size": 2}, "waves": waves(prompts=2, more=False)},
    ),
    "two blocks a chunk, little host memory": (
        "tiny",
        {"blocks_per_chunk": 2, "host_bytes": "1300KiB"},
        {},
    ),
    "sliding windows": ("windowed", {}, {}),
    "sliding windows, little host memory": ("windowed", {"host_bytes": "1300KiB"}, {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_and_logprobs_are_those_of_a_run_without_offload(runs: Runs, way: str) -> None:
    shape, extra, more = WAYS[way]
    loaded = runs.run(shape, extra, **more)
    assert differing(runs.run(shape, None), loaded) == {}
    assert counted(loaded, "stored_chunks") > 0
    assert counted(loaded, "loaded_chunks") > 0
    assert counted(loaded, "failed_loads") == 0
    assert (counted(loaded, "evicted_chunks") > 0) == ("little" in way)
    assert loaded["compiled"] == [], "a request has compiled something"


def test_a_hybrid_says_and_finds_what_it_does_with_a_large_cache_of_vllms_own(runs: Runs) -> None:
    """What it says depends on where vLLM has cut a prompt, by some hundredths: so it is cut alike in all runs."""
    cut = {"enable_prefix_caching": True, "max_num_batched_tokens": 5 * BLOCK}
    prompts = waves(prompts=2, more=False)
    baseline = runs.run("hybrid", None, engine=cut, waves=prompts)
    loaded = runs.run("hybrid", {}, waves=prompts)
    assert differing(baseline, loaded) == {} and counted(loaded, "loaded_chunks") > 0
    hits = [{name: answer["cached"] for name, answer in answers(run).items()} for run in (baseline, loaded)]
    assert hits[0] == hits[1] and hits[1]["again-0"] == hits[1]["again-1"] == 14 * BLOCK
    faulty = runs.run("hybrid", {}, waves=prompts, transfer=transfer({"fault": "stale"}, faulty=True))
    assert differing(baseline, faulty) != {}


def test_repeated_prompts_are_loaded_whole_and_later_turns_of_a_conversation(runs: Runs) -> None:
    said = answers(runs.run("tiny", {}))
    for number in range(PROMPTS):
        assert said[f"again-{number}"]["cached"] == 15 * BLOCK, number
    assert said["after-reset"]["cached"] == 0
    assert said["after-reset-again"]["cached"] == 15 * BLOCK
    assert said["talk-0"]["cached"] >= TURN // BLOCK * BLOCK
    assert said["talk-1"]["cached"] > said["talk-0"]["cached"]


@pytest.mark.parametrize("fault", ["swapped", "doubled", "stale"])
def test_the_comparison_finds_loads_that_bring_other_bytes(runs: Runs, fault: str) -> None:
    faulty = runs.run("tiny", {}, transfer=transfer({"fault": fault}, faulty=True))
    assert differing(runs.run("tiny", None), faulty) != {}


@pytest.mark.parametrize("shape", ["tiny", "windowed"])
@pytest.mark.parametrize("fault", ["failing_loads", "failing_stores"])
def test_what_fails_is_computed(runs: Runs, shape: str, fault: str) -> None:
    faulty = runs.run(shape, {}, transfer=transfer({"fault": fault}, faulty=True))
    assert differing(runs.run(shape, None), faulty) == {}
    assert counted(faulty, fault.replace("failing", "failed")) > 0
    assert (counted(faulty, "failed_loads") > 0) == (fault == "failing_loads")


def test_under_vllms_own_connector_a_failed_load_ends_the_engine(runs: Runs) -> None:
    faulty = runs.run("tiny", {}, transfer=transfer({"fault": "failing_loads"}, recovers=False, faulty=True))
    assert "a load that a test lets fail" in faulty["failed"]
