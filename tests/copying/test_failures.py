"""Failure half-way: a device that fails at every move of every verb, decisions after it, Ctrl-C in the middle."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from failing import SCENARIOS, Rig, T, on_host_only, rewound_or_failed
from kvpool import KVCacheManager, OutOfBlocks, PoolClosed
from kvpool.device.regions import SOURCE, TARGET
from kvpool.errors import BlockNotFound, DeviceError
from tests import debug
from tests.seeds import seeds, some_of
from tests.waiting import until


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    opened: list[Rig] = []

    def build(P: int, S: int, **options: Any) -> Rig:
        opened.append(Rig(P, S, **options))
        return opened[-1]

    yield build
    for each in opened:
        each.cache.close()


# -- a device that fails at move k -------------------------------------------------------------


def expected_losses(moves: NDArray[np.int64], refused: Callable[[int], bool]) -> set[int]:
    """Targets that do not hold what their last move should have brought."""
    lost: set[int] = set()
    for i, move in enumerate(moves):
        (lost.add if refused(i) or int(move[SOURCE]) in lost else lost.discard)(int(move[TARGET]))
    return lost


def moves_of(make_rig: Callable[..., Rig], name: str) -> NDArray[np.int64]:
    """The moves of a scenario where nothing fails."""
    rig = make_rig(12, 12)
    act = SCENARIOS[name][0](rig)
    rig.device.arm()
    act(rig)
    rig.check_everything()
    return np.concatenate(rig.device.seen)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_scenarios_make_the_moves_that_they_are_about(make_rig: Callable[..., Rig], name: str) -> None:
    kinds = {
        (source >= 12, target >= 12, tokens < T) for source, target, tokens, _ in moves_of(make_rig, name).tolist()
    }
    assert kinds == SCENARIOS[name][1]


@pytest.mark.parametrize(
    ("rest", "every"),
    [
        pytest.param(False, False, id="one of each kind"),
        pytest.param(False, True, id="one move", marks=pytest.mark.exhaustive),
        pytest.param(True, True, id="all from there", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_failing_move_loses_its_target_and_nothing_else(
    make_rig: Callable[..., Rig], name: str, rest: bool, every: bool
) -> None:
    moves = moves_of(make_rig, name)
    kinds = {tuple(kind): k for k, kind in enumerate(np.sign(moves[:, :3] - [12, 12, T]).tolist())}
    for k in range(len(moves)) if every else sorted({0, *kinds.values()}):

        def refused(place: int, k: int = k) -> bool:
            return place >= k if rest else place == k

        rig = make_rig(12, 12)
        act = SCENARIOS[name][0](rig)
        rig.check_everything()
        state = rig.cache.core.tokens
        before = live_rows(rig)
        rig.device.arm(refused)
        act(rig)
        rig.device.arm()
        lost = expected_losses(moves, refused)
        assert rig.lost == len(lost)
        gone = {target for target in lost if target < 12}
        rows = {row for row in live_rows(rig) if gone & set(state.table[row].tolist())}
        assert {i & 0xFFFFFFFF for i in rig.failed} == rows
        assert name != "batch" or rows - before or not gone
        rig.check_everything()
        rig.check_failed()
        carry_on(rig)


def live_rows(rig: Rig) -> set[int]:
    return set(np.flatnonzero(rig.cache.core.tokens.sequences["live"]).tolist())


def carry_on(rig: Rig) -> None:
    """The pool goes on: everything is found, reused and moved as before."""
    for sequence in list(rig.live.values()):
        rig.release(rig.commit(sequence))
    for start in (0, 100, 300, 0, 9000, 300):
        rig.release(rig.add(range(start, start + 14)))
        rig.check_everything()


GONE = DeviceError("gone", completed=1, sticky=True)


USES: list[Callable[[KVCacheManager], object]] = [
    lambda cache: cache.add_sequence([1]),
    lambda cache: cache.append_tokens(0, [1]),
    lambda cache: cache.commit(0),
    lambda cache: cache.rewind(0, [1]),
    lambda cache: cache.release(0),
    lambda cache: cache.block_table(0),
    lambda cache: cache.match_prefix([1]),
    lambda cache: cache.blocks_needed(sequences=0),
    lambda cache: cache.evictable_after_release(0),
    lambda cache: cache.sequence_length(0),
    lambda cache: cache.content.prefetch([1]),
    lambda cache: cache.pin([bytes(16)]),
    lambda cache: cache.pin_blocks(0),
    lambda cache: cache.revoke(""),
    lambda cache: cache.content.refresh(),
    lambda cache: cache.events(),
    lambda cache: cache.clear(),
]


@pytest.mark.parametrize(
    ("error", "name"),
    some_of(
        len(SCENARIOS) + 2,
        [
            *((GONE, name) for name in SCENARIOS),
            *((error, name) for name in SCENARIOS for error in (OSError("gone"), MemoryError())),
        ],
    ),
    ids=repr,
)
def test_a_device_that_is_gone_closes_the_pool(make_rig: Callable[..., Rig], error: Exception, name: str) -> None:
    """An error of a type that no device promises counts as one that will not go away."""
    rig = make_rig(12, 12)
    act = SCENARIOS[name][0](rig)
    moves = moves_of(make_rig, name)

    def fail() -> None:
        if error is GONE:
            rig.device.inner.copy_blocks(rig.device.seen[-1][:1])
        raise error

    rig.device.arm()
    rig.device.before = fail
    with pytest.raises(PoolClosed) if name in ("batch", "append", "rewind") else nullcontext():
        act(rig)
    assert len(rig.device.seen) == 1, "it was asked again"
    assert rig.lost == len(expected_losses(moves, lambda i: i >= (error is GONE)))
    rig.check_everything(closed=True)
    cache, before = rig.cache, debug.dump(rig.cache.core.tokens)
    for use in USES:
        with pytest.raises(PoolClosed, match="gone|MemoryError"):
            use(cache)
    assert debug.dump(cache.core.tokens) == before and len(rig.device.seen) == 1
    cache.verify()
    assert cache.stats().device.capacity == 12
    assert len(cache.close().sequences) == cache.stats().sequences


@seeds(5, 80)
def test_after_random_failures_every_cached_byte_is_right(make_rig: Callable[..., Rig], seeds: range) -> None:
    lost = 0
    for seed in seeds:
        print("seed", seed)
        rng = random.Random(seed)
        rig = make_rig(rng.randint(3, 9), rng.randint(0, 6), partial_reuse=rng.random() < 0.8)
        rig.device.arm(lambda place, rng=rng: rng.random() < 0.2)
        for _ in range(40):
            with suppress(OutOfBlocks):
                act_at_random(rig, rng)
            rig.check_everything()
            if rng.random() < 0.2:
                rig.check_failed()
        rig.device.arm()
        rig.check_failed()
        lost += rig.lost
    assert lost, "the device never failed"


def act_at_random(rig: Rig, rng: random.Random) -> None:
    prompt = [*range(8 * rng.randint(0, 1), 16)][: rng.randint(1, 14)] + [rng.randint(90, 92)] * rng.randint(0, 5)
    sequence = rng.choice([*rig.live.values(), None])
    verb = rng.randrange(8)
    if verb < 2 or sequence is None:
        rig.admit([prompt, prompt[: rng.randint(1, 9)]][: rng.randint(1, 2)], retention=None)
    elif verb == 2:
        room = rig.cache.device_blocks * rig.cache.tokens_per_block - len(sequence)
        rig.append(sequence, [rng.randint(0, 9)] * min(room, rng.randint(1, 9)))
    elif verb == 3:
        count = rng.randint(0, len(sequence))
        rig.cache.rewind(sequence.id, count)
        rewound_or_failed(rig, sequence, count)
    elif verb == 4:
        rig.cache.content.prefetch(prompt)
    elif verb == 5:
        rig.cache.content.offload(prompt)
    else:
        rig.release(rig.commit(sequence), store=verb == 6 or rng.random() < 0.7)


# -- decisions that wait for a batch that then fails ----------------------------------------------


def in_flight(rig: Rig, start: Callable[[], object], meanwhile: Callable[[], Any]) -> Any:
    """Return the outcome of ``meanwhile``, decided while the moves of ``start`` are being enqueued, the first of which
    then fails."""
    entered, go = threading.Event(), threading.Event()

    def gate() -> None:
        rig.device.before = None
        entered.set()
        go.wait()

    rig.device.arm(lambda place: place == 0)
    rig.device.before = gate
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(start)
        assert entered.wait(600)
        second = threads.submit(meanwhile)
        try:
            until(lambda: rig.cache.stats().sequences or rig.cache.stats().leases or second.done(), "decision")
        finally:
            go.set()
        first.result()
    rig.device.arm()
    return second.exception() or second.result()


@pytest.mark.parametrize(
    "prompt", [[0, 1, 2, 3, 50], [0, 1, 2, 60], [0, 1, 2, 3, 4, 70]], ids=["hit", "part", "hit and part"]
)
def test_what_builds_on_a_block_that_never_came_is_lost_too(make_rig: Callable[..., Rig], prompt: list[int]) -> None:
    """The second decision sees the first one's target as cached on the device; nothing of it may survive."""
    rig = make_rig(6, 6)
    on_host_only(rig, 0, 8)
    new = in_flight(rig, lambda: rig.cache.content.prefetch(range(8)), lambda: rig.cache.add_sequence(prompt))
    assert rig.arrived(new, prompt) is None, "it rests on bytes that never came"
    assert rig.lost == (2 if prompt == [0, 1, 2, 60] else 1)
    rig.check_everything()
    rig.check_failed()
    carry_on(rig)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_reader_gets_no_lease_of_bytes_that_never_came(make_rig: Callable[..., Rig], tier: str) -> None:
    rig = make_rig(6, 6)
    cache, key = rig.cache, rig.prompt(range(4)).keys[0]
    if tier == "device":
        on_host_only(rig, 0, 4)
        got = in_flight(rig, lambda: cache.content.prefetch(range(4)), lambda: cache.pin([key], tier="device"))
    else:
        rig.seed(range(4), committed=4)
        got = in_flight(rig, lambda: cache.content.offload(range(4)), lambda: cache.find_and_pin_host(key))
    rig.check_everything()
    assert got is None or isinstance(got, BlockNotFound)
    assert cache.leases == []


