"""`python -m kvpool plan`: text, JSON and charts that say the same, wrong usage, interruption."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpool.__main__ import main
from kvpool.common.arrays.layout import PRESETS, BlockLayout
from kvpool.device import cuda
from kvpool.device.cuda import calibration
from kvpool.device.cuda.runtime import Gpu
from kvpool.tools.planner import CapacityPlan, Machine, Surveyor, survey_of
from kvpool.tools.replay import synthetic

Output = pytest.CaptureFixture[str]
ROWS = [{"timestamp": 1000 * n, "input_length": 600, "output_length": 20, "hash_ids": [0, n % 3]} for n in range(6)]
GIB = 1 << 30


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def plan_of(capsys: Output, *arguments: str, status: int = 0) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def text_of(capsys: Output, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == "", "nobody watches, so there is no progress bar"
    return out


def test_json_has_every_figure(trace: str, capsys: Output) -> None:
    tiers = ["--device-blocks", "40", "--host-blocks", "60"]
    plan = plan_of(capsys, trace, *tiers, "--prefill-tokens-per-second", "10000")

    # The first id is shared by all, each second id is seen twice; their last 88 tokens are five blocks and a half.
    tokens = 5 * 512 + 3 * 80
    ceiling = plan["ceiling"]
    assert (ceiling["hit_tokens"], ceiling["hit_blocks"]) == (tokens, tokens // 16)
    rates = (ceiling["token_rate"], ceiling["block_rate"])
    assert rates == pytest.approx((tokens / 3600, tokens / 16 / 228))
    counts = [plan[name] for name in ("requests", "prompt_tokens", "output_tokens", "prompt_blocks")]
    assert counts == [6, 3600, 120, 228] and not plan["interrupted"]
    assert plan["trace"] == "trace.jsonl (mooncake)" and plan["model"] == "llama-3-8b, bfloat16"
    assert plan["machine"]["block_bytes"] == 16 * 128 * 1024
    pool = plan["pool"]
    assert (pool["device"]["blocks"], pool["both"]["blocks"]) == (40, 100)
    hits = [tokens for _, tokens in plan["curve"]]
    assert hits == sorted(hits) and hits[-1] == tokens
    assert list(plan["reach"]) == ["0.5", "0.75", "0.9", "0.95", "0.99"]
    assert plan["table"][-1]["of_ceiling"] == 1 and plan["table"][0]["blocks"] >= plan["longest_request_blocks"]
    assert sum(count for _, count in plan["reuse_gaps"]["seconds"]) == tokens // 16
    assert plan["prefixes"]["top"][0]["tokens"] == 512 and plan["tenants"] == []


def test_text_says_what_json_says(trace: str, capsys: Output) -> None:
    pool = ["--device-memory", "80MiB", "--host-memory", "120MiB"]
    arguments = [trace, *pool, "--prefill-tokens-per-second", "10000", "--link-bandwidth", "25"]
    plan, text = plan_of(capsys, *arguments), text_of(capsys, *arguments)
    ceiling = plan["ceiling"]
    assert f"{ceiling['token_rate']:.2%} of prompt tokens, {ceiling['block_rate']:.2%} of prompt blocks" in text
    for row in plan["table"]:
        assert re.search(rf" {row['blocks']:,} +{row['token_rate']:.2%} ", text)
    for share, row in plan["reach"].items():
        assert f"to reach {float(share):.0%} of the ceiling you need {row['gib']:.3g} GiB" in text
    assert f"device + host  0.195 GiB: {plan['pool']['both']['token_rate']:.2%}" in text
    assert "link: 25 GB/s (as given), 50 µs" in text and "beats recomputing for hits of 1 token or more" in text
    assert "< 3 s" in text and "0 to 512" in text and "interrupted" not in text


def test_without_a_prefill_speed_no_time_is_made_up(trace: str, capsys: Output) -> None:
    plan, text = plan_of(capsys, trace), text_of(capsys, trace)
    assert plan["break_even"] is None and plan["ceiling"]["saved_seconds_per_request"] is None and plan["pool"] is None
    assert "saved per request" not in text and "--prefill-tokens-per-second" in text


def test_time_saved_counts_prefill_and_what_crosses_the_link() -> None:
    survey = survey_of(synthetic(120, seed=4).requests)
    layout = BlockLayout.for_model("llama-3-8b", tokens_per_block=16)
    plan = CapacityPlan(survey, Machine(layout, 10_000.0, 20.0, device_blocks=500, host_blocks=4_000))
    device, both = survey.hit_tokens(500), survey.hit_tokens(4_500)
    assert 0 < device < both
    crossing = (both - device) * 131_072 / 20e9
    assert plan.saved_seconds(4_500, 500) == pytest.approx((both / 10_000 - crossing) / 120)
    assert plan.saved_seconds(500, 500) == pytest.approx(device / 10_000 / 120)
    row, step = plan.row(500), survey.hit_tokens(500 + 16 * GIB // layout.block_bytes)
    assert row.next_16_gib == pytest.approx((step - device) / survey.prompt_tokens) and row.next_16_gib > 0


def test_onboarding_beats_recomputing_from_where_its_latency_is_earned() -> None:
    survey = survey_of(synthetic(20).requests)
    layout = BlockLayout.for_model("llama-3-8b", tokens_per_block=16)
    plan = CapacityPlan(survey, Machine(layout, 100_000.0, 20.0, link_latency=500.0))
    break_even = plan.break_even()
    # A token takes 10 µs to compute and 6.55 µs to cross.
    assert break_even is not None and break_even.tokens == 146
    assert 145 * 10 < 500 + 145 * 6.5536 and 146 * 10 > 500 + 146 * 6.5536
    assert break_even.worthwhile_above_gb_per_second == pytest.approx(13.1072)
    slow = CapacityPlan(survey, Machine(layout, 100_000.0, 13.0)).break_even()
    assert slow is not None and slow.tokens is None


def test_every_preset_and_explicit_numbers_give_their_bytes(trace: str, capsys: Output) -> None:
    shape = "--layers 10 --kv-heads 2 --head-dim 64"
    for arguments, token_bytes in (
        *((f"--model {name}", BlockLayout.for_model(name, tokens_per_block=1).block_bytes) for name in PRESETS),
        (shape, 10 * 2 * 64 * 2 * 2),
        (f"{shape} --planes 1 --dtype float8_e4m3fn", 10 * 2 * 64),
        ("--model llama-3-8b --dtype int8", 65_536),
    ):
        assert plan_of(capsys, trace, *arguments.split())["machine"]["token_bytes"] == token_bytes


def test_a_column_tenant_gives_curves(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "tenants.jsonl"
    path.write_text("".join(json.dumps({**row, "tenant": f"t{n % 2}"}) + "\n" for n, row in enumerate(ROWS)))
    plan = plan_of(capsys, str(path))
    assert {(tenant["name"], tenant["requests"]) for tenant in plan["tenants"]} == {("t0", 3), ("t1", 3)}
    assert sum(tenant["ceiling_tokens"] for tenant in plan["tenants"]) == plan["ceiling"]["hit_tokens"]
    assert re.search(r"t1 +3 +1,800 .*%", text_of(capsys, str(path)))


def test_a_sample_shows_its_error(capsys: Output) -> None:
    plan, text = plan_of(capsys, "--sample", "0.2"), text_of(capsys, "--sample", "0.2")
    assert plan["sample"] == 0.2 and plan["ceiling"]["standard_error"] > 0
    assert f"{2 * plan['table'][-1]['standard_error']:.2%}" in text and "±" in text
    assert "±" not in text_of(capsys)


def test_standard_input_and_a_limit(trace: str, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(Path(trace).read_bytes()))))  # type: ignore[arg-type]
    plan = plan_of(capsys, "-", "--limit", "4")
    assert plan["requests"] == 4 and plan["trace"] == "<stdin> (mooncake)"


def test_nothing_reused_is_said_and_drawn(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"tokens": [1]}\n')
    assert "nothing is found again" in text_of(capsys, str(path))
    assert plan_of(capsys, str(path))["ceiling"]["hit_tokens"] == 0
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    text_of(capsys, str(path), "--plot", str(tmp_path / "one.svg"))
    assert (tmp_path / "one.svg").exists()


SAMPLED = ["--limit", "100", "--sample", "0.5"]
SIZED = ["--limit", "100", "--device-blocks", "1500", "--host-blocks", "3000"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("suffix", "arguments"), [("png", SIZED), ("svg", SIZED), ("svg", SAMPLED), ("html", SAMPLED)])
def test_charts_are_drawn(suffix: str, arguments: list[str], tmp_path: Path, capsys: Output) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    path = tmp_path / f"plan.{suffix}"
    text_of(capsys, *arguments, "--plot", str(path))
    drawn = path.read_bytes()
    if suffix == "png":
        assert drawn.startswith(b"\x89PNG") and len(drawn) > 20_000
        return
    text = drawn.decode()
    assert "What more KV memory buys" in text and "unbounded memory" in text
    assert suffix == "svg" or ("<pre>plan " in text and text.startswith("<!DOCTYPE html>"))
    sampled = "--sample" in arguments
    assert ("two standard errors of the sample" in text) == sampled == ("device + host</text>" not in text)


def test_a_chart_that_cannot_be_written_is_an_error_of_the_user(
    trace: str, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without matplotlib before the plan is made; where the file turns out not to be writable after it."""
    (tmp_path / "a.svg").mkdir()
    arguments = ["plan", trace, "--plot", str(tmp_path / "a.svg")]
    if importlib.util.find_spec("matplotlib"):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert "ceiling" in out and "a.svg" in err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and 'pip install ".[plot]"' in err


