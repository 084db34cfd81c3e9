"""Operations that are applied together: what calls one after the other do, with nobody in between, or nothing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from engine import Engine, small_layout
from failing import Rig
from kvpool import BlockNotFound, KVCacheManager, LayerGroup, LeaseExpired, OutOfBlocks, OutOfSequences, UnknownSequence
from kvpool.pool import operations as op
from tests import debug
from tests.race.lab import Lab

Make = Callable[..., Engine]
T = 4


def picture(cache: KVCacheManager) -> tuple[bytes, list[bytes], list[int], list[int]]:
    """Every byte of the state and of what its policy knows, open leases, and what waits to be enqueued."""
    transfer, states = cache.core.transfer, cache.core.states
    books = [policy_book for state in states for policy_book in debug.book(state)]
    return debug.dump_all(states), books, [lease.id for lease in cache.leases], [transfer._decided, *transfer._queue]


# -- the same as one after the other -----------------------------------------------------------------------------------

GROUPS: dict[str, list[dict[str, Any]]] = {
    "full": [{}],
    "window": [{"window": 6, "sinks": 3}],
    "recurrent": [{"kind": "recurrent", "snapshot_tokens": 8}],
    "all": [{}, {"window": 4}, {"kind": "recurrent", "snapshot_tokens": 4}],
}


class Twin:
    """A pool whose ids and keys are those of any other of its kind. Its clock is not asked under the lock."""

    def __init__(self, groups: str, device: str = "cpu", policy: str = "lru") -> None:
        kinds = GROUPS[groups]
        made = [LayerGroup(small_layout(1 if "kind" in rule else T), **rule) for rule in kinds]
        self.cache = KVCacheManager(
            groups=made,
            device_blocks=[9] * len(made),
            host_blocks=[5] * len(made),
            max_sequences=5,
            max_sequence_tokens=48,
            secret=bytes(32),
            clock=self.now,
            device=device,
            event_capacity=64,
            policy=policy,
            **({"tokens_per_block": T} if kinds[0].get("kind") else {}),
        )
        for state in self.cache.core.states:
            state.sequences["generation"] = 1
        self.leases: list[Any] = []

    def now(self) -> int:
        assert not hasattr(self, "cache") or not self.cache.core.lock._is_owned(), "the caller's code under the lock"
        return 7

    def run(self, operation: op.Operation) -> Any:
        """By the verb of its own."""
        cache, arguments = self.cache, operation.arguments
        if operation.verb == "match":
            return cache.match_prefix(*arguments)
        if operation.verb == "pin":
            return cache.pin(arguments[0], owner=arguments[1], tier=arguments[2], stream=0)
        if operation.verb == "unpin":
            return arguments[0].close()
        if operation.verb == "add":
            retention, priority, ttl, some, encoder = arguments[1:]
            return cache.add_sequence_batch(
                arguments[0],
                retention=retention,
                decode_priority=priority,
                decode_ttl_ms=ttl,
                allow_partial_batch=some,
                encoder_tokens=encoder,
                stream=0,
            )
        if operation.verb == "append":
            return cache.append_tokens(*arguments, stream=0)
        if operation.verb == "commit":
            return cache.commit(*arguments, stream=0)
        return cache.release(arguments[0], store=arguments[1], stream=0)


def in_numbers(result: Any) -> Any:
    """What a verb returned, in numbers."""
    if hasattr(result, "blocks"):
        return result.blocks.tolist()
    return [np.asarray(field).tolist() for field in result[:-1]] if hasattr(result, "refused") else result


class Drawn:
    """Random lists of operations, for a pool and its twin."""

    def __init__(self, seed: int, groups: str, policy: str) -> None:
        self.random, self.groups, self.policy = Random(seed), groups, policy
        self.pool = Twin(groups, policy=policy)
        self.history: list[Callable[[Twin], list[op.Operation]]] = []

    def draw(self) -> Callable[[Twin], list[op.Operation]]:
        """A list of operations, by numbers, for any twin in the same state."""
        random, cache = self.random, self.pool.cache
        live = cache.core.live().tolist()
        lengths = {i: int(cache.sequence_length(i)) for i in live}
        makers: list[Callable[[Twin], op.Operation]] = []
        for _ in range(random.randint(1, 5)):
            some = random.sample(live, random.randint(1, len(live))) if live else []
            if random.random() < 0.05:
                some = [*some, random.choice([-1, 5])]
            prompt = [random.randrange(2) for _ in range(random.randint(1, 22))]
            verb = random.choice(["match", "pin", "unpin", "add", "add", "append", "append", "commit", "release"])
            if verb == "match":
                makers.append(lambda twin, prompt=prompt: op.match(prompt))
            elif verb == "pin":
                keys = cache.block_keys(prompt).keys[:1]
                makers.append(lambda twin, keys=keys: op.pin(keys, owner="x"))
            elif verb == "unpin" and self.pool.leases:
                place = random.randrange(len(self.pool.leases))
                makers.append(lambda twin, place=place: op.unpin(twin.leases[place]))
            elif verb == "add":
                prompts, partial = (
                    [prompt[: random.randint(1, 22)] for _ in range(random.choice((1, 2)))],
                    random.random() < 0.3,
                )
                makers.append(lambda twin, p=prompts, some=partial: op.add(p, allow_partial_batch=some))
            elif verb == "append" and some:
                counts = [random.choice((0, 1, 1, 5)) for _ in some]
                makers.append(lambda twin, i=some, c=counts: op.append(i, [1] * sum(c), c))
            elif verb == "commit" and some:
                counts = [lengths.get(i, 3) for i in some] if random.random() < 0.4 else None
                makers.append(lambda twin, i=some, c=counts: op.commit(i, c))
            elif verb == "release" and some:
                store = random.random() < 0.7
                makers.append(lambda twin, i=some[:1], s=store: op.release(i, store=s))
        return lambda twin: [make(twin) for make in makers]

    def note(self, twin: Twin, results: Sequence[Any]) -> None:
        twin.leases += [result for result in results if hasattr(result, "blocks")]

    def again(self) -> Twin:
        """A twin in which the same has happened, one call after the other."""
        twin = Twin(self.groups, policy=self.policy)
        for make in self.history:
            self.note(twin, [twin.run(operation) for operation in make(twin)])
        return twin


@pytest.mark.parametrize(
    ("groups", "policy"), [*((groups, "lru") for groups in GROUPS), ("full", "agent"), ("window", "adaptive")]
)
@pytest.mark.parametrize("seed", range(4))
def test_a_list_does_what_its_verbs_do_or_nothing(groups: str, policy: str, seed: int) -> None:
    drawn, refused, done = Drawn(seed, groups, policy), 0, 0
    cache = drawn.pool.cache
    for _ in range(60):
        make = drawn.draw()
        before = picture(cache)
        try:
            results = cache.apply(make(drawn.pool), stream=0)
        except Exception as error:
            assert picture(cache) == before, f"seed {seed}: {error!r} changed something"
            cache.verify()
            if refused % 8 == 0:
                twin = drawn.again()
                with pytest.raises(type(error)):
                    for operation in make(twin):
                        twin.run(operation)
                twin.cache.close()
            refused += 1
        else:
            done += 1
            drawn.note(drawn.pool, results)
            drawn.history.append(make)
            cache.verify()
    twin = drawn.again()
    assert debug.dump_all(twin.cache.core.states) == debug.dump_all(cache.core.states), f"seed {seed}"
    assert refused > 8 and done > 8, f"seed {seed}: {refused} refused, {done} done"
    assert [in_numbers(lease) for lease in twin.leases] == [in_numbers(lease) for lease in drawn.pool.leases]
    for opened in (twin.cache, cache):
        opened.close()


# -- refused as a whole ------------------------------------------------------------------------------------------------


def test_copies_of_a_refused_list_are_never_made(make: Make) -> None:
    """They would go where the host has other content again."""
    engine = make(P=4, S=1)
    engine.seed(range(4), committed=4)
    engine.seed(range(100, 116), committed=16)
    assert engine.keys(range(4)) == [*engine.cached("host")]
    with pytest.raises(UnknownSequence):
        engine.cache.apply([op.add([[200]]), op.add([[300]]), op.release([77])], stream=0)
    assert engine.cache.prefetch([200, 201, 202, 203, 204]) is not None
    assert engine.add(range(5)).cached == 4, "and its bytes were compared"


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (lambda engine, i: op.append(i, [1] * 22), OutOfBlocks),
        (lambda engine, i: op.append(i, [1] * 40), ValueError),
        (lambda engine, i: op.add([list(range(200, 230))]), OutOfBlocks),
        (lambda engine, i: op.add([list(range(200, 300))]), ValueError),
        (lambda engine, i: op.add([[1], [2], [3]]), OutOfSequences),
        (lambda engine, i: op.pin(engine.prompt(range(90, 94)).keys), BlockNotFound),
        (lambda engine, i: op.commit(i, [2]), ValueError),
        (lambda engine, i: op.commit([i, i]), ValueError),
        (lambda engine, i: op.release([77]), UnknownSequence),
        (lambda engine, i: op.unpin(engine.closed), LeaseExpired),
    ],
    ids=["append", "append never fits", "add", "never fits", "rows", "pin", "counts", "twice", "unknown", "closed"],
)
@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("policy", ["lru", "agent"])
def test_a_refusal_at_any_place_leaves_every_byte(
    make: Make, policy: str, place: int, bad: Callable[[Any, int], op.Operation], error: type[Exception]
) -> None:
    engine: Any = make(P=8, S=3, max_sequences=4, event_capacity=32, policy=policy)
    engine.seed(range(50, 60), committed=10)
    first, two = engine.commit(engine.add(range(6))), engine.add(range(100, 105))
    keys = engine.prompt(range(50, 58)).keys
    engine.closed, lease = engine.cache.pin(keys, stream=0), engine.cache.pin(keys, stream=0)
    engine.closed.close()
    operations = [
        op.append(first.id, [1, 2, 3]),
        op.commit(first.id),
        op.unpin(lease),
        op.add([[*range(50, 60), 9]]),
        op.release(two.id),
        op.match([1]),
    ]
    operations.insert(place, bad(engine, first.id))
    before = picture(engine.cache)
    with pytest.raises(error):
        engine.cache.apply(operations, stream=0)
    assert picture(engine.cache) == before and not lease.closed
    engine.cache.verify()
    engine.check_all()
    del operations[place]
    engine.cache.apply(operations, stream=0)
    assert lease.closed
    engine.live.clear()


def test_a_refusal_leaves_the_names_of_namespaces(make: Make) -> None:
    """Names that nothing bears are forgotten now and then: here half-way, when a sequence of one has been released."""
    cache = make(P=4, max_sequences=1, event_capacity=0).cache
    sequence = cache.add_sequence(cache.block_keys([1, 2, 3], salt="mine"))
    names = cache.core.names
    for i in range(names.LEAST - 1 - len(names.known)):
        names.learn([cache.block_keys([1], salt=f"gone {i}")])
    with pytest.raises(OutOfSequences):
        cache.apply([op.release(sequence), *(op.add([cache.block_keys([4], salt=salt)]) for salt in ("one", "two"))])
    assert cache.keys_of(sequence).salt == "mine"
    cache.release(sequence)


def test_a_step_with_room_copies_no_state(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(P=60, S=8)
    running = [engine.add(range(9 * i, 9 * i + 7)) for i in range(4)]
    ids = [sequence.id for sequence in running]
    taken: list[int] = []
    undo = engine.cache._undo
    monkeypatch.setattr(undo, "take", lambda rows, columns: taken.append(1))
    engine.cache.apply([op.commit(ids), op.release(ids[0]), op.append(ids[1:], [1, 2, 3], [1, 1, 1]), op.add([[1, 2]])])
    assert not taken
    with pytest.raises(UnknownSequence):
        engine.cache.apply([op.append(ids[0], [1]), op.commit(ids[1:])])
    assert not taken  # the first of all is refused
    engine.live.clear()


def test_no_garbage_is_collected_while_lists_of_two_pools_overlap(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that the collector closes half-way would be open again after a refusal, and nobody's. The second pool's
    list is under way when that of the first ends."""
    pools = [make(P=4).cache for _ in range(2)]
    inside, enabled = [threading.Event() for _ in pools], list[bool]()
    first_is_done = threading.Event()
    match = [cache._match for cache in pools]

    def first(keys: Any) -> Any:
        inside[0].set()
        assert inside[1].wait(600)
        return match[0](keys)

    def second(keys: Any) -> Any:
        inside[1].set()
        assert first_is_done.wait(600)
        enabled.append(gc.isenabled())
        return match[1](keys)

    for cache, call in zip(pools, (first, second), strict=True):
        monkeypatch.setattr(cache, "_match", call)
    other = threading.Thread(target=lambda: inside[0].wait(600) and pools[1].apply([op.match([1])]))
    other.start()
    pools[0].apply([op.match([1])])
    first_is_done.set()
    other.join(600)
    assert enabled == [False]
    assert gc.isenabled()


