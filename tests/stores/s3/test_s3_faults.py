"""An S3Store whose server is slow, refuses, dies, answers late or gives wrong bytes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.storage import ABSENT, DAMAGED, FAILED, OK, StoreWorker
from kvpool.storage.store_requests import StoreRequest
from kvpool.storage.urls import open_store
from tests.children import in_child, refuses
from tests.stores.lab import (
    IDENTITY,
    begin_load,
    codes_of,
    done,
    fill,
    keys_of,
    memory,
    open_queue,
    returned,
    right,
    saved,
)
from tests.stores.s3.weed import BUCKET, Proxy, Weed
from tests.waiting import at_once

Again = Callable[..., Any]


def objects(weed: Weed, place: str, kind: str = "packs") -> list[str]:
    """The names of the packs, or of the logs, below the prefix of a test."""
    prefix = place.removeprefix(f"//{BUCKET}/") + f"/kvpool5-{kind}"
    return [entry["path"] for page in weed.client().list(prefix) for entry in page]


def impatient(again: Again, piece_bytes: int = 1 << 22, **options: Any) -> StoreWorker:
    """A queue whose store has a short timeout. Under load, requests of ``open`` may exceed it: it is opened again."""
    while True:
        with suppress(OSError):
            return open_queue(again(**options), piece_bytes=piece_bytes)


def answered(call: Callable[[], StoreRequest]) -> list[int]:
    """The codes of a call to a store that is impatient: it is made until no block of it has failed."""
    while FAILED in (answer := codes_of(call())):
        pass
    return answer


@pytest.fixture(autouse=True)
def listed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others have saved is looked for whenever something is missing."""
    monkeypatch.setattr("kvpool.storage.backends.s3.s3_store._LISTED_SECONDS", 0.0)


@pytest.mark.parametrize("drop", ["forget", "clear", "clear a namespace"])
@pytest.mark.parametrize("by_another", [False, True])
def test_a_save_that_arrives_after_a_drop_changes_nothing(
    again: Again, proxy: Proxy, weed: Weed, place: str, drop: str, by_another: bool
) -> None:
    """Whoever has sent it, and whoever looks."""
    with impatient(again, endpoint=proxy.address, timeout=0.5) as saving, open_queue(again()) as other:
        dropping = other if by_another else saving
        keys, tag = keys_of(saving, 6), saving.secret.tag(b"tenant")
        fill(saving.memory, 6)
        proxy.hold = "PUT kvpool5-packs"
        while not proxy.held.acquire(blocking=False):  # On a slow machine it may be given up before it is there.
            assert codes_of(saving.save(keys, np.arange(6), tag=tag)) == [FAILED] * 6
        proxy.hold = ""
        begun = {"forget": lambda: dropping.forget(keys), "clear": dropping.clear}.get(
            drop, lambda: dropping.clear(tag)
        )()
        assert begun.wait(600) and begun.ok == len(begun.codes), begun.error
        assert set(proxy.release(1)) == {200}, "the server has taken what was late"
        assert objects(weed, place)
        for queue in (other, saving):
            assert answered(lambda queue=queue: queue.find(keys)) == [ABSENT] * 6
            assert answered(lambda queue=queue: queue.load(keys, np.arange(20, 26))) == [ABSENT] * 6
        with open_queue(again()) as later:
            assert done(later.find(keys)).codes.tolist() == [ABSENT] * 6
        assert not objects(weed, place), "whoever has found it has deleted it"
        assert answered(lambda: saving.save(keys, np.arange(6), tag=tag)) == [OK] * 6
        assert returned(other.load(keys, np.arange(20, 26))).ok == 6


def test_a_drop_counts_for_other_workers_when_it_has_returned(again: Again) -> None:
    with open_queue(again()) as dropping, open_queue(again()) as other:
        keys = saved(dropping, 8)
        assert done(other.find(keys)).ok == 8
        assert done(dropping.forget(keys[:2])).dropped == 2
        assert codes_of(other.load(keys, np.arange(20, 28))) == [ABSENT] * 2 + [OK] * 6
        assert done(other.forget(keys[7:])).dropped == 1
        assert done(dropping.find(keys)).codes.tolist() == [ABSENT] * 2 + [OK] * 5 + [ABSENT]
        # What is saved anew counts again, and the drop of others of its pack stays.
        saved(dropping, 1)
        assert done(other.find(keys)).codes.tolist() == [OK, ABSENT] + [OK] * 5 + [ABSENT]
        assert done(dropping.clear()).dropped == 6
        assert codes_of(other.load(keys, np.arange(20, 28))) == [ABSENT] * 8


