"""The page of figures is made by one command, without any other engine, and says which were left out and why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asv_bench import figures

HARNESS = """
import argparse, json, sys
parser = argparse.ArgumentParser()
for name in ("adapter", "limit", "capacity", "reps", "out", "trace"):
    parser.add_argument("--" + name)
def main():
    options = parser.parse_args()
    if options.adapter == "lmcache":
        sys.exit("No module named lmcache")
    row = dict.fromkeys(("us_ingest", "us_admit", "us_append", "us_finish"), 10.0)
    row |= {"us_per_req": 40.0 if options.adapter == "kvpool:policy=lru" else 200.0, "hit_tokens": 7, "requests": 5}
    if options.adapter.startswith("sglang"):
        row["slot_kernel_s"] = 80e-6 * 5
    with open(options.out, "w") as file:
        file.write(json.dumps(row) + "\\n")
if __name__ == "__main__":
    main()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "SECONDS", 0.001)
    monkeypatch.setattr(figures, "ROUNDS", 1)
    monkeypatch.setattr(figures.os, "getloadavg", lambda: (0.5, 0.5, 0.5))


def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    page = tmp_path / "figures.md"
    monkeypatch.setattr(sys, "argv", ["figures", "--page", str(page), *arguments])
    figures.main()
    return page.read_text(encoding="utf-8")


def test_the_page_is_made_without_any_other_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = written(tmp_path, monkeypatch)
    assert all(f"`{call.place}`" in text for call in figures.CALLS)
    assert all(f"- `{name}`: no harness was given" in text for name in figures.PEERS)
    assert f"Measured on {figures.machine().partition(' with ')[0]}" in text and "numba" in figures.machine()


def test_a_busy_machine_is_refused_unless_any_load_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures.os, "getloadavg", lambda: (12.0, 12.0, 12.0))
    with pytest.raises(SystemExit, match="2"):
        written(tmp_path, monkeypatch)
    assert "load average: expected at most 1, got 12.0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert "with a load average of 12.0" in written(tmp_path, monkeypatch, "--any-load")


def test_what_the_harness_can_run_is_beside_kvpool_and_the_rest_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "replay.py").write_text(HARNESS)
    text = written(tmp_path, monkeypatch, "--harness", str(tmp_path))
    assert "- `lmcache`: No module named lmcache" in text and "- `vllm" not in text
    assert "| `vllm:sha256` | 200 |  | 10 | 10 | 10 | 10 | 7 | 5.0 |" in text
    assert "| `sglang:rust` | 200 | 120 | 10 | 10 | 10 | 10 | 7 | 3.0 |" in text
    assert "| `kvpool, adaptive` | 200 |  | 10 | 10 | 10 | 10 | 7 | 5.0 |" in text
    assert "python -m asv_bench.figures --harness PATH\n" in text
