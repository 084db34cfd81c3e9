"""PeerStore keeps the contract; over a server of another process that is killed, hangs, lies or is not there, it is at
worst a miss."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from kvpool.remote import ClientKeys, ServerKeys
from kvpool.remote.session import Failed, Message, Received, Session
from kvpool.storage import ABSENT, CANCELLED, FAILED, LATE, OK, MemoryStore, StoreWorker
from kvpool.storage.backends.peer.peer_store import PeerStore, StoreCall, StoreDone, StoreHello, StoreWelcome
from kvpool.storage.backends.peer.store_server import StoreServer
from kvpool.storage.backends.shared_secret import SharedSecret
from kvpool.storage.store import MODEL_BYTES
from kvpool.storage.urls import open_store
from tests.children import in_child, refuses
from tests.remote.workers import Fake, counted, packed
from tests.stores.contract import LastingContract
from tests.stores.lab import (
    BLOCK_BYTES,
    IDENTITY,
    Clock,
    Gate,
    Wrong,
    begin_load,
    begin_save,
    codes_of,
    done,
    keys_of,
    memory,
    open_queue,
    returned,
    saved,
)
from tests.stores.peering import KEY, MAC, ROOT, SECRET, SPACE, TAG, WIRE_KEY, Raw, Serve, call, client
from tests.stores.peering import serve as serve
from tests.stores.peering import servers as servers
from tests.waiting import until


@contextmanager
def clients(server: StoreServer, count: int) -> Iterator[list[StoreWorker]]:
    """Queues over stores of their own."""
    with ExitStack() as opened:
        yield [opened.enter_context(open_queue(client(server))) for _ in range(count)]


def held(kind: str, serve: Serve, **options: Any) -> tuple[StoreServer, Wrong, Gate]:
    """A server whose store holds calls of this kind until the gate is opened."""
    store = Wrong(MemoryStore(64 * BLOCK_BYTES))
    gate = store.hold(kind)
    return serve(store, **options), store, gate


class TestPeerStore(LastingContract):
    @pytest.fixture
    def make(self, serve: Serve) -> Callable[[int], PeerStore]:
        return lambda blocks: client(serve(MemoryStore(blocks * BLOCK_BYTES)))

    @pytest.fixture
    def again(self, servers: list[StoreServer]) -> Callable[[], PeerStore]:
        return lambda: client(servers[-1])


# -- several clients -----------------------------------------------------------------------------------


def test_saves_that_hang_keep_no_load_of_another_client_waiting(serve: Serve) -> None:
    store = Wrong(MemoryStore(64 * BLOCK_BYTES))
    server = serve(store)
    with clients(server, 3) as (saver, two, other):
        keys, gate = saved(saver, 4), store.hold("save")
        hanging = [begin_save(queue, 4, 4) for queue in (saver, two)]
        counted(server, in_flight=2)
        gate.wait()
        assert begin_load(other, keys).wait(600)
        gate.open()
        assert [returned(job).ok for job in hanging] == [4, 4]


def test_saves_that_were_given_up_take_no_place(serve: Serve) -> None:
    """As many saves as the server takes wait for a store that hangs. Their clients give up."""
    server, _, gate = held("save", serve, calls_waiting=4)
    writer, reader = client(server, connections=16, timeout=0.5), client(server)
    with open_queue(writer, piece_bytes=BLOCK_BYTES) as saving, open_queue(reader) as loading:
        keys = keys_of(saving, 16)
        while not gate.reached.is_set():  # A client that is slow may give up before its calls are in the store.
            returned(saving.save(keys, np.arange(16)))
        assert codes_of(begin_load(loading, keys)) == [ABSENT] * 16
        gate.open()


@pytest.mark.parametrize("clears", [False, True])
def test_a_save_that_its_client_gave_up_leaves_nothing_that_was_dropped_later(serve: Serve, clears: bool) -> None:
    """It still hangs in the server's store."""
    wrong = Wrong(MemoryStore(64 * BLOCK_BYTES))
    wrong.threads, gate, wrong.deaf = 4, wrong.hold("save"), True
    with open_queue(client(serve(wrong), timeout=0.2)) as queue:
        keys = keys_of(queue, 4)
        while not gate.reached.is_set():  # A client that is slow may give up before its call is in the store.
            assert returned(queue.save(keys, np.arange(4))).ok == 0
        dropped = queue.clear() if clears else queue.forget(keys)
        until(lambda: dropped.error, "call that waited in vain")
        assert not {"forget", "clear"} & set(wrong.calls) and not dropped.done
        gate.open()
        assert dropped.wait(600) and not wrong.inner.stats()["blocks"]
        # A call was made twice, since its answer was late: the second found nothing.
        assert dropped.dropped == 4 or wrong.calls.count("clear" if clears else "forget") > 1
        assert done(queue.find(keys)).ok == 0


