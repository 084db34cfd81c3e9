"""The policy of eviction for vLLM's own CPU tier, under vLLM's own manager."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

vllm_policy = pytest.importorskip(
    "kvpool.integrations.vllm.cache_policy",
    reason="needs vLLM: python -m tests.engines build, then python -m tests.engines test",
    exc_type=ImportError,
)

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key  # noqa: E402
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager  # noqa: E402
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus  # noqa: E402

SEED = 7
POLICIES = ("lru", "arc", "AgentCachePolicy")


def keys(session: int, count: int, first: int = 0) -> list[Any]:
    return [make_offload_key(b"%d %d" % (session, place), 0) for place in range(first, count)]


class Tier:
    """vLLM's manager with a policy, and the clock of both."""

    def __init__(self, policy: str, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.count = 0.0, 0
        monkeypatch.setattr(vllm_policy.AgentCachePolicy, "clock", staticmethod(lambda: self.now))
        self.manager = CPUOffloadingManager(chunks, policy, "kvpool.integrations.vllm.cache_policy")

    def here(self, asked: list[Any]) -> int:
        context = ReqContext("look")
        found = [self.manager.lookup(key, context) == LookupResult.HIT for key in asked]
        return [*found, False].index(False)

    def request(self, asked: list[Any]) -> int:
        """Serve a prompt as vLLM's scheduler does. Returns how many chunks it reuses."""
        self.count += 1
        context = ReqContext(f"r{self.count}")
        self.manager.on_new_request(context)
        for place, key in enumerate(asked):
            context.set_offload_key_position(key, 32 * (place + 1))
        reused = self.here(asked)
        self.manager.prepare_load(asked[:reused], context)
        self.manager.complete_load(asked[:reused], context)
        found = self.manager.prepare_store(asked, context)
        if found is not None:
            self.manager.complete_store(found.keys_to_store, context)
        self.manager.on_request_finished(context)
        return reused


def turns(users: int, count: int) -> Iterator[tuple[float, list[Any]]]:
    """Sessions of agents whose contexts grow, and which end. Together they do not fit into the tier."""
    print(f"seed {SEED}")
    draw, due = Random(SEED), [(0.1 * user, user, 4) for user in range(users)]
    session = users
    for _ in range(count):
        due.sort()
        at, own, length = due.pop(0)
        yield at, keys(own, length)
        pause = draw.uniform(2, 12) if own % 3 else draw.uniform(20, 40)
        if length < 14:
            due.append((at + pause, own, length + 1))
        else:
            due.append((at + pause, session, 4))
            session += 1


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    hits = {}
    for policy in POLICIES:
        tier, hits[policy] = Tier(policy, 40, monkeypatch), 0
        for tier.now, asked in turns(12, 400):
            hits[policy] += tier.request(asked)
    return hits


def test_of_agents_more_chunks_are_hits_than_with_the_policies_of_vllm(played: dict[str, int]) -> None:
    assert played["AgentCachePolicy"] > 1.1 * max(played["lru"], played["arc"]), played


def test_the_end_of_a_chain_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Tier("AgentCachePolicy", 10, monkeypatch)
    tier.request(keys(1, 10))
    tier.now = 1.0
    tier.request(keys(2, 4))
    assert (tier.here(keys(1, 10)), tier.here(keys(2, 4))) == (6, 4)


def test_what_is_protected_or_in_use_is_no_victim_and_a_refusal_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = Tier("AgentCachePolicy", 6, monkeypatch)
    policy, context = tier.manager._policy, ReqContext("load")
    tier.request(keys(1, 6))
    tier.manager.prepare_load(keys(1, 2), context)
    protected = set(keys(1, 4, first=2))
    assert policy.evict(3, protected) is None
    assert tier.here(keys(1, 6)) == 6
    assert [key for key, _ in policy.evict(2, protected)] == keys(1, 6, first=4)[::-1]
    assert tier.here(keys(1, 6)) == 4


def test_after_a_reset_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Tier("AgentCachePolicy", 6, monkeypatch)
    tier.request(keys(1, 6))
    tier.manager.reset_cache()
    assert tier.here(keys(1, 6)) == 0
    assert tier.request(keys(2, 6)) == 0 and tier.request(keys(2, 6)) == 6


def test_what_is_known_of_chunks_that_are_gone_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Tier("AgentCachePolicy", 8, monkeypatch)
    for session in range(200):
        tier.now = float(session)
        tier.request(keys(session, 6))
    policy = tier.manager._policy
    assert len(policy._chain_of) <= 32 and len(policy._chains) <= 32 and len(policy._chunks) <= 8


def test_the_hooks_of_a_later_vllm_tell_it_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """There ``insert`` has the request, and uses are told by ``on_request_access``."""
    now = [0.0]
    monkeypatch.setattr(vllm_policy.AgentCachePolicy, "clock", staticmethod(lambda: now[0]))
    policy = vllm_policy.AgentCachePolicy(8)
    for at, (session, length) in enumerate([(1, 4), (2, 4)]):
        now[0], context = float(10 * at), ReqContext(str(session))
        for place, key in enumerate(keys(session, length)):
            context.set_offload_key_position(key, place)
            chunk = ChunkStatus(4 * at + place)
            chunk.ref_cnt = 0
            policy.insert(key, chunk, context)
        policy.on_request_access(keys(session, length), context, inserted=True)
    assert [key for key, _ in policy.evict(3, set())] == keys(1, 4, first=1)[::-1]


def test_a_chain_is_worth_more_the_sooner_its_kind_comes_back() -> None:
    pauses = vllm_policy._Pauses()
    kinds = [vllm_policy._Chain(pauses=1, mean=int(pauses.octaves(1000 * seconds))) for seconds in (2, 200)]
    for _ in range(40):
        pauses.learn(kinds[0], 2.0, True)
        pauses.learn(kinds[1], 200.0, True)
    assert pauses.worth(kinds[0], 1.0) > 5 * pauses.worth(kinds[1], 1.0)
    assert pauses.worth(kinds[0], 60.0) < pauses.worth(kinds[0], 1.0), "it has most probably gone"
