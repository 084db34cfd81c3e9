"""An S3Store whose server is slow, refuses, dies, answers late or gives wrong bytes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.stores import ABSENT, DAMAGED, FAILED, OK
from kvpool.stores.urls import open_store
from tests.stores.lab import content, done, fill, names, open_queue, returned, saved
from tests.stores.s3.weed import BUCKET, Door, Weed

Again = Callable[..., Any]


def objects(weed: Weed, place: str) -> list[str]:
    """The names of the blocks below the prefix of a test."""
    prefix = place.removeprefix(f"//{BUCKET}/") + "/kvpool3-blocks"
    return [one["path"] for found in weed.client().list(prefix) for one in found]


@pytest.mark.parametrize("over_a_mark", [False, True])
@pytest.mark.parametrize("clears", [False, True])
def test_a_save_that_arrives_after_a_drop_changes_nothing(
    again: Again, door: Door, clears: bool, over_a_mark: bool
) -> None:
    with open_queue(again(endpoint=door.address, timeout_ms=500)) as queue:
        fill(queue.memory, 2)
        keys = queue.secret.opaque(names(2))
        if over_a_mark:
            saved(queue, 2)
            assert done(queue.forget(keys)).dropped == 2
        door.hold = "If-Match" if over_a_mark else "PUT"
        assert returned(queue.save(keys, np.arange(2))).codes.tolist() == [FAILED] * 2
        assert all(door.held.acquire(timeout=600) for _ in range(2))
        door.hold = ""
        dropped = queue.clear() if clears else queue.forget(keys)
        assert dropped.wait(600) and dropped.ok == len(dropped.codes), dropped.error
        assert set(door.release(2)) <= {412, 409}, "the server has refused what was late"
        assert done(queue.find(keys)).codes.tolist() == [ABSENT] * 2
        saved(queue, 2)
        assert returned(queue.load(keys, np.arange(10, 12))).ok == 2


def test_what_was_forgotten_saved_again_and_cleared_is_not_brought_back(again: Again, door: Door) -> None:
    """The clear may not delete what was saved over a mark: the save from before the mark would find nothing there."""
    with open_queue(again(endpoint=door.address, timeout_ms=500)) as queue:
        fill(queue.memory, 1)
        keys, door.hold = queue.secret.opaque(names(1)), "PUT"
        assert returned(queue.save(keys, np.arange(1))).codes.tolist() == [FAILED]
        assert door.held.acquire(timeout=600)
        door.hold = ""
        done(queue.forget(keys))
        saved(queue, 1)
        cleared = done(queue.clear())
        assert cleared.ok == 1 and cleared.dropped == 1
        assert door.release(1)[0] in (412, 409)
        assert done(queue.find(keys)).codes.tolist() == [ABSENT]


def test_a_slow_server_costs_no_more_than_the_timeout_and_writes_nothing_later(again: Again, door: Door) -> None:
    with open_queue(again(endpoint=door.address, timeout_ms=300)) as queue:
        keys, door.hold = saved(queue, 2), "GET"
        assert returned(queue.load(keys, np.arange(10, 12))).codes.tolist() == [FAILED] * 2
        queue.memory[10:12] = 7
        door.release(2)
        assert (queue.memory[10:12] == 7).all()
        assert returned(queue.load(keys, np.arange(10, 12))).ok == 2


@pytest.mark.parametrize("status", [500, 503, 507, 403])
def test_a_server_that_refuses_fails_the_calls_and_is_used_again_when_it_serves(
    again: Again, door: Door, status: int
) -> None:
    """A full server answers with 500 or 507."""
    with open_queue(again(endpoint=door.address, timeout_ms=500)) as queue:
        keys, door.status = saved(queue, 2), status
        other = queue.secret.opaque(names(2, 10))
        assert returned(queue.save(other, np.arange(2))).codes.tolist() == [FAILED] * 2
        assert returned(queue.load(keys, np.arange(10, 12))).codes.tolist() == [FAILED] * 2
        assert done(queue.find(keys)).codes.tolist() == [FAILED] * 2
        forgotten = queue.forget(keys[:1])
        door.status = 0
        assert forgotten.wait(600) and forgotten.ok == 1
        assert returned(queue.load(keys, np.arange(10, 12))).codes.tolist() == [ABSENT, OK]
        assert returned(queue.save(other, np.arange(2))).ok == 2


def test_a_server_that_was_killed_half_way_has_what_it_had_acknowledged(again: Again, weed: Weed) -> None:
    with open_queue(again(timeout_ms=1000), piece_bytes=1 << 14) as queue:
        fill(queue.memory, 48)
        keys = queue.secret.opaque(names(48))
        jobs = [queue.save(keys[i : i + 4], np.arange(i, i + 4)) for i in range(0, 48, 4)]
        assert jobs[2].wait(600, returned=True)
        weed.kill()
        assert all(job.wait(600, returned=True) for job in jobs)
        codes = np.concatenate([job.codes for job in jobs])
        assert set(codes.tolist()) <= {OK, FAILED} and (codes == OK).sum() >= 4
        assert returned(queue.load(keys[:1], np.arange(50, 51))).codes.tolist() == [FAILED]
        weed.start()
        found = returned(queue.load(keys, np.arange(48)))
        assert (found.codes[codes == OK] == OK).all() and set(found.codes.tolist()) <= {OK, ABSENT}
        for number in np.flatnonzero(found.codes == OK).tolist():
            assert np.array_equal(queue.memory[number], content(number))
        assert done(queue.forget(keys)).dropped == found.ok
        assert done(queue.find(keys)).codes.tolist() == [ABSENT] * 48


def test_wrong_bytes_are_served_to_nobody_and_can_be_saved_anew(again: Again, weed: Weed, place: str) -> None:
    with open_queue(again()) as queue:
        keys = saved(queue, 3)
        for name, size in zip(sorted(objects(weed, place)), (4096 + 16, 1 << 20, 1), strict=True):
            weed.client().put(name, bytes(size))
        codes = returned(queue.load(keys, np.arange(10, 13))).codes.tolist()
        assert sorted(codes) == sorted([DAMAGED, ABSENT, ABSENT])
        saved(queue, 3)
        assert returned(queue.load(keys, np.arange(10, 13))).ok == 3


def test_saves_without_an_answer_are_bounded_and_counted(
    again: Again, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.stores.s3.s3_store._UNSURE_MAX", 3)
    with open_queue(again(endpoint=door.address, timeout_ms=300)) as queue:
        keys = queue.secret.opaque(names(5))
        done(queue.find(keys))
        door.status = 503
        returned(queue.save(keys[:4], np.arange(4)))
        assert queue.stats().store["unsure"] == 4
        door.status = 0
        assert returned(queue.save(keys[4:], np.arange(1))).ok == 1
        assert queue.stats().store["unsure"] == 0


def test_of_many_that_save_one_block_at_a_time_the_server_takes_one(weed: Weed, place: str) -> None:
    """What forget counts on."""
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

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert sorted(taken) == [str(turn) for turn in range(2)]


def test_an_error_names_no_credential(again: Again, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "WRONGKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-and-private")
    with pytest.raises(OSError, match="cannot be used") as caught:
        open_queue(again())
    shown = str(caught.value) + repr(again())
    assert "wrong-and-private" not in shown and "WRONGKEY" not in shown and "\n" not in shown


def test_two_models_and_two_secrets_have_prefixes_of_their_own(again: Again, weed: Weed, place: str) -> None:
    with open_queue(again()) as queue:
        saved(queue, 1)
    with open_queue(again(secret=b"\2" * 32)) as queue:
        assert done(queue.find(queue.secret.opaque(names(1)))).codes.tolist() == [ABSENT]
        saved(queue, 1)
    assert len({name.split("/")[-2] for name in objects(weed, place)}) == 2


@pytest.mark.parametrize(
    "text", ["s3:", "s3:bucket", "s3://B", "s3://bucket/../other", "s3://bucket//a", "s3://bucket/a?timeout_ms=1"]
)
def test_a_wrong_place_is_refused(text: str, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    with pytest.raises(ValueError, match=r"place|timeout_ms"):
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
    found = open_store(f"s3://bucket/a/b?endpoint=http://127.0.0.1:8333&threads=2&secret_file={file}")
    assert repr(found) == "S3Store('//bucket/a/b/')" and found.threads == 2 and found.secret == b"\xab" * 32


def test_without_its_library_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ImportError, match=r'pip install "\.\[s3\]"'):
        open_store("s3://bucket/a")