# -- what is not an operation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operations", "error", "says"),
    [
        ("x", TypeError, "operations: expected a list.*got 'x'"),
        ([1], TypeError, r"operations\[0\]: expected one of kvpool.pool.operations.*got 1"),
        ([op.Operation("close", ())], TypeError, "expected one of kvpool.pool.operations"),
        (
            [op.Operation("commit", ())],
            TypeError,
            r"operations\[0\]: expected one of kvpool.pool.operations.*got Operation.*",
        ),
        ([op.Operation("commit", None)], TypeError, "expected one of kvpool.pool.operations"),
        ([("commit", (1,))], TypeError, "expected one of kvpool.pool.operations"),
        (
            [op.pin(np.zeros((1, 2), np.uint64))],
            ValueError,
            "stream: expected the stream that reads the pinned blocks, got None",
        ),
        ([op.append([1, 2], [1, 2])], ValueError, "counts: expected one for each of 2 ids, got None"),
        (
            [op.append(1, [1, 2], [1])],
            ValueError,
            "counts: expected numbers that add up to the 2 entries of tokens, got 1",
        ),
        ([op.release(1, store=1)], TypeError, "store: .*1"),
        ([op.unpin(7)], TypeError, "lease: expected a lease.*got 7"),
        ([op.add([[1]], retention=[])], ValueError, "retention: expected 1, one for each of the prompts, got 0"),
        ([op.add([[1]], decode_priority=101)], ValueError, "decode_priority"),
        ([op.add([[1]], encoder_tokens=[3])], ValueError, "encoder_tokens"),
        ([op.match([])], ValueError, "prompt"),
    ],
)
def test_wrong_arguments_are_named(make: Make, operations: Any, error: type[Exception], says: str) -> None:
    engine = make()
    before = picture(engine.cache)
    with pytest.raises(error, match=says):
        engine.cache.apply(operations)
    assert picture(engine.cache) == before


