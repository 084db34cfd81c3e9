"""A real mlx-lm computes with KV that comes back from a prompt cache what it computes with its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="needs mlx-lm: python -m tests.engines torchless build")

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

from kvpool.integrations.local import state_keys
from tests.engines.torchless import mlx_lab
from tests.ports import free_ports

DEADLINE_S = 600
WEIGHTS = "random, seed 0"


def prompt(count: int, seed: int = 7) -> list[int]:
    return np.random.default_rng(seed).integers(0, mlx_lab.VOCABULARY, count).tolist()


@pytest.mark.parametrize("memory", ["4MiB", "128KiB"])
@pytest.mark.parametrize("kind", mlx_lab.KINDS)
def test_logits_are_those_of_the_engines_own_kv(kind: str, memory: str) -> None:
    seed = int(os.environ.get("KVPOOL_SEED", "3"))
    print(f"seed {seed}")
    model = mlx_lab.model_of(kind)
    with mlx_lab.prompt_cache(kind, model, host_bytes=memory) as cache:
        engine = mlx_lab.Engine(kind, model, cache)
        mlx_lab.converse(engine, int(os.environ.get("KVPOOL_CONVERSATIONS", "12")), np.random.default_rng(seed))
        print(f"{engine.hits} hits, {engine.reused} tokens, {cache.stats()}; {engine.against_uncut()}")
        assert engine.hits > 5
        assert cache.nbytes <= {"4MiB": 4 << 20, "128KiB": 128 << 10}[memory]


@pytest.mark.parametrize("kind", mlx_lab.KINDS)
def test_a_prefix_is_found_and_the_last_token_is_left_to_compute(kind: str) -> None:
    model, tokens = mlx_lab.model_of(kind), prompt(100)
    with mlx_lab.prompt_cache(kind, model) as cache:
        assert cache.fetch_nearest_cache("model", tokens) == (None, tokens)
        cache.insert_cache("model", tokens[:70], mlx_lab.computed(kind, model, tokens[:70]))
        exact = kind in ("sliding windows", "recurrent hybrid")
        assert len(cache.fetch_nearest_cache("model", tokens)[1]) == (30 if exact else 36)
        assert len(cache.fetch_nearest_cache("model", tokens[:71])[1]) == (1 if exact else 7)
        assert cache.fetch_nearest_cache("model", tokens[:1]) == (None, tokens[:1])
        assert cache.fetch_nearest_cache("model", [9, *tokens]) == (None, [9, *tokens])


def test_a_prompt_larger_than_the_memory_keeps_its_beginning() -> None:
    model, tokens = mlx_lab.model_of("full attention"), prompt(400)
    with mlx_lab.prompt_cache("full attention", model, host_bytes=5 * 6144) as cache:
        cache.insert_cache("model", tokens, mlx_lab.computed("full attention", model, tokens))
        known = 400 - len(cache.fetch_nearest_cache("model", tokens)[1])
        assert known == len(cache) * 16 > 0
        assert cache.stats().skipped == {"crowded": 1}


def test_a_state_of_more_tokens_than_were_named_is_not_kept() -> None:
    kind, tokens = "recurrent hybrid", prompt(40)
    model = mlx_lab.model_of(kind)
    with mlx_lab.prompt_cache(kind, model) as cache:
        caches = mlx_lab.computed(kind, model, tokens)
        cache.insert_cache("model", tokens[:-1], caches)
        assert cache.fetch_nearest_cache("model", tokens)[0] is None
        assert cache.stats().skipped == {"ahead": 1}


def test_another_model_finds_nothing_and_has_the_memory() -> None:
    model, tokens = mlx_lab.model_of("full attention"), prompt(64)
    with mlx_lab.prompt_cache("full attention", model) as cache:
        cache.insert_cache("model", tokens, mlx_lab.computed("full attention", model, tokens))
        assert cache.fetch_nearest_cache("other", tokens)[0] is None
        assert len(cache) == 0
        assert cache.fetch_nearest_cache("model", tokens)[0] is None


# -- stores ----------------------------------------------------------------------------------------------

SAVES = """
import sys, time
from tests.engines.torchless import mlx_lab, test_mlx
kind, store = sys.argv[1:]
model, tokens = mlx_lab.model_of(kind), test_mlx.prompt(100)
cache = mlx_lab.prompt_cache(kind, model, stores=store, weights=test_mlx.WEIGHTS)
caches = mlx_lab.empty(kind, model)
logits = mlx_lab.compute(model, tokens[:80], caches)
cache.insert_cache("model", tokens[:80], caches)
assert cache.drain(600)
print(mlx_lab.compute(model, tokens[80:], caches).tolist(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("kind", mlx_lab.KINDS)
def test_after_a_kill_the_next_process_computes_with_what_was_saved(kind: str, tmp_path: Path) -> None:
    store = f"disk:{tmp_path}/kv-{{part}}?capacity=4MiB"
    words = [sys.executable, "-c", SAVES, kind, store]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        answer = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    model, tokens = mlx_lab.model_of(kind), prompt(100)
    with mlx_lab.prompt_cache(kind, model, stores=store, weights=WEIGHTS) as cache:
        caches, rest = cache.fetch_nearest_cache("model", tokens)
        assert caches is not None
        assert len(rest) == 20
        assert mlx_lab.compute(model, rest, caches).tolist() == answer
    with mlx_lab.prompt_cache(kind, model, stores=store, weights="other") as cache:
        assert cache.fetch_nearest_cache("model", tokens)[0] is None


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("kind", mlx_lab.KINDS)
def test_a_restart_finds_all_that_the_process_found_however_large(kind: str, share: float, tmp_path: Path) -> None:
    model, tokens = mlx_lab.model_of(kind), prompt(1000 if kind == "full attention" else 300)
    settings: dict[str, Any] = {"stores": f"disk:{tmp_path}/kv-{{part}}?capacity=16MiB", "load_share": share}
    known, logits = [], []
    caches = mlx_lab.computed(kind, model, tokens)
    for restart in range(2):
        with mlx_lab.prompt_cache(kind, model, host_bytes="512KiB", weights=WEIGHTS, **settings) as cache:
            if not restart:
                cache.insert_cache("model", tokens, caches)
                assert cache.drain(600)
            for _ in range(2):
                cached, rest = cache.fetch_nearest_cache("model", [*tokens, 5])
                assert cached is not None
                known.append(len(tokens) + 1 - len(rest))
                logits.append(mlx_lab.compute(model, rest, cached).tolist())
            assert cache.stats().skipped == {}
    assert known == [{"full attention": 992, "quantised": 288}.get(kind, 300)] * 4
    assert logits == [logits[0]] * 4


def test_a_snapshot_that_is_none_is_a_miss_and_counted() -> None:
    kind, tokens = "recurrent hybrid", prompt(60)
    model = mlx_lab.model_of(kind)
    with mlx_lab.prompt_cache(kind, model) as cache:
        cache.insert_cache("model", tokens[:50], mlx_lab.computed(kind, model, tokens[:50]))
        (shelf,) = cache._shelves
        (key,) = state_keys(tokens, 16, range(50, 51))
        with shelf.blocks.pin([key + bytes(4)]) as lease:
            row = shelf.blocks.memory[lease.blocks[0]]
            row[16:40] = np.frombuffer(b'{"plain": {}, "arrays": ', np.uint8)
        assert cache.fetch_nearest_cache("model", tokens)[0] is None
        assert cache.stats().skipped == {"damaged": 1}


# -- whose KV it is --------------------------------------------------------------------------------------


def test_each_adapter_has_kv_of_its_own_in_memory_and_on_a_disk(tmp_path: Path) -> None:
    from mlx_lm import load

    path, kind, tokens = str(mlx_lab.save(tmp_path / "model")), "full attention", prompt(100)
    adapters = [None, *(str(mlx_lab.save_adapter(tmp_path / f"adapter {n}", n)) for n in (1, 2))]
    models = {(path, adapter, None): load(path, adapter_path=adapter)[0] for adapter in adapters}
    logits_of = {
        name: mlx_lab.compute(model, tokens, mlx_lab.empty(kind, model)).tolist() for name, model in models.items()
    }
    assert len({*map(tuple, logits_of.values())}) == 3
    now: list[Any] = []
    store = f"disk:{tmp_path}/kv-{{part}}?capacity=16MiB"
    with mlx_lab.prompt_cache(kind, lambda: now, stores=store) as cache:
        for turn in range(3):
            for name, model in models.items():
                now[:] = [model]
                caches, rest = cache.fetch_nearest_cache(name, tokens)
                assert len(rest) == (100 if not turn else 4)
                caches = caches or mlx_lab.empty(kind, model)
                logits = mlx_lab.compute(model, rest, caches)
                assert np.allclose(logits.tolist(), logits_of[name], atol=0.05)
                cache.insert_cache(name, tokens, caches)
                assert cache.drain(600)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("model", "other"),
        (("model", None, None), ("model", "an adapter", None)),
        (("model", "a", None), ("model", None, "a")),
        (("model", "a", None), ("model", "b", None)),
        (("model", None, "a"), ("model", None, "b")),
        (("model", None, None, "kv of 4 bits"), ("model", None, None)),
    ],
    ids=str,
)
def test_models_adapters_and_draft_models_by_other_names_find_nothing(first: Any, second: Any, tmp_path: Path) -> None:
    model, tokens, kind = mlx_lab.model_of("full attention"), prompt(64), "full attention"
    caches = mlx_lab.computed(kind, model, tokens)
    store = f"disk:{tmp_path}/kv-{{part}}?capacity=16MiB"
    with mlx_lab.prompt_cache(kind, model, stores=store, weights=WEIGHTS) as cache:
        cache.insert_cache(first, tokens, caches)
        assert cache.drain(600)
        assert cache.fetch_nearest_cache(second, [*tokens, 5])[0] is None
        assert len(cache.fetch_nearest_cache(first, [*tokens, 5])[1]) == 1


