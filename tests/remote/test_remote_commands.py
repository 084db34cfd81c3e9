"""Two processes: one replays under memory pressure and serves, the other fetches and checks every byte; and the
measurement beside it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpool.__main__ import main
from kvpool.common.arrays.layout import BlockLayout
from kvpool.pool.manager import KVCacheManager
from kvpool.remote import BlockServer
from kvpool.tools.cli import workers
from kvpool.tools.cli.workers import SECRET
from kvpool.tools.replay import synthetic
from kvpool.tools.replay.serving import Fetching, Throughput, measure

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--device-blocks", "600", "--host-blocks", "300", "--block-bytes", "512"]
KEY = bytes(range(32))


def figures_of(report: dict[str, Any], group: str) -> dict[str, int]:
    return {figure["name"]: figure["value"] for figure in report[group]}


def test_two_processes_fetch_under_pressure_and_every_figure_is_right(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "--blocks", "2000", "--round-bytes", "0", "--json", *SMALL]) == 0
    out = capfd.readouterr().out
    report = json.loads(out)
    assert report["passed"] and report["failure"] is None and report["throughput"] == []
    fetched, served = figures_of(report, "fetch"), figures_of(report, "server")
    assert fetched["blocks fetched"] >= 2000 and fetched["blocks with wrong bytes"] == 0
    assert (
        served["blocks served"] >= fetched["blocks fetched"]
        and served["leases left"] == served["blocks left pinned"] == 0
    )
    assert served["host blocks evicted meanwhile"] > 300, "there was no pressure"
    assert not re.search(r"[0-9a-f]{64}", out), "a secret was printed"


def test_a_server_of_ones_own_is_fetched_from_and_ends_with_its_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv(SECRET, KEY.hex())
    command = [sys.executable, "-m", "kvpool", "serve", "--until-eof", *SMALL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdin is not None and process.stdout is not None
        endpoint = process.stdout.readline().split()[1]
        assert main(["fetch", "--endpoint", endpoint, "--blocks", "300", *SMALL]) == 0
        text = capsys.readouterr().out
        assert "ok      blocks fetched" in text and "bare" not in text
        monkeypatch.setenv(SECRET, KEY[::-1].hex())
        assert main(["fetch", "--endpoint", endpoint, "--blocks", "300", *SMALL]) == 1
        assert "KVPOOL_SECRET: expected the value that the server was started with" in capsys.readouterr().out
        process.stdin.close()
        served = process.stdout.read()
        assert process.wait(600) == 0
    assert "FAILED" not in served and re.search("requests refused +0\n", served)


def test_wrong_bytes_are_found() -> None:
    layout, trace = BlockLayout.of_block_bytes(512, 16), synthetic(4)
    with KVCacheManager(layout, device_blocks=1, host_blocks=1000, device="cpu", secret=KEY) as cache:
        for request in trace.requests:
            keys = cache.block_keys(request.prompt(), salt=request.salt, adapter_id=request.adapter_id)
            cache.import_blocks(keys, [bytes(512)] * len(keys.keys))
        for calls, where in ((0, "in the pool"), (1, "as it came")):
            with (
                BlockServer(cache) as server,
                Fetching(trace, layout, server.endpoint, blocks=20, host_blocks=1000, secret=KEY) as fetching,
            ):
                fetching.calls = calls
                figures = {figure.name: figure for figure in fetching.run()}
            assert not figures["blocks with wrong bytes"].ok and where in fetching.first_wrong


@pytest.mark.parametrize(
    ("arguments", "secret", "words"),
    [
        (["serve"], "", SECRET),
        (["serve"], "zz" * 16, SECRET),
        (["serve"], "00" * 15, SECRET),
        (["serve"], "00" * 65, SECRET),
        (["fetch", "--endpoint", "tcp://127.0.0.1:1"], "", SECRET),
        (["fetch", "-"], "00" * 16, "TRACE"),
        (["fetch", "--round-bytes", "1"], "", "--round-bytes"),
        (["serve", "--block-bytes", "100"], "00" * 16, "--block-bytes"),
    ],
)
def test_wrong_usage_is_named(arguments: list[str], secret: str, words: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv(SECRET, secret)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and words in error and (not secret or secret not in error)


@pytest.mark.parametrize("arguments", [["/nowhere"], ["--endpoint", "tcp://192.0.2.1:1"]], ids=str)
def test_a_trace_or_an_endpoint_that_cannot_be_had_is_wrong_usage(
    arguments: list[str], monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv(SECRET, KEY.hex())
    for command in ("serve", "fetch"):
        assert main([command, *arguments]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


def test_a_server_that_does_not_start_is_a_failure(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(workers.sys, "executable", "/bin/false")
    assert main(["fetch", "--blocks", "1", *SMALL]) == 1
    assert "did not start" in capsys.readouterr().out


@pytest.mark.parametrize("block_bytes", [65536, 4096])
def test_the_measurement_moves_every_block_each_way(block_bytes: int) -> None:
    found = measure(block_bytes, round_bytes=48 * block_bytes, rounds=2)
    assert (found.round_bytes, found.rounds) == (48 * block_bytes, 2)
    assert min(found.fetch, found.fetch_blocks, found.bare, found.bare_copied, found.ratio, found.ratio_in_buffers) > 0


def test_a_slow_transfer_is_shown_and_fails_nothing(monkeypatch: Any, capsys: Any) -> None:
    def slow(size: int, **options: Any) -> Throughput:
        return Throughput(size, 16, 1 << 20, 1, 1e9, 1e9, 2e9, 2e9, 0.5, 0.5)

    monkeypatch.setattr("kvpool.tools.replay.serving.measure", slow)
    assert main(["fetch", "--blocks", "100", "--round-bytes", "1MiB", *SMALL]) == 0
    out = capsys.readouterr().out
    assert re.search(r"65,536 bytes x 16: .* 0\.50", out) and "FAILED" not in out


@pytest.mark.parametrize("options", [{"round_bytes": 1}, {"rounds": 0}], ids=str)
def test_a_measurement_of_nothing_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="round_bytes: expected at least one message, once, got .*, rounds=0"):
        measure(4096, **options)


def test_a_server_whose_endpoint_is_taken_is_wrong_usage(make: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv(SECRET, KEY.hex())
    with BlockServer(make(4, 8, 8).cache) as server:
        assert main(["serve", "--endpoint", server.endpoint, *SMALL]) == 2
    assert "in use" in capsys.readouterr().err
