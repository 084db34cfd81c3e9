"""Headers are checked when they are read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvpool.remote.session import (
    HEADER_BYTES_MAX,
    Blocks,
    Failed,
    Find,
    Found,
    Get,
    Hello,
    Malformed,
    Message,
    Welcome,
    decode,
    encode,
)

MESSAGES = [
    Hello(1, "client", "a" * 32, "b" * 32, "inline"),
    Get(2, 3),
    Find(2),
    Welcome(3, (4096, 0, 192), 64, 8, 1 << 26),
    Found(4),
    Blocks(4, "1101"),
    Failed(0, "limit", 'too "many" \u00fc \ud800'),
]
KINDS = tuple(type(message) for message in MESSAGES)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_kind_comes_back_as_it_was(message: Message) -> None:
    assert decode(encode(message), KINDS) == message
    with pytest.raises(Malformed, match="kind: expected one of .*, got "):
        decode(encode(message), tuple(kind for kind in KINDS if kind is not type(message)))


def header(**changes: Any) -> bytes:
    values: dict[str, Any] = {"kind": "blocks", "id": 7, "found": "11"} | changes
    return json.dumps({name: value for name, value in values.items() if value is not ...}).encode()


@pytest.mark.parametrize(
    ("data", "reason", "id"),
    [
        (b"\xff\x00", "not JSON", 0),
        (b"[" * 5000, "not JSON", 0),
        (b"9" * 5000, "not JSON", 0),
        (b"[1]", "not a JSON object", 0),
        (b" " * (HEADER_BYTES_MAX + 1), "header: expected up to 16384 bytes, got 16385", 0),
        (header(kind="hello"), "kind: expected one of blocks, found, got 'hello'", 7),
        (header(kind=["blocks"]), "kind", 7),
        (header(id=...), "missing or unknown", 0),
        (header(more=1), "missing or unknown", 7),
        (header(found=...), "missing or unknown", 7),
        (header(id=-1), r"blocks\.id: expected an integer of 63 bits, got -1", 0),
        (header(id=1 << 63), r"blocks\.id: expected an integer of 63 bits, got .*", 0),
        (header(id=True), r"blocks\.id: expected an integer of 63 bits, got True", 0),
        (header(id="7"), r"blocks\.id: expected an integer of 63 bits, got '7'", 0),
        (header(found="1" * 4097), r"blocks\.found: expected up to 4096 characters, got '.*", 7),
    ],
    ids=range(15),
)
def test_what_is_not_a_message_is_named(data: bytes, reason: str, id: int) -> None:
    with pytest.raises(Malformed, match=reason) as caught:
        decode(data, (Blocks, Found))
    assert caught.value.id == id
