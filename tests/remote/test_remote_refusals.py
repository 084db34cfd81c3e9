"""A client that asks for what it may not have, or sends anything at all, gets a clear error, and the server goes on."""

from __future__ import annotations

import random
import socket
from typing import Any

import pytest
from relay import Relay
from workers import HUGE, LARGE, SECRET, Make, Raw, expected, stored, until, worker

from kvpool.remote import BlockClient, BlockServer, Limits, RemoteError
from kvpool.remote.messages import Blocks, Failed, Message, Released, Welcome, decode

ANSWERS = (Welcome, Blocks, Released, Failed)


def answer(raw: Raw, *frames: bytes) -> Message:
    raw.send(*frames)
    return decode(raw.receive()[0], ANSWERS)


@pytest.mark.parametrize(
    ("layout", "secret", "code", "reason"),
    [
        ({"head_dim": 4}, SECRET, "layout", "one BlockLayout"),
        ({"head_dim": 3, "dtype": "int16"}, SECRET, "layout", "one BlockLayout"),
        ({"head_dim": 3, "tokens": "HND"}, SECRET, "layout", "one BlockLayout"),
        ({"head_dim": 3}, bytes(32), "secret", "same secret="),
        ({"head_dim": 3}, None, "secret", "same secret="),
    ],
)
def test_pools_that_do_not_fit_together_are_refused_with_the_reason(
    make: Make, layout: dict[str, Any], secret: bytes | None, code: str, reason: str
) -> None:
    there, here = worker(make), worker(make, layout=layout, secret=secret)
    tokens = stored(there, 4)
    with BlockServer(there.cache) as server, BlockClient(server.endpoint, here.cache) as client:
        for _ in range(2):
            with pytest.raises(RemoteError, match=reason) as caught:
                client.fetch(tokens)
            assert caught.value.code == code and caught.value.blocks == 0
        assert here.reusable(tokens) == 0 and server.stats().refused == 2


@pytest.mark.parametrize("order", ["layer_first", "block_first"])
def test_pools_whose_host_blocks_are_alike_fit_together(make: Make, order: str) -> None:
    there, here = worker(make), worker(make, layout={"head_dim": 3, "order": order})
    tokens = stored(there, 4)
    with BlockServer(there.cache) as server, BlockClient(server.endpoint, here.cache) as client:
        assert client.fetch(tokens) == 4
    assert here.add(tokens).cached == 16


def test_garbage_is_answered_and_the_server_goes_on(make: Make) -> None:
    there = worker(make)
    key = there.keys(stored(there, 4))[0]
    with BlockServer(there.cache) as server, Raw(server.endpoint, there) as raw:
        get, hello = raw.get(), raw.hello()
        cases = [
            [b""], [b"", b""], [b"garbage"], [hello, key], [get], [get, b""], [get, key[:15]], [get, key, key], [get, key + b"x"],
            [raw.hello(id=0)], [raw.hello(client="a" * 65)], [raw.hello(client="a\nb")], [hello.replace(b'"id": 1', b'"id": "1"')],
        ]  # fmt: skip
        for frames in cases:
            error = answer(raw, *frames)
            assert isinstance(error, Failed) and error.code == "malformed", (frames, error)
            assert error.id in (0, 1)
        assert server.stats().malformed == len(cases)
        error = answer(raw, raw.get(transport="carrier pigeon"), key)
        assert isinstance(error, Failed) and error.code == "transport" and "'inline'" in error.reason
        assert isinstance(answer(raw, get, key), Blocks)


def test_random_frames_never_stop_the_server(make: Make) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    dice = random.Random(seed)
    there = worker(make)
    tokens = stored(there, 4)
    with BlockServer(there.cache) as server, Raw(server.endpoint, there) as raw:
        good = [raw.get(), b"".join(there.keys(tokens))]
        for _ in range(300):
            frames = [bytearray(frame) for frame in good]
            for _ in range(dice.randrange(1, 4)):
                frame = dice.choice(frames)
                frame[dice.randrange(len(frame))] = dice.randrange(256)
            if dice.random() < 0.3:
                frames.insert(dice.randrange(3), bytearray(dice.randbytes(dice.randrange(40))))
            assert answer(raw, *(bytes(frame) for frame in frames))
        assert isinstance(answer(raw, *good), Blocks)
        until(lambda: server.stats().transfers == 0 and not there.cache.leases, "end of all transfers")


