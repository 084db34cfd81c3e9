"""A replay in a process that joins a cluster finds what the process of an earlier replay has left there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("blake3")

from tests.stores.mooncake.cluster import ROOT, Cluster

SMALL = "--limit 40 --seed 3 --device-blocks 400 --host-blocks 64 --active 4 --store-wait 60 --device cpu".split()


def replay(store: str) -> dict[str, Any]:
    """What ``python -m kvpool replay --verify`` says of a store. Every byte is compared."""
    command = [sys.executable, "-m", "kvpool", "replay", *SMALL, "--verify", "--json", "--store", store]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["failure"] is None
    return said


def test_the_second_of_two_processes_starts_warm_and_every_byte_is_right(
    cluster: Cluster, secret: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text(secret.hex())
    file.chmod(0o600)
    store = f"mooncake:{cluster.address}?secret_file={file}"  # it lends no memory: another process's keeps the blocks
    cold, warm = replay(store), replay(store)
    assert cold["stored"]["earlier_tokens"] == 0 and cold["stored"]["saved_blocks"] > 100
    assert warm["stored"]["earlier_tokens"] > 0 and warm["hits"]["tokens"] > cold["hits"]["tokens"]
    assert warm["verified"]["loaded_blocks"] == warm["stored"]["loaded_blocks"] > 0
