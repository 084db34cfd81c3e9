"""The Llama of examples/engine_llama.py: its logits are those of NumPy, and its tokens do not depend on where K and V
have been meanwhile. Over the emulated driver in single precision, in half precision once."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool.device.cuda import unusable
from kvpool.storage import StorageManager
from kvpool.storage.urls import open_store

pytestmark = pytest.mark.gpu
SINGLE, HALF = 2e-4, 0.1
"""The most that a logit may differ from NumPy's, whose sums are double. Logits are up to about 4."""
CHATS, TURNS, SEED = 5, 2, 3
IDENTITY = {"revision": "0", "kv_dtype": "float32", "hash_version": "kvpool 1"}


@pytest.fixture
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    missing = unusable()
    if missing:
        pytest.skip(missing)
    return load("engine_llama")


@functools.cache
def made(example: ModuleType, dtype: str = "float32") -> Any:
    shape = dataclasses.replace(example.TINY, dtype=dtype)
    return example.Model(shape, SEED, importlib.import_module("cupy"))


@pytest.fixture
def model(example: ModuleType) -> Any:
    return made(example)


@contextmanager
def opened(example: ModuleType, model: Any, device_blocks: int, host_blocks: int, **options: Any) -> Iterator[Any]:
    """An engine with a pool of its own, which is verified at the end."""
    store, pool = options.pop("store", None), {"device": "cuda", "max_sequences": 16}
    if store is not None:
        pool |= {"event_capacity": 4096, "secret": store.secret}
    tiers = {"device_blocks": device_blocks, "host_blocks": host_blocks}
    with kvpool.KVCacheManager(model.shape.layout, **tiers, **pool) as cache:
        storage = None
        if store is not None:
            identity = kvpool.ModelIdentity("llama", **IDENTITY, layout=model.shape.layout)
            storage = StorageManager(cache, [store], identity=identity)
        engine = example.Engine(model, cache, storage)
        yield engine
        engine.close()
        cache.verify()
        if storage is not None:
            storage.close()


