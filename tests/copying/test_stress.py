"""The pin stress in short: it passes on this pool, and each of its checks fails when what it checks is broken."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import BlockLayout, BlockNotFound, KVCacheManager, Lease
from kvpool.__main__ import main
from kvpool.tools.replay import ReplayConfig, synthetic
from kvpool.tools.replay.engine import Report
from kvpool.tools.replay.stress_run import EVENTS, ExpectedContents, Reader, Stress, StressConfig, VictimWatch

T = 4
REPLAY = ReplayConfig(BlockLayout.of_block_bytes(512, 16), 1024, 64, verify=True, events=EVENTS)
WRONG = "blocks with wrong bytes"
CONFIG = StressConfig(REPLAY, reads=2_000, evictions=500, shielded=50)


def stress(config: StressConfig) -> tuple[Report, set[str]]:
    """The report of a run, and the names of the figures that are not as they must be."""
    with Stress(synthetic(), config) as run:
        report = run.run()
    return report, {figure.name for figure in report.figures if not figure.ok}


def test_a_short_run_holds_every_promise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stress", "--reads", "3000"]) == 0
    out, err = capsys.readouterr()
    assert "pinned reads" in out and "FAILED" not in out
    assert not [line for line in err.splitlines() if "compiling, about" not in line]


def test_a_trace_starts_again_until_there_are_enough_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": n, "input_length": 1000, "output_length": 30, "hash_ids": [n, 100 + n]} for n in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["stress", str(path), "--reads", "500", "--device-blocks", "32", "--host-blocks", "16", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    values = {figure["name"]: figure["value"] for figure in report["figures"]}
    assert report["passed"] and report["config"]["tokens_per_block"] == 128
    assert values["pinned reads"] >= 500 and values["host evictions"] >= 50


def test_a_pin_that_does_not_hold_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lease is closed behind its first check."""
    check, close = Reader._check, Lease.close

    def checked(self: Reader, lease: Lease, expected: list[bytes | None]) -> None:
        check(self, lease, expected)
        lease.close()

    monkeypatch.setattr(Reader, "_check", checked)
    monkeypatch.setattr(Lease, "close", lambda self: None if self.closed else close(self))
    # Whether a block is evicted between two checks is up to the threads: runs are made until one was.
    report, failed = next((run for run in map(stress, 50 * [CONFIG]) if WRONG in run[1]), (None, set()))
    assert report is not None
    # Evictions that met no pin are not counted as if they had.
    assert failed == {WRONG, "... where a pinned block would have been the victim"} and not report.passed
    assert report.failure is not None and "wrong bytes, first in host block" in report.failure


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
    assert any(WRONG in stress(CONFIG)[1] for _ in range(50))


def test_a_lease_that_is_never_closed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    close = Lease.close
    monkeypatch.setattr(Lease, "close", lambda self: close(self) if self.id != 7 else None)
    assert stress(CONFIG)[1] == {"leases open at the end", "blocks pinned at the end"}


def test_events_that_were_missed_are_found() -> None:
    _, failed = stress(replace(CONFIG, replay=replace(REPLAY, events=256)))
    assert {"events dropped or missing", "keys in which events and pool differ"} & failed


def test_contents_and_bytes_that_no_request_calls_for_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    learned = ExpectedContents.bytes_of
    monkeypatch.setattr(ExpectedContents, "bytes_of", lambda self, key: learned(self, key) if key[0] % 4 else None)
    assert stress(CONFIG)[1] == {"blocks with content that no request has"}
    zeros = b"\0" * 512
    monkeypatch.setattr(ExpectedContents, "bytes_of", lambda self, key: learned(self, key) if key[0] % 4 else zeros)
    assert stress(CONFIG)[1] == {"blocks with wrong bytes"}


def test_what_either_thread_dies_of_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(KVCacheManager, "find_and_pin_host", fail)
        assert stress(CONFIG)[0].failure == "reader: RuntimeError: broken"
    with monkeypatch.context() as patch:
        patch.setattr(ExpectedContents, "learn", fail)
        assert stress(CONFIG)[0].failure == "scheduler: RuntimeError: broken"


def test_a_run_that_gets_nowhere_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"tokens": [1, 2, 3], "output_length": 1}\n')
    assert main(["stress", str(path), "--device-blocks", "8", "--host-blocks", "1"]) == 1
    assert "FAILED  host evictions" in capsys.readouterr().out


def test_control_c_prints_the_figures_so_far(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    learn = ExpectedContents.learn

    def interrupted(self: ExpectedContents, request: Any) -> None:
        if request.index == 9:
            signal.raise_signal(signal.SIGINT)
        learn(self, request)

    monkeypatch.setattr(ExpectedContents, "learn", interrupted)
    assert main(["stress", "--reads", "100000000"]) == 130
    assert "interrupted: the figures so far" in capsys.readouterr().out


class OneBlock:
    """A pool that is used one content, which is one block, at a time, and the watch over it."""

    def __init__(self, device_blocks: int, host_blocks: int) -> None:
        layout = BlockLayout.of_block_bytes(8 * T, T)
        self.cache = KVCacheManager(layout, device_blocks=device_blocks, host_blocks=host_blocks, partial_reuse=False)
        self.watch = VictimWatch(self.cache)

    def use(self, *contents: int) -> None:
        """Compute a sequence with a block for each content, the first ones shared with whoever begins alike."""
        sequence = self.cache.add_sequence(np.repeat(np.array(contents, np.int32), T))
        self.cache.commit(sequence)
        self.cache.release(sequence)

    def pin(self, content: int) -> Lease:
        lease = self.cache.find_and_pin_host(self.cache.block_keys([content] * T).keys[0])
        assert lease is not None
        return lease

    def seen(self) -> tuple[int, int]:
        return self.watch.evictions, self.watch.shielded


@pytest.fixture
def one() -> Iterator[OneBlock]:
    pool = OneBlock(1, 3)
    yield pool
    pool.cache.verify()
    pool.cache.close()


def test_a_pinned_block_counts_as_victim_once_when_its_turn_comes(one: OneBlock) -> None:
    for content in range(4):
        one.use(content)
    first = one.pin(0)
    one.use(4)
    assert one.seen() == (1, 1), "block 0 was first: 1 went in its place"
    one.use(5)
    assert one.seen() == (2, 1), "without pins block 0 would have gone before: 2 was next"
    first.close()
    one.pin(4)
    one.use(6)
    assert one.seen() == (3, 1), "3 was first, then 4, then 0, which came back last"
    one.use(7)
    assert one.seen() == (4, 2), "block 4 was first: 0 went in its place"
    one.cache.revoke("")


def test_pins_that_are_not_first_shield_nothing(one: OneBlock) -> None:
    for content in range(4):
        one.use(content)
    with one.pin(1):
        one.use(4)
        assert one.seen() == (1, 0), "block 0 was first"
    one.use(5)
    assert one.seen() == (2, 0), "block 1 is behind 2 and 3"


def test_a_decision_with_many_evictions_counts_each_pinned_block_among_its_first() -> None:
    pool = OneBlock(3, 6)
    for content in range(0, 90, 10):
        pool.use(content)
    leases = [pool.pin(10), pool.pin(30)]
    pool.use(100, 101, 102)
    assert pool.seen() == (3, 2), "0, 10 and 20 would have gone without the first pin; 0, 20 and 30 without the second"
    pool.use(200, 201, 202)
    assert pool.seen() == (6, 2), "both have been counted"
    for lease in leases:
        lease.close()
    pool.cache.verify()
    pool.cache.close()
