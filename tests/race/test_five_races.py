"""The five races of ``docs/races.md``, one test or two for each, with the block numbers of the page. They run in the
interpreter, and those of streams on the sim device."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from engine import small_layout
from kvpool import KVCacheManager, PagedKV, scatter_kv
from kvpool.device.sim import RaceError
from tests.race.lab import SOME, Lab
from tests.race.test_interleavings import explored

# ----------------------------------------
# 1. A victim is taken twice, or a pin comes between.


def every_schedule(scene: str, function: str) -> None:
    """One thread is stopped before each line of a function, in turn, and the other one runs. Each such schedule must
    end right."""
    report = json.loads(explored(scene, "--inside", function))
    if report["failed"] is not None:
        first, *_, last = report["failure"].splitlines()
        raise AssertionError(f"{first}: {last}")
    assert report["schedules"] > 10


@pytest.mark.parametrize(
    "scene",
    [pytest.param("victim_of_growth", id="two that evict"), pytest.param("host_pin", id="one that evicts and a pin")],
)
def test_a_victim_is_chosen_and_taken_in_one_step(scene: str) -> None:
    every_schedule(scene, "take_victim")


def test_a_block_is_looked_up_and_pinned_in_one_step() -> None:
    every_schedule("host_pin", "pin_keys")


# ----------------------------------------
# 2. A staged host buffer is overwritten under a pending gather.

ABSENT = -7


def two_steps(rows: tuple[int, int], seed: int, progress: float) -> tuple[list[str], list[str]]:
    """A scheduler that runs a step ahead: step 1 hands over the table of A, step 2 that of B, each into a table and a
    row of its own, while the stream has done neither. What a kernel behind each reads, where it is wrong; and what the
    device found."""
    lab = Lab(6, 0, seed=seed, progress=progress)
    a, b = lab.add([1, 2, 3, 4, 5]), lab.add([11, 12, 13, 14, 15])
    gate, wrong = lab.sim.stall(lab.a), list[str]()
    for number, (sequence, row) in enumerate(zip((a, b), rows, strict=True), 1):
        table, wanted = np.full((2, 3), ABSENT, np.int32), lab.table(sequence)

        def kernel(number: int = number, table: Any = table, row: int = row, wanted: Any = wanted) -> None:
            if table[row].tolist() != wanted:
                wrong.append(f"step {number} reads blocks {table[row].tolist()} in row {row}, and not {wanted}")

        lab.cache.tables.copy_batch_block_offsets(table, sequence.id, rows=row)
        lab.sim.launch(lab.a, kernel, loads=[table])
    gate.open()
    with suppress(RaceError):
        lab.sim.run()
    return wrong, [re.split("[;\n]", line)[0] for line in lab.findings()]


@pytest.mark.parametrize("rows", [(0, 0), (0, 1)], ids=["v1, the ids", "v2, the ids and the rows"])
def test_a_step_reads_the_table_that_was_staged_for_it(rows: tuple[int, int]) -> None:
    for seed, progress in SOME:
        wrong, races = two_steps(rows, seed, progress)
        assert not wrong + races, f"seed {seed}, progress {progress}: {'; '.join(wrong + races[:1])}"


# ----------------------------------------
# 3. A shared prefix is overwritten while another request reads it.


def load_a_chunk(seed: int, progress: float) -> tuple[list[str], list[str]]:
    """A reads its prompt, tokens 0 to 9 in blocks 0, 1 and 2. A store brings a chunk of 12 tokens for B, which shares
    blocks 0 and 1; those 8 tokens of the chunk are from another run, with other bytes. What A reads, where it is wrong;
    and what the device found."""
    lab = Lab(6, 0, T=4, seed=seed, progress=progress)
    a, wrong, prompt = lab.commit(lab.add(range(10))), list[str](), [*range(8), *range(30, 34)]
    assert lab.table(a) == [0, 1, 2]
    reservation = lab.cache.imports.reserve(lab.prompt(prompt), stream=lab.b)
    table, skip = reservation.blocks.tolist(), reservation.skip_prefix_n_tokens
    assert table == [0, 1, 3] and skip == 8
    tokens = np.stack(lab.expected.of((None, None), [(token, 0) for token in prompt]))
    tokens[:8] ^= 1
    chunk = np.ascontiguousarray(tokens.transpose(2, 1, 0, 3, 4)).view(lab.cache.layout.storage_dtype)
    paged = PagedKV.of_pool(lab.cache.layout, lab.cache.memory.device_pool)
    slots = np.array([table[i // 4] * 4 + i % 4 for i in range(12)])

    def arrive() -> None:
        scatter_kv(paged, slots, chunk, skip_prefix_n_tokens=skip)

    def attend() -> None:
        other = [i for i in range(8) if not np.array_equal(lab.block(i // 4)[:, :, i % 4], a.bytes[i])]
        if other:
            wrong.append(f"A reads tokens {other} of another run in blocks {sorted({i // 4 for i in other})}")

    lab.sim.launch(lab.b, arrive, writes=lab.rows(table, skip, 12))
    lab.sim.launch(lab.a, attend, reads=lab.rows([0, 1], 0, 8))
    reservation.commit()
    return wrong, [re.split("[;\n]", line)[0] for line in lab.findings()]


def test_a_chunk_that_is_loaded_leaves_a_prefix_alone_that_another_request_reads() -> None:
    runs = {(seed, progress): load_a_chunk(seed, progress) for seed, progress in SOME}
    (seed, progress), (wrong, races) = max(runs.items(), key=lambda item: sum(map(len, item[1])))
    assert not wrong + races, f"seed {seed}, progress {progress}: {'; '.join(wrong + races[:1])}"


# ----------------------------------------
# 4. A counter on the wrong tier.


def test_counts_stay_on_the_tier_of_their_block() -> None:
    """Prompts of one block each. The ninth is the first that evicts: its block was the first one's, and that content
    moves to the host."""
    with KVCacheManager(small_layout(4), device_blocks=8, host_blocks=4, device="cpu", secret=bytes(32)) as cache:

        def counts() -> str:
            device, host = cache.stats().device, cache.stats().host
            return f"device {device.free} free, {device.used} used; host {host.free} free, {host.used} used"

        for number in range(1, 21):
            sequence = cache.add_sequence(list(range(4 * number, 4 * number + 4)))
            cache.commit(sequence)
            held = counts()
            cache.release(sequence)
            released = counts()
            assert (held, released) == (
                "device 7 free, 1 used; host 4 free, 0 used",
                "device 8 free, 0 used; host 4 free, 0 used",
            ), f"prompt {number} of one block is held: {held}. It is released: {released}"
        assert cache.stats().offloaded_blocks == 12
        cache.verify()


# ----------------------------------------
# 5. Reuse that shrinks between estimate and admission.

BUDGET = 28


def test_a_batch_reuses_what_was_promised_before_it() -> None:
    """Nine device blocks: B's prefix in two of them, which are the oldest content, other content in three, four empty.
    A needs six blocks. The scheduler has planned the step with what ``match_prefix`` says of both."""
    with KVCacheManager(small_layout(4), device_blocks=9, host_blocks=0, device="cpu", secret=bytes(32)) as cache:
        for first, count in ((0, 8), (50, 4), (60, 4), (70, 4)):
            sequence = cache.add_sequence(list(range(first, first + count)))
            cache.commit(sequence)
            cache.release(sequence)
        prompts = [cache.block_keys(list(range(100, 124))), cache.block_keys([*range(8), 90])]
        promised = [cache.match_prefix(prompt).tokens for prompt in prompts]
        assert promised == [0, 8] and cache.stats().device.free == 9
        admission = cache.add_sequence_batch(prompts)
        got = admission.cached_tokens.tolist()
        computed = sum(map(len, prompts)) - sum(got)
        assert got == promised, (
            f"B was promised {promised[1]} cached tokens and got {got[1]}: the step computes {computed} tokens, "
            f"and its budget is {BUDGET}"
        )
        assert computed <= BUDGET
        cache.release(admission.ids)
