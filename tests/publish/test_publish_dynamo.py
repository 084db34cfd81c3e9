"""Dynamo's own indexer, where it is installed, finds for every prompt what the pool would reuse."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from engine import Make
from kvpool.integrations.kv_events import KVEventPublisher
from tests.ports import free_ports
from tests.waiting import until

SCRIPT = "import sys; from dynamo._core import run_kv_indexer; run_kv_indexer(sys.argv[1:])"


def ask(port: int, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.loads(reply.read() or b"null")


@pytest.fixture
def index() -> Iterator[Callable[[KVEventPublisher, int], int]]:
    """Start an indexer of a publisher's events with blocks of that many tokens. Return its port."""
    if importlib.util.find_spec("dynamo") is None or importlib.util.find_spec("dynamo._core") is None:
        pytest.skip("ai-dynamo-runtime is not installed")
    started: list[subprocess.Popen[bytes]] = []

    def start(publisher: KVEventPublisher, tokens: int) -> int:
        [port] = free_ports()
        options = f"--block-size {tokens} --port {port} --threads 1 --workers 1={publisher.endpoint}".split()
        command = [sys.executable, "-c", SCRIPT, *options]
        started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

        def answers() -> bool:
            with (
                suppress(urllib.error.URLError, ConnectionError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health"),
            ):
                return True
            return False

        until(answers, "indexer")
        return port

    yield start
    for process in started:
        process.terminate()
        process.wait(600)


def cached_tokens(port: int, prompt: range, **names: Any) -> tuple[int, int]:
    """Tokens of a prompt on the GPU, and tokens on it and then on the CPU, as the indexer has them."""
    reply = ask(port, "/query", {"token_ids": list(prompt), "model_name": "default", **names})
    worker = reply["instances"].get("1", {"gpu": 0, "cpu": 0})
    return worker["gpu"], worker["cpu"]


def await_tokens(port: int, prompt: range, tokens: tuple[int, int], **names: Any) -> None:
    until(lambda: cached_tokens(port, prompt, **names) == tokens, str(tokens))


def test_dynamo_finds_what_the_pool_would_reuse(make: Make, index: Callable[..., int]) -> None:
    engine = make(T=16, P=12, S=8, event_capacity=256)
    with KVEventPublisher(engine.cache, interval_seconds=0.002) as publisher:
        port = index(publisher, 16)

        def again() -> None:
            engine.cache.clear()
            engine.seed(range(5000, 5081), committed=80)
            time.sleep(0.05)

        # Until the subscription of the indexer has reached the publisher.
        until(lambda: cached_tokens(port, range(5000, 5080)) == (80, 80) or again(), "subscription")
        for start in (0, 1000):
            engine.seed(range(start, start + 81), committed=80)
        engine.seed(range(81), committed=80, adapter_id="lora", salt="tenant")
        for start in (0, 1000):
            match = engine.cache.match_prefix(list(range(start, start + 81)))
            await_tokens(port, range(start, start + 80), (match.device_tokens, match.full_tokens))
        await_tokens(port, range(80), (80, 80), lora_name="lora", cache_salt="tenant")
        engine.cache.clear()
        await_tokens(port, range(80), (0, 0), lora_name="lora", cache_salt="tenant")