def test_not_inside_another_call(make: Make) -> None:
    engine = make()
    with engine.cache.core.lock, pytest.raises(RuntimeError, match="apply inside another call"):
        engine.cache.apply([])


# -- one enqueueing ----------------------------------------------------------------------------------------------------


def test_nothing_is_enqueued_before_all_is_decided() -> None:
    rig = Rig(4, 4)
    rig.seed(range(16), committed=16)
    sequence = int(rig.cache.add_sequence([90]))
    lengths: list[int] = []
    rig.device.before = lambda: lengths.append(int(rig.cache.core.tokens.sequences["length"][sequence & 0xFFFFFFFF]))
    rig.cache.apply([op.append(sequence, list(range(7))), op.append(sequence, [1])])
    assert lengths and set(lengths) == {9}
    rig.device.before = None
    rig.cache.release(sequence)
    rig.cache.close()


def test_a_lease_whose_copy_is_refused_is_none_and_the_rest_is_done() -> None:
    rig = Rig(3, 4)
    rig.seed(range(8), committed=8)
    rig.cache.offload(list(range(8)))
    rig.release(rig.add(range(50, 62)), store=False)
    keys = rig.prompt(range(8)).keys
    rig.device.arm(lambda place: place == 1)
    added, lease = rig.cache.apply([op.add([list(range(9))]), op.pin(keys, tier="device")], stream=0)
    assert lease is None and not rig.cache.leases and rig.lost == 1
    rig.failed = added.ids.tolist()
    rig.check_failed()
    rig.cache.close()


def test_streams_are_ordered_as_those_of_single_calls() -> None:
    for seed in range(4):
        lab = Lab(4, 4, seed=seed)
        first = lab.commit(lab.add([1, 2, 3]))
        lab.cache.apply([op.commit(first.id), op.release(first.id)], stream=lab.a)
        del lab.live[first.id]
        added, lease = lab.cache.apply([op.add([[1, 2, 9], [5, 6, 7]]), op.pin(lab.prompt([1, 2]).keys)], stream=lab.b)
        with lab.on(lab.b):
            for new, tokens in zip(added.ids.tolist(), ([1, 2, 9], [5, 6, 7]), strict=True):
                lab.admitted(new, tokens)
        lab.read(lease, [1, 2], lab.b)
        lab.cache.apply([op.unpin(lease), op.release(added.ids)], stream=lab.b)
        lab.live.clear()
        assert not lab.findings(), f"seed {seed}"
