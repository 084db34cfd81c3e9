"""llama.cpp answers with states that come back as it answers without them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.waiting import at_once

pytest.importorskip("xllamacpp", reason="needs xllamacpp: python -m tests.engines torchless build")

from kvpool import PoolClosed
from kvpool.integrations.llamacpp import PrefixCache
from kvpool.integrations.local import state_keys
from tests.engines.torchless import gguf_lab
from tests.engines.torchless.gguf_lab import answer, prefix_cache, prompt


@pytest.fixture(params=gguf_lab.KINDS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return gguf_lab.save(tmp_path / "model.gguf", request.param)


@pytest.fixture
def attention(tmp_path: Path) -> Path:
    return gguf_lab.save(tmp_path / "model.gguf")


def forget_slots(cache: PrefixCache) -> None:
    """Have llama.cpp and the prefix cache forget what slot 0 has."""
    cache._post("/slots/0?action=erase", {})
    cache._held[0] = cache._held[0][:0]


def test_conversations_get_the_tokens_that_a_new_engine_gives(model: Path) -> None:
    seed = int(os.environ.get("KVPOOL_SEED", "5"))
    print(f"seed {seed}")
    random, systems, live, reused = np.random.default_rng(seed), [prompt(150, 1), prompt(90, 2)], [], 0
    with prefix_cache(model, host_bytes="8MiB") as cache, prefix_cache(model, {"cache_prompt": False}) as plain:
        for _ in range(int(os.environ.get("KVPOOL_CONVERSATIONS", "12"))):
            tokens = list(systems[random.integers(2)] if random.random() < 0.5 or not live else live[-1])
            for _ in range(2):
                tokens += random.integers(3, 259, int(random.integers(1, 60))).tolist()
                reply, known = answer(cache, tokens)
                plain.clear()
                plain._post("/slots/0?action=erase", {})
                assert reply == answer(plain, tokens)[0]
                tokens, reused = tokens + reply, reused + known
            live.append(tokens)
        print(f"{reused} tokens reused, {cache.stats()}")
        assert reused > 500
        assert cache.stats().nbytes <= 8 << 20


def test_a_system_prompt_that_repeats_is_kept_by_itself(model: Path) -> None:
    system = prompt(200, 1)
    with prefix_cache(model) as cache:
        known = [answer(cache, system + prompt(50, seed)[1:])[1] for seed in range(2, 6)]
        forget_slots(cache)
        known.append(answer(cache, system + prompt(50, 6)[1:])[1])
    assert known[0] == 0 and min(known[2:]) >= 199


def test_a_repeated_prefix_that_a_store_has_is_not_kept_again_after_a_restart(model: Path, tmp_path: Path) -> None:
    store, system = f"disk:{tmp_path}/kv?capacity=64MiB", prompt(200, 1)
    with prefix_cache(model, stores=store) as cache:
        for seed in (2, 3):
            answer(cache, system + prompt(50, seed)[1:])
        assert cache.stats().kept == 3
        assert cache.drain(600)
    with prefix_cache(model, stores=store) as cache:
        known = [answer(cache, system + prompt(50, seed)[1:])[1] for seed in (4, 5, 6)]
        assert cache.stats().kept == 3
    assert min(known) >= 199


RUNS = """
import sys, time
from pathlib import Path
from tests.engines.torchless.gguf_lab import answer, prefix_cache, prompt
cache = prefix_cache(Path(sys.argv[1]), stores=sys.argv[2])
tokens = prompt(300, 1)
tokens += answer(cache, tokens)[0]
assert cache.drain(600)
print(answer(cache, tokens + [7, 8, 9])[0], flush=True)
time.sleep(600)
"""


def test_after_a_kill_the_next_process_answers_from_what_was_saved(model: Path, tmp_path: Path) -> None:
    store = f"disk:{tmp_path}/kv?capacity=64MiB"
    words = [sys.executable, "-c", RUNS, str(model), store]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        expected = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    with prefix_cache(model, host_bytes="16MiB") as new:
        tokens = prompt(300, 1)
        tokens += answer(new, tokens)[0]
    with prefix_cache(model, stores=store) as cache:
        reply, known = answer(cache, [*tokens, 7, 8, 9])
    assert reply == expected and known >= 307


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_restart_finds_a_state_that_nearly_fills_the_memory(attention: Path, tmp_path: Path, share: float) -> None:
    store, tokens = f"disk:{tmp_path}/kv?capacity=64MiB", prompt(1200, 1)
    settings: dict[str, Any] = {"host_bytes": "512KiB", "stores": store, "load_share": share}
    with prefix_cache(attention, **settings) as cache:
        tokens += answer(cache, tokens)[0]
        assert cache.drain(600)
        forget_slots(cache)
        assert answer(cache, [*tokens, 7])[1] == len(tokens) - 1
    for _ in range(2):
        with prefix_cache(attention, **settings) as cache:
            assert answer(cache, [*tokens, 7])[1] >= len(tokens) - 1
            assert cache.stats().skipped == {}


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"rope_freq_base": 5000.0}, {}),
        ({"n_ctx": 2048}, {}),
        ({}, {"weights": "others"}),
    ],
    ids=["rope", "context", "weights"],
)
def test_states_of_other_settings_or_weights_are_not_found(
    attention: Path, tmp_path: Path, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    store, tokens = f"disk:{tmp_path}/kv?capacity=64MiB", prompt(200, 1)
    with prefix_cache(attention, stores=store) as cache:
        answer(cache, tokens)
        assert cache.drain(600)
    with prefix_cache(attention, settings, stores=store, **options) as other:
        assert answer(other, tokens)[1] == 0
    gguf_lab.save(attention, seed=1)
    with prefix_cache(attention, stores=store) as replaced:
        assert answer(replaced, tokens)[1] == 0


def test_a_state_that_llama_refuses_is_computed_and_counted(attention: Path) -> None:
    tokens = prompt(200, 1)
    with prefix_cache(attention) as cache:
        (key,) = state_keys(tokens, 64, range(150, 151))
        cache._blocks.put_state(key, b"no state" * 100)
        assert answer(cache, tokens)[1] == 0
        assert cache.stats().skipped == {"refused": 1}
        assert answer(cache, tokens)[1] > 0


def test_a_state_larger_than_the_memory_is_not_kept_and_counted(attention: Path) -> None:
    with prefix_cache(attention, host_bytes="64KiB") as cache:
        answer(cache, prompt(400, 1))
        assert cache.stats().nbytes == 0
        assert cache.stats().skipped == {"crowded": 1}


def test_threads_share_the_slots(attention: Path) -> None:
    with prefix_cache(attention, {"n_parallel": 2, "n_ctx": 2 * gguf_lab.CONTEXT}) as cache:
        expected = [answer(cache, prompt(120, seed))[0] for seed in range(6)]
        assert at_once(lambda seed: answer(cache, prompt(120, seed))[0], range(6)) == expected


def test_nobody_else_can_ask_the_server(attention: Path) -> None:
    with prefix_cache(attention) as cache:
        address = cache._server.listening_address
        assert address.startswith("http://127.0.0.1:")
        body = json.dumps({"prompt": "1"}).encode()
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(urllib.request.Request(f"{address}/completion", body))
        folder = cache._folder
        assert folder.stat().st_mode & 0o777 == 0o700 and not list(folder.iterdir())
    assert not folder.exists()


def test_bad_input_is_refused_and_the_next_prompt_is_served(attention: Path) -> None:
    with pytest.raises(ValueError, match="host_bytes: expected .*, got none"):
        prefix_cache(attention, host_bytes=None)
    with pytest.raises(ValueError, match="name its weights"):
        prefix_cache(attention.with_name("absent"))
    with prefix_cache(attention) as cache:
        with pytest.raises(urllib.error.HTTPError, match="400"):
            cache.complete("1", n_predict="many")
        assert len(answer(cache, prompt(80, 1))[0]) == 8
        assert cache.chat([{"role": "user", "content": "1"}], n_predict=2)["tokens"]
    with pytest.raises(PoolClosed):
        cache.complete("1")
