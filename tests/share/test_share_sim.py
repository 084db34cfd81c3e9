"""What another process writes into a pool on the sim device: a reservation declares it, to the token, and nothing else
is passed over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from groups_lab import CROSS, FULL, RECURRENT, WINDOWED
from kvpool import KVCacheManager, MemoryOptions, PagedKV, attach, scatter_kv
from kvpool.device.sim import RaceError, SimDevice, UndeclaredWrite
from kvpool.device.sim.shadow import Shadow
from kvpool.errors import ReservationExpired
from kvpool.pool import Reservation
from tests.race.lab import OTHERS, SOME, Lab
from tests.race.test_races import Scenario, X, Y, cached, run
from tests.seeds import some_of

Make = Callable[..., Lab]


@pytest.fixture
def make_lab() -> Iterator[Make]:
    """Opens shared pools of tiny blocks (two tokens)."""
    opened: list[Lab] = []

    def build(P: int = 6, S: int = 4, **options: Any) -> Lab:
        opened.append(Lab(P, S, memory=MemoryOptions(shared=True), **options))
        return opened[-1]

    yield build
    for lab in opened:
        if not lab.cache.closed:
            assert lab.findings() == []


def write(lab: Lab, table: Sequence[int], tokens: Sequence[int], start: int) -> None:
    """Another process brings tokens from ``start`` on. It declares nothing to the device: it does not know of it."""
    with attach(lab.cache.memory.share()) as there:
        expected = lab.expected.of((None, None), [(token, 0) for token in tokens])
        for i in range(start, len(tokens)):
            there.pool.view(np.uint8).reshape(*there.pool.shape[:-1], -1)[:, :, table[i // lab.T], i % lab.T] = (
                expected[i]
            )


def serve(lab: Lab, first: int) -> None:
    """Admits, writes, commits, evicts, and onboards again."""
    for prompt in ([first, 1, 2, 3, 4], [first + 50, 1, 2, 3, 4], [first, 1, 2, 3, 4]):
        lab.release(lab.add(prompt))
    lab.sim.run()


@pytest.mark.parametrize(("seed", "progress"), some_of(len(SOME), SOME + OTHERS))
def test_a_reservation_declares_what_another_process_writes_until_it_is_committed(
    make_lab: Make, seed: int, progress: float
) -> None:
    lab = make_lab(P=7, seed=seed, progress=progress)
    cached(lab, X)
    with lab.cache.imports.reserve(lab.prompt([*X[:2], 7, 8, 9])) as reservation:
        assert reservation.skip_prefix_n_tokens == 2
        for done in (3, 5):
            write(lab, reservation.blocks.tolist(), [*X[:2], 7, 8, 9][:done], 2)
            serve(lab, 100 * done)
            lab.sim.check()
        reservation.commit()
    serve(lab, 900)
    assert lab.add([*X[:2], 7, 8, 9, 10]).cached == 5, "the engine compares every byte of it"


def commit(lab: Lab, reservation: Reservation) -> None:
    reservation.commit()


def abort(lab: Lab, reservation: Reservation) -> None:
    reservation.abort()


def revoke(lab: Lab, reservation: Reservation) -> None:
    assert lab.cache.revoke("loader") == 1


def reset(lab: Lab, reservation: Reservation) -> None:
    lab.cache.clear(force=True)


ENDS = [commit, abort, revoke, reset]


@pytest.mark.parametrize("end", ENDS)
def test_what_another_process_writes_after_the_end_is_found(
    make_lab: Make, end: Callable[[Lab, Reservation], None]
) -> None:
    lab = make_lab()
    reservation = lab.cache.imports.reserve(lab.prompt(Y), owner="loader")
    table = reservation.blocks.tolist()
    write(lab, table, Y, 0)
    end(lab, reservation)
    lab.sim.check()
    write(lab, table, [31, 32, 33], 0)
    with pytest.raises(UndeclaredWrite, match=f"block {table[0]} tokens \\[0, 1\\]"):
        lab.sim.check()


@pytest.mark.parametrize(("seed", "progress"), some_of(len(SOME), SOME + OTHERS))
def test_what_another_process_writes_after_its_deadline_reaches_nobody_before_the_abort(
    make_lab: Make, seed: int, progress: float
) -> None:
    lab = make_lab(P=7, seed=seed, progress=progress)
    reservation = lab.cache.imports.reserve(lab.prompt(Y), owner="loader", deadline_seconds=0.01)
    table = reservation.blocks.tolist()
    lab.clock.now += 10
    assert reservation.overdue
    serve(lab, 300)
    write(lab, table, Y, 0)
    serve(lab, 400)
    lab.sim.check()
    with pytest.raises(ReservationExpired):
        reservation.commit()
    reservation.abort()
    serve(lab, 500)
    assert lab.add([*Y, 6]).cached == 0


@pytest.mark.parametrize("prompt", [X[:2], Y])
def test_what_another_process_writes_without_a_reservation_is_found(make_lab: Make, prompt: list[int]) -> None:
    lab = make_lab()
    write(lab, [0, 1, 2], prompt, 0)
    with pytest.raises(UndeclaredWrite, match="block 0 tokens"):
        lab.sim.check()


def test_tokens_that_the_pool_has_and_those_after_the_end_of_a_reserved_prompt_are_not_declared(
    make_lab: Make,
) -> None:
    """A block of which the pool has one token: the loader may write the other one."""
    lab = make_lab()
    cached(lab, X)
    reservation = lab.cache.imports.reserve(lab.prompt([X[0], 8, 9]))
    assert reservation.skip_prefix_n_tokens == 1
    first, last = reservation.blocks.tolist()
    pool = lab.cache.memory.device_pool
    pool[:, :, first, 1], pool[:, :, last, 0] = 5, 5
    lab.sim.check()
    for block, token in ((first, 0), (last, 1)):
        pool[:, :, block, token] = 5
        with pytest.raises(UndeclaredWrite, match=f"block {block} tokens \\[{token}\\]"):
            lab.sim.check()
    reservation.abort()


def test_a_loader_that_names_its_stream_declares_itself(make_lab: Make) -> None:
    lab = make_lab()
    with lab.cache.imports.reserve(lab.prompt(Y), stream=lab.b) as reservation:
        write(lab, reservation.blocks.tolist(), Y, 0)
        with pytest.raises(UndeclaredWrite):
            lab.sim.check()


def test_in_a_pool_that_is_not_shared_nobody_else_writes() -> None:
    with Lab(4, 0).cache as cache:
        reservation = cache.imports.reserve([1, 2])
        cache.memory.device_pool[:, :, reservation.blocks] = 3
        with pytest.raises(UndeclaredWrite):
            cache.core.device.check()  # type: ignore[attr-defined]
        reservation.abort()


@pytest.mark.parametrize("what", ["reads", "writes"])
def test_a_kernel_in_a_block_that_another_process_fills_is_a_race(make_lab: Make, what: str) -> None:
    lab = make_lab()
    reservation = lab.cache.imports.reserve(lab.prompt(Y))
    rows = lab.rows(reservation.blocks.tolist(), 2, 4)
    lab.sim.launch(lab.a, lambda: None, **{what: rows})
    with pytest.raises(RaceError, match="another process"):
        lab.sim.check()
    with lab.sim.host_access(reads=rows):
        pass
    with pytest.raises(RaceError, match="another process"):
        lab.sim.check()
    reservation.abort()
    lab.sim.launch(lab.a, lambda: None, **{what: rows})
    lab.sim.check()


def another_process_in_a_block_that_is_being_offloaded(lab: Lab) -> None:
    cached(lab, X)
    with lab.cache.imports.reserve(lab.prompt(Y)) as reservation:
        write(lab, reservation.blocks.tolist(), Y, 0)
        reservation.commit()
    assert lab.cache.stats().offloaded_blocks == 1
    lab.add([*Y, 6])


def another_process_after_tokens_that_are_being_copied(lab: Lab) -> None:
    cached(lab, X)
    with lab.cache.imports.reserve(lab.prompt([X[0], 9])) as reservation:
        assert reservation.skip_prefix_n_tokens == 1
        write(lab, reservation.blocks.tolist(), [X[0], 9], 1)
        reservation.commit()
    assert lab.add([X[0], 9, 5]).cached == 2


RACES: dict[Scenario, tuple[str, dict[str, Any]]] = {
    another_process_in_a_block_that_is_being_offloaded: ("reader_waits", {"P": 3, "S": 2}),
}


SCENARIOS = [*RACES, another_process_after_tokens_that_are_being_copied]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_another_process_races_with_nobody(scenario: Scenario) -> None:
    for seed, progress in SOME:
        failures = run(
            scenario,
            {"P": 4, "S": 2, **RACES.get(scenario, ("", {}))[1], "memory": MemoryOptions(shared=True)},
            seed,
            progress,
        )
        assert not failures, f"seed {seed}, progress {progress}: {failures}"


@pytest.mark.parametrize("scenario", RACES, ids=lambda scenario: scenario.__name__)
def test_the_race_with_another_process_is_found_without_its_guard(scenario: Scenario) -> None:
    guard, options = RACES[scenario]
    for seed, progress in SOME:
        assert run(scenario, {**options, "memory": MemoryOptions(shared=True)}, seed, progress, guard), (
            f"seed {seed}, progress {progress}: nothing was found"
        )


def test_what_is_written_while_the_device_compares_is_not_taken_for_undeclared(
    make_lab: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks of the device at one block."""
    lab = make_lab(P=8)
    reservation = lab.cache.imports.reserve(lab.prompt(Y))
    block, other = int(reservation.blocks[0]), lab.add([40, 41])
    compare, values = Shadow.differences, iter(range(1, 1000))

    def writes_first(self: Shadow, *blocks: Any) -> Any:
        lab.cache.memory.device_pool[:, :, block] = next(values)
        return compare(self, *blocks)

    monkeypatch.setattr(Shadow, "differences", writes_first)
    serve(lab, 100)
    lab.sim.check()
    lab.cache.memory.device_pool[:, :, lab.table(other)[0]] += 1
    with pytest.raises(UndeclaredWrite, match=f"block {lab.table(other)[0]}"):
        lab.sim.check()
    monkeypatch.undo()
    lab.write(other, 0)
    reservation.abort()


