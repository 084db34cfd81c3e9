"""Blocks through NIXL: the reader takes them, its notification unpins them, and two workers of one host do not
collide."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zmq
from workers import LARGE, SECRET, SMALL, Make, Raw, expected, stored, worker

from kvpool.remote import BlockClient, BlockServer, RemoteError
from kvpool.remote.nixl import INSTALL, NixlClient, NixlServer, available, new_agent
from kvpool.remote.session import Blocks, Get
from tests.waiting import until

needs_nixl = pytest.mark.skipif(bool(available()), reason=available())


@needs_nixl
@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
def test_the_next_request_with_the_prefix_hits(make: Make, layout: dict[str, Any]) -> None:
    there, here = worker(make, layout=layout), worker(make, layout=layout)
    tokens = stored(there, 20)
    with BlockServer(there.cache, transport=NixlServer()) as server:
        with BlockClient(
            server.endpoint, here.cache, transport=NixlClient(), blocks_per_message=3, messages_in_flight=2
        ) as client:
            assert client.fetch(tokens) == 20
            fetched = client.fetch_blocks([bytes(16), *there.keys(tokens)])
            content = expected(there, tokens)
            assert [None if block is None else bytes(block) for block in fetched] == [None, *content]
            places = [7, 3, 4, 5, 0, 19, 18, 2]  # neighbours and others
            fetched = client.fetch_blocks([there.keys(tokens)[place] for place in places])
            assert [bytes(block or b"") for block in fetched] == [content[place] for place in places]
            until(lambda: not there.cache.leases, "end of the leases")
    assert here.add(tokens).cached == 80  # compares every byte


@needs_nixl
def test_blocks_stay_pinned_until_the_reader_says_that_it_is_done(make: Make) -> None:
    there = worker(make)
    tokens = stored(there, 4)
    with BlockServer(there.cache, transport=NixlServer()) as server, Raw(server.endpoint, there) as raw:
        raw.send(raw.hello(transport="nixl"))
        [metadata] = raw.answer().frames
        raw.send(Get(2, 0), b"".join(there.keys(tokens)))
        answer = raw.answer()
        tag, addresses = answer.frames
        assert answer.message == Blocks(2, "1111") and len(addresses) == 32
        assert raw.session is not None and raw.session.verify_mac(expected(there, tokens), answer.mac)
        [lease] = there.cache.leases
        assert bytes(addresses) == lease.addresses.tobytes()
        reader = new_agent()
        name = reader.add_remote_agent(bytes(metadata))
        reader.send_notif(name, bytes(16))
        reader.send_notif(name, b"no tag")
        assert not raw.socket.poll(100) and len(there.cache.leases) == 1
        reader.send_notif(name, bytes(tag))
        until(lambda: not there.cache.leases, "end of the lease")


@needs_nixl
def test_a_reader_that_died_leaves_a_lease_that_is_reported_and_revocable(make: Make) -> None:
    there = worker(make)
    keys = there.keys(stored(there, 4))
    with BlockServer(there.cache, transport=NixlServer()) as server:
        for end in ("revoke", "close"):
            with Raw(server.endpoint, there) as raw:
                raw.enter(client="mortal", transport="nixl").ask(Get(2, 0), b"".join(keys))
                [lease] = there.cache.leases
                assert lease.owner.startswith("remote mortal ")
                if end == "revoke":
                    assert there.cache.revoke(lease.owner) == 1
                    until(lambda: server.stats().transfers == 0, "end of the transfer")
        server.close(timeout=0)
        assert not there.cache.leases and server.stats().transfers == 0


@needs_nixl
def test_a_client_with_another_transport_is_refused(make: Make) -> None:
    there, here = worker(make), worker(make)
    with BlockServer(there.cache, transport=NixlServer()) as server, BlockClient(server.endpoint, here.cache) as client:
        with pytest.raises(RemoteError, match="transport 'inline': this server sends 'nixl'"):
            client.fetch(list(range(9)))
    with BlockServer(there.cache) as server, BlockClient(server.endpoint, here.cache, transport=NixlClient()) as client:
        with pytest.raises(RemoteError, match="transport 'nixl': this server sends 'inline'"):
            client.fetch(list(range(9)))


@needs_nixl
@pytest.mark.parametrize("metadata", [[], [b"garbage"], [b"", b""]], ids=str)
def test_metadata_that_is_none_is_an_error(make: Make, metadata: list[bytes]) -> None:
    there, here = worker(make), worker(make)

    class Liar(NixlServer):
        def welcome(self) -> list[bytes]:
            return metadata

    with BlockServer(there.cache, transport=Liar()) as server:
        with BlockClient(server.endpoint, here.cache, transport=NixlClient()) as client:
            with pytest.raises(RemoteError, match="malformed"):
                client.fetch(list(range(9)))


@needs_nixl
def test_two_workers_of_one_host_serve_each_other(make: Make) -> None:
    here = worker(make, layout=LARGE)
    mine, its = stored(here, 6), list(range(1000, 1025))
    script = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]!r}
from engine import open_engine
from kvpool.remote import BlockClient, BlockServer
from kvpool.remote.nixl import NixlClient, NixlServer
engine = open_engine(4, 16, 32, layout={LARGE!r}, secret={SECRET!r})
engine.seed({its!r})
engine.cache.content.offload(engine.prompt({its!r}))
with BlockServer(engine.cache, transport=NixlServer()) as server:
    print(server.endpoint, flush=True)
    with BlockClient(sys.argv[1], engine.cache, transport=NixlClient()) as client:
        assert client.fetch({mine!r}) == 6
    sys.stdin.read()
assert engine.seed({mine!r}) == 24
assert not engine.cache.leases
engine.cache.verify()
engine.cache.close()
"""
    with BlockServer(here.cache, transport=NixlServer()) as server:
        command = [sys.executable, "-c", script, server.endpoint]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            lines = iter(process.stdout.readline, "")
            endpoint = next(line for line in lines if line.startswith("tcp://")).strip()
            with BlockClient(endpoint, here.cache, transport=NixlClient()) as client:
                assert client.fetch(its) == 6
            process.stdin.close()
            assert process.wait(600) == 0
        until(lambda: not here.cache.leases, "end of the leases")
    assert here.add(its).cached == 24


def test_without_nixl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    for build in (NixlServer, NixlClient):
        with pytest.raises(ImportError, match=INSTALL):
            build()
    assert INSTALL in available()


def test_without_pyzmq_the_error_says_what_to_install() -> None:
    assert zmq.zmq_version()
    script = (
        "import sys; sys.modules['zmq'] = None\ntry: import kvpool.remote\nexcept ImportError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert 'pip install ".[remote]"' in done.stdout
