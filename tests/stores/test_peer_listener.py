"""Which clients may use a StoreServer, and what strangers and wrong arguments cost it."""

from __future__ import annotations

import importlib
import logging
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from kvpool.remote import ClientKeys, ServerKeys
from kvpool.storage import ABSENT, MemoryStore
from kvpool.storage.backends.peer.peer_store import PeerStore
from kvpool.storage.backends.peer.store_server import StoreServer
from kvpool.storage.backends.shared_secret import SharedSecret
from kvpool.storage.urls import open_store
from tests.stores.lab import (
    BLOCK_BYTES,
    done,
    keys_of,
    open_queue,
    returned,
    saved,
)
from tests.stores.peering import KEY, MAC, SECRET, TAG, WIRE_KEY, Raw, Serve, call, client
from tests.stores.peering import serve as serve
from tests.stores.peering import servers as servers
from tests.waiting import until


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
    path = tmp_path / "secret"
    path.write_text(SECRET.hex() + "\n")
    path.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        PeerStore("tcp://127.0.0.1:1", secret_file=path)
    path.chmod(0o600)
    path.write_text("00" * 31)
    with pytest.raises(ValueError, match="64 hex digits"):
        PeerStore("tcp://127.0.0.1:1", secret_file=path)
    path.write_text(SECRET.hex() + "\n")
    server = serve()
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
