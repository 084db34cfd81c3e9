"""The remote reader fetches from another process under memory pressure, and notices values that are wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

import kvpool

pytest.importorskip("zmq")

from kvpool.remote import BlockServer, RemoteError

from .test_examples import EXAMPLES, run

SECRET = bytes(range(32))


@pytest.mark.exhaustive
def test_a_prompt_comes_from_another_process_while_it_evicts_blocks() -> None:
    printed = run("examples/remote_reader.py")
    counts = re.search(r"([\d,]+) blocks fetched in [\d,]+ calls; ([\d,]+) tokens reused, 0 values wrong", printed)
    assert counts is not None, printed
    fetched, reused = (int(count.replace(",", "")) for count in counts.groups())
    assert fetched >= 200 and reused >= 4 * 200
    assert not re.search(r"[0-9a-f]{64}", printed), "a secret was printed"


def test_a_reader_joins_a_worker_that_runs(load: Callable[[str], ModuleType]) -> None:
    """With the secret of the worker it reads, with another one it is refused. The worker ends with its input."""
    example = load("remote_reader")
    command = [sys.executable, str(EXAMPLES / "remote_reader.py"), "serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(f"{SECRET.hex()}\n")
        worker.stdin.flush()
        endpoint = worker.stdout.readline().strip()
        assert example.read(endpoint, SECRET, 50) == 0
        with pytest.raises(RemoteError):
            example.read(endpoint, SECRET[::-1], 50)
        worker.stdin.close()
        assert worker.wait(600) == 0


def test_wrong_values_are_noticed(load: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    example = load("remote_reader")
    with kvpool.KVCacheManager(example.LAYOUT, device_blocks=1, host_blocks=512, device="cpu", secret=SECRET) as cache:
        for number in range(example.PROMPTS):
            keys = cache.block_keys(example.prompt_of(number))
            blocks = np.zeros((len(keys.keys), example.LAYOUT.block_bytes), np.uint8)
            cache.imports.import_blocks(keys, list(blocks))
        with BlockServer(cache) as server:
            assert example.read(server.endpoint, SECRET, 20) == 1
    assert " 0 values wrong" not in capsys.readouterr().out