def test_every_group_declares_what_its_loader_writes() -> None:
    sim, tokens = SimDevice(progress=0.3), list(range(22))
    options: dict[str, Any] = {"device": sim, "memory": MemoryOptions(shared=True), "max_sequence_tokens": 64}
    groups = {"groups": [FULL, WINDOWED, RECURRENT, CROSS], "device_blocks": [12, 12, 8, 4]}
    with KVCacheManager(**groups, **options) as cache, attach(cache.memory.share()) as there:
        reservation = cache.imports.reserve(tokens, encoder_tokens=7)
        blocks = [reservation.blocks_of(group) for group in range(4)]
        for group, pools in enumerate(there.pools):
            slots = reservation.slot_mapping_of(group)
            for layout, pool in zip(there.layouts[group], pools, strict=True):
                shape = (layout.planes, layout.layers, len(slots), layout.kv_heads, layout.head_dim)
                scatter_kv(PagedKV.of_pool(layout, pool), slots, np.ones(shape, layout.storage_dtype))
            assert np.count_nonzero(slots >= 0) == (22, 22, np.count_nonzero(blocks[group] >= 0), 7)[group]
        sim.check()
        reservation.commit()
        assert cache.match_prefix([*tokens, 1]).tokens > 0
        for group, pools in enumerate(there.pools):
            for pool in pools:
                pool[0, 0, blocks[group][blocks[group] >= 0][0]] += 1
                with pytest.raises(UndeclaredWrite):
                    sim.check()
    sim.close()
