"""``python -m kvpool store``: one folder for several engines of a machine. What was acknowledged to an engine is kept,
whichever process is killed; the service ends cleanly, and reports its state."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest

from kvpool.__main__ import main
from kvpool.storage import MemoryStore
from kvpool.storage.store import Bytes
from kvpool.storage.urls import open_store
from tests.stores.lab import BLOCK_BYTES, Gate, Wrong, begin_load, keys_of, open_queue, right, saved
from tests.stores.peering import ROOT, Serve, client
from tests.stores.peering import serve as serve
from tests.stores.peering import servers as servers
from tests.waiting import until


class Service:
    """The service over a folder, started again after it was killed."""

    def __init__(self, folder: Path) -> None:
        self.secret = folder / "secret"
        self.secret.write_text("ab" * 32)
        self.secret.chmod(0o600)
        self.endpoint, self.text = f"ipc://{folder}/s", f"disk:{folder}/kv?capacity=16MiB"
        self.options = [f"--listen={self.endpoint}", f"--block-bytes={BLOCK_BYTES}", f"--secret-file={self.secret}"]
        self.store = f"peer:{self.endpoint}?secret_file={self.secret}&timeout=600"

    def start(self, *more: str) -> dict[str, str]:
        """What it says of where it is, by the first word."""
        command = [sys.executable, "-m", "kvpool", "store", self.text, *self.options, *more]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = dict(self.process.stdout.readline().split() for _ in range(1 + len(more) // 2))
        assert said["endpoint"] == self.endpoint
        return said

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        return self.process.wait(600)

    def check(self, keys: Bytes) -> None:
        """The blocks with these keys, numbered from 0, come and have the right bytes."""
        with open_queue(open_store(self.store)) as queue:
            assert right(queue, begin_load(queue, keys)).ok == len(keys)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    served = Service(tmp_path)
    yield served
    served.end(signal.SIGKILL)


def test_the_service_says_how_it_is_keeps_its_place_and_ends_cleanly(service: Service, tmp_path: Path) -> None:
    metrics = service.start("--metrics-port", "0")["metrics"]
    with open_queue(open_store(service.store)) as queue:
        keys = saved(queue, 4)
    text = urlopen(metrics, timeout=600).read().decode()
    assert re.search(r'kvpool_store_server_blocks_total{kind="saved",pool="store"} 4\.0', text)
    assert re.search(r'kvpool_store_server_figure{figure="blocks",pool="store"} 4\.0', text)
    assert "ab" * 32 not in text
    assert urlopen(metrics.replace("/metrics", "/health"), timeout=600).read() == b"ok\n"
    second = ["store", f"disk:{tmp_path}/other?capacity=1MiB", *service.options]
    assert main(second) == 2, "the place is taken"
    with open_queue(open_store(service.store)) as queue:
        saved(queue, 1)
    (tmp_path / "s").unlink()
    (tmp_path / "s").write_text("mine")
    assert main(second) == 2, "a file is in the way"
    assert (tmp_path / "s").read_text() == "mine" and service.process.poll() is None
    assert service.end(signal.SIGTERM) == 0
    (tmp_path / "s").unlink()
    for how in (signal.SIGKILL, signal.SIGTERM):
        service.start()
        service.check(keys)
        service.end(how)


def test_a_store_that_hangs_or_keeps_nothing_is_trouble(serve: Serve) -> None:
    metrics = pytest.importorskip("kvpool.integrations.metrics")
    wrong, gate = Wrong(MemoryStore(64 * BLOCK_BYTES)), Gate()
    wrong.threads, wrong.deaf = 2, True
    server = serve(wrong)

    def fails() -> None:
        raise OSError("no space left")

    with (
        open_queue(client(server)) as queue,
        open_queue(client(server, timeout=0.2)) as impatient,
        metrics.served(0, health=server.trouble) as (shown, url),
    ):
        shown.add("store", server)
        health = url.replace("/metrics", "/health")
        saved(queue, 1)
        assert urlopen(health, timeout=600).read() == b"ok\n"
        keys = keys_of(queue, 1, 7)
        wrong.before["save"] = fails
        assert queue.save(keys, np.zeros(1, np.int64)).wait(600, returned=True)
        with pytest.raises(HTTPError) as refused:
            urlopen(health, timeout=600)
        assert refused.value.code == 503 and refused.value.read() == b"the last save failed\n"
        wrong.before["save"] = gate
        while not gate.reached.is_set():  # A client that is slow may give up before its call is in the store.
            assert impatient.save(keys, np.zeros(1, np.int64)).wait(600, returned=True)
        until(lambda: server.trouble().endswith(" calls hang in the store"), "call that hangs")
        assert server.trouble() == f"{server.stats().hanging} calls hang in the store"
        gate.open()
        until(lambda: not server.trouble(), "end of the call")
    server.close()
    assert server.closed and server.trouble() == "closed"