def test_a_drop_counts_for_all_packs_of_a_save_that_was_begun_before(
    again: Again, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.storage.backends.s3.s3_store._PACK_BYTES", 5 * (4096 + 16) + 100)
    with open_queue(again(endpoint=proxy.address, timeout=600.0)) as saving, open_queue(again()) as other:
        keys = keys_of(saving, 10)
        fill(saving.memory, 10)
        proxy.hold = "PUT kvpool5-packs"
        job = saving.save(keys, np.arange(10))
        assert proxy.held.acquire(timeout=600)
        assert other.forget(keys[5:]).wait(600)
        proxy.release(1)
        assert returned(job).ok == 10
        assert done(other.find(keys)).codes.tolist() == [OK] * 5 + [ABSENT] * 5


def test_what_was_read_of_a_dropped_pack_is_not_taken_for_what_was_saved_anew(again: Again, proxy: Proxy) -> None:
    with open_queue(again(endpoint=proxy.address, timeout=600.0)) as queue, open_queue(again()) as other:
        keys = saved(queue, 2)
        # The pack stays, as one of its blocks does.
        assert done(other.forget(keys[:1])).dropped == 1
        proxy.hold = "GET kvpool5-packs"
        job = queue.load(keys, np.arange(20, 22))
        assert proxy.held.acquire(timeout=600)
        saved(queue, 1)
        proxy.release(1)
        assert codes_of(job) == [ABSENT, OK]


def test_drops_of_many_workers_at_a_time_are_all_kept(again: Again) -> None:
    with ExitStack() as opened:
        queues = [opened.enter_context(open_queue(again())) for _ in range(4)]
        keys = saved(queues[0], 8)
        jobs = [queue.forget(keys[2 * i : 2 * i + 2]) for i, queue in enumerate(queues)]
        assert all(job.wait(600) and job.ok == 2 for job in jobs), [job.error for job in jobs]
        assert done(queues[0].find(keys)).codes.tolist() == [ABSENT] * 8
    with open_queue(again()) as later:
        assert done(later.find(keys)).codes.tolist() == [ABSENT] * 8


def test_blocks_of_one_save_are_one_request_and_one_more_asks_for_drops(again: Again, proxy: Proxy) -> None:
    with open_queue(again(endpoint=proxy.address)) as queue:
        keys = keys_of(queue, 32)
        fill(queue.memory, 32)
        done(queue.find(keys))
        for call in (
            lambda: queue.save(keys, np.arange(32)),
            lambda: queue.find(keys),
            lambda: queue.load(keys, np.arange(32)),
        ):
            proxy.seen.clear()
            assert returned(call()).ok == 32
            asked = [line for line in proxy.seen if "kvpool5-drops" not in line]
            assert len(asked) <= 1 and len(proxy.seen) <= 2, proxy.seen


def test_a_block_larger_than_a_part_is_sent_in_parts(again: Again, weed: Weed, place: str) -> None:
    with StoreWorker(again(), memory(2, 9 << 20), IDENTITY) as queue:
        fill(queue.memory, 1)
        keys = keys_of(queue, 1)
        assert returned(queue.save(keys, np.arange(1))).ok == 1
        assert returned(queue.load(keys, np.arange(1, 2))).ok == 1
        assert np.array_equal(queue.memory[1], queue.memory[0])
        assert weed.client().head(objects(weed, place)[0])["e_tag"].endswith('-2"')


def test_a_slow_server_costs_no_more_than_the_timeout_and_writes_nothing_later(again: Again, proxy: Proxy) -> None:
    with impatient(again, endpoint=proxy.address, timeout=0.3) as queue, open_queue(again()) as patient:
        keys, proxy.hold = saved(patient, 2), "GET kvpool5-packs"
        while not proxy.held.acquire(blocking=False):
            assert codes_of(queue.load(keys, np.arange(10, 12))) == [FAILED] * 2
        queue.memory[10:12] = 7
        proxy.release(1)
        assert (queue.memory[10:12] == 7).all()
        assert answered(lambda: queue.load(keys, np.arange(10, 12))) == [OK] * 2


@pytest.mark.parametrize("kind", ["find", "load", "save"])
def test_nothing_is_served_while_drops_cannot_be_read(again: Again, proxy: Proxy, kind: str) -> None:
    with impatient(again, endpoint=proxy.address, timeout=0.3) as queue, open_queue(again()) as patient:
        keys, proxy.hold = saved(patient, 2), "GET kvpool5-drops"
        rows = () if kind == "find" else (np.arange(2),)
        while not proxy.held.acquire(blocking=False):
            assert codes_of(getattr(queue, kind)(keys, *rows)) == [FAILED] * 2
        proxy.release(1)
        assert answered(lambda: getattr(queue, kind)(keys, *rows)) == [OK] * 2


@pytest.mark.parametrize("status", [500, 503, 507, 403])
def test_a_server_that_refuses_fails_the_calls_and_is_used_again_when_it_serves(
    again: Again, proxy: Proxy, status: int
) -> None:
    """A full server answers with 500 or 507."""
    with impatient(again, endpoint=proxy.address, timeout=0.5) as queue, open_queue(again()) as patient:
        keys, proxy.status = saved(patient, 2), status
        other = keys_of(queue, 2, 10)
        assert codes_of(queue.save(other, np.arange(2))) == [FAILED] * 2
        assert codes_of(queue.load(keys, np.arange(10, 12))) == [FAILED] * 2
        assert done(queue.find(keys)).codes.tolist() == [FAILED] * 2
        forgotten = queue.forget(keys[:1])
        proxy.status = 0
        assert forgotten.wait(600) and forgotten.ok == 1
        assert answered(lambda: queue.load(keys, np.arange(10, 12))) == [ABSENT, OK]
        assert answered(lambda: queue.save(other, np.arange(2))) == [OK] * 2


def test_a_server_that_was_killed_half_way_has_what_it_had_acknowledged(again: Again, weed: Weed) -> None:
    with impatient(again, 1 << 14, timeout=1.0) as queue:
        fill(queue.memory, 48)
        keys = keys_of(queue, 48)
        first = answered(lambda: queue.save(keys[:4], np.arange(4)))
        jobs = [queue.save(keys[i : i + 4], np.arange(i, i + 4)) for i in range(4, 48, 4)]
        assert jobs[1].wait(600, returned=True)
        weed.kill()
        assert all(job.wait(600, returned=True) for job in jobs)
        codes = np.concatenate([first, *(job.codes for job in jobs)])
        assert set(codes.tolist()) <= {OK, FAILED} and (codes == OK).sum() >= 4
        assert codes_of(queue.load(keys[:1], np.arange(50, 51))) == [FAILED]
        weed.start()
        with open_queue(again()) as later:
            loaded = right(later, begin_load(later, keys))
            assert (loaded.codes[codes == OK] == OK).all() and set(loaded.codes.tolist()) <= {OK, ABSENT}
        assert done(queue.forget(keys)).ok == 48
        assert answered(lambda: queue.find(keys)) == [ABSENT] * 48


def test_a_save_that_was_killed_half_way_leaves_nothing_or_whole_packs(again: Again, weed: Weed, place: str) -> None:
    """Processes that save are killed at their work, each after a longer pause, until one has saved something."""
    program = f"""
import numpy as np, sys
from kvpool.storage.backends.s3 import S3Store
from tests.stores.lab import fill, names, open_queue
with open_queue(S3Store({place!r}, endpoint={weed.address!r}, secret=bytes([1]) * 32), piece_bytes=1 << 15) as queue:
    fill(queue.memory, 48)
    jobs = [queue.save(queue.secret.derive_keys(names(48)), np.arange(48)) for _ in range(3)]
    print("begun", flush=True)
    sys.stdin.read()
"""
    kept = 0
    for pause in chain((0.0, 0.002, 0.01), (0.05 * 2**n for n in count())):
        with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1) as saving:
            assert saving.stdout is not None and saving.stdout.readline() == b"begun\n"
            time.sleep(pause)
            saving.kill()
        with open_queue(again()) as queue:
            loaded = right(queue, begin_load(queue, keys_of(queue, 48)))
            assert set(loaded.codes.tolist()) <= {OK, ABSENT}
            kept += loaded.ok
            assert done(queue.clear()).dropped == loaded.ok
        if kept and pause >= 0.05:
            break


