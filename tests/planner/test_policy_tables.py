"""The tables of policies: each has a row for each capacity, and where all fits, every policy hits the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from asv_bench import policies
from kvpool.state import adaptive, chains


@pytest.mark.parametrize("table", [name for name in policies.TABLES if name != "constants"])
def test_a_table_has_a_row_for_each_capacity(table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for turn in range(12):
        for chat in range(3):
            ids = [1000 * chat + i for i in range(2 * turn + 2)]
            rows.append({"timestamp": 1000 * turn, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids})
    trace = tmp_path / "chats.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = ["lru"] if table == "hostcache" else ["lru", "adaptive"]
    policies.main(
        [table, str(trace), "--blocks", "256", "4000", "--host", "8", "--store", "4000", "--policies", *names]
    )
    header, little, much = capsys.readouterr().out.splitlines()
    hits = [[float(cell) for cell in row.split("|")[3:-1]] for row in (little, much)]
    assert header.count("`") == 2 * len(names) and len(set(hits[1])) == 1
    whole = 100 * sum(2 * turn for turn in range(12)) / sum(2 * turn + 2 for turn in range(12))
    assert hits[1][0] == pytest.approx(whole, abs=0.01) or (table == "recurrent" and hits[1][0] <= whole)
    assert table == "store" or max(hits[0]) <= hits[1][0]


def test_every_constant_of_the_table_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names in policies.CONSTANTS.items():
        assert all(hasattr(sys.modules[module], name) for name in names), module
    monkeypatch.setattr(adaptive, "_SURE", 1.0)
    monkeypatch.setattr(chains, "SAMPLE", 16)
    policies.change("kvpool.state.adaptive:_SURE=2")
    policies.change("kvpool.state.chains:SAMPLE=8")
    assert (adaptive._SURE, chains.SAMPLE) == (2.0, 8)
