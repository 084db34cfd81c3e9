"""Who may use a StoreServer, and what strangers and wrong arguments cost it."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from kvpool.remote import ClientKeys, ServerKeys
from kvpool.stores import ABSENT, MemoryStore
from kvpool.stores.peer.peer_store import PeerStore
from kvpool.stores.peer.store_server import StoreServer
from kvpool.stores.seals import SharedSecret
from kvpool.stores.urls import open_store
from tests.stores.lab import BLOCK_BYTES, done, names, open_queue, returned, saved
from tests.stores.peering import KEY, ROOT, SEAL, SECRET, TAG, WIRE_KEY, Raw, Serve, call, client
from tests.stores.peering import serve as serve
from tests.stores.peering import servers as servers
from tests.waiting import until


def test_a_client_that_reads_nothing_holds_few_answers(serve: Serve) -> None:
    size = 16 << 20  # more than the buffers of a connection
    server = serve(MemoryStore(size), block_bytes=size)
    raw = Raw(server.endpoint, rcvhwm=1, rcvbuf=4096)
    raw.ask(call("save", wait_ms=60_000, tag=TAG, limit=1), KEY, SEAL, blocks=[bytes(size)])
    for number in range(2, 14):
        raw.send(call("load", number, 60_000), KEY)
    until(lambda: server.stats().calls == 13 and not server.stats().under_way, "calls")
    held = 12 - server.stats().dropped
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


def test_with_keys_the_server_needs_no_secret_and_strangers_are_not_let_in(serve: Serve) -> None:
    (public, private), (own, mine), (_, _) = (zmq.curve_keypair() for _ in range(3))
    server = serve(keys=ServerKeys(public, private, [own]))
    with open_queue(client(server, keys=ClientKeys(own, mine, public))) as queue:
        keys = saved(queue, 4)
        assert returned(queue.load(keys, np.arange(4))).ok == 4
    stranger = zmq.curve_keypair()
    with pytest.raises(PermissionError, match="does not accept"):
        open_queue(client(server, keys=ClientKeys(*stranger, public)))


def test_clients_with_another_secret_behind_keys_find_nothing_of_each_other(serve: Serve) -> None:
    (public, private), (own, mine) = zmq.curve_keypair(), zmq.curve_keypair()
    server, keys = serve(keys=ServerKeys(public, private, [own])), ClientKeys(own, mine, public)
    with open_queue(client(server, keys=keys)) as one, open_queue(client(server, keys=keys, secret=bytes(32))) as other:
        saved(one, 4)
        assert done(other.find(other.secret.opaque(names(4)))).codes.tolist() == [ABSENT] * 4


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
    store = open_store(f"peer:{server.endpoint}?secret_file={path}&timeout_ms=600000&connections=1")
    assert isinstance(store, PeerStore) and store.threads == 1
    with open_queue(store) as queue, open_queue(client(server)) as other:
        assert np.array_equal(saved(queue, 1), other.secret.opaque(names(1)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"secret": None}, "accepted is one of them"),
        ({"secret": b"short"}, "secret: accepted are 32 bytes"),
        ({"secret": "a text of 32"}, "secret: accepted are 32 bytes"),
        ({"secret_file": "/nowhere"}, "accepted is one of them"),
        ({"timeout_ms": 0}, "timeout_ms=0"),
        ({"connections": 65}, "connections=65"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        PeerStore("tcp://127.0.0.1:1", **({"secret": SECRET} | options))
    assert "short'" not in str(caught.value)


def test_without_pyzmq_the_extra_is_named() -> None:
    for name in ("peer_store", "store_server"):
        script = f"import sys; sys.modules['zmq'] = None; import kvpool.stores.peer.{name}"
        run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
        assert run.returncode and 'pip install ".[remote]"' in run.stderr


@pytest.mark.parametrize("text", ["peer:", "peer:tcp://127.0.0.1:1", "peer:tcp://127.0.0.1:1?timeout_ms=x"])
def test_a_text_that_is_no_peer_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"store=|secret"):
        open_store(text)