def test_a_process_that_ends_right_after_a_call_ends_well(again: Again, weed: Weed, place: str) -> None:
    """Even if the store was not closed. The library's coroutines aborted one of four such processes."""
    program = f"""
import numpy as np
from kvpool.storage.backends.s3 import S3Store
from kvpool.storage.store import Space
store = S3Store({place!r}, endpoint={weed.address!r}, secret=bytes([1]) * 32)
store.open(Space(bytes(16), np.ones((6, 1 << 20), np.uint8)))
keys = np.random.default_rng().integers(0, 256, (6, 32), np.uint8)
for first in range(0, 6, 2):
    part, rows = keys[first : first + 2], np.arange(first, first + 2)
    assert store.save(part, rows, np.zeros((2, 16), np.uint8), bytes(16), 1 << 62, lambda: False).all()
assert store.load(keys, np.arange(6), lambda: False)[0].all()
"""
    for _ in range(6):
        assert subprocess.run([sys.executable, "-c", program], timeout=600).returncode == 0


def test_a_wrong_byte_in_a_pack_damages_one_block(again: Again, weed: Weed, place: str) -> None:
    with open_queue(again()) as queue, open_queue(again()) as other:
        keys = saved(queue, 8)
        (name,) = objects(weed, place)
        data = bytearray(weed.client().get(name).bytes())
        data[8 * 16 + 2 * (16 + 4096) + 100] ^= 1
        weed.client().put(name, bytes(data))
        assert codes_of(queue.load(keys, np.arange(10, 18))) == [OK] * 2 + [DAMAGED] + [OK] * 5
        assert done(other.find(keys)).codes.tolist() == [OK] * 2 + [ABSENT] + [OK] * 5
        saved(other, 8)
        assert returned(queue.load(keys, np.arange(10, 18))).ok == 8


