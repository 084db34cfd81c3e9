"""Blocks stay pinned until the transport has let go of them, whatever the client does, and nobody but the server's
thread waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from relay import Relay
from workers import HUGE, Make, counted, expected, stored, unpinned, worker

from engine import Engine
from kvpool.remote import BlockClient, BlockServer, Limits, RemoteError, RemoteTimeout
from kvpool.remote.transport import InlineServer

BLOCKS = 16
ALL = Limits(bytes_in_total=BLOCKS << 20, bytes_per_client=1 << 40)


class Fetch(threading.Thread):
    """Fetches the blocks of a prompt by key on a thread; ``result`` is them, or the exception."""

    def __init__(self, client: BlockClient, keys: list[bytes]) -> None:
        super().__init__(daemon=True)
        self._client, self._keys = client, keys
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = [None if block is None else bytes(block) for block in self._client.fetch_blocks(self._keys)]
        except Exception as error:
            self.result = error

    def wait(self) -> Any:
        self.join(600)
        assert not self.is_alive(), "the fetch did not end within 600 s"
        return self.result


class Offering(InlineServer):
    """Notes that blocks were offered to a client."""

    def __init__(self) -> None:
        super().__init__()
        self.offered = threading.Event()

    def offer(self, group: int, rows: Any) -> Any:
        self.offered.set()
        return super().offer(group, rows)


@contextmanager
def stalled(make: Make, **options: Any) -> Iterator[tuple[Engine, list[int], BlockServer, Relay, Fetch]]:
    """A server whose whole host tier is on its way to a client that reads nothing."""
    there = worker(make, BLOCKS + 1, BLOCKS, layout=HUGE)
    tokens = stored(there, BLOCKS)

    transport = Offering()
    with (
        BlockServer(there.cache, limits=ALL, transport=transport, **options) as server,
        Relay(server.endpoint) as relay,
    ):
        with BlockClient(relay.endpoint, there.cache, name="slow") as client:
            assert client.fetch_blocks([bytes(16)]) == [None]  # is connected
            transport.offered.clear()
            relay.hold()
            fetch = Fetch(client, there.keys(tokens))
            assert transport.offered.wait(600)
            if "stall_seconds" not in options:  # else the transfer may be over before anybody has looked
                counted(server, transfers=1)
            yield there, tokens, server, relay, fetch
            relay.pass_on()
            fetch.wait()


def overwrite(engine: Engine) -> int:
    """Let the scheduler go on with other prompts, and offload them; how many host blocks they took."""
    other = list(range(7000, 7000 + BLOCKS * engine.T + 1))
    engine.seed(other)
    return engine.cache.content.offload(engine.prompt(other))


def test_a_slow_client_gets_whole_blocks_while_the_scheduler_goes_on(make: Make) -> None:
    with stalled(make) as (there, tokens, server, relay, fetch):
        [lease] = there.cache.leases
        assert lease.owner.startswith("remote slow ") and len(lease.blocks) == BLOCKS
        assert overwrite(there) == 0, "pinned blocks were taken"
        relay.pass_on()
        assert fetch.wait() == expected(there, tokens)
        unpinned(there)
        assert overwrite(there) == BLOCKS
        assert server.stats().transfers == server.stats().transfer_bytes == 0


def test_a_client_whose_lease_was_revoked_finds_that_its_blocks_are_void(make: Make) -> None:
    with stalled(make) as (there, tokens, server, relay, fetch):
        [lease] = there.cache.leases
        assert lease.age_ms >= 0
        assert there.cache.revoke(lease.owner) == 1
        assert overwrite(there) == BLOCKS
        relay.pass_on()
        error = fetch.wait()
        assert isinstance(error, RemoteError) and error.code == "seal", error
        assert server.stats().revoked == 1
        assert fetch._client.fetch_blocks(there.keys(tokens)[:1]) == [None]


def test_blocks_whose_lease_was_revoked_before_their_macs_are_not_sent(make: Make) -> None:
    """Their MAC would be right for whatever is there by then."""
    there = worker(make)
    tokens = stored(there, 4)

    class Revoking(InlineServer):
        def offer(self, group: int, rows: Any) -> Any:
            offer = super().offer(group, rows)
            assert there.cache.revoke(there.cache.leases[0].owner) == 1
            return offer

    with BlockServer(there.cache, transport=Revoking()) as server:
        with BlockClient(server.endpoint, there.cache) as client, pytest.raises(RemoteError) as caught:
            client.fetch_blocks(there.keys(tokens))
        assert caught.value.code == "revoked" and server.stats().revoked == 1 and server.stats().blocks == 0


ENDS = ["the connection is lost", "the client takes nothing for too long", "the server closes"]


@pytest.mark.parametrize("end", ENDS)
def test_what_was_on_its_way_is_released_when(make: Make, end: str) -> None:
    options = {"stall_seconds": 0.3} if "nothing" in end else {}
    with stalled(make, **options) as (there, tokens, server, relay, fetch):
        if "lost" in end:
            relay.cut()
        elif "closes" in end:
            server.close(timeout=0.01)
            assert server.closed and not there.cache.leases and server.stats().transfers == 0
            server.close()
        unpinned(there)
        assert "lost" in end or fetch.is_alive(), "the client gave up first"
        assert overwrite(there) == BLOCKS
        relay.cut()
        assert isinstance(fetch.wait(), RemoteTimeout)
