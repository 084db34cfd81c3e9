"""The pin stress in short: it passes on this pool, and each of its checks fails when what it checks is broken."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool import BlockLayout, KVCacheManager, Lease
from kvpool.errors import BlockNotFound
from kvpool.tools.replay import ReplayConfig, Trace, read_trace, synthetic
from tests import stress
from tests.stress import EVENTS, ExpectedContents, Reader, Stress, StressConfig

REPLAY = ReplayConfig(BlockLayout.of_block_bytes(512, 16), 1024, 64, device="cpu", verify=True, events=EVENTS)
WRONG = "blocks with wrong bytes"
CONFIG = StressConfig(REPLAY, reads=2_000, evictions=500)


def failed(config: StressConfig = CONFIG, trace: Trace | None = None) -> set[str]:
    """Run the stress, and return the names of the figures that are wrong."""
    with Stress(trace or synthetic(), config) as run:
        return {figure.name for figure in run.run() if not figure.ok}


def test_a_short_run_holds_every_promise(capsys: pytest.CaptureFixture[str]) -> None:
    assert stress.main(["--reads", "3000"]) == 0
    printed = capsys.readouterr().out
    assert "pinned reads" in printed and "seed 0" in printed and "FAILED" not in printed


def test_a_trace_starts_again_until_there_are_enough_reads(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": n, "input_length": 1000, "output_length": 30, "hash_ids": [n, 100 + n]} for n in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    layout = BlockLayout.of_block_bytes(2048, 128)
    config = StressConfig(replace(REPLAY, layout=layout, device_blocks=32, host_blocks=16), reads=500, evictions=50)
    with Stress(read_trace(str(path)), config) as run:
        figures = {figure.name: figure for figure in run.run()}
    assert all(figure.ok for figure in figures.values())
    assert figures["pinned reads"].value >= 500 and figures["host evictions"].value >= 50


def until_found(name: str) -> Iterator[set[str]]:
    """Whether a block is evicted between two checks depends on the threads: run until one was."""
    return (names for names in (failed() for _ in range(50)) if name in names)


@pytest.mark.exhaustive
def test_a_pin_that_does_not_hold_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lease is closed after its first check."""
    check, close = Reader._check, Lease.close

    def checked(self: Reader, lease: Lease, expected: list[bytes | None]) -> None:
        check(self, lease, expected)
        lease.close()

    monkeypatch.setattr(Reader, "_check", checked)
    monkeypatch.setattr(Lease, "close", lambda self: None if self.closed else close(self))
    assert WRONG in next(until_found(WRONG))


@pytest.mark.exhaustive
def test_a_block_found_in_one_step_and_pinned_in_the_next_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    find_and_pin = KVCacheManager.find_and_pin_host

    def in_two_steps(self: KVCacheManager, key: Any, *, owner: str = "") -> Lease | None:
        lease = find_and_pin(self, key, owner=owner)
        if lease is None:
            return None
        lease.close()
        # Here the scheduler may evict what was found.
        time.sleep(0)
        try:
            return self.pin_blocks(lease.blocks, owner=owner)
        except BlockNotFound:
            return None

    monkeypatch.setattr(KVCacheManager, "find_and_pin_host", in_two_steps)
    assert WRONG in next(until_found(WRONG))


@pytest.mark.exhaustive
def test_a_lease_that_is_never_closed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    close = Lease.close
    monkeypatch.setattr(Lease, "close", lambda self: close(self) if self.id != 7 else None)
    assert failed() == {"leases open at the end", "blocks pinned at the end"}


@pytest.mark.exhaustive
def test_events_that_were_missed_are_found() -> None:
    wrong = failed(replace(CONFIG, replay=replace(REPLAY, events=256)))
    assert {"events dropped or missing", "keys in which events and pool differ"} & wrong


@pytest.mark.exhaustive
def test_contents_and_bytes_that_no_request_calls_for_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    learned = ExpectedContents.bytes_of
    monkeypatch.setattr(ExpectedContents, "bytes_of", lambda self, key: learned(self, key) if key[0] % 4 else None)
    assert failed() == {"blocks with content that no request has"}
    zeros = b"\0" * 512
    monkeypatch.setattr(ExpectedContents, "bytes_of", lambda self, key: learned(self, key) if key[0] % 4 else zeros)
    assert failed() == {WRONG}


@pytest.mark.parametrize(("owner", "name"), [(KVCacheManager, "find_and_pin_host"), (ExpectedContents, "learn")])
def test_an_error_of_either_thread_ends_the_run(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(owner, name, fail)
    with Stress(synthetic(), CONFIG) as run, pytest.raises(RuntimeError, match="broken"):
        run.run()


@pytest.mark.exhaustive
def test_a_run_that_gets_nowhere_ends(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"tokens": [1, 2, 3], "output_length": 1}\n')
    config = replace(CONFIG, replay=replace(REPLAY, device_blocks=8, host_blocks=1))
    assert "host evictions" in failed(config, read_trace(str(path)))
