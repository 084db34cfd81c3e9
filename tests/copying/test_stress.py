"""The pin stress in short: it passes on this pool, and each of its checks fails when what it checks is broken."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvpool import BlockLayout, KVCacheManager, Lease
from kvpool.errors import BlockNotFound
from kvpool.tools.replay import ReplayConfig, synthetic
from tests import stress
from tests.stress import REQUESTS, Stress, StressConfig

REPLAY = ReplayConfig(BlockLayout.of_block_bytes(512, 16), 1024, 64, device="cpu", verify=True)
CONFIG = StressConfig(REPLAY, reads=2_000, evictions=500)


def failed() -> set[str]:
    """Run the stress, and return the names of the figures that are wrong."""
    with Stress(synthetic(REQUESTS), CONFIG) as run:
        return {figure.name for figure in run.run() if not figure.ok}


def test_a_short_run_holds_every_promise(capsys: pytest.CaptureFixture[str]) -> None:
    assert stress.main(["--reads", "3000"]) == 0
    printed = capsys.readouterr().out
    assert "pinned reads" in printed and "seed 0" in printed and "FAILED" not in printed


@pytest.mark.exhaustive
def test_a_block_found_in_one_step_and_pinned_in_the_next_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a block is evicted between the two steps depends on the threads: run until one was."""
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
    assert any("blocks with wrong bytes" in failed() for _ in range(50))


@pytest.mark.parametrize(("owner", "name"), [(KVCacheManager, "find_and_pin_host"), (Stress, "_look")])
def test_an_error_of_either_thread_ends_the_run(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(owner, name, fail)
    with Stress(synthetic(REQUESTS), CONFIG) as run, pytest.raises(RuntimeError, match="broken"):
        run.run()
