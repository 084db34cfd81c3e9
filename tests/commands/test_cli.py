"""The command line: options, exit status, JSON, interruption, pipes and the progress bar."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from kvpool.__main__ import main
from kvpool.common.progress import say, shown_progress, watched
from kvpool.state.arrays import POLICIES
from kvpool.tools.replay import Replay, VerificationError

Output = pytest.CaptureFixture[str]
ROOT = Path(__file__).resolve().parents[2]
ROWS = [{"timestamp": n, "input_length": 600, "output_length": 20, "hash_ids": [0, n % 3]} for n in range(6)]
SMALL = ["--device-blocks", "300", "--host-blocks", "100", "--block-bytes", "256"]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def summary_of(capsys: Output, *arguments: str, status: int = 0) -> dict[str, Any]:
    assert main(["replay", *arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_a_trace_is_replayed_and_summarised(trace: str, capsys: Output) -> None:
    assert main(["replay", trace, *SMALL, "--verify"]) == 0
    out, err = capsys.readouterr()
    assert "6 replayed" in out and "3,600 in prompts" in out and "every byte of" in out
    assert err == "", "nobody watches, so there is no progress bar"


def test_json_summary_has_the_figures_and_the_resolved_configuration(trace: str, capsys: Output) -> None:
    summary = summary_of(capsys, trace, *SMALL, "--active", "3", "--no-partial")
    assert summary["requests"] == 6 and summary["prompt_tokens"] == 3600 and summary["output_tokens"] == 120
    # The first id is shared by all; each second id is seen twice, and its last token is never matched.
    assert summary["hits"]["device_tokens"] == 5 * 512 + 3 * 80
    config = summary["config"]
    assert (config["device_blocks"], config["host_blocks"], config["block_bytes"]) == (300, 100, 256)
    assert (config["active"], config["partial"], config["verify"], config["trace"]) == (3, False, False, trace)
    assert set(summary["control_us_per_request"]) == {"keys", "match_allocate", "append", "commit", "release"}


def test_without_a_trace_a_seeded_workload_is_replayed(capsys: Output) -> None:
    first, again, other = (
        summary_of(capsys, "--limit", "30", "--block-bytes", "256", "--seed", seed) for seed in ("1", "1", "2")
    )
    assert first["hits"] == again["hits"] and first["prompt_tokens"] == again["prompt_tokens"]
    assert first["prompt_tokens"] != other["prompt_tokens"]
    assert first["requests"] == 30 and "seed 1" in first["config"]["trace"]
    assert first["hits"]["partial_tokens"] > 0


@pytest.mark.parametrize(
    ("arguments", "device_blocks", "host_blocks"),
    [
        ("--device-memory 1MiB --host-memory 1.5mib", 256, 384),
        ("--device-memory 1MB --host-memory 0", 244, 0),
        ("--device-memory 2m --block-bytes 8KiB --host-blocks 7", 256, 7),
        ("--device-memory 12582912 --model gpt-oss-20b", 16, 0),
        ("--device-memory 0.25GiB --model llama-3-8b --tokens-per-block 32 --host-memory 8MiB", 64, 2),
    ],
)
def test_sizes_become_blocks(
    arguments: str, device_blocks: int, host_blocks: int, tmp_path: Path, capsys: Output
) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"tokens": [1]}\n')
    config = summary_of(capsys, str(path), *arguments.split())["config"]
    assert (config["device_blocks"], config["host_blocks"]) == (device_blocks, host_blocks)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("", "the following arguments are required: command"),
        (
            "replay --device-memory 100TiB",
            "--device-memory: expected at most [0-9]+ bytes with blocks of 4096, got",
        ),
        ("plan --plot /nope/x.svg", "--plot: expected a file in a folder that exists and can be written"),
        ("replay --active 0", "argument --active: expected 1 to 2147483647, got 0"),
        ("replay --device-memory 8apples", "expected a size such as 4096, 512MiB or 8GiB, got '8apples'"),
        ("replay --device-memory 1KiB", "--device-memory: expected one block of 4096 bytes .*got 1024 bytes"),
        ("replay --device-blocks 5 --device-memory 1GiB", "not allowed with argument --device-blocks"),
        ("replay --block-bytes 100", "--block-bytes: .*100"),
        ("replay --model gpt-5", "--model: expected a config.json or one of .*llama-3-8b, .*got 'gpt-5'"),
        ("replay --model none.json --device-blocks 9", "none.json: .*No such file"),
        ("plan --users 4", "--users and --think-cap describe a TRACE, and none is given"),
        ("replay --policy no", ", ".join(map(repr, POLICIES))),
        ("replay --store /tmp/x", "; did you mean disk:/tmp/x?"),
        ("replay --store s3://b/x", "a bucket of 3 to 63 of a-z"),
        ("plan --model .", r"\./config.json: .*No such file"),
        ("replay --model llama-3-8b", "--model needs --device-memory or --device-blocks"),
        ("replay --model llama-3-8b --block-bytes 64", "leave out --block-bytes"),
        ("replay --format qwen", "--format, .* describe a TRACE, and none is given"),
        ("plan --plot plan.pdf", r"--plot: 'plan.pdf' does not end in .png, .svg, .html"),
        ("plan --model gpt-5", "expected a config.json or one of .*, got 'gpt-5'"),
        ("plan --model llama-3-8b --layers 3", "--layers is instead of --model"),
        ("plan --layers 3", "--kv-heads, --head-dim must be given too"),
        ("plan --layers 3 --kv-heads 1 --head-dim 8 --planes 3", "planes: expected 1 to 2.*got 3"),
        ("plan --dtype float7", "dtype: expected .*got 'float7'"),
        ("plan --host-memory 1GiB", "a host tier needs --device-memory or --device-blocks"),
        ("plan --device-memory 1", "--device-memory: expected one block .*got 1 bytes"),
        ("plan --prefill-tokens-per-second 0", "prefill_tokens_per_second: expected a number above 0.*got 0.0"),
        ("plan --link-bandwidth nan", "link_bandwidth: expected a number above 0, got nan"),
        ("plan --link-latency -1", "link_latency: expected .*got -1.0"),
        ("plan --sample 2", "expected 0 to 1, got 2"),
        ("plan --store", "a store needs --device-memory or --device-blocks"),
        ("plan --device-blocks 9 --store-bandwidth 0", "store_bandwidth: expected a number above 0.*got 0.0"),
        ("plan --device-blocks 9 --store-latency nan", "store_latency: expected .*got nan"),
        ("plan --limit 20 --policies agent lur", "argument --policies: "),
        ("plan --limit 20 --policies agent --at 500 1", r"--at 1: the longest request needs \d+ blocks"),
        ("plan --limit 20 --policies --sample 0.5", "expected 1"),
        ("plan --at 500", "--at needs --policies"),
        ("plan --say stop", "--say needs --policies"),
        ("replay --limit 5 --verify --policies", "--verify is not for --policies"),
        ("replay --limit 5 --store memory: --policies", "--store is not for --policies"),
        ("replay --limit 5 --device sim --policies", "--device sim is not for --policies"),
        ("replay --limit 5 --metrics-port 0 --policies", "--metrics-port is not for --policies"),
        ("replay --store floppy:/a", "--store: store: expected"),
        ("replay --store memory:", "--store: "),
        ("replay --store memory:?capacity=1MiB --device sim", "no --device sim"),
        ("replay --store-wait 3", "--store-wait is of --store"),
        ("replay --store memory:?capacity=1MiB --store-wait 0", "--store-wait: expected 0.001"),
    ],
)
def test_wrong_usage_says_what_is_accepted(arguments: str, reason: str, capsys: Output) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(arguments.split()))
    assert ended.value.code == 2 and re.search(reason, capsys.readouterr().err)


def test_a_replay_that_fits_no_request_fails_and_says_what_would_fit(capsys: Output) -> None:
    assert main(["replay", "--device-blocks", "3", "--limit", "5", "--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert "nothing was replayed: expected requests of at most 48 tokens, which 3 device blocks hold" in captured.err


def test_a_replay_on_sim_says_that_it_found_no_race(capsys: Output) -> None:
    small = ["--limit", "4", "--cut", "32", "--device-blocks", "24", "--host-blocks", "24", "--active", "2"]
    assert main(["replay", "--device", "sim", "--policy", "adaptive", *small]) == 0
    printed = capsys.readouterr().out
    assert "races     no race was found" in printed and "policy    adaptive follows LRU until" in printed


def test_a_broken_trace_is_named_with_line_and_fault(trace: str, capsys: Output) -> None:
    with open(trace, "a") as file:
        file.write('{"timestamp": 1}\n')
    assert main(["replay", trace, *SMALL]) == 2
    out, err = capsys.readouterr()
    assert out == "" and f"error: {trace}, line 7: column 'input_length' is missing" in err
    assert main(["replay", trace + ".gz"]) == 2
    assert f"{trace}.gz: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["replay", "plan"])
def test_a_path_with_a_nul_is_an_error_of_the_user(command: str, tmp_path: Path, capsys: Output) -> None:
    assert main([command, f"{tmp_path}/a\0b"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "cannot be read: a path cannot have a NUL character" in err


def test_a_verification_that_compared_nothing_fails(trace: str, capsys: Output) -> None:
    """A script that takes the exit status for an answer must not read "right" where nothing was looked at."""
    tiny = ["--device-blocks", "8", "--block-bytes", "256"]
    assert summary_of(capsys, trace, *tiny, status=1)["requests"] == 0
    assert main(["replay", trace, *tiny, "--verify"]) == 1
    out, err = capsys.readouterr()
    assert "error: nothing was verified: 0 requests were replayed, 6 skipped" in err
    assert "FAILED: nothing was verified" in out
    assert summary_of(capsys, trace, *tiny, "--verify", status=1)["failure"].startswith("nothing was verified")


def test_a_failed_verification_has_its_own_exit_status(
    trace: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Replay) -> None:
        raise VerificationError("device block 3: other bytes", block=3, tier="device", token=0, layer=0, plane=0)

    monkeypatch.setattr(Replay, "_check_idle", fail)
    assert main(["replay", trace, *SMALL, "--verify", "--json"]) == 1
    out, err = capsys.readouterr()
    assert "error: device block 3: other bytes" in err
    assert json.loads(out)["failure"] == "device block 3: other bytes"


def test_control_c_prints_the_summary_so_far(trace: str, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Replay._admit

    def interrupted(self: Replay, request: Any) -> None:
        if request.index == 4:
            signal.raise_signal(signal.SIGINT)
        admit(self, request)

    monkeypatch.setattr(Replay, "_admit", interrupted)
    assert main(["replay", trace, *SMALL]) == 130
    assert "interrupted after 4 of 6 requests" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [None, types.SimpleNamespace(), io.TextIOWrapper(io.BytesIO())])
def test_progress_is_shown_only_in_a_terminal(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(stream, "close"):
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    assert not watched()
    with shown_progress(1, "units") as progress:
        progress(1)


@pytest.mark.parametrize("installed", [True, False])
def test_a_progress_bar_is_shown_to_who_watches(trace: str, installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    if not installed:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main(["replay", trace, *SMALL]) == 0
    assert ("0/6" in terminal.getvalue()) == bool(terminal.getvalue()) == installed


def test_a_reader_that_has_gone_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("kvpool.hostcache.warming.warm_up", lambda **_: None)
    with os.fdopen(writer, "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert main(["warm-up"]) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("redirection", "status", "message"),
    [
        ("2>&-", 0, ""),
        (">&-", 0, ""),
        ("> >(true)", 0, ""),
        (">/dev/full", 2, "error: standard output: No space left on device\n"),
    ],
)
def test_streams_may_be_closed_or_full(trace: str, redirection: str, status: int, message: str) -> None:
    command = shlex.join([sys.executable, "-m", "kvpool", "replay", trace, *SMALL])
    done = subprocess.run(["bash", "-c", f"{command} {redirection}"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, message)
    assert ("6 replayed" in done.stdout) == (redirection == "2>&-")


def test_a_terminal_without_blocks_shows_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO(), "ascii"))
    assert main(["plan", "--limit", "20"]) == 0
    assert b"share of the ceiling" in written.getvalue() and b"????" in written.getvalue()


# ----------------------------------------
# The command line says its version and its name, and what is wrong before how it is used.


def test_what_is_said_beside_a_bar_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with shown_progress(3, " requests"):
        say("kvpool: compiling")
    assert "requests" in terminal.getvalue() and "\rkvpool: compiling\n" in terminal.getvalue()