@pytest.mark.parametrize("other", [{"kv_bits": 4}, {"quantized_kv_start": 16}, {"weights": "others"}], ids=str)
def test_quantised_kv_of_other_settings_is_not_found(other: dict[str, Any], tmp_path: Path) -> None:
    kind, tokens = "quantised", prompt(64)
    model = mlx_lab.model_of(kind)
    caches = mlx_lab.computed(kind, model, tokens)
    settings = {"stores": f"disk:{tmp_path}/kv-{{part}}?capacity=16MiB", "weights": WEIGHTS}
    with mlx_lab.prompt_cache(kind, model, **settings) as cache:
        cache.insert_cache("model", tokens, caches)
        assert cache.drain(600)
    with mlx_lab.prompt_cache(kind, mlx_lab.model_of(kind), **(settings | other)) as cache:
        assert cache.fetch_nearest_cache("model", [*tokens, 5])[0] is None
    with mlx_lab.prompt_cache(kind, model, **settings) as cache:
        assert len(cache.fetch_nearest_cache("model", [*tokens, 5])[1]) == 1


def test_images_are_in_the_key_by_the_ids_that_the_server_gives_them() -> None:
    from mlx_lm.server import _make_vision

    kind, tokens = "full attention", [*prompt(32), *[499] * 16, *prompt(32)]
    model = mlx_lab.model_of(kind)
    keys = [_make_vision(tokens, urls=[url], pixel_values=[], token_id=499).cache_key for url in ("a", "b")]
    caches = mlx_lab.computed(kind, model, tokens)
    with mlx_lab.prompt_cache(kind, model) as cache:
        cache.insert_cache("model", keys[0], caches)
        assert len(cache.fetch_nearest_cache("model", [*keys[0], 5])[1]) == 1
        assert len(cache.fetch_nearest_cache("model", [*keys[1], 5])[1]) == 81 - 32


