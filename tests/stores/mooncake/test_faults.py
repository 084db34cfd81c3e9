"""Whatever happens to a cluster, no wrong byte is served: at worst a block is a miss, within the deadline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.storage import ABSENT, DAMAGED, FAILED, LATE, OK, REFUSED, StoreRequest, StoreWorker
from tests.children import in_child, refuses
from tests.stores.lab import BLOCK_BYTES, content, fill, keys_of, right, saved
from tests.stores.mooncake.cluster import ROOT, Cluster, object_prefix
from tests.waiting import until

MIB = 1 << 20
Start = Callable[..., Cluster]
OpenAt = Callable[..., StoreWorker]


def load(queue: StoreWorker, count: int, first: int = 0, seconds: float = 600.0) -> StoreRequest:
    """Load blocks, and compare those that are OK."""
    job = queue.load(keys_of(queue, count, first), np.arange(count), deadline=queue.now() + seconds)
    assert job.wait(600), "a job ends at its deadline"
    return right(queue, job, first)


def save(queue: StoreWorker, count: int, first: int = 0, seconds: float = 600.0) -> StoreRequest:
    fill(queue.memory, count, first)
    job = queue.save(keys_of(queue, count, first), np.arange(count), deadline=queue.now() + seconds)
    assert job.wait(600), "a job ends at its deadline"
    assert job.wait(600, returned=True)
    return job


@pytest.fixture
def library(cluster: Cluster) -> Iterator[Any]:
    """A client of Mooncake without kvpool, that does what kvpool would not."""
    from mooncake.store import MooncakeDistributedStore

    made = MooncakeDistributedStore()
    assert made.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", cluster.address) == 0
    yield made
    made.close()


# -- several workers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("row_padding", [0, *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (16, 4096))])
def test_a_worker_finds_what_another_has_saved(
    cluster: Cluster, open_at: OpenAt, secret: bytes, row_padding: int
) -> None:
    """Whether or not there is room for MACs after its rows."""
    other, queue = cluster.worker(secret), open_at(cluster.address, row_padding=row_padding)
    assert other.do(do="save", first=0, count=20)["codes"] == [OK] * 20
    assert load(queue, 24).codes.tolist() == [OK] * 20 + [ABSENT] * 4
    assert save(queue, 10, 30).ok == 10
    assert other.do(do="load", first=30, count=10) == {"codes": [OK] * 10, "wrong": 0, "error": ""}


def test_two_workers_that_save_one_key_leave_one_whole_block(cluster: Cluster, open_at: OpenAt, secret: bytes) -> None:
    """Each has computed it with other rounding. A save is refused while the other's is under way."""
    other, queue = cluster.worker(secret), open_at(cluster.address)
    fill(queue.memory, 40)
    other.send(do="save", first=0, count=40, shift=1000)
    job = queue.save(keys_of(queue, 40), np.arange(40))
    codes = other.answer()["codes"]
    assert job.wait(600, returned=True) and {*codes, *job.codes.tolist()} <= {OK, REFUSED}
    assert all(OK in pair for pair in zip(codes, job.codes.tolist(), strict=True)), "one of them has stored it"
    assert other.do(do="load", first=0, count=40, shifts=[0, 1000]) == {"codes": [OK] * 40, "wrong": 0, "error": ""}


# -- what a cluster says and does not do ---------------------------------------------------------------


def object_name(queue: StoreWorker, secret: bytes, number: int) -> str:
    return object_prefix(secret) + keys_of(queue, 1, number)[0].tobytes().hex()


@pytest.mark.parametrize("row_padding", [0, 16])
def test_what_another_has_put_under_a_key_is_damaged_and_removed(
    cluster: Cluster, open_at: OpenAt, library: Any, secret: bytes, row_padding: int
) -> None:
    queue = open_at(cluster.address, row_padding=row_padding)
    saved(queue, 3)
    assert library.upsert(object_name(queue, secret, 1), os.urandom(BLOCK_BYTES + 16)) == 0
    # Without a MAC, and the right one is still after the row.
    assert library.upsert(object_name(queue, secret, 2), content(2, BLOCK_BYTES).tobytes()) == 0
    first, *others = load(queue, 3).codes.tolist()
    assert first == OK and others[0] == DAMAGED and others[1] in (DAMAGED, FAILED)
    assert load(queue, 2).codes.tolist() == [OK, ABSENT]


def test_a_save_that_another_has_begun_and_never_ends_is_refused(
    cluster: Cluster, open_at: OpenAt, library: Any, secret: bytes
) -> None:
    """The library says that it was stored."""
    queue = open_at(cluster.address)
    begun = [object_name(queue, secret, number) for number in range(2)]
    assert library.batch_put_session_start(begun, [BLOCK_BYTES + 16] * 2) == [0, 0]
    assert save(queue, 3).codes.tolist() == [REFUSED, REFUSED, OK]
    assert load(queue, 3).codes.tolist() == [ABSENT, ABSENT, OK]
    assert queue.stats().store["not_stored"] == 2
    library.batch_put_session_revoke(begun)


def test_a_cluster_without_memory_refuses(own_cluster: Start, open_at: OpenAt) -> None:
    queue = open_at(own_cluster().address)
    assert save(queue, 4).codes.tolist() == [REFUSED] * 4 and queue.stats().store["no_space"] == 4