def test_packs_that_are_cut_replaced_or_gone_are_served_to_nobody_and_saved_anew(
    again: Again, weed: Weed, place: str
) -> None:
    with open_queue(again()) as queue:
        keys = np.concatenate([saved(queue, 1, first) for first in range(4)])
        for name, size in zip(sorted(objects(weed, place)), (4096 + 16, 1 << 20, 1, 0), strict=True):
            weed.client().put(name, bytes(size))
        assert codes_of(queue.load(keys, np.arange(10, 14))) == [DAMAGED] * 4
        keys = saved(queue, 4)
        weed.client().delete(objects(weed, place))
        assert codes_of(queue.load(keys, np.arange(10, 14))) == [ABSENT] * 4
        saved(queue, 4)
        assert returned(queue.load(keys, np.arange(10, 14))).ok == 4


@pytest.mark.parametrize("size", [0, 50, 4 << 20])
def test_a_log_with_wrong_bytes_drops_all_that_was_saved_before(
    again: Again, weed: Weed, place: str, size: int
) -> None:
    with open_queue(again()) as queue, open_queue(again()) as other:
        keys = saved(queue, 6)
        done(queue.forget(keys[:1]))
        weed.client().put(objects(weed, place, "drops")[0], bytes(size))
        assert codes_of(other.load(keys, np.arange(10, 16))) == [ABSENT] * 6
        saved(other, 6)
        assert returned(queue.load(keys, np.arange(10, 16))).ok == 6