CHANGES: dict[str, tuple[str, Callable[[list[Any]], list[Any]]]] = {
    "quantised": ("full attention", lambda caches: [QuantizedKVCache(mlx_lab.GROUP, mlx_lab.BITS) for _ in caches]),
    "window": (
        "sliding windows",
        lambda caches: [RotatingKVCache(16) if isinstance(leaf, RotatingKVCache) else leaf for leaf in caches],
    ),
    "max_kv_size": ("full attention", lambda caches: [RotatingKVCache(16, keep=4) for _ in caches]),
    "bits": ("quantised", lambda caches: [QuantizedKVCache(mlx_lab.GROUP, 4) for _ in caches]),
    "element type": ("full attention", lambda caches: caches),
    "two prompts": ("full attention", lambda caches: caches),
}


@pytest.mark.parametrize("change", CHANGES)
def test_caches_of_other_settings_are_not_kept_and_counted(change: str) -> None:
    kind, changed = CHANGES[change]
    model, other, tokens = mlx_lab.model_of(kind), mlx_lab.model_of(kind), prompt(40)
    if change == "element type":
        other.set_dtype(mx.float32)
    caches = changed(mlx_lab.empty(kind, model))
    mx.eval(other(mx.array([tokens] * (1 + (change == "two prompts"))), cache=caches))
    with mlx_lab.prompt_cache(kind, model) as cache:
        cache.insert_cache("model", tokens, caches)
        assert len(cache) == 0
        assert cache.stats().skipped == {"batched" if change == "two prompts" else "unknown": 1}


# -- the server ------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """``mlx_lm.server`` with a prompt cache. Gives its address."""
    folder = mlx_lab.save(tmp_path / "model", request.param)
    [port] = free_ports()
    words = [
        sys.executable,
        "-m",
        "kvpool.integrations.mlx",
        "--host-bytes",
        "16MiB",
        "--tokens-per-block",
        "16",
        "--store",
        f"disk:{tmp_path}/kv-{{part}}?capacity=16MiB",
        "--model",
        str(folder),
        "--port",
        str(port),
    ]
    log = tmp_path / "log"
    with log.open("w") as file, subprocess.Popen(words, stdout=file, stderr=file) as process:
        address, end = f"http://127.0.0.1:{port}", time.monotonic() + DEADLINE_S
        while time.monotonic() < end and process.poll() is None:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield address
        process.kill()
    print(log.read_text()[-4000:])


def chat(address: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 8, "temperature": 0.0}
    asked = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=DEADLINE_S) as answer:
        reply: dict[str, Any] = json.load(answer)
    return reply


@pytest.mark.parametrize("server", ["full attention", "recurrent hybrid"], indirect=True)
def test_the_server_reuses_a_conversation(server: str) -> None:
    said = [{"role": "user", "content": " ".join(map(str, prompt(100)))}]
    first = chat(server, said)
    again = chat(server, said)
    assert again["choices"][0]["message"]["content"] == first["choices"][0]["message"]["content"]
    answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    later = chat(server, [*said, answer, {"role": "user", "content": "5 6 7"}])
    assert later["usage"]["prompt_tokens_details"]["cached_tokens"] >= 90
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
