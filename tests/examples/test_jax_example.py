"""The engine in JAX: its array is the pool's device tier, and stays where it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed; it comes with the extra 'test'")

HAPPENED = [
    "blocks reused on the device",
    "blocks offloaded",
    "blocks onboarded",
    "preempted chats that came back from the host",
]


@pytest.fixture
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("engine_jax")


def counts_in(output: str) -> dict[str, int]:
    lines = output.splitlines()
    return {line[8:]: int(line[:7].replace(",", "")) for line in lines if line[:7].strip().replace(",", "").isdigit()}


@pytest.mark.exhaustive
def test_every_logit_is_that_of_the_model_without_a_cache(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.main(["--chats", "16", "--device", "cpu", "--check"]) == 0
    counts = counts_in(capsys.readouterr().out)
    assert all(counts[what] for what in HAPPENED), counts


@pytest.mark.exhaustive
def test_after_a_restart_prompts_come_from_the_disk(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--chats", "16", "--device", "cpu", "--store", f"disk:{tmp_path}/kv?capacity=16MiB"]
    assert example.main(words) == 0
    first = counts_in(capsys.readouterr().out).get("blocks that came from the store", 0)
    example.main([*words, "--check"])  # not all that the example wants to show happens once more
    output = capsys.readouterr().out
    assert counts_in(output)["blocks that came from the store"] > first
    assert float(output.partition("largest difference of a logit ")[2].split()[0]) < 1e-9


def test_the_array_is_the_tier_and_a_step_makes_no_second_one(
    example: ModuleType, load: Callable[[str], ModuleType]
) -> None:
    tier = example.DeviceTier(64)
    cache = example.kvpool.KVCacheManager(
        example.LAYOUT, device_blocks=64, device="cpu", memory=example.kvpool.MemoryOptions(device_memory=tier)
    )
    with cache:
        cache.memory.device_pool[0, 0, 3] = 7
        assert (np.asarray(tier.kv[0, 0, 3]) == 7).all()
    weights = example.jax.tree.map(example.jnp.asarray, load("engine_numpy").make_weights(0))
    batch = [np.zeros(32, np.int64)] * 4 + [np.zeros((6, 16), np.int64)]
    compiled = example.step.lower(tier.kv, weights, *batch).compile().memory_analysis()
    assert compiled.alias_size_in_bytes >= tier.kv.nbytes
    nothing = example.step.lower(example.jnp.zeros(example.LAYOUT.device_shape(1)), weights, *batch).compile()
    # What a step needs besides does not grow with the pool.
    assert compiled.temp_size_in_bytes - nothing.memory_analysis().temp_size_in_bytes < tier.kv.nbytes / 2


def test_an_array_that_moves_is_refused_before_a_pool_has_it(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    jit = jax.jit

    def kept(function: Any, **options: Any) -> Any:
        return jit(function)

    monkeypatch.setattr(example.jax, "jit", kept)
    with pytest.raises(RuntimeError, match=r"moves donated arrays.*docs/jax\.md"):
        example.DeviceTier(4)


def test_a_tier_beside_gives_back_the_bytes_that_it_got(example: ModuleType) -> None:
    kv = example.jnp.asarray(np.random.default_rng(0).random(example.LAYOUT.device_shape(8)))
    before = np.asarray(kv).copy()
    beside = example.BesideTier(4)
    assert beside.save(kv, [b"a", b"b"], [5, 2]) == 2
    assert beside.save(kv, [b"a", b"c"], [0, 1]) == 1
    after = np.asarray(beside.load(kv, [b"b", b"a", b"c"], [0, 1, 7]))
    for target, source in ((0, 2), (1, 5), (7, 1), (3, 3)):
        assert (after[:, :, target] == before[:, :, source]).all()
    with pytest.raises(example.kvpool.errors.BlockNotFound):
        beside.load(after, [b"d"], [0])
    beside.close()