def test_a_drop_counts_after_the_log_was_lost(again: Again, weed: Weed, place: str) -> None:
    with open_queue(again()) as queue, open_queue(again()) as other:
        keys = saved(queue, 6)
        done(queue.forget(keys[:1]))
        weed.client().delete(objects(weed, place, "drops"))
        assert done(other.forget(keys[1:2])).dropped == 1
        assert done(queue.find(keys)).codes.tolist() == [ABSENT] * 2 + [OK] * 4
        assert done(queue.forget(keys[2:3])).dropped == 1
        assert done(other.find(keys)).codes.tolist()[1:] == [ABSENT] * 2 + [OK] * 3


def test_what_others_save_is_found_after_the_clock_was_set_back(again: Again, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_queue(again()) as queue, open_queue(again()) as other:
        keys = saved(queue, 2)
        assert done(other.find(keys)).codes.tolist() == [OK] * 2
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() - 300.0)
        keys = saved(queue, 2, 10)
        assert done(other.find(keys)).codes.tolist() == [OK] * 2


def test_a_child_is_refused(again: Again) -> None:
    with open_queue(store := again()):
        in_child(lambda: refuses(store.stats, store.close))


def test_the_youngest_blocks_are_known_where_the_index_is_small(again: Again) -> None:
    with open_queue(again()) as queue:
        keys = np.concatenate([saved(queue, 5, first) for first in (0, 10, 20)])
    with open_queue(again(index_blocks=11)) as queue:
        assert done(queue.find(keys)).codes.tolist() == [ABSENT] * 5 + [OK] * 10
        saved(queue, 5, 30)
        assert done(queue.find(keys)).codes.tolist() == [ABSENT] * 10 + [OK] * 5
        assert queue.stats().store["blocks"] == 10


def test_the_server_takes_one_of_many_writes_of_an_object_at_a_time(weed: Weed, place: str) -> None:
    """What drops count on."""
    import obstore

    client, taken, together = weed.client(), list[str](), threading.Barrier(8)

    def put(number: int) -> None:
        for turn in range(2):
            together.wait(600)
            try:
                client.put(f"race/{place[2:]}/{turn}", b"%d" % number * 1000, mode="create")
                taken.append(str(turn))
            except obstore.exceptions.AlreadyExistsError:
                pass

    at_once(put, range(8))
    assert sorted(taken) == [str(turn) for turn in range(2)]


def test_an_error_and_a_log_name_no_credential(
    again: Again, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "WRONGKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-and-private")
    with pytest.raises(OSError, match="cannot be used") as caught:
        open_queue(again())
    shown = str(caught.value) + repr(again()) + caplog.text
    assert "wrong-and-private" not in shown and "WRONGKEY" not in shown and "\n" not in shown


def test_two_models_and_two_secrets_have_prefixes_of_their_own(again: Again, weed: Weed, place: str) -> None:
    with open_queue(again()) as queue:
        saved(queue, 1)
    with open_queue(again(secret=b"\2" * 32)) as queue:
        assert done(queue.find(keys_of(queue, 1))).codes.tolist() == [ABSENT]
        saved(queue, 1)
    assert len({name.split("/")[-2] for name in objects(weed, place)}) == 2


@pytest.mark.parametrize(
    "text", ["s3:", "s3:bucket", "s3://B", "s3://bucket/../other", "s3://bucket//a", "s3://bucket/a?timeout=0.001"]
)
def test_a_wrong_place_is_refused(text: str, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    with pytest.raises(ValueError, match=r"place|timeout|expected s3://BUCKET/PREFIX"):
        open_store(text)


def test_credentials_in_a_text_are_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("HOME", str(tmp_path))
    for text in ("secret_access_key=private", "session_token=private", "endpoint=http://me:private@h"):
        with pytest.raises(ValueError) as caught:
            open_store(f"s3://bucket/a?{text}")
        assert "private" not in str(caught.value)


def test_a_text_names_bucket_prefix_and_server(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    file = tmp_path / "secret"
    file.write_text("ab" * 32)
    file.chmod(0o600)
    opened = open_store(f"s3://bucket/a/b?endpoint=http://127.0.0.1:8333&threads=2&secret_file={file}")
    assert repr(opened) == "S3Store('//bucket/a/b/')" and opened.threads == 2 and opened.secret == b"\xab" * 32


def test_without_its_library_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ImportError, match=r'pip install "\.\[s3\]"'):
        open_store("s3://bucket/a")
