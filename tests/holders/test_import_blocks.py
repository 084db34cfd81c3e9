"""Content from elsewhere enters the host tier under keys of the importer's own, whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import Engine, Make
from kvpool import BlockKeys, PoolClosed
from kvpool.errors import DeviceError
from tests import debug

SECRET = bytes(range(32))


def content(engine: Engine, tokens: list[int], **names: Any) -> list[bytes]:
    """What another pool's host blocks hold for the full blocks of a prompt."""
    other = np.zeros((len(tokens) // engine.T, engine.cache.layout.block_bytes), np.uint8)
    extra = names.pop("extra_ids", None) or [0] * len(tokens)
    expected = engine.expected.of((names.get("salt"), names.get("adapter_id")), list(zip(tokens, extra, strict=True)))
    shape = engine.cache.memory.host_pool.shape[1:]
    for i, block in enumerate(other):
        view = block.view(engine.cache.layout.storage_dtype).reshape(shape).view(np.uint8)
        for slot in range(engine.T):
            view[:, :, slot] = expected[i * engine.T + slot]
    return [block.tobytes() for block in other]


def prompt_of(engine: Engine, count: int, start: int = 0, **names: Any) -> tuple[BlockKeys, list[bytes]]:
    tokens = list(range(start, start + count))
    return engine.prompt(tokens, **names), content(engine, tokens, **names)


@pytest.mark.parametrize("names", [{}, {"salt": "a"}, {"adapter_id": 3}, {"extra_ids": [7] * 14}], ids=str)
def test_the_next_request_with_the_prefix_hits(make: Make, names: dict[str, Any]) -> None:
    engine = make(4, 8, 8)
    prompt, data = prompt_of(engine, 14, **names)
    assert engine.cache.imports.import_blocks(prompt, data) == 3
    assert engine.cache.match_prefix(prompt).host_tokens == 12
    assert engine.add(list(range(14)), **names).cached == 12  # compares every byte
    assert engine.add(list(range(14)), **(names | {"salt": "other"})).cached == 0


def test_blocks_that_are_cached_on_either_tier_are_skipped_and_a_part_of_the_prefix_can_come(make: Make) -> None:
    engine = make(4, 8, 8)
    engine.seed(range(5), committed=4)
    prompt, data = prompt_of(engine, 16)
    assert engine.cache.imports.import_blocks(prompt, data[2:], first=2) == 2
    assert engine.reusable(range(16)) == 4, "its ancestors are missing"
    assert [engine.cache.imports.import_blocks(prompt, data) for _ in range(2)] == [1, 0]
    assert len(engine.cached("host")) == 3
    assert engine.add([*range(16), 9]).cached == 16


def test_it_stops_where_the_host_has_no_room(make: Make) -> None:
    engine = make(4, 4, 3)
    prompt, data = prompt_of(engine, 20)
    assert engine.cache.imports.import_blocks(prompt, data) == 3
    first, others = engine.prompt(range(4)), prompt_of(engine, 8, 100)
    with engine.cache.pin(first.keys, tier="host"):
        assert engine.cache.imports.import_blocks(*others, priority=34) == 0, "all others are worth more"
        assert engine.cache.imports.import_blocks(*others, priority=35) == 2
    assert engine.cache.match_prefix(engine.prompt(range(9))).tokens == 4
    assert engine.cache.imports.import_blocks(*prompt_of(engine, 8, 200)) == 2


def test_the_end_of_a_prompt_ages_first(make: Make) -> None:
    engine = make(4, 4, 3)
    engine.cache.imports.import_blocks(*prompt_of(engine, 12))
    blocks = engine.cached("host")
    assert [blocks[key] for key in engine.keys(range(12))] == engine.order("host")[::-1]


BAD: list[tuple[Callable[[list[bytes]], Any], dict[str, int], str]] = [
    (lambda data: data[0], {}, "data: .*"),
    (lambda data: [data[0][:-1]], {}, r"data\[0\]: expected the 192 bytes of a block, got 191"),
    (lambda data: [data[0], data[1] + b"x"], {}, r"data\[1\]: expected the 192 bytes of a block, got 193"),
    (lambda data: [data[0], None], {}, r"data\[1\]: expected a contiguous buffer, got NoneType"),
    (lambda data: [np.frombuffer(data[0] * 2, np.uint8)[::2]], {}, "contiguous"),
    (lambda data: [np.array([None] * (len(data[0]) // 8))], {}, r"data\[0\]"),
    (lambda data: data, {"first": 1}, "data: expected blocks of the prompt's 3 full ones, got 3 from first=1 on"),
    (lambda data: data, {"first": -1}, "first: .*-1"),
    (lambda data: data, {"priority": 101}, "priority: .*101"),
]


def test_bad_input_changes_nothing(make: Make) -> None:
    engine, other = make(4, 4, 4, secret=SECRET), make(4, 4, 4, secret=SECRET[::-1])
    imports = engine.cache.imports
    prompt, data = prompt_of(engine, 14)
    before = debug.dump(engine.cache.core.tokens)
    for wrong, options, message in BAD:
        with pytest.raises((TypeError, ValueError), match=message):
            imports.import_blocks(prompt, wrong(data), **options)
    with pytest.raises(TypeError, match="prompt: .*"):
        imports.import_blocks([1, 2, 3, 4], data)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="another secret"):
        imports.import_blocks(*prompt_of(other, 8))
    assert debug.dump(engine.cache.core.tokens) == before


class Meanwhile:
    """A buffer size check that lets a test act between taking blocks and publishing them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine, act: Callable[[], Any]) -> None:
        fill = engine.cache._writer._fill

        def interrupted(*args: Any) -> None:
            fill(*args)
            act()

        monkeypatch.setattr(engine.cache._writer, "_fill", interrupted)


def test_what_is_being_written_cannot_be_found_or_evicted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(4, 2, 3)
    prompt, data = prompt_of(engine, 12)

    def act() -> None:
        assert engine.cache.match_prefix(prompt).tokens == 0
        assert engine.cache.find_and_pin_host(prompt.keys[0]) is None
        engine.seed(range(100, 108), committed=8)
        engine.seed(range(200, 208), committed=8)  # would offload
        engine.cache.verify()

    Meanwhile(monkeypatch, engine, act)
    assert engine.cache.imports.import_blocks(prompt, data) == 3
    assert engine.cache.match_prefix(engine.prompt(range(13))).host_tokens == 12


def test_content_that_is_computed_meanwhile_is_not_stored_twice(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(4, 8, 4)
    prompt, data = prompt_of(engine, 12)
    Meanwhile(monkeypatch, engine, lambda: engine.seed(range(8), committed=8))
    assert engine.cache.imports.import_blocks(prompt, data) == 1
    assert engine.cache.match_prefix(engine.prompt(range(13))) == (8, 4, 0, 0)


def test_a_reset_meanwhile_stores_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(4, 8, 4)
    prompt, data = prompt_of(engine, 12)
    Meanwhile(monkeypatch, engine, engine.cache.clear)
    assert engine.cache.imports.import_blocks(prompt, data) == 0
    assert not engine.cached("host") and engine.free("host") == 4


def test_a_failure_half_way_gives_the_blocks_back_empty(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(4, 8, 4)

    def fail() -> None:
        raise DeviceError("gone")

    Meanwhile(monkeypatch, engine, fail)
    with pytest.raises(DeviceError):
        engine.cache.imports.import_blocks(*prompt_of(engine, 12))
    assert not engine.cached("host") and engine.cache.stats().host.empty == 4


def test_the_memory_stays_until_an_import_has_written(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(4, 8, 4)
    closer = threading.Thread(target=engine.cache.close)

    def act() -> None:
        closer.start()
        closer.join(0.2)
        assert not engine.cache._pools.closed

    Meanwhile(monkeypatch, engine, act)
    with pytest.raises(PoolClosed):
        engine.cache.imports.import_blocks(*prompt_of(engine, 12))
    closer.join(600)
    assert engine.cache._pools.closed


def test_a_prompt_does_not_push_its_own_prefix_out(make: Make) -> None:
    engine = make(4, 2, 2)
    prompt, data = prompt_of(engine, 12)
    assert engine.cache.imports.import_blocks(prompt, data[:1]) == 1
    assert engine.cache.imports.import_blocks(prompt, data[1:], first=1) == 1
    assert engine.cache.match_prefix(engine.prompt(range(13))).host_tokens == 8