def reference(model: Any, tokens: list[int]) -> Any:
    """All logits, in NumPy with double precision, from the same weights."""
    shape, n = model.shape, len(tokens)
    positions, pairs = np.arange(n), shape.head_dim // 2

    def host(array: Any) -> Any:
        return array.get().astype(np.float64)

    def normed(x: Any, weight: Any) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * host(weight)

    def rotated(x: Any) -> Any:
        angle = positions[:, None, None] * 10000.0 ** (-2 * np.arange(pairs) / shape.head_dim)
        left, right = x[..., :pairs], x[..., pairs:]
        turned = left * np.cos(angle) - right * np.sin(angle), left * np.sin(angle) + right * np.cos(angle)
        return np.concatenate(turned, -1)

    x, future = host(model.embed)[tokens], np.triu(np.full((n, n), -np.inf), 1)
    for w in model.layers:
        qkv = (normed(x, w["before_attention"]) @ host(w["qkv"])).reshape(n, -1, shape.head_dim)
        q, k, v = np.split(qkv, [shape.heads, shape.heads + shape.kv_heads], axis=1)
        k, v = (np.repeat(each, shape.heads // shape.kv_heads, axis=1) for each in (rotated(k), v))
        scores = np.einsum("nhd,mhd->hnm", rotated(q), k) / np.sqrt(shape.head_dim) + future
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hnm,mhd->nhd", weights, v).reshape(n, -1) @ host(w["out"])
        gate, up = np.split(normed(x, w["before_mlp"]) @ host(w["gate_up"]), 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ host(w["down"])
    return normed(x, model.norm) @ host(model.head)


def tokens_of(chats: list[Any]) -> list[list[int]]:
    return [chat.tokens for chat in chats]


@functools.cache
def uncached(example: ModuleType) -> list[list[int]]:
    """What the model answers with nothing reused, on a device tier with room for everything."""
    with opened(example, made(example), 400, 8) as engine:
        engine.reuse = False
        chats = example.serve(engine, CHATS, TURNS, SEED)
        stats = engine.cache.stats()
        assert stats.reused_device_blocks + stats.reused_host_blocks + stats.onboarded_blocks == 0
        assert not {example.SWAPPED_OUT, example.STARTED_AGAIN} & engine.happened.keys()
    return tokens_of(chats)


@pytest.fixture
def expected(example: ModuleType) -> list[list[int]]:
    return uncached(example)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", SINGLE), ("float16", HALF)])
def test_logits_are_those_of_numpy(example: ModuleType, dtype: str, tolerance: float) -> None:
    """Of tokens that were decoded, of the ends of prompts, and of whole conversations without a cache."""
    model = made(example, dtype)
    with opened(example, model, 100, 8) as engine:
        engine.keep_logits = True
        chats = example.serve(engine, 2, 2, SEED)
        assert engine.cache.stats().reused_device_blocks > 0 and engine.happened["tokens decoded"] > 0
        for chat in chats:
            wanted = reference(model, chat.tokens)
            assert 1 < np.abs(wanted).max() < 8
            np.testing.assert_allclose(engine.uncached(chat.tokens), wanted, rtol=0, atol=tolerance)
            answer = len(chat.logits) // 2
            np.testing.assert_allclose(chat.logits[answer:], wanted[-answer - 1 : -1], rtol=0, atol=tolerance)


def test_tokens_do_not_depend_on_the_tiers(example: ModuleType, model: Any, expected: list[list[int]]) -> None:
    """Hits, offloads, onboards, chats that are swapped out and come back."""
    with opened(example, model, 48, 160) as engine:
        chats = example.serve(engine, CHATS, TURNS, SEED)
        stats = engine.cache.stats()
    assert stats.reused_device_blocks > 0 and stats.offloaded_blocks > 0 and stats.onboarded_blocks > 0
    assert engine.happened[example.SWAPPED_OUT] > 0 and engine.happened[example.CAME_BACK] > 0
    assert tokens_of(chats) == expected


def test_a_chat_starts_again_if_the_host_has_no_room(
    example: ModuleType, model: Any, expected: list[list[int]]
) -> None:
    with opened(example, model, 48, 4) as engine:
        chats = example.serve(engine, CHATS, TURNS, SEED)
    assert engine.happened[example.STARTED_AGAIN] > 0
    assert tokens_of(chats) == expected


def test_tokens_are_the_same_after_a_restart_from_disk(
    example: ModuleType, model: Any, expected: list[list[int]], tmp_path: Path
) -> None:
    url, tiers = f"disk:{tmp_path}?capacity=64MiB", (400, 200)
    with opened(example, model, *tiers, store=open_store(url)) as engine:
        example.serve(engine, CHATS, 1, SEED)
        assert engine.storage.drain(60)
        assert engine.storage.stats().saved_blocks > 0
    with opened(example, model, *tiers, store=open_store(url)) as engine:
        chats = example.serve(engine, CHATS, TURNS, SEED)
        assert engine.storage.stats().loaded_blocks > 0 and engine.cache.stats().onboarded_blocks > 0
    assert tokens_of(chats) == expected


def test_a_wrong_table_is_noticed(
    example: ModuleType, model: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decodes of one step read the blocks of another sequence."""
    stage = kvpool.pool.GraphTables.stage

    def wrong(tables: Any, ids: Any, *arguments: Any, **options: Any) -> None:
        stage(tables, [*ids[1:], ids[0]], *arguments, **options)

    monkeypatch.setattr(kvpool.pool.GraphTables, "stage", wrong)
    with opened(example, model, 400, 8) as engine:
        assert tokens_of(example.serve(engine, CHATS, TURNS, SEED)) != expected


def test_the_example_runs(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--tiny", "--chats", "5"]) == 0
    assert example.CAME_BACK in capsys.readouterr().out