# -- Ctrl-C ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True], ids=["", "and the device fails"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_next_call_enqueues_what_an_interrupt_has_left(
    make_rig: Callable[..., Rig], name: str, fails: bool
) -> None:
    dumps = []
    for interrupted in (False, True):
        rig = make_rig(12, 12)
        act = SCENARIOS[name][0](rig)
        rig.device.arm((lambda place: place == 1) if fails else None)
        before = set(rig.cache.sequences)
        if interrupted:
            rig.device.before = lambda: signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                act(rig)
            rig.device.before = None
            rig.cache.content.refresh(0)
        else:
            act(rig)
        admitted = [new for new in rig.cache.sequences if new not in before]
        if admitted or interrupted:
            rig.live.clear()
        if admitted:
            rig.cache.release(admitted)
        rig.check_everything()
        assert rig.lost == fails
        dumps.append(debug.dump(rig.cache.core.tokens))
    assert dumps[0] == dumps[1], "not what the call does when nobody interrupts it"


def test_an_interrupt_right_before_a_change_changes_nothing(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(6, 6)
    rig.seed(range(8), committed=8)
    keys = rig.prompt(range(8)).keys
    lease = rig.cache.pin(keys, owner="a")
    for call in (lambda: rig.cache.pin(keys), lambda: rig.cache.pin_blocks([0]), lease.close, rig.cache.clear):
        before = debug.dump(rig.cache.core.tokens)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(rig.cache.core.changes, "run", lambda *_, **__: signal.raise_signal(signal.SIGINT))
            call()
        assert debug.dump(rig.cache.core.tokens) == before and rig.cache.leases == [lease]
        rig.check_everything()


# -- what fails elsewhere ----------------------------------------------------------------------------


def test_an_exit_raised_by_the_device_does_not_copy_a_batch_twice(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(2, 6)
    on_host_only(rig, 0, 8)
    rig.seed(range(100, 108), committed=8)

    def leave() -> None:
        rig.device.before = None
        rig.device.inner.copy_blocks(rig.device.seen[-1])
        raise SystemExit

    rig.device.before = leave
    with pytest.raises(SystemExit):
        rig.cache.content.prefetch(range(8))
    with suppress(PoolClosed):
        rig.cache.content.prefetch([1])
    rig.check_everything(closed=True)


def test_a_device_that_cannot_synchronize_can_be_closed(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(4, 4)

    def fail() -> None:
        raise DeviceError("gone", sticky=True)

    monkeypatch.setattr(rig.device, "synchronize", fail)
    with suppress(DeviceError):
        rig.cache.close()
    rig.cache.close()
    assert rig.cache._pools.closed