def test_a_save_that_arrives_after_a_drop_of_its_client_is_not_kept(serve: Serve) -> None:
    """It was sent before, over another connection. Saves of other clients are kept."""
    memory = MemoryStore(64 * BLOCK_BYTES)
    raw, tag = Raw(serve(memory).endpoint), "00" * 16

    def kept(session: str, era: int) -> int:
        save = call("save", session=session, era=era, tag=tag, limit=8)
        assert isinstance(raw.ask(save, KEY, MAC, blocks=[bytes(BLOCK_BYTES)]), StoreDone)
        return memory.stats()["blocks"]

    drops: list[list[Any]] = [
        [call("forget", session="one", era=1), KEY],
        [call("clear", session="one", era=2, tag=tag)],
    ]
    for drop in drops:
        era = drop[0].era
        assert kept("one", era - 1) == 1
        assert raw.ask(*drop).count == 1 and memory.stats()["blocks"] == 0
        assert kept("one", era - 1) == 0 and kept("other", 0) == 1
        raw.ask(*drop)
        assert kept("one", era) == 1
        raw.ask(*drop)
    assert raw.ask(call("forget", session="one", era=1), KEY).count == 0
    assert kept("one", 1) == 0, "an old drop that comes late ends no era"
    raw.close()


def test_saves_that_come_after_a_drop_wait_for_it_and_loads_do_not(serve: Serve) -> None:
    """Otherwise a drop might wait for ever for the saves of others."""
    wrong = Wrong(MemoryStore(64 * BLOCK_BYTES))
    wrong.threads = 4
    server = serve(wrong)
    with clients(server, 3) as (saver, two, three):
        keys, gate = saved(saver, 4), wrong.hold("save")
        saves = [begin_save(saver, 2, 10)]
        gate.wait()
        dropped = two.forget(keys[:2])
        counted(server, in_flight=2)
        saves.append(begin_save(three, 2, 20))
        counted(server, in_flight=3)
        assert begin_load(three, keys[2:], 10).wait(600)
        assert wrong.calls.count("save") == 2 and "forget" not in wrong.calls
        gate.open()
        assert dropped.wait(600) and [returned(job).ok for job in saves] == [2, 2]


def test_a_server_whose_store_knows_no_tags_clears_nothing(serve: Serve) -> None:
    """It could not distinguish whose blocks they are."""
    wrong = Wrong(MemoryStore(64 * BLOCK_BYTES))
    wrong.clears_prefix = MODEL_BYTES
    with open_queue(client(serve(wrong))) as queue:
        saved(queue, 2)
        dropped = queue.clear()
        until(lambda: "does not know tags" in dropped.error, "error")
        assert not dropped.done and wrong.inner.stats()["blocks"] == 2 and "clear" not in wrong.calls


# -- servers that are killed, away or late -------------------------------------------------------------

_OTHER_PROCESS = """
import sys, time
from kvpool.storage import MemoryStore
from kvpool.storage.backends.peer.store_server import StoreServer

class Slow(MemoryStore):
    def load(self, keys, rows, stop):
        print("loading", flush=True)
        time.sleep(float(sys.argv[3]))
        return super().load(keys, rows, stop)

secret = b"known to all clients, and nobody"
with StoreServer(Slow(1 << 20), sys.argv[1], block_bytes=int(sys.argv[2]), secret=secret) as it:
    print(it.endpoint, flush=True)
    sys.stdin.read()
"""


