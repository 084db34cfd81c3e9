"""Whatever a server does, the client's pool gets whole blocks or none, and the caller a clear error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from relay import Relay
from workers import HUGE, LARGE, Fake, Make, expected, packed, pair, stored, wire_key, worker

from engine import Engine
from kvpool.remote import BlockClient, BlockServer, RemoteError, RemoteTimeout
from kvpool.remote.session import Blocks, Find, Found, Get, Hello, Received, Session, Welcome

Script = Callable[[Any, list[bytes]], list[Any]]


class fake_server(Fake):
    """A server that answers every ``get`` with the messages that a script makes of it, and the blocks that it would
    have. A message is [header, *blocks], or [header, tuple of other frames]."""

    def __init__(self, engine: Engine, script: Script, **welcome: Any) -> None:
        size = engine.cache.layout.block_bytes
        limits = {"block_bytes": (size,), "blocks_per_request": 64, "requests": 8, "bytes": 1 << 26} | welcome

        def answer(session: Session, received: Received) -> list[list[bytes]]:
            request = received.message
            if isinstance(request, Hello):
                return [packed(session, Welcome(request.id, **limits))]
            blocks = [bytes([i]) * size for i in range(received.frames[0].nbytes // 16)]
            return [message(session, *reply) for reply in script(request, blocks)]

        def message(session: Session, header: Any, *blocks: Any) -> list[bytes]:
            if blocks and isinstance(blocks[0], tuple):
                return packed(session, header, *blocks[0])
            return packed(session, header, blocks=blocks)

        super().__init__(wire_key(engine), answer, (Hello, Get, Find))

    def __enter__(self) -> str:  # type: ignore[override]
        return self.endpoint


TOKENS = list(range(33))
ALL = "1" * 8
"""Eight blocks are there: those of TOKENS."""


def reply(found: str = ALL, choose: Callable[[list[bytes]], Any] = lambda blocks: blocks, number: int = 0) -> Script:
    """An answer with some of the blocks, to a request of another number."""
    return lambda get, blocks: [[Blocks(get.id + number, found), *choose(blocks)]]


def say(*answer: Any) -> Script:
    """The same answer to whatever is asked."""
    return lambda get, blocks: [[*answer]]


def find(*frames: bytes, number: int = 0) -> Script:
    """An answer to the question which blocks are there."""
    return lambda find, blocks: [[Found(find.id + number), frames]]


WINDOW = {"window": 6}
"""A pool with it asks which blocks are there before it asks for some."""
WRONG: dict[str, tuple[Script, dict[str, int]]] = {
    "no JSON": (say(b"what?"), {}),
    "a request": (lambda get, blocks: [[get]], {}),
    "an unknown id": (reply(number=1), {}),
    "id 0": (say(Blocks(0, ALL)), {}),
    "too few places": (reply(ALL[1:], lambda blocks: blocks[1:]), {}),
    "too many places": (reply(ALL + "1", lambda blocks: [*blocks, blocks[0]]), {}),
    "places that are not digits": (reply("x" * 8, lambda blocks: []), {}),
    "a frame too few": (reply(choose=lambda blocks: blocks[1:]), {}),
    "a frame too many": (reply(choose=lambda blocks: [*blocks, blocks[0]]), {}),
    "a short frame": (reply(choose=lambda blocks: [*blocks[1:], blocks[0][1:]]), {}),
    "a long frame": (reply(choose=lambda blocks: [*blocks[1:], blocks[0] + b"x"]), {}),
    "frames without blocks": (reply("0" * 8, lambda blocks: blocks[:1]), {}),
    "blocks in other frames": (reply(choose=lambda blocks: [tuple(blocks)]), {}),
    "no bits": (find(), WINDOW),
    "bits in two frames": (find(b"\xff", b""), WINDOW),
    "too few bits": (find(b""), WINDOW),
    "too many bits": (find(b"\xff\xff"), WINDOW),
    "bits of an unknown id": (find(b"\xff", number=1), WINDOW),
    "blocks in place of bits": (reply(), WINDOW),
}


@pytest.mark.parametrize(("script", "options"), WRONG.values(), ids=WRONG)
def test_what_no_server_sends_is_an_error_and_nothing_enters_the_pool(
    make: Make, script: Script, options: dict[str, int]
) -> None:
    here = worker(make, **options)
    with fake_server(here, script) as endpoint, BlockClient(endpoint, here.cache) as client:
        with pytest.raises(RemoteError, match="malformed: .* sent") as caught:
            client.fetch(TOKENS)
        assert caught.value.blocks == 0 and here.reusable(TOKENS) == 0


def test_what_comes_after_a_whole_answer_is_an_answer_to_nobody(make: Make) -> None:
    here = worker(make)
    with fake_server(here, lambda get, blocks: 2 * reply()(get, blocks)) as endpoint:
        with BlockClient(endpoint, here.cache, messages_in_flight=1) as client:
            with pytest.raises(RemoteError, match="malformed: .* sent"):
                client.fetch(TOKENS)
                client.fetch_blocks(here.keys(TOKENS))
    assert here.reusable(TOKENS) == 32


@pytest.mark.parametrize("name", ["block_bytes", "blocks_per_request", "requests", "bytes"])
def test_a_welcome_that_makes_no_sense_is_an_error(make: Make, name: str) -> None:
    here, wrong = worker(make), (1,) if name == "block_bytes" else 0
    with fake_server(here, reply(), **{name: wrong}) as endpoint, BlockClient(endpoint, here.cache) as client:
        with pytest.raises(RemoteError, match="malformed"):
            client.fetch(TOKENS)


@pytest.mark.parametrize("options", [{}, WINDOW], ids=["about blocks", "about a question"])
def test_a_server_that_is_silent_is_a_timeout(make: Make, options: dict[str, int]) -> None:
    here = worker(make, **options)
    with fake_server(here, lambda get, blocks: []) as endpoint:
        with BlockClient(endpoint, here.cache) as client:
            client._connected()
            client._timeout_ms = 100
            with pytest.raises(RemoteTimeout, match="did not answer for 100 ms") as caught:
                client.fetch(TOKENS)
            assert caught.value.blocks == 0 and caught.value.code == "timeout"
    with BlockClient(endpoint, here.cache) as client, pytest.raises(TimeoutError, match="nobody listens"):
        client.fetch(TOKENS)
    assert here.reusable(TOKENS) == 0


def test_blocks_with_wrong_macs_do_not_enter_the_pool(make: Make) -> None:
    """As when somebody writes into them on their way."""
    here = worker(make)
    server = fake_server(here, reply())
    send = server.send

    def send_changed(client: bytes, frames: list[bytes]) -> None:
        """Blocks come with one other bit."""
        last = frames[-1]
        send(client, frames if len(frames) < 2 else [*frames[:-1], last[:-1] + bytes([last[-1] ^ 1])])

    server.send = send_changed  # type: ignore[method-assign]
    with server as endpoint, BlockClient(endpoint, here.cache) as client:
        for call in (lambda: client.fetch(TOKENS), lambda: client.fetch_blocks(here.keys(TOKENS))):
            with pytest.raises(RemoteError, match="not those that the server has sealed") as caught:
                call()
            assert caught.value.code == "seal" and caught.value.blocks == 0
    assert here.reusable(TOKENS) == 0


def test_answers_out_of_order_are_put_in_order(make: Make) -> None:
    there, here = worker(make), worker(make)
    content = expected(there, TOKENS)
    asked: list[Get] = []

    def script(get: Get, blocks: list[bytes]) -> list[list[Any]]:
        asked.append(get)
        if len(asked) < 4:
            return []
        replies: list[list[Any]] = [[Blocks(get.id, "11"), *content[2 * i : 2 * i + 2]] for i, get in enumerate(asked)]
        return replies[::-1]

    with fake_server(here, script) as endpoint:
        with BlockClient(endpoint, here.cache, blocks_per_message=2, messages_in_flight=4) as client:
            assert client.fetch(TOKENS) == 8
    assert here.add(TOKENS).cached == 32


def test_a_late_answer_is_not_taken_for_the_next_request(make: Make) -> None:
    there, here = worker(make, layout=LARGE), worker(make, layout=LARGE)
    first, second = stored(there, 6), stored(there, 6, 1000)
    with BlockServer(there.cache) as server, Relay(server.endpoint) as relay:
        with BlockClient(relay.endpoint, here.cache) as client:
            assert client.fetch([1]) == 0
            assert client.fetch_blocks([bytes(16)]) == [None]
            relay.hold()
            client._timeout_ms = 300
            with pytest.raises(RemoteTimeout):
                client.fetch(first)
            relay.pass_on()
            client._timeout_ms = 600_000
            assert client.fetch(second) == 6
            assert client.fetch(first) == 6
    assert here.add(second).cached == 24 and here.add(first).cached == 24


def test_a_server_that_dies_in_mid_transfer_leaves_nothing_half_written(make: Make) -> None:
    there, here = worker(make, 20, 20, layout=HUGE), worker(make, 20, 20, layout=HUGE)
    tokens = stored(there, 16)
    server = BlockServer(there.cache)
    with server, Relay(server.endpoint) as relay:
        with BlockClient(relay.endpoint, here.cache, blocks_per_message=4, messages_in_flight=2) as client:
            assert client.fetch(tokens[:9]) == 2
            relay.hold()
            client._timeout_ms = 500
            with pytest.raises(RemoteTimeout) as caught:
                client.fetch(tokens)
            relay.cut()
            server.close(timeout=0)
            relay.pass_on()
            assert here.reusable(tokens) == 4 * (2 + caught.value.blocks) < 64
            with pytest.raises(RemoteTimeout):
                client.fetch(tokens)
    assert here.add(tokens).cached < 64  # compares every byte


def test_a_server_that_starts_again_is_found_again(make: Make) -> None:
    with pair(make, 8) as (there, here, tokens, server, client):
        assert client.fetch(tokens[:9]) == 2
        server.close()
        client._timeout_ms = 300
        with pytest.raises(RemoteTimeout):
            client.fetch(tokens)
        with BlockServer(there.cache, server.endpoint):
            client._timeout_ms = 600_000
            assert client.fetch(tokens) == 6
    with pytest.raises(ValueError, match="the client is closed"):
        client.fetch(tokens)


def test_a_second_thread_is_sent_away(make: Make) -> None:
    here = worker(make)
    with fake_server(here, lambda get, blocks: []) as endpoint, BlockClient(endpoint, here.cache) as client:
        client._connected()
        client._timeout_ms = 500
        client._disconnect()
        inside, refused, take = threading.Event(), threading.Event(), client._transport.connect

        def connect(*arguments: Any) -> None:
            inside.set()
            assert refused.wait(600)
            take(*arguments)

        client._transport.connect = connect  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(client.fetch, TOKENS)
            assert inside.wait(600)
            for call in (lambda: client.fetch(TOKENS), client.close):
                with pytest.raises(RuntimeError, match="another thread"):
                    call()
            refused.set()
            assert isinstance(first.exception(600), RemoteTimeout), "the first thread was disturbed"


@pytest.mark.parametrize(
    "options",
    [
        {"name": "a" * 65},
        {"name": 3},
        {"timeout": 0},
        {"timeout": "1"},
        {"blocks_per_message": 5000},
        {"messages_in_flight": 0},
    ],
    ids=str,
)
def test_wrong_arguments_are_named(make: Make, options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        BlockClient("tcp://127.0.0.1:1", worker(make).cache, **options)
