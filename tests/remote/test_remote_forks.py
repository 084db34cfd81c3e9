"""In a child of os.fork() there are no threads and no sockets: what would wait for them says so at once, and the parent
goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from workers import Make, stored, worker

from kvpool import ForkedProcess
from kvpool.publish import KVEventPublisher
from kvpool.remote import BlockClient, BlockServer
from tests.children import in_child


def refuses(call: Callable[[], object]) -> None:
    with pytest.raises(ForkedProcess, match=r"belongs to process \d+, and this is process \d+: make one of its own"):
        call()


def test_a_server_a_publisher_and_a_client_refuse_a_child_and_serve_their_parent(make: Make) -> None:
    there, here = worker(make, event_capacity=64), worker(make)
    tokens = stored(there, 4)
    publisher, server = KVEventPublisher(there.cache, interval_ms=2), BlockServer(there.cache)
    client = BlockClient(server.endpoint, here.cache)
    assert client.fetch(tokens[:5]) == 1
    publisher.flush()

    def child() -> None:
        for call in (server.close, publisher.flush, publisher.close, client.close):
            refuses(call)
        refuses(lambda: client.fetch(tokens))
        refuses(lambda: client.fetch_blocks([bytes(16)]))
        for one in (server, publisher, client):
            with pytest.raises(ForkedProcess), one:
                pass
        assert server.stats().blocks == 1 and publisher.stats().messages

    in_child(child)
    publisher.flush()
    assert client.fetch(tokens) == 3
    client.close()
    server.close()
    publisher.close()


def test_a_child_can_end_as_programs_do(make: Make) -> None:
    """Objects that nobody uses any more are collected there, which must not wait for their threads."""
    there = worker(make, event_capacity=64)
    publisher, server = KVEventPublisher(there.cache, interval_ms=2), BlockServer(there.cache)

    def child() -> None:
        nonlocal publisher, server
        del publisher, server
        import gc

        gc.collect()

    in_child(child)
    publisher.flush()
    server.close()
    publisher.close()


def test_a_child_has_a_copy_of_the_pool_that_its_parent_does_not_see(make: Make) -> None:
    there = worker(make)
    tokens = stored(there, 4)
    lease = there.cache.pin(there.keys(tokens), tier="host")

    def child() -> None:
        there.cache.reset() if not there.cache.leases else there.cache.revoke(there.cache.leases[0].owner)
        assert there.cache.stats().host.used == 0 or not there.cache.leases
        other = list(range(9000, 9017))
        sequence = there.cache.add_sequence(other)
        there.cache.commit(sequence)
        there.cache.release(sequence)
        there.cache.verify()

    in_child(child)
    assert not lease.closed and there.cache.match_prefix(list(range(9000, 9017))).full_tokens == 0
    lease.close()
    there.cache.verify()
