"""A replay over a store: the second run starts warm, and every byte that comes back is compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography")

from kvpool.__main__ import main
from kvpool.common.arrays.layout import BlockLayout
from kvpool.storage import MemoryStore
from kvpool.storage.store import Store
from kvpool.tools.replay import Replay, ReplayConfig, Request, Summary, Trace, VerificationError, synthetic
from kvpool.tools.replay import engine as replay_engine
from kvpool.tools.replay.content import KVBytes, token_states
from kvpool.tools.replay.verifier import Verifier
from tests.stores.lab import Gate, Wrong, fail

LAYOUT = BlockLayout.of_block_bytes(4096, 16)
TINY: dict[str, Any] = {"device_blocks": 400, "host_blocks": 32, "active": 4, "device": "cpu", "store_wait": 60.0}


def run(store: Store, trace: Trace | None = None, *, verify: bool = True, **options: Any) -> Summary:
    config = ReplayConfig(LAYOUT, **(TINY | {"store": store, "verify": verify} | options))
    with Replay(trace or synthetic(20, seed=3), config) as replay:
        return replay.run()


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    yield MemoryStore(1 << 28)


def test_the_second_run_starts_warm_and_every_byte_is_right(store: MemoryStore) -> None:
    cold, warm = run(store), run(store)
    for summary in (cold, warm):
        assert summary.requests == 20 and summary.failure is None
        assert summary.verified is not None and summary.stored is not None
        assert summary.verified.reused_tokens == summary.hits.tokens
        assert summary.verified.loaded_blocks == summary.stored.loaded_blocks > 0
        assert set(summary.stored.not_loaded) <= {"cancelled"}, "by prefetches for which the host has no room"
    assert cold.stored is not None and warm.stored is not None
    assert cold.stored.earlier_tokens == 0 and cold.stored.saved_blocks > 300
    assert warm.stored.earlier_tokens > 0 and warm.hits.tokens > cold.hits.tokens
    assert warm.stored.saved_blocks < cold.stored.saved_blocks
    assert "it started cold" in cold.text() and "it started warm" in warm.text()
    assert warm.as_dict()["stored"]["earlier_tokens"] == warm.stored.earlier_tokens


def test_prompts_that_share_nothing_come_from_the_store_alone(store: MemoryStore) -> None:
    requests = [Request(i, i + 1, 1601, 4, tokens=np.arange(1601, dtype=np.int32) + 10_000 * i) for i in range(8)]
    trace = Trace("apart", "native", requests)
    assert run(store, trace, host_blocks=100).hits.tokens == 0
    warm = run(store, trace, host_blocks=100)
    assert warm.stored is not None and warm.hits.tokens == 8 * 1600
    assert warm.stored.hit_tokens == warm.stored.earlier_tokens == 8 * 1600
    assert warm.stored.prefetches == {"loaded": 8}


def test_prompts_longer_than_the_host_tier_get_as_much_as_it_holds(store: MemoryStore) -> None:
    requests = [Request(i, i + 1, 1601, 4, tokens=np.arange(1601, dtype=np.int32)) for i in range(3)]
    run(store, Trace("one", "native", requests[:1]))
    warm = run(store, Trace("the same three times", "native", requests), device_blocks=120, active=1)
    assert warm.stored is not None and warm.stored.earlier_tokens == 32 * 16
    assert warm.hits.tokens == 32 * 16 + 2 * 1600


def test_a_namespace_gets_nothing_of_another(store: MemoryStore) -> None:
    def trace(salt: str) -> Trace:
        return Trace("one", "native", [Request(0, 1, 161, 4, tokens=np.arange(161, dtype=np.int32), salt=salt)])

    assert run(store, trace("a")).hits.tokens == run(store, trace("b")).hits.tokens == 0
    assert run(store, trace("a")).hits.tokens == 160


@pytest.mark.exhaustive
def test_a_run_that_writes_no_bytes_leaves_nothing_for_one_that_compares_them(store: MemoryStore) -> None:
    assert (unwritten := run(store, verify=False).stored) is not None and unwritten.saved_blocks > 0
    assert (stored := run(store).stored) is not None and stored.earlier_tokens == 0


def test_blocks_whose_macs_are_wrong_are_computed_again(store: MemoryStore) -> None:
    run(store)
    wrong = Wrong(store)
    wrong.after["load"] = lambda answer: (answer[0], answer[1] ^ 1)
    summary = run(wrong)
    assert summary.failure is None and summary.stored is not None
    assert summary.stored.loaded_blocks == 0 and summary.stored.not_loaded["damaged"] > 0


def test_a_store_that_hangs_costs_the_wait_and_no_more(store: MemoryStore) -> None:
    run(store, synthetic(3, seed=3))
    wrong, gate = Wrong(store), Gate()
    wrong.before["load"] = gate
    config = ReplayConfig(LAYOUT, **(TINY | {"store": wrong, "store_wait": 0.2, "verify": True}))
    with Replay(synthetic(3, seed=3), config) as replay:
        summary = replay.run()
        gate.open()
    assert summary.requests == 3 and summary.stored is not None and summary.stored.hit_tokens == 0
    assert summary.stored.not_loaded


@pytest.mark.exhaustive
def test_content_that_is_not_the_prompts_fails_the_verification(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run expects other bytes for the same tokens: what the store has is whole, and wrong."""
    run(store)
    monkeypatch.setattr(
        replay_engine, "token_states", lambda *arguments, **named: token_states(*arguments, **named) ^ 1
    )
    with pytest.raises(VerificationError, match="what came from a store is no block of this prompt") as caught:
        run(store)
    assert caught.value.tier == "host"


def test_a_block_with_one_wrong_byte_is_not_a_block_of_the_prompt() -> None:
    device, host = (np.zeros(4 * LAYOUT.block_bytes, np.uint8) for _ in range(2))
    verifier, states = Verifier(LAYOUT, device, host, 4, 4), token_states(np.arange(32), 16)
    KVBytes(LAYOUT, host, LAYOUT.host_strides(4), 4).write(states.reshape(2, 16), np.array([0, 1]))
    verifier.expect(states)
    verifier.loaded(np.array([4, 5]))
    assert verifier.failure is None and verifier.verified.loaded_blocks == 2
    host[LAYOUT.block_bytes - 1] ^= 1
    verifier.loaded(np.array([4]))
    with pytest.raises(VerificationError, match="host block 4, token 15"):
        verifier.raise_failure()


COMMAND = ["replay", "--limit", "40", "--device-blocks", "400", "--host-blocks", "64", "--active", "4", "--verify"]


@pytest.mark.exhaustive
def test_the_command_keeps_blocks_on_disk_for_its_next_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"disk:{tmp_path}/blocks?capacity=64MiB"
    said = []
    for _ in range(2):
        assert main([*COMMAND, "--device", "cpu", "--store", text]) == 0
        said.append(capsys.readouterr().out)
    assert "0 of them from an earlier run: it started cold" in said[0]
    assert "it started warm" in said[1] and "blocks of the store" in said[1]


def test_a_store_that_cannot_be_opened_leaves_nothing_behind(store: MemoryStore) -> None:
    wrong = Wrong(store)

    wrong.before["open"] = fail
    with pytest.raises(OSError, match="I/O error"):
        run(wrong)
    assert run(store).requests == 20