@contextmanager
def other_process(endpoint: str, load_seconds: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    arguments = [sys.executable, "-c", _OTHER_PROCESS, endpoint, str(BLOCK_BYTES), str(load_seconds)]
    with subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_a_server_killed_in_the_middle_of_a_load_is_a_miss_and_is_used_again_once_it_is_back() -> None:
    with other_process("tcp://127.0.0.1:*", 600) as (process, endpoint):
        queue = open_queue(client(endpoint))
        keys = saved(queue, 4)
        queue.memory[8:12] = 7
        job = begin_load(queue, keys, 8)
        assert process.stdout is not None and process.stdout.readline() == "loading\n"
        process.kill()
        assert job.wait(600, returned=True), "noticed long before the call's own ten minutes are over"
        assert job.codes.tolist() == [FAILED] * 4 and "connection has ended" in job.error
        assert (queue.memory[8:12] == 7).all(), "rows of a load that failed"
        assert codes_of(queue.find(keys)) == [FAILED] * 4
    with other_process(endpoint, 0) as (_, where), queue:
        assert where == endpoint, "the same port"
        assert codes_of(begin_load(queue, keys, 8)) == [ABSENT] * 4
        assert np.array_equal(saved(queue, 4), keys), "the secret is the clients', so the keys are the same"
        assert returned(begin_load(queue, keys, 8)).ok == 4
        assert queue.stats().store["failed_calls"] == 2


def test_a_store_opens_without_its_server_and_says_so(caplog: pytest.LogCaptureFixture, serve: Serve) -> None:
    server = serve()
    endpoint = server.endpoint
    assert server.close(600)
    with caplog.at_level(logging.WARNING), open_queue(client(endpoint)) as queue:
        assert "the store is not there" in caplog.text and "nobody listens" in caplog.text
        assert done(queue.find(keys_of(queue, 1))).codes.tolist() == [FAILED]
        serve(endpoint=endpoint)
        saved(queue, 4)


def test_a_slow_server_is_late_at_the_deadline_and_its_late_answer_reaches_no_row(
    serve: Serve, store: Wrong, clock: Clock
) -> None:
    server = serve(store)
    with open_queue(client(server), clock=clock) as queue:
        keys, gate = saved(queue, 4), store.hold("load")
        queue.memory[8:12] = 7
        job = queue.load(keys, np.arange(8, 12), deadline=clock.soon())
        gate.wait()
        clock.pass_(1.0)
        assert done(job).codes.tolist() == [LATE] * 4
        assert job.wait(600, returned=True), "the client waits no longer, although the server still hangs"
        gate.open()
        del store.before["load"]
        counted(server, in_flight=0)
        assert (queue.memory[8:12] == 7).all()
        done(begin_load(queue, keys))


def test_a_server_stops_a_call_for_which_its_client_waits_no_longer(serve: Serve) -> None:
    begun, stopped = threading.Event(), threading.Event()

    class Endless(MemoryStore):
        def load(self, keys: Any, rows: Any, stop: Any) -> Any:
            begun.set()
            while not stop():
                time.sleep(0.005)
            stopped.set()
            return np.full(len(keys), CANCELLED, np.uint8), np.zeros((len(keys), 16), np.uint8)

    with open_queue(client(serve(Endless(1 << 20)), timeout=0.2)) as queue:
        while not begun.is_set():  # On a slow machine the time may be over before the call has come to the store.
            assert not returned(begin_load(queue, keys_of(queue, 2))).ok
        assert stopped.wait(600)


def test_a_server_with_a_call_that_hangs_closes_when_that_call_returns(serve: Serve) -> None:
    server, store, gate = held("find", serve)
    with open_queue(client(server)) as queue:
        job = queue.find(keys_of(queue, 1))
        gate.wait()
        assert not server.close(0.05) and "close" not in store.calls
        assert codes_of(job) == [FAILED]
        gate.open()
        assert server.close(600) and server.close(600) and store.calls.count("close") == 1


# -- servers and clients that lie ----------------------------------------------------------------------


@contextmanager
def liar(welcome: int, *frames: Any) -> Iterator[str]:
    """A server that answers a hello, and then the call 2 with the header and the frames that a test likes."""

    def answer(session: Session, received: Received) -> list[list[bytes]]:
        if isinstance(received.message, StoreHello):
            return [packed(session, StoreWelcome(received.message.id, welcome))]
        return [packed(session, frames[0], *frames[1:3], blocks=frames[3:])]

    with Fake(WIRE_KEY, answer, (StoreHello, StoreCall)) as fake:
        yield fake.endpoint


def _block(count: int) -> bytes:
    return bytes(count * BLOCK_BYTES)


_WRONG_ANSWERS: dict[str, Sequence[bytes | Message]] = {
    "no JSON": [b"{"],
    "another kind": [StoreWelcome(2, 4)],
    "blocks in place of MACs": [StoreDone(2, 0), bytes([OK] * 2), _block(2)],
    "another number": [StoreDone(9, 0), bytes([OK] * 2), bytes(32), _block(2)],
    "no frames": [StoreDone(2, 0)],
    "too many frames": [StoreDone(2, 0), bytes([OK] * 2), bytes(32), _block(2), b""],
    "codes of another length": [StoreDone(2, 0), bytes([OK] * 3), bytes(48), _block(3)],
    "MACs of another length": [StoreDone(2, 0), bytes([OK] * 2), bytes(31), _block(2)],
    "fewer blocks than codes": [StoreDone(2, 0), bytes([OK] * 2), bytes(32), _block(1)],
    "a frame that is too long": [StoreDone(2, 0), bytes([OK] * 2), bytes(32), bytes((4 << 20) + 1)],
    "an error": [Failed(2, "store", "the disk\x1b[2J is full")],
}


@pytest.mark.parametrize("frames", _WRONG_ANSWERS.values(), ids=_WRONG_ANSWERS)
def test_what_no_server_answers_fails_the_call_and_ends_the_connection(frames: Sequence[bytes | Message]) -> None:
    with liar(4, *frames) as endpoint:
        store = client(endpoint)
        store.open(SPACE)
        SPACE.memory[:2] = 7
        with pytest.raises(OSError, match=r"tcp://.*(sent|the disk.\[2J is full|connection has ended)") as caught:
            store.load(np.zeros((2, 32), np.uint8), np.arange(2), lambda: False)
        assert "\x1b" not in str(caught.value) and (SPACE.memory[:2] == 7).all()
        assert store.stats() == {"connections": 0, "connected": 1, "failed_calls": 1}
        store.close()


@pytest.mark.parametrize("most", [0, 4097, 1 << 40])
def test_a_server_that_wants_absurd_calls_is_not_used(most: int) -> None:
    with liar(most) as endpoint:
        store = client(endpoint)
        store.open(SPACE)
        assert store.stats()["connections"] == 0
        store.close()


def _save(tag: str) -> StoreCall:
    return call("save", tag=tag, limit=1)


_WRONG_CALLS: dict[str, Sequence[Any]] = {
    "no JSON": [b"nonsense"],
    "a long header": [b" " * 20_000],
    "an answer": [StoreDone(1, 0)],
    "another call": [call("steal"), KEY],
    "number 0": [call("find", 0), KEY],
    "a hello with frames": [StoreHello(1, BLOCK_BYTES), b""],
    "no keys": [call("find")],
    "half a key": [call("find"), bytes(48)],
    "too many keys": [call("load"), 5 * KEY],
    "too much time": [call("find", wait_ms=1 << 40), KEY],
    "no blocks": [_save(TAG), KEY, MAC],
    "long blocks": [_save(TAG), KEY, MAC, [bytes(BLOCK_BYTES + 1)]],
    "blocks in two frames": [_save(TAG), KEY, MAC, [bytes(BLOCK_BYTES - 1), b"x"]],
    "short MACs": [_save(TAG), KEY, bytes(15), [bytes(BLOCK_BYTES)]],
    "no tag": [_save(""), KEY, MAC, [bytes(BLOCK_BYTES)]],
    "a clear with keys": [call("clear", tag=TAG), KEY],
    "a clear of half a model": [call("clear", tag="00" * 4)],
    "a tag of words": [_save("zz" * 16), KEY, MAC, [bytes(BLOCK_BYTES)]],
}


def _blocks_of(frames: Sequence[Any]) -> list[bytes]:
    return frames[-1] if isinstance(frames[-1], list) else []


@pytest.fixture
def picky(serve: Serve) -> StoreServer:
    return serve(call_bytes=4 * BLOCK_BYTES)


@pytest.mark.parametrize("frames", _WRONG_CALLS.values(), ids=_WRONG_CALLS)
def test_what_no_client_sends_is_refused_and_nobody_else_notices(picky: StoreServer, frames: Sequence[Any]) -> None:
    raw = Raw(picky.endpoint)
    error = raw.ask(*(frame for frame in frames if not isinstance(frame, list)), blocks=_blocks_of(frames))
    assert error.code == "malformed" and picky.stats().malformed == 1
    assert isinstance(raw.ask(call("find"), KEY), StoreDone)
    raw.close()
    with open_queue(client(picky)) as queue:
        saved(queue, 4)
    assert picky.stats().saved_blocks == 4


# -- bounds --------------------------------------------------------------------------------------------


def test_no_more_calls_are_read_than_may_wait(serve: Serve) -> None:
    server, _, gate = held("find", serve, calls_waiting=2)
    raws = [Raw(server.endpoint) for _ in range(12)]
    for raw in raws:
        raw.send(call("find", wait_ms=60_000), KEY)
    counted(server, in_flight=4)
    gate.wait()
    assert server.stats().in_flight == 4
    gate.open()
    for raw in raws:
        assert raw.socket.poll(600_000), "those that waited are answered later"
        raw.close()


def test_a_server_that_was_restarted_costs_no_failed_call(serve: Serve) -> None:
    server = serve()
    with open_queue(client(server)) as queue:
        saved(queue, 4)
        endpoint = server.endpoint
        assert server.close(600)
        serve(endpoint=endpoint)
        saved(queue, 4)
        assert queue.stats().store["failed_calls"] == 0


def test_connections_beyond_the_most_are_refused(serve: Serve) -> None:
    server = serve(connections=1)
    with open_queue(client(server, connections=1)) as queue:
        saved(queue, 1)
        other = client(server, timeout=0.3)
        other.open(SPACE)
        assert other.stats()["connections"] == 0
        counted(server, connections_refused=1)
        other.close()


def test_a_child_gets_an_error_and_does_not_hang(serve: Serve) -> None:
    server = serve()
    store = client(server)
    with open_queue(store) as queue:
        saved(queue, 1)
        key = np.zeros((1, 32), np.uint8)
        in_child(lambda: refuses(store.close, server.close, server.stats, lambda: store.find(key)))
        saved(queue, 2)


def test_threads_and_descriptors_end_with_the_store_and_the_server(serve: Serve) -> None:
    def count() -> int:
        gc.collect()  # jobs that nobody has asked for are in a cycle with their queue
        return len(os.listdir("/proc/self/fd"))

    def once() -> None:
        server = serve()
        with StoreWorker(client(server), memory(), IDENTITY) as queue:
            saved(queue, 1)
        assert queue.close(600) and server.close(600)

    once()
    before, threads = count(), threading.active_count()
    for _ in range(3):
        once()
    until(lambda: threading.active_count() <= threads and count() <= before + 1, "end of threads and descriptors")


@pytest.mark.parametrize("kind", ["save", "load"])
def test_no_two_threads_of_a_server_use_the_same_memory(serve: Serve, kind: str) -> None:
    """Blocks of two clients that load at once would be mixed, and dropped as damaged."""
    server_call, rows = call("load", wait_ms=60_000) if kind == "load" else _save(TAG), list[list[int]]()
    store = Wrong(MemoryStore(64 * BLOCK_BYTES))
    store.threads, gate, call_store = 3, store.hold(kind), getattr(store, kind)

    def noting(keys: Any, taken: Any, *rest: Any) -> Any:
        rows.append(taken.tolist())
        return call_store(keys, taken, *rest)

    setattr(store, kind, noting)
    server = serve(store, call_bytes=4 * BLOCK_BYTES)
    raws = [Raw(server.endpoint) for _ in range(2)]
    keys = b"".join(bytes([number]) * 32 for number in range(3))
    more, blocks = ([], []) if kind == "load" else ([bytes(3 * 16)], [bytes(3 * BLOCK_BYTES)])
    for raw in raws:
        raw.send(server_call, keys, *more, blocks=blocks)
    until(lambda: len(rows) == 2, "calls")
    gate.open()
    assert not set(rows[0]) & set(rows[1])
    for raw in raws:
        assert isinstance(raw.answer().message, StoreDone)
        raw.close()


# -- who may use a server --------------------------------------------------------------------------------


def test_a_client_that_reads_nothing_holds_few_answers(serve: Serve) -> None:
    size = 16 << 20  # more than the buffers of a connection
    server = serve(MemoryStore(size), block_bytes=size)
    raw = Raw(server.endpoint, rcvhwm=1, rcvbuf=4096)
    raw.ask(call("save", wait_ms=60_000, tag=TAG, limit=1), KEY, MAC, blocks=[bytes(size)])
    for number in range(2, 14):
        raw.send(call("load", number, 60_000), KEY)
    until(lambda: server.stats().calls == 13 and not server.stats().in_flight, "calls")
    held = 12 - server.stats().dropped
    # At each end one waits and one is under way.
    assert held <= 4, f"{held} answers wait for a client that reads nothing"
    raw.close()


def test_a_client_with_another_secret_is_not_let_in(serve: Serve) -> None:
    with pytest.raises(PermissionError, match="does not accept this client's secret"):
        open_queue(client(serve(), secret=bytes(32)))


def test_blocks_of_another_size_are_refused(serve: Serve) -> None:
    server = serve(block_bytes=2 * BLOCK_BYTES)
    with pytest.raises(
        ValueError, match=rf"blocks of {BLOCK_BYTES} bytes: this server has blocks of {2 * BLOCK_BYTES}"
    ):
        open_queue(client(server))
    assert server.stats().refused == 1


def test_with_keys_strangers_are_not_let_in_and_clients_of_other_secrets_find_nothing(serve: Serve) -> None:
    (public, private), friend, stranger = (zmq.curve_keypair() for _ in range(3))
    server, keys = serve(keys=ServerKeys(public, private, [friend[0]])), ClientKeys(*friend, public)
    with (
        open_queue(client(server, keys=keys)) as queue,
        open_queue(client(server, keys=keys, secret=bytes(32))) as other,
    ):
        assert returned(queue.load(saved(queue, 4), np.arange(4))).ok == 4
        assert done(other.find(keys_of(other, 4))).codes.tolist() == [ABSENT] * 4
    with pytest.raises(PermissionError, match="does not accept"):
        open_queue(client(server, keys=ClientKeys(*stranger, public)))


def test_only_this_machine_without_keys() -> None:
    for make in (
        lambda: PeerStore("tcp://10.0.0.1:5555", secret=SECRET),
        lambda: StoreServer(MemoryStore(1 << 20), "tcp://0.0.0.0:*", block_bytes=4096, secret=SECRET),
    ):
        with pytest.raises(ValueError, match="without keys="):
            make()


def test_the_secret_is_shown_nowhere(caplog: pytest.LogCaptureFixture, serve: Serve) -> None:
    with caplog.at_level(logging.DEBUG):
        store = client(serve())
        with open_queue(store):
            shown = caplog.text + repr(store) + repr(SharedSecret(SECRET)) + repr(vars(store))
        assert SECRET.decode() not in shown and WIRE_KEY.hex() not in shown and repr(WIRE_KEY) not in shown
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(SharedSecret(SECRET))


def test_a_secret_comes_from_a_file_that_only_its_owner_may_read(tmp_path: Path, serve: Serve) -> None:
    path, server = tmp_path / "secret", serve()
    path.write_text(SECRET.hex() + "\n")
    path.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        PeerStore("tcp://127.0.0.1:1", secret_file=path)
    path.chmod(0o600)
    store = open_store(f"peer:{server.endpoint}?secret_file={path}&timeout=600&connections=1")
    assert isinstance(store, PeerStore) and store.threads == 1
    with open_queue(store) as queue, open_queue(client(server)) as other:
        assert np.array_equal(saved(queue, 1), keys_of(other, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"secret": b"short"}, "secret: expected 32 bytes"),
        ({"secret_file": "/nowhere"}, "expected one of them"),
        ({"timeout": 0}, "timeout: expected a finite number from 0.001 to 600, got 0"),
        ({"connections": 65}, "connections: expected 1 to 64, got 65"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        PeerStore("tcp://127.0.0.1:1", **({"secret": SECRET} | options))
    assert "short'" not in str(caught.value)


def test_without_pyzmq_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    for name in ("peer_store", "store_server"):
        monkeypatch.delitem(sys.modules, f"kvpool.storage.backends.peer.{name}")
        with pytest.raises(ImportError, match=r'pip install "\.\[remote\]"'):
            importlib.import_module(f"kvpool.storage.backends.peer.{name}")
