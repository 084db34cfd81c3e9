"""What requests wish for their chunks, and which conversation goes: the scheduler's side of the plug-in for vLLM."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "kvpool.integrations.vllm.spec",
    reason="needs vLLM: python -m tests.engines build, then python -m tests.engines test",
    exc_type=ImportError,
)

import msgspec
from vllm.v1.kv_hints import KvHintsEnvelope
from vllm.v1.kv_offload.base import ReqContext

from kvpool.integrations.vllm.spec import KVPoolOffloadingConnector
from tests.engine import Clock
from tests.engines.vllm_lab import HIT, MISS, Manager, keys

# -- policies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "left"), [("lru", (2, 10)), ("agent", (10, 2))])
def test_a_request_that_has_finished_is_a_turn_of_its_conversation(policy: str, left: tuple[int, int]) -> None:
    """One comes back every ten seconds, another one every two hundred. There is room for both, and for four more."""
    clock = Clock()
    manager = Manager(24, 0, policy=policy, clock=clock)

    def turn(first: int, at: int, count: int = 10) -> None:
        clock.now, wanted, context = 1000 * at, keys(*range(first, first + count)), ReqContext(req_id=f"{first} {at}")
        for place, key in enumerate(wanted):
            context.set_offload_key_position(key, 16 * (place + 1))
        manager.real.on_new_request(context)
        hits = [key for key in wanted if manager.real.lookup(key, context) is HIT]
        if hits:
            manager.real.prepare_load(hits, context)
            manager.real.complete_load(hits, context)
        for some in (wanted[len(hits) : 5], wanted[max(len(hits), 5) :]):
            stored = manager.real.prepare_store(some, context)
            manager.real.complete_store(set(stored.keys_to_store), context)
        manager.real.on_request_finished(context)

    with manager.cache as cache:
        for at in range(0, 2_000, 10):
            turn(0, at)
            if at % 200 == 0:
                turn(100, at)
        turn(0, 2_000)
        turn(100, 2_001)
        turn(200, 2_002, 12)
        assert tuple(sum(cache.lookup(keys(*range(first, first + 10))) == cache.HERE) for first in (0, 100)) == left
        cache.verify()


# -- hints -----------------------------------------------------------------------------------------------


def hinted(
    manager: Manager, name: str, numbers: range, message: object, *, as_params: bool = True, salt: str = ""
) -> None:
    """Serve a request that carries a message."""
    manager.real.salt = salt
    fields = {"kv_transfer_params": {"kv_hints": message}} if as_params else {"kv_hints": message}
    context = ReqContext(req_id=name, **fields)
    manager.real.on_new_request(context)
    stored = manager.real.prepare_store(keys(*numbers), context)
    if stored is not None:
        manager.real.complete_store(stored.keys_to_store, context)
    manager.real.on_request_finished(context)


def envelope(kind: object, payload: object, count: int = 1) -> dict[str, Any]:
    action = {"action_id": "a", "action_type": kind, "action_version": "1", "payload": payload}
    return {"protocol_version": "1", "message_id": "m", "actions": [action] * count}


@pytest.mark.parametrize("as_params", [True, False])
@pytest.mark.parametrize("kind", ["pin", "retain"])
def test_what_a_request_wishes_for_its_chunks_outlives_others(kind: str, as_params: bool) -> None:
    manager, message = Manager(64, 0), envelope(kind, {"lease_ms": 60_000})
    if not as_params:
        message = msgspec.convert(message, KvHintsEnvelope)  # type: ignore[assignment]
    with manager.cache as cache:
        hinted(manager, "r", range(4), message, as_params=as_params)
        for first in range(100, 400, 4):
            hinted(manager, f"r{first}", range(first, first + 4), None)
        assert manager.lookup(0, 3, 100, 103) == [HIT, HIT, MISS, MISS]
        assert manager.counted()[f"vllm:kvpool_hint_actions:('{kind}', 'done')"] == 1
        hinted(manager, "s", range(4), envelope("drop", {}))
        assert manager.lookup(0, 3) == [MISS, MISS]
        cache.verify()


HINTS = ("pin", "retain", "prefetch", "drop")
PIN = envelope("pin", {})
DEEP: object = []
for _ in range(50_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "message",
    [
        {},
        "x" * 10_000,
        envelope("pin", {}, 65),
        envelope("steal", {}),
        envelope("pin", {"lease_ms": -1}),
        envelope("pin", {"lease_ms": 1 << 40}),
        envelope("drop", {"tokens": [1]}),
        {**PIN, "protocol_version": "2"},
        {**PIN, "message_id": "x" * 300},
        DEEP,
        envelope("pin", DEEP),
    ],
)
def test_a_wrong_hint_is_counted_and_its_request_goes_on(message: object) -> None:
    manager = Manager(8, 0)
    with manager.cache:
        hinted(manager, "r", range(4), message)
        assert manager.lookup(0, 3) == [HIT, HIT]
        assert manager.counted()["vllm:kvpool_hint_actions:('none', 'refused')"] == 1
        assert not manager.real._requests


def test_whatever_requests_wish_they_keep_a_sixteenth_of_the_tier() -> None:
    seed = random.randrange(1 << 16)
    print(f"seed {seed}")
    draw, manager = random.Random(seed), Manager(64, 0)
    with manager.cache as cache:
        for i in range(200):
            first, length, kind = draw.randrange(400), draw.randrange(1, 12), draw.choice(HINTS)
            payload = {} if kind == "drop" else {"lease_ms": draw.randrange(1, 600_000)}
            message = envelope(kind, payload, draw.randrange(1, 5))
            hinted(manager, f"r{i}", range(first, first + length), message)
            assert sum(cache._states[0].blocks["priority"] > 35) <= 64 // 16
            cache.verify()


def test_a_namespace_pays_for_its_hints_with_its_own_budget() -> None:
    manager = Manager(64, 0)
    with manager.cache as cache:
        for i in range(20):
            first = 10 * i
            hinted(manager, f"r{i}", range(first, first + 3), envelope("pin", {}), salt="greedy")
        assert manager.counted()["vllm:kvpool_hint_actions:('pin', 'done')"] == 1
        hinted(manager, "s", range(1000, 1004), envelope("pin", {}), salt="other")
        hinted(manager, "t", range(2000, 2004), envelope("pin", {}))
        assert manager.counted()["vllm:kvpool_hint_actions:('pin', 'done')"] == 2
        assert (cache._states[0].blocks["priority"] > 35).sum() == 3 * (64 // 16)


@pytest.mark.parametrize("salt", ["tenant", None])
def test_the_connector_says_whose_the_request_is_that_begins(salt: str | None) -> None:
    manager, salts = Manager(4, 0), list[str]()
    connector = KVPoolOffloadingConnector.__new__(KVPoolOffloadingConnector)
    connector.connector_scheduler = SimpleNamespace(
        manager=manager.real, on_new_request=lambda request: salts.append(manager.real.salt)
    )
    with manager.cache:
        manager.real.salt = "the one before"
        connector.on_new_request(SimpleNamespace(cache_salt=salt))
    assert salts == [salt or ""]
