"""Policies beside LRU and the ceilings: LRU of a pool is that of the curve, nobody beats MIN, the oracle keeps who
comes back soon, and text, JSON and chart say the same."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from asv_bench import policies
from kvpool.__main__ import main
from kvpool.tools.planner import Surveyor
from kvpool.tools.planner.policies import MIN, ORACLE, SessionOracle, compare, min_hits, next_uses, through_pool
from kvpool.tools.planner.survey import Use
from kvpool.tools.replay import Request, synthetic

SEED = 3


def uses_of(requests: list[Request]) -> tuple[list[Use], Any]:
    surveyor = Surveyor(16, keep=True)
    for request in requests:
        surveyor.record(request)
    return surveyor.uses, surveyor.survey()


def chains(random: Random) -> list[Use]:
    """Requests whose prompts extend a few beginnings."""
    uses = []
    for number in range(60):
        beginning, length = random.randrange(4), random.randrange(1, 9)
        blocks = np.arange(10 * beginning, 10 * beginning + length, dtype=np.int32)
        uses.append(Use(Request(number, 0, length, 0), blocks, length, length, 0))
    return uses


def naive_min(uses: Sequence[Use], capacity: int) -> int:
    """Belady's rule as it is written: of what is held and what has come, the block that is used last goes."""
    order = [int(block) for use in uses for block in use.blocks]
    held, hits = set[int](), 0
    for place, block in enumerate(order):
        hits += block in held
        held.add(block)
        rest = order[place + 1 :]
        if len(held) > capacity:
            held.remove(max(held, key=lambda block: rest.index(block) if block in rest else len(rest)))
    return hits


@pytest.mark.parametrize("capacity", [1, 3, 8, 40])
def test_min_is_beladys_rule(capacity: int) -> None:
    print("seed", SEED)
    uses = chains(Random(SEED))
    following, counted = next_uses(uses)
    assert min_hits(following, counted, capacity) == naive_min(uses, capacity)
    room, ends = max(capacity, 8), np.cumsum([len(use.blocks) for use in uses])
    holding, most = policies.min_holding(following, ends, room), min_hits(following, counted, room)
    assert holding <= most and (holding == most or room == 8)


@pytest.mark.parametrize("capacity", [400, 900])
def test_lru_of_a_pool_is_that_of_the_curve_and_min_bounds_every_policy(capacity: int) -> None:
    uses, survey = uses_of(synthetic(150, seed=SEED).requests)
    # The pool has one block more, for the last token of a prompt.
    measured = through_pool(uses, survey.longest_blocks, capacity, "lru")
    assert survey.curve.hits(capacity) <= measured <= survey.curve.hits(capacity + 1)
    table = compare(uses, survey, [capacity], ["agent", "adaptive"])
    assert table.hits["lru"] == [survey.curve.hits(capacity)] and ORACLE not in table.hits
    assert all(hits[0] <= table.hits[MIN][0] for hits in table.hits.values()) and table.hits[MIN][0] > measured
    for policy in ("agent", "adaptive"):
        needed = table.as_lru[policy][0]
        assert survey.curve.hits(needed) >= table.hits[policy][0] > survey.curve.hits(needed - 1)
        assert table.memory(policy, 0) == capacity / needed


def turn(session: int, blocks: range, returns: float) -> Use:
    request = Request(0, 0, len(blocks), 0, session=session, returns=returns)
    return Use(request, np.array(blocks, np.int32), len(blocks), len(blocks), 0)


def test_the_session_oracle_keeps_who_comes_back_first_and_drops_what_was_left_behind() -> None:
    inf = float("inf")
    uses = [turn(0, range(4), 10.0), turn(1, range(10, 14), 20.0), turn(0, range(6), 30.0), turn(1, range(10, 14), inf)]
    # Session 1 has just come, and gives its place up all the same.
    assert list(map(SessionOracle(uses, 4).find, uses)) == [0, 0, 4, 0]
    assert list(map(SessionOracle(uses, 10).find, uses)) == [0, 0, 4, 4]
    elsewhere = [turn(0, range(3, 6), 10.0) for _ in range(4)]
    uses = [turn(0, range(3), 1.0), *elsewhere, turn(1, range(10, 14), 5.0), turn(0, range(3, 6), inf)]
    assert list(map(SessionOracle(uses, 7).find, uses))[-1] == 3, "the first three blocks went, not these"


def test_what_cannot_be_compared_is_refused() -> None:
    uses, survey = uses_of(synthetic(20).requests)
    with pytest.raises(ValueError, match="capacity: .*-1"):
        survey.curve.hits(-1)
    with pytest.raises(ValueError, match="capacities: expected .*, as the longest request has, got "):
        compare(uses, survey, [1], ["agent"])
    with pytest.raises(ValueError, match="said: expected nothing, stop, future.*got 'all'"):
        compare(uses, survey, [5000], ["agent"], said="all")
    with pytest.raises(ValueError, match="sample: expected 1.*got 0.5"):
        Surveyor(16, 0.5, keep=True)


SESSION = {
    "block": 16,
    "requests": [
        [10 * n, 16 * (n + 3), 2, "tool_use", 1, 5, 0, n - 1, n + 2 if n else 0, [[n + 2, 1]] if n else [[0, 3]]]
        for n in range(8)
    ],
}


def test_the_plan_says_it_as_text_json_and_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "agents.jsonl"
    path.write_text("".join(json.dumps({"session": str(n), **SESSION}) + "\n" for n in range(12)))
    chart = tmp_path / "plan.svg"
    arguments = ["plan", str(path), "--policies", "agent", "--say", "future", "--at", "40", "20", "--users", "6"]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["policies"]
    assert (report["said"], report["blocks"]) == ("future", [20, 40])
    assert set(report["hit_rates"]) == {"lru", "agent", ORACLE, MIN}
    for rates in report["hit_rates"].values():
        assert all(0 <= rate <= best for rate, best in zip(rates, report["hit_rates"][MIN], strict=True))
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    assert main([*arguments, "--plot", str(chart)]) == 0
    text = capsys.readouterr().out
    for rate in report["hit_rates"]["agent"]:
        assert f"{rate:.2%}" in text
    assert re.search(r"agent: the same hits as LRU with \d+% of the memory", text)
    assert "What a policy finds (the engine says future)" in chart.read_text()