def test_an_empty_sample_is_an_error(trace: str, capsys: Output) -> None:
    assert main(["plan", trace, "--sample", "0"]) == 2
    assert "sample: expected 1e-06 to 1, got 0.0" in capsys.readouterr().err


def test_control_c_prints_the_plan_so_far(trace: str, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Surveyor.record

    def interrupted(self: Surveyor, request: Any) -> None:
        record(self, request)
        if request.index == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Surveyor, "record", interrupted)
    plan = plan_of(capsys, trace, status=130)
    assert plan["interrupted"] and plan["requests"] == 4 and "interrupted after 4 requests" in plan["trace"]


def test_bandwidth_is_what_the_gpu_was_calibrated_with(
    trace: str, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(0, "H1", 1 << 30, 13000, "9.0", 132, "x16", "13.0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cuda, "unusable", lambda: None)
    monkeypatch.setattr(cuda, "describe_gpus", lambda: [gpu])
    assert plan_of(capsys, trace)["machine"]["link_gb_per_second"] == 50
    speeds = (("onboard", 30.0), ("onboard", 41.0), ("offload", 99.0))
    rows = tuple(calibration.Measurement(direction, 1 << 20, 64, "batched", speed) for direction, speed in speeds)
    place = calibration.place("H1", 13000, {"XDG_CACHE_HOME": str(tmp_path)})
    for measured, bandwidth in ((gpu, 41), (gpu._replace(link="x8"), 50)):
        calibration.store(place, calibration.made(measured, rows))
        plan = plan_of(capsys, trace)
        assert plan["machine"]["link_gb_per_second"] == bandwidth, "another link is none of this GPU's"
        assert (plan["link"] == "as calibrated on H1") == (bandwidth == 41)
