"""A Mooncake cluster of this machine: a master and processes that lend memory, which a test can stop, kill and start
again. Their output goes to files."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import warnings
from pathlib import Path
from typing import Any

from kvpool import ModelIdentity
from kvpool.storage.backends.mooncake import guarded_client as mooncake_client
from tests.ports import free_ports
from tests.stores.lab import IDENTITY

ROOT = Path(__file__).resolve().parents[3]
READY_SECONDS = 600.0


def missing() -> str:
    """Why there can be no cluster here, or ""."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mooncake_client.library()
    except ImportError as error:
        return str(error)
    return ""


def object_prefix(secret: bytes, identity: ModelIdentity = IDENTITY, kind: str = "kvpool4") -> str:
    """What the names of a model's objects begin with."""
    content = b"kvpool mooncake" + bytes.fromhex(identity.fingerprint)
    return f"{kind}-{hashlib.blake2b(content, key=secret, digest_size=8).hexdigest()}-"


class Part:
    """A process of the cluster."""

    def __init__(self, command: list[str], log: Path, **environment: str) -> None:
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> None:
        """Ask it to end, and wait; kill it if it does not."""
        self.resume()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(600)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(600)
        self.process.stdout.close()


class Master(Part):
    """``mooncake_master``. ``address`` is for clients."""

    def __init__(self, log: Path, ports: list[int], *flags: str) -> None:
        import mooncake

        self.flags, self.ports = flags, ports
        self.address = f"127.0.0.1:{ports[0]}"
        program = str(Path(str(mooncake.__file__)).with_name("mooncake_master"))
        places = [
            f"--rpc_address=127.0.0.1 --rpc_port={ports[0]}",
            f"--metrics_host=127.0.0.1 --metrics_port={ports[1]}",
        ]
        command = [program, *" ".join(places).split(), *flags]
        super().__init__(command, log, GLOG_logtostderr="1")
        # It writes nothing to stdout that anybody needs.
        end = time.monotonic() + READY_SECONDS
        while not self._ready():
            assert self.process.poll() is None and time.monotonic() < end, f"the master does not begin: {log}"
            time.sleep(0.02)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[1]}/health", timeout=600) as answer:
                return b'"service_ready":true' in answer.read()
        except OSError:
            return False

    def end(self) -> None:
        self.resume()
        self.process.terminate()
        super().end()


class Worker(Part):
    """A process with a MooncakeStore, which executes commands (see ``tests.stores.mooncake.worker``)."""

    def __init__(self, log: Path, master: str, secret: bytes, segment: int = 0, block_bytes: int = 4096) -> None:
        command = [sys.executable, "-m", "tests.stores.mooncake.worker", master, str(segment), str(block_bytes)]
        super().__init__(command, log)
        self.send(secret=secret.hex())
        assert self.answer() == "ready", f"a worker does not begin: {log}"

    def send(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"a worker has ended: {self.log}"
        return json.loads(line)

    def do(self, **order: Any) -> Any:
        self.send(**order)
        return self.answer()


class Cluster:
    """A master and its workers. Everything ends with ``close``."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder, self.flags, self.ports = folder, flags, free_ports(2)
        self.workers: list[Worker] = []
        self.master = self._start()

    @property
    def address(self) -> str:
        return self.master.address

    def _start(self) -> Master:
        return Master(self.folder / "master.log", self.ports, *self.flags)

    def restart_master(self) -> None:
        """Kill the master, if it runs, and start another one under its address."""
        if self.master.process.poll() is None:
            self.master.kill()
        self.master = self._start()

    def worker(self, secret: bytes, segment: int = 0, block_bytes: int = 4096) -> Worker:
        log = self.folder / f"worker-{len(self.workers)}.log"
        self.workers.append(Worker(log, self.address, secret, segment, block_bytes))
        return self.workers[-1]

    def close(self) -> None:
        """The workers end while there is a master to part from."""
        for worker in self.workers:
            worker.kill()
        self.master.end()
