"""A client makes no call that would crash the process, and a store passes on no answer that it should not. Over a
library that answers what a test wants."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvpool import PoolClosed
from kvpool.storage import ABSENT, DAMAGED, FAILED, OK, REFUSED, StoreWorker
from kvpool.storage.backends.mooncake import guarded_client as mooncake_client
from kvpool.storage.backends.mooncake.guarded_client import Client
from kvpool.storage.backends.mooncake.mooncake_store import MooncakeStore
from tests.children import in_child, refuses
from tests.ports import free_ports
from tests.stores.lab import (
    BLOCK_BYTES,
    IDENTITY,
    OTHER,
    Gate,
    begin_load,
    begin_save,
    codes_of,
    keys_of,
    memory,
    returned,
)
from tests.stores.mooncake.cluster import object_prefix

SIZE = BLOCK_BYTES + 16


class Library:
    """Stands in for MooncakeDistributedStore. ``answers[name]`` is what a call answers for each key, or a function."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.answers: dict[str, Any] = {
            "batch_put_from_multi_buffers": 0,
            "batch_get_into_multi_buffers": SIZE,
            "batch_is_exist": 1,
            "batch_remove": 0,
            "setup": 0,
            "register_buffer": 0,
        }

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            answer = self.answers.get(name, 0)
            if callable(answer):
                return answer(*arguments)
            return [answer] * len(arguments[0]) if name.startswith("batch_") and isinstance(answer, int) else answer

        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(mooncake_client, "library", lambda: lambda: made)
    monkeypatch.setattr(mooncake_client, "reach", lambda master: "127.0.0.1")
    for name, value in mooncake_client.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def queue(library: Library) -> Iterator[StoreWorker]:
    with StoreWorker(MooncakeStore(secret=bytes(32)), memory(), IDENTITY) as made:
        yield made


def client() -> Client:
    return Client("127.0.0.1:1", 0, "", "P2PHANDSHAKE", "tcp", "")


@pytest.fixture
def hung(library: Library) -> Iterator[tuple[Client, Gate]]:
    """A client of which a call is under way until the gate is opened."""
    made, gate = client(), Gate()
    library.answers["batch_is_exist"] = lambda keys: gate() or [1]
    reader = threading.Thread(target=lambda: made.exist(["a"]))
    reader.start()
    gate.wait()
    assert made.calls == 1
    yield made, gate
    gate.open()
    reader.join(600)


# -- no call before, after, or in a child --------------------------------------------------------------


def test_nothing_is_called_before_open_and_after_close(library: Library) -> None:
    store, keys, rows = MooncakeStore(secret=bytes(32)), np.zeros((1, 32), np.uint8), np.zeros(1, np.int64)
    for _ in range(2):
        for call in (
            lambda: store.find(keys),
            lambda: store.save(keys, rows, np.zeros((1, 16), np.uint8), bytes(16), 1 << 62, lambda: False),
            lambda: store.load(keys, rows, lambda: False),
            lambda: store.forget(keys),
        ):
            library.calls.clear()
            with pytest.raises(PoolClosed, match="not open"):
                call()
            assert not library.calls
        with StoreWorker(store, memory(), IDENTITY) as queue:
            with pytest.raises(ValueError, match="expected one that is not open"):
                StoreWorker(store, memory(), IDENTITY)
            assert queue.find(keys).wait(600)
        store.close()
        assert library.calls.count("close") == 1
    with pytest.raises(TypeError, match="secret would travel"):
        pickle.dumps(store)


def test_a_client_that_is_closed_calls_nothing(library: Library) -> None:
    made = client()
    made.close()
    library.calls.clear()
    for call in (lambda: made.exist(["a"]), lambda: made.register(memory(1)), lambda: made.remove(["a"])):
        with pytest.raises(PoolClosed, match="closed"):
            call()
    made.close()
    assert not library.calls