@pytest.mark.exhaustive
def test_leases_that_end_during_a_load_give_misses(own_cluster: Start, open_at: OpenAt, secret: bytes) -> None:
    cluster = own_cluster("--default_kv_lease_ttl=1")
    cluster.worker(secret, 64 * MIB)
    queue = open_at(cluster.address, slots=32, block_bytes=MIB, piece=32 * MIB)
    assert save(queue, 32).ok == 32
    for _ in range(4):
        assert set(load(queue, 32).codes.tolist()) <= {OK, FAILED}
    assert queue.stats().store["lease_ended"] > 0


# -- what dies and hangs -------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_master_that_dies_and_comes_back(own_cluster: Start, open_at: OpenAt, secret: bytes) -> None:
    cluster = own_cluster("--default_kv_lease_ttl=500")
    cluster.worker(secret, 16 * MIB)
    queue = open_at(cluster.address)
    assert save(queue, 8).ok == 8
    cluster.master.kill()
    jobs = [load(queue, 8, seconds=1.0), save(queue, 8, 100, seconds=1.0)]
    assert {code for job in jobs for code in job.codes.tolist()} <= {LATE, FAILED}
    cluster.restart_master()
    until(lambda: save(queue, 8, 200).ok == 8)
    assert load(queue, 8).codes.tolist() == [ABSENT] * 8, "a master that is new knows of nothing"
    assert load(queue, 8, 200).ok == 8


@pytest.mark.exhaustive
def test_a_worker_that_is_killed_with_a_load_under_way(own_cluster: Start, open_at: OpenAt, secret: bytes) -> None:
    cluster = own_cluster("--client_ttl=2", "--default_kv_lease_ttl=500")
    first = cluster.worker(secret, 64 * MIB)
    queue = open_at(cluster.address, slots=32, block_bytes=MIB, piece=32 * MIB)
    assert save(queue, 32).ok == 32
    began = threading.Event()

    def loads() -> list[int]:
        codes = [OK]
        while codes[-1] == OK:
            codes += load(queue, 32, seconds=5.0).codes.tolist()
            began.set()
        return codes

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(loads)
        assert began.wait(600)
        first.kill()
        assert set(done.result()) <= {OK, FAILED, ABSENT, LATE} and done.result()[-1] != OK
    cluster.worker(secret, 64 * MIB)
    until(lambda: save(queue, 4, 500).ok == 4)
    assert load(queue, 4, 500).ok == 4
    until(lambda: load(queue, 4).codes.tolist() == [ABSENT] * 4)


@pytest.mark.exhaustive
def test_a_worker_that_hangs_and_resumes_with_the_bytes_of_another_save(
    own_cluster: Start, open_at: OpenAt, secret: bytes
) -> None:
    """It has bytes for a key that was given up. Their place belongs to other keys when it takes them."""
    cluster = own_cluster("--default_kv_lease_ttl=500", "--client_ttl=60")
    holder = cluster.worker(secret, 16 * MIB)
    hung, other = (open_at(cluster.address, slots=8, block_bytes=MIB) for _ in range(2))
    # There are connections then. On a busy machine the library gives up some transfers.
    until(lambda: save(hung, 4).ok == 4)
    until(lambda: save(other, 2, 50).ok == 2)
    holder.freeze()
    job = save(hung, 4, 100, seconds=1.0)
    assert set(job.codes.tolist()) <= {LATE, FAILED}
    fill(other.memory, 4, 200)
    late = other.save(keys_of(other, 4, 200), np.arange(4), deadline=other.now() + 60)
    until(lambda: other.stats().running_calls == 1 or late.done)
    holder.resume()
    assert late.wait(600, returned=True)
    for first, count in ((0, 4), (50, 2), (100, 4), (200, 4)):
        for queue in (hung, other):
            assert set(load(queue, count, first).codes.tolist()) <= {OK, ABSENT, FAILED, DAMAGED}


# -- processes -----------------------------------------------------------------------------------------


def test_a_child_of_fork_harms_nobody(cluster: Cluster, open_at: OpenAt, secret: bytes) -> None:
    queue = open_at(cluster.address)
    keys = saved(queue, 4)
    in_child(lambda: refuses(lambda: queue.find(keys)))
    assert load(queue, 4).ok == 4


@pytest.mark.exhaustive
def test_a_process_that_ends_without_closing_ends_well(own_cluster: Start) -> None:
    """Even with calls in flight."""
    cluster = own_cluster()
    cluster.worker(bytes(32), 16 * MIB)
    code = f"""
import numpy as np
from kvpool.storage import StoreWorker
from kvpool.storage.backends.mooncake.mooncake_store import MooncakeStore
from tests.stores.lab import IDENTITY, memory, saved
queue = StoreWorker(MooncakeStore({cluster.address!r}, secret=bytes(32)), memory(), IDENTITY)
saved(queue, 4)
queue.load(queue.secret.derive_keys([b"a"]), np.arange(1))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr


# ----------------------------------------
# A replay in a process that joins a cluster finds what the process of an earlier replay has left there.


SMALL = "--limit 40 --seed 3 --device-blocks 400 --host-blocks 64 --active 4 --store-wait 60 --device cpu".split()


def replay(store: str) -> dict[str, Any]:
    """What ``python -m kvpool replay --verify`` says of a store. Every byte is compared."""
    command = [sys.executable, "-m", "kvpool", "replay", *SMALL, "--verify", "--json", "--store", store]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["failure"] is None
    return said


@pytest.mark.exhaustive
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