def test_what_is_not_zeromq_is_ignored(make: Make) -> None:
    there = worker(make)
    tokens = stored(there, 2)
    with BlockServer(there.cache) as server, BlockClient(server.endpoint, worker(make).cache) as client:
        host, _, port = server.endpoint.removeprefix("tcp://").rpartition(":")
        for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\xff" * 1000):
            with socket.create_connection((host, int(port))) as one:
                one.sendall(data)
        assert client.fetch(tokens) == 2


def test_a_frame_that_is_too_long_ends_the_connection_not_the_server(make: Make) -> None:
    there = worker(make)
    tokens = stored(there, 2)
    with BlockServer(there.cache) as server, Raw(server.endpoint, there) as raw, Raw(server.endpoint, there) as other:
        raw.send(raw.hello(), bytes(1 << 20))
        assert not raw.socket.poll(300)
        assert isinstance(answer(other, other.get(), there.keys(tokens)[0]), Blocks)
        assert server.stats().malformed == 0


def test_more_blocks_than_the_limit_are_refused(make: Make) -> None:
    there = worker(make)
    keys = there.keys(stored(there, 8))
    with BlockServer(there.cache, limits=Limits(blocks_per_request=7)) as server, Raw(server.endpoint, there) as raw:
        error = answer(raw, raw.get(), b"".join(keys))
        assert isinstance(error, Failed) and error.code == "limit" and "8 blocks" in error.reason and "7" in error.reason
        assert isinstance(answer(raw, raw.get(), b"".join(keys[:7])), Blocks)


def test_more_requests_than_the_limit_wait_or_are_refused_and_all_are_answered(make: Make) -> None:
    there = worker(make, 40, 36, layout=HUGE)
    tokens = stored(there, 16)
    with BlockServer(there.cache, limits=Limits(16, 1, 16 << 20)) as server, Relay(server.endpoint) as relay:
        with Raw(relay.endpoint, there) as raw:
            assert isinstance(answer(raw, raw.hello()), Welcome)
            relay.hold()
            for number in range(1, 4):
                raw.send(raw.get(id=number), b"".join(there.keys(tokens)[:16]))
            until(lambda: server.stats().refused == 1, "refusal")
            assert server.stats().transfers == 1 and len(there.cache.leases) == 1
            relay.pass_on()
            answers = [decode(raw.receive()[0], ANSWERS) for _ in range(5)]
            failed = [one for one in answers if isinstance(one, Failed)]
            assert [one.id for one in failed] == [3] and "requests wait" in failed[0].reason
            assert sorted(one.id for one in answers if isinstance(one, Released)) == [1, 2]


def test_clients_share_the_bytes_in_total(make: Make) -> None:
    there = worker(make, 20, 16, layout=HUGE)
    tokens = stored(there, 16)
    limits = Limits(16, bytes_per_client=16 << 20, bytes_in_total=16 << 20)
    with BlockServer(there.cache, limits=limits) as server, Relay(server.endpoint) as relay, Raw(relay.endpoint, there) as slow:
        assert isinstance(answer(slow, slow.hello()), Welcome)
        relay.hold()
        slow.send(slow.get(), b"".join(there.keys(tokens)))
        until(lambda: server.stats().transfers == 1, "transfer")
        with Raw(server.endpoint, there) as other:
            other.send(other.get(), there.keys(tokens)[0])
            assert not other.socket.poll(200), "the total was passed"
            relay.pass_on()
            header, frame = other.receive()
            assert frame == expected(there, tokens)[0]


def test_a_pool_that_was_closed_is_an_error_to_clients(make: Make) -> None:
    there, here = worker(make, layout=LARGE), worker(make, layout=LARGE)
    tokens = stored(there, 4)
    with BlockServer(there.cache) as server, BlockClient(server.endpoint, here.cache) as client:
        assert client.fetch(tokens[:9]) == 2
        until(lambda: not there.cache.leases, "end of the leases")
        there.cache.close()
        with pytest.raises(RemoteError, match="closed"):
            client.fetch(tokens)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"blocks_per_request": 0}, "blocks_per_request=0"), ({"requests_per_client": 0}, "requests_per_client=0"),
     ({"bytes_per_client": True}, "bytes_per_client=True"), ({"bytes_in_total": -1}, "bytes_in_total=-1")],
)  # fmt: skip
def test_wrong_limits_are_named(limits: dict[str, Any], reason: str) -> None:
    with pytest.raises((ValueError, TypeError), match=reason):
        Limits(**limits)


def test_limits_that_hold_no_block_and_pools_without_a_host_tier_are_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="do not hold one block of 192 bytes"):
        BlockServer(worker(make).cache, limits=Limits(bytes_per_client=191))
    with pytest.raises(ValueError, match="host_blocks=0"):
        BlockServer(worker(make, S=0).cache)