@pytest.mark.parametrize("by", ["its owner", "the end of the interpreter"])
def test_who_closes_waits_for_calls_under_way(library: Library, hung: tuple[Client, Gate], by: str) -> None:
    """A thread that the interpreter ends inside a call crashes the process."""
    made, gate = hung
    closer = threading.Thread(target=made.close if by == "its owner" else mooncake_client.end_all)
    closer.start()
    while True:
        try:
            made.register(memory(1))
        except PoolClosed:
            break
    assert closer.is_alive() and "close" not in library.calls
    gate.open()
    closer.join(600)
    assert library.calls.count("close") == 1 and made.calls == 0


def test_what_hangs_for_ever_is_left_to_the_end_of_the_process(library: Library, hung: tuple[Client, Gate]) -> None:
    hung[0].close(0.05)
    assert "close" not in library.calls


def test_memory_that_is_lent_is_not_taken_back_from_a_master_that_is_gone(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would stop all threads for a quarter of a minute."""
    made = Client("127.0.0.1:1", 16 << 20, "", "P2PHANDSHAKE", "tcp", "")
    monkeypatch.undo()
    made._master = f"127.0.0.1:{free_ports()[0]}"
    made.close()
    assert "close" not in library.calls


def test_a_child_gets_an_error_and_destroys_nothing(queue: StoreWorker, library: Library) -> None:
    made = client()
    library.calls.clear()

    def child() -> None:
        refuses(lambda: made.exist(["a"]), made.close, client)
        assert library in mooncake_client._KEPT and not library.calls

    in_child(child)
    made.close()


def test_a_child_does_not_wait_for_memory_that_calls_of_its_parent_had(library: Library) -> None:
    store = MooncakeStore(secret=bytes(32), threads=1)
    keys, rows = np.zeros((1, 32), np.uint8), np.zeros(1, np.int64)
    with StoreWorker(store, memory(), IDENTITY), store._area():
        in_child(lambda: refuses(lambda: store.load(keys, rows, lambda: False)))


# -- what the library answers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "meaning", "reason"),
    [
        (-200, REFUSED, "no_space"),
        (-703, ABSENT, "unfinished"),
        (-704, ABSENT, "not_there"),
        (-707, FAILED, "lease_ended"),
        (-800, FAILED, "transfer_failed"),
        (-801, DAMAGED, "checksum"),
        (-900, FAILED, "master_unreachable"),
        (-901, FAILED, "master_late"),
        (-600, FAILED, "bad_argument"),
        (-12345, FAILED, "other_error"),
    ],
)
def test_each_code_has_one_meaning_and_is_counted(
    queue: StoreWorker, library: Library, code: int, meaning: int, reason: str
) -> None:
    for name in ("batch_put_from_multi_buffers", "batch_get_into_multi_buffers", "batch_is_exist"):
        library.answers[name] = code
    keys = keys_of(queue, 2)
    jobs = [queue.find(keys), queue.save(keys, np.arange(2)), begin_load(queue, keys)]
    assert [codes_of(job) for job in jobs] == [[meaning] * 2] * 3
    assert queue.stats().store[reason] == 6
    if meaning == FAILED:
        assert all(reason in job.error and str(code) in job.error for job in jobs)


def test_a_put_that_stored_nothing_is_refused(queue: StoreWorker, library: Library) -> None:
    """It says 0 if another client has begun with the key, and will never end."""
    library.answers["batch_is_exist"] = lambda keys: [1, 0, -900]
    assert codes_of(begin_save(queue, 3)) == [OK, REFUSED, FAILED]
    assert queue.stats().store["not_stored"] == 1


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1])
def test_an_object_of_another_size_is_damaged_and_removed(queue: StoreWorker, library: Library, size: int) -> None:
    library.answers["batch_get_into_multi_buffers"] = size
    assert codes_of(queue.load(keys_of(queue, 1), np.arange(1))) == [DAMAGED]
    assert library.calls.count("batch_remove") == 1 and queue.stats().store["wrong_size"] == 1


def test_what_cannot_be_forgotten_is_an_error_and_what_is_gone_is_none(queue: StoreWorker, library: Library) -> None:
    keys = keys_of(queue, 3)
    answers = iter([[-900] * 3, [0, -703, -704], [0, -704, -704]])
    library.answers["batch_remove"] = lambda *_: next(answers)
    job = queue.forget(keys)
    assert returned(job).ok == 3 and job.dropped == 1
    assert next(answers, None) is None and "unfinished" in job.error
    stats = queue.stats().store
    assert stats["not_there"] == 0 and stats["master_unreachable"] == 3 and stats["unfinished"] == 1


def test_a_clear_names_the_objects_of_this_model_and_secret(queue: StoreWorker, library: Library) -> None:
    """It is tried again until the library says how many it has removed."""
    asked, answers = list[tuple[Any, ...]](), iter([-900, 7])

    def remove(*arguments: Any) -> int:
        asked.append(arguments)
        return next(answers)

    library.answers["remove_by_regex"] = remove
    job = queue.clear()
    assert returned(job).ok == 1 and job.dropped == 7
    mine, others = (object_prefix(secret, identity) for secret, identity in ((bytes(32), IDENTITY), (bytes(32), OTHER)))
    assert asked == [(f"^{mine}", True)] * 2 and mine != others


def test_a_damaged_block_that_cannot_be_removed_is_still_damaged(queue: StoreWorker, library: Library) -> None:
    library.answers |= {"batch_get_into_multi_buffers": 1, "batch_remove": -900}
    assert codes_of(begin_load(queue, keys_of(queue, 2))) == [DAMAGED] * 2


@pytest.mark.parametrize("answer", [None, [0] * 5])
def test_an_answer_of_another_form_fails_the_blocks(queue: StoreWorker, library: Library, answer: Any) -> None:
    library.answers["batch_get_into_multi_buffers"] = lambda *arguments: answer
    job = queue.load(keys_of(queue, 4), np.arange(4))
    assert codes_of(job) == [FAILED] * 4 and "has answered" in job.error


def test_rows_of_a_load_that_the_library_gave_up_are_not_returned_before_it_has_let_go(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a minute it returns, although transfers into the rows may still run."""
    slept = list[float]()
    monkeypatch.setattr(mooncake_client.time, "sleep", slept.append)
    now = iter([0.0, 1.0, 10.0, 70.0, 100.0, 160.0])
    monkeypatch.setattr(mooncake_client.time, "monotonic", lambda: next(now))
    made = client()
    library.answers["batch_get_into_multi_buffers"] = lambda keys, *rest: [SIZE, -800, SIZE]
    made.get(["a", "b", "c"], [[1]] * 3, [[1]] * 3)
    assert not slept
    made.get(["a", "b", "c"], [[1]] * 3, [[1]] * 3)
    assert slept == [3 * 4 + 5.0]
    library.answers["batch_get_into_multi_buffers"] = SIZE
    made.get(["a", "b", "c"], [[1]] * 3, [[1]] * 3)
    assert len(slept) == 1
    monkeypatch.undo()
    made.close()


def test_a_call_is_bounded_and_stop_is_asked_between(library: Library) -> None:
    store, calls = MooncakeStore(secret=bytes(32)), list[int]()
    library.answers["batch_get_into_multi_buffers"] = lambda keys, *rest: calls.append(len(keys)) or [SIZE] * len(keys)
    with StoreWorker(store, memory(200), IDENTITY, piece_bytes=1 << 30):
        keys = np.zeros((100, 32), np.uint8)
        store.load(keys, np.arange(100), lambda: False)
        assert sum(calls) == 100 and max(calls) == 32
        codes, _ = store.load(keys, np.arange(100), lambda: len(calls) >= 6)
        assert codes.tolist().count(OK) == 64


def test_a_limit_counts_what_was_saved_and_room_is_made_first(queue: StoreWorker, library: Library) -> None:
    removed = list[int]()
    library.answers["batch_remove"] = lambda keys, force: removed.append(len(keys)) or [0] * len(keys)
    tag = queue.secret.tag(b"tenant")
    for first in (0, 4):
        job = begin_save(queue, 4, first, tag=tag, limit=6)
        assert returned(job).ok == 4
    assert removed == [2] and queue.stats().store["dropped"] == 2
    library.answers["batch_remove"] = -900
    assert codes_of(begin_save(queue, 4, 8, tag=tag, limit=6)) == [FAILED] * 4, "what cannot be dropped still counts"
    assert codes_of(begin_save(queue, 1, 20, tag=tag, limit=0)) == [REFUSED]


# -- beginning -----------------------------------------------------------------------------------------


def test_a_master_that_is_not_there_is_an_error_at_once(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(mooncake_client, "library", lambda: lambda: library)
    address = f"127.0.0.1:{free_ports()[0]}"
    with pytest.raises(OSError, match=f"no Mooncake master at {address}"):
        StoreWorker(MooncakeStore(address, secret=bytes(32)), memory(), IDENTITY)
    assert "setup" not in library.calls


@pytest.mark.parametrize(("name", "code"), [("setup", -1), ("register_buffer", -600)])
def test_a_client_that_does_not_begin_is_an_error(library: Library, name: str, code: int) -> None:
    library.answers[name] = code
    with pytest.raises(OSError, match=f"code {code}"):
        StoreWorker(MooncakeStore(secret=bytes(32)), memory(), IDENTITY)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), r"pip install .\.\[mooncake\]"),
        (ImportError("libibverbs.so.1: cannot open shared object file"), "apt-get install libibverbs1"),
        (ImportError("other"), r"cannot be loaded \(other\)$"),
    ],
)
def test_what_is_missing_is_named(error: ImportError, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        def find_spec(self, name: str, *rest: Any) -> None:
            if name == "mooncake":
                raise error

    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(ImportError, match=words):
        MooncakeStore(secret=bytes(32))


def test_a_version_that_lacks_calls_is_refused_and_one_that_was_not_tested_gives_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = type(sys)("mooncake.store")
    monkeypatch.setitem(sys.modules, "mooncake", type(sys)("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    module.MooncakeDistributedStore = object
    with pytest.raises(ImportError, match="has no setup: pip install"):
        mooncake_client.library()
    module.MooncakeDistributedStore = type("Store", (), dict.fromkeys(mooncake_client._METHODS))
    monkeypatch.setattr(mooncake_client.metadata, "version", lambda package: "9.9")
    with pytest.warns(RuntimeWarning, match="Mooncake 9.9 was not tested"):
        mooncake_client.library()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"master": "host"}, "master: expected HOST:PORT.*got 'host'"),
        ({"master": "etcd://a:1;b:2"}, "expected HOST:PORT of one master"),
        ({"master": "a:70000"}, "master: .*"),
        ({"master": 3}, "master: .*3"),
        ({"segment": 100}, "segment: expected 0, or 16777216 to .*got 100"),
        ({"protocol": "udp"}, "protocol: .*'udp'"),
        ({"threads": 0}, "threads"),
        ({"threads": "many"}, "threads: expected an integer"),
        ({"hostname": 1}, "hostname"),
        ({"transform": 1}, "transform: .*1"),
        ({"secret": "ab" * 32}, "secret: expected 32 bytes"),
        ({"secret_file": "/x"}, "expected one of them"),
    ],
)
def test_bad_arguments_are_named(library: Library, arguments: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words) as raised:
        MooncakeStore(**({"secret": bytes(32)} | arguments))
    assert "abab" not in str(raised.value)


class Changed:
    extra = 0

    def outgoing(self, key: bytes, block: memoryview) -> bytes:
        return bytes(block)

    def incoming(self, key: bytes, kept: memoryview) -> bytes:
        return bytes(kept)


@pytest.mark.parametrize("changes", [False, True])
def test_the_host_tier_is_opened_to_others_only_where_it_has_to_be(library: Library, changes: bool) -> None:
    registered, rows = list[int](), memory()
    library.answers["register_buffer"] = lambda address, nbytes: registered.append(address) or 0
    with StoreWorker(MooncakeStore(secret=bytes(32), transform=Changed() if changes else None), rows, IDENTITY):
        assert (rows.ctypes.data in registered) != changes and len(registered) == 2 - changes


def test_settings_that_are_there_stay_and_others_get_short_bounds(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "7")
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "soon")
    monkeypatch.delenv("MC_RPC_TIMEOUT_MS")
    client().close()
    assert os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] == "7"
    assert os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "2" and os.environ["MC_RPC_TIMEOUT_MS"] == "2000"
