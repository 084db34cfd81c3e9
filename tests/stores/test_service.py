"""``python -m kvpool store``: one folder for several engines of a machine. What was acknowledged to an engine is kept,
whichever process is killed; the service ends cleanly, and reports its state."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest

from kvpool.__main__ import main
from kvpool.storage import MemoryStore
from kvpool.storage.urls import open_store
from tests.stores.lab import BLOCK_BYTES, Gate, Wrong, content, keys_of, names, open_queue, returned, saved
from tests.stores.peering import ROOT, Serve, client
from tests.stores.peering import serve as serve
from tests.stores.peering import servers as servers
from tests.stores.service_engine import OF_ALL
from tests.waiting import until

Process = subprocess.Popen[str]


def start(*arguments: str) -> Process:
    return subprocess.Popen([sys.executable, "-m", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


class Service:
    """The service over a folder, started again after it was killed; and the engines, whose words threads read."""

    def __init__(self, folder: Path) -> None:
        self.secret = folder / "secret"
        self.secret.write_text("ab" * 32)
        self.secret.chmod(0o600)
        self.endpoint, self.text = f"ipc://{folder}/s", f"disk:{folder}/kv?capacity=16MiB"
        self.options = [f"--listen={self.endpoint}", f"--block-bytes={BLOCK_BYTES}", f"--secret-file={self.secret}"]
        self.store = f"peer:{self.endpoint}?secret_file={self.secret}&timeout=600"
        self.said: list[list[list[str]]] = []
        self.running: list[Process] = []

    def start(self, *more: str) -> dict[str, str]:
        """What it says of where it is, by the first word."""
        self.process = start("kvpool", "store", self.text, *self.options, *more)
        assert self.process.stdout is not None
        said = dict(self.process.stdout.readline().split() for _ in range(1 + len(more) // 2))
        assert said["endpoint"] == self.endpoint
        return said

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        return self.process.wait(600)

    def engine(self, seconds: float) -> tuple[Process, threading.Thread]:
        number, said = len(self.said), list[list[str]]()
        self.said.append(said)
        process = start("tests.stores.service_engine", self.store, str(number), str(seconds))
        self.running.append(process)
        assert process.stdout is not None
        thread = threading.Thread(target=lambda: said.extend(line.split() for line in process.stdout or ()))
        thread.start()
        return process, thread

    def kept(self, number: int) -> list[int]:
        """The blocks that were acknowledged to an engine, in that order."""
        return [int(number) for words in list(self.said[number]) if words[0] == "kept" for number in words[1:]]

    def check(self, blocks: set[int]) -> None:
        """All these blocks come, and have the right bytes."""
        with open_queue(open_store(self.store)) as queue:
            for first in range(0, OF_ALL, 64):
                wanted = sorted(blocks & set(range(first, first + 64)))
                keys = queue.secret.derive_keys([names(1, number)[0] for number in wanted])
                job = queue.load(keys, np.arange(len(wanted)))
                assert returned(job).ok == len(wanted), job.error
                assert all(np.array_equal(queue.memory[at], content(number)) for at, number in enumerate(wanted))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    served = Service(tmp_path)
    yield served
    for process in (served.process, *served.running):
        process.kill()
        process.wait(600)


@pytest.mark.exhaustive
def test_three_engines_share_a_folder_whoever_is_killed(service: Service) -> None:
    """An engine is killed, then the service, which comes back; in the end it is stopped and started. What was
    acknowledged to any engine comes back, and has the right bytes."""
    service.start()
    engines = [service.engine(600) for _ in range(3)]

    def progress(number: int, more: int = 40) -> Callable[[], bool]:
        target = len(service.kept(number)) + more
        return lambda: len(service.kept(number)) >= target or engines[number][0].poll() is not None

    for number in range(3):
        until(progress(number), "block that is kept")
    engines[0][0].kill()
    service.end(signal.SIGKILL)
    service.start()
    for number in (1, 2):
        until(progress(number, 400), "block that is kept after the service has come back")
        assert engines[number][0].poll() is None, "an engine has ended, for wrong bytes perhaps"
    for process, thread in engines:
        process.kill()
        thread.join(600)
    acknowledged = set().union(*(service.kept(number) for number in range(3)))
    assert all(["came", "8"] in said for said in service.said[1:]), "engines load what others have saved"
    service.check(acknowledged)
    assert service.end(signal.SIGTERM) == 0
    service.start()
    service.check(acknowledged)


def test_the_service_says_how_it_is_keeps_its_place_and_ends_cleanly(service: Service, tmp_path: Path) -> None:
    metrics = service.start("--metrics-port", "0")["metrics"]
    with open_queue(open_store(service.store)) as queue:
        saved(queue, 4)
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
