"""The races that ``tests/race`` finds on the sim device, on the cuda device: real CuPy, late streams, wrong bytes."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from engine import Bytes, Clock, Engine, Request, small_layout
from kvpool import KVCacheManager, KVPoolError, MemoryOptions
from kvpool.device.base import Stream
from kvpool.device.cuda import CudaDevice
from kvpool.errors import DeviceError
from tests.emulated import lab
from tests.race import test_races as races
from tests.race import test_sequence_races as drafts
from tests.race.lab import Lab
from tests.race.test_races import Scenario, Unasked

pytestmark = pytest.mark.gpu
SEEDS, COPY_PATHS = range(12), ("plain", "batched", "kernel", "bulk")
RACES = {**races.RACES, **{scenario: race for scenario, race in drafts.DRAFTS.items() if race[0]}}
# These are not races of streams: a lease that the host gets, and calls of other threads.
STREAMS = {
    scenario: guard
    for scenario, (guard, _) in RACES.items()
    if guard not in {"reader_waits", "others_batches_too", "ticket_order"}
}

# The stream that is waited for, where the guard is there: held back, it runs when nothing else can, whatever the seed.
LATE = {
    races.offload_of_a_block_that_the_engine_is_still_writing: "a",
    races.reuse_of_an_evicted_block_before_its_offload_has_read_it: "offload",
    races.onboard_into_a_block_whose_last_reader_is_queued: "a",
    races.hit_on_a_block_whose_write_is_queued_on_another_stream: "a",
    races.reuse_of_a_released_block_on_another_stream: "a",
    races.onboard_from_a_host_block_whose_offload_is_pending: "offload",
    races.read_of_a_block_that_is_being_onboarded: "onboard",
    races.two_evictions_into_one_host_block_in_one_step: "offload",
    races.eviction_into_a_host_block_that_is_being_onboarded: "onboard",
    races.evictions_into_host_blocks_that_the_same_admission_onboards: "onboard",
    races.evictions_into_host_blocks_that_the_same_prefetch_onboards: "onboard",
    races.partial_copy_from_a_block_that_is_being_onboarded: "onboard",
    races.a_host_block_reused_while_a_copy_of_its_reader_is_pending: "b",
    races.reuse_of_a_block_that_a_revoked_reader_is_still_copying: "b",
    races.partial_copy_from_tokens_that_the_engine_is_still_writing: "a",
    races.rewound_blocks_reused_on_another_stream: "a",
    races.rewind_into_a_block_that_is_being_offloaded: "offload",
    races.growth_into_a_block_that_is_being_offloaded: "offload",
    races.a_reader_on_a_stream_of_a_block_that_is_being_onboarded: "onboard",
    races.a_kernel_launched_before_the_wait_for_a_load: "onboard",
    races.a_kernel_launched_before_the_save_of_its_block: "offload",
    races.a_hit_on_what_a_lagging_prefetch_brings: "onboard",
    races.a_layer_read_while_it_is_loaded: "onboard",
    drafts.dropped_drafts_reused_on_another_stream: "a",
    drafts.shared_drafts_copied_while_the_engine_is_still_writing_them: "a",
    drafts.tokens_moved_in_a_copy_that_is_still_being_made: "within",
    drafts.tokens_moved_in_a_block_that_is_being_copied_for_another: "within",
    drafts.shared_drafts_copied_into_a_block_that_is_being_onboarded: "onboard",
}


def paths_of(scenario: Scenario) -> Sequence[str]:
    """The ways of copying by which a race shows in every run. Moves of one call that depend on each other are not
    ordered by streams: plain copies are made in the order of the moves, as the stream keeps it, and the thread blocks
    of a kernel in an order that is drawn, so that some runs are lucky. The copies of a batch are torn and mixed."""
    return ("batched",) if STREAMS[scenario] == "levels" else COPY_PATHS


class EmulatedGpu(CudaDevice):
    """The cuda device, with kernels that are Python functions."""

    def __init__(self, path: str) -> None:
        super().__init__(calibration=path)
        self._kept: list[Any] = []
        self.errors: list[str] = []

    def hold(self, name: str) -> None:
        """One of the streams that were created."""
        lab.driver().hold(next(stream.handle for stream in self._streams.own.values() if stream.owner == name))

    def launch(self, stream: Stream, kernel: Callable[[], None], **declared: Any) -> None:
        def run() -> None:
            try:
                kernel()
            except Exception as error:
                self.errors.append(repr(error))

        self._kept.append(lab.driver().host_function(run, stream.handle))

    def close(self) -> None:
        """Also let go of the kernels, which refer to this device."""
        super().close()
        self._kept.clear()

    def check(self) -> None:
        assert not self.errors, self.errors


class EmulatedLab(Lab):
    """A lab on an emulated GPU: nothing is known of accesses, only bytes are compared."""

    def __init__(self, P: int, S: int, *, path: str, guard: str | None = None) -> None:
        self.sim: Any = EmulatedGpu(path)
        device: Any = Unasked(self.sim) if guard else self.sim
        clock = Clock()
        cache = KVCacheManager(
            small_layout(2), device_blocks=P, host_blocks=S, device=device, clock=clock, secret=bytes(32)
        )
        Engine.__init__(self, cache)
        self.clock = clock
        self.a, self.b = self.sim.create_stream("a"), self.sim.create_stream("b")
        self._stream, self._streams, self.wrong = self.a, {}, []
        self.prompts: list[list[int]] = []
        pool = cache.memory.device_pool
        span = (ctypes.c_uint8 * pool.nbytes).from_address(pool.data.ptr)
        self._device_pool = np.ndarray(pool.shape, pool.dtype, span, strides=pool.strides)
        if guard is not None:
            cache.core.disable_guard(guard)

    def block(self, block_id: int) -> Bytes:
        if block_id >= self.cache.device_blocks:
            return self.cache.memory.host_pool[block_id - self.cache.device_blocks].view(np.uint8)
        return self._device_pool[:, :, block_id].view(np.uint8)

    def add(self, tokens: Sequence[int], **options: Any) -> Request:
        self.prompts.append(list(tokens))
        return super().add(tokens, **options)

    def findings(self) -> list[str]:
        """Compare also all content that is still there, in both tiers, and all sequences once everything has run."""
        self.sim.synchronize()
        for sequence in self.live.values():
            self.check(sequence)
        for prompt, tier in itertools.product(self.prompts, ("device", "host")):
            expected = self.expected.of((None, None), [(token, 0) for token in prompt])
            for end in range(self.T, len(prompt) + 1, self.T):
                with (
                    contextlib.suppress(KVPoolError),
                    self.cache.pin(self.keys(prompt[:end])[-1:], tier=tier) as lease,
                ):
                    for slot, token in enumerate(expected[end - self.T : end]):
                        self.compare(int(lease.blocks[0]), slot, token, f"{prompt[:end]}")
        return super().findings()


def run(
    scenario: Scenario,
    seed: int,
    path: str,
    guard: str | None = None,
    *,
    late: str | None = None,
    progress: float = 0.0,
) -> list[str]:
    """What a scenario found. Nothing runs before somebody waits, or with ``progress`` some; the stream ``late`` runs
    last."""
    driver = lab.driver()
    driver.quiet(seed, progress)
    try:
        made = EmulatedLab(**RACES[scenario][1], path=path, guard=guard)
        if late is not None:
            made.sim.hold(late)
        try:
            scenario(made)
        except (AssertionError, DeviceError):
            if guard is None:
                raise
        return made.findings()
    finally:
        driver.quiet(seed, 0.3, 100)


def test_every_scenario_of_streams_has_a_stream_that_is_late() -> None:
    assert set(LATE) == set(STREAMS)


@pytest.mark.parametrize("scenario", STREAMS, ids=lambda scenario: scenario.__name__)
def test_nothing_races(scenario: Scenario) -> None:
    for seed in SEEDS:
        path = COPY_PATHS[seed % 4]
        for late, progress in ((None, (0.0, 0.0, 0.2)[seed // 3 % 3]), (LATE[scenario], 0.0)):
            failures = run(scenario, seed, path, late=late, progress=progress)
            assert not failures, f"seed {seed}, {path}, {late} late: {failures}"


@pytest.mark.parametrize("scenario", STREAMS, ids=lambda scenario: scenario.__name__)
def test_the_race_shows_in_every_run_without_its_guard(scenario: Scenario) -> None:
    paths = paths_of(scenario)
    for seed in SEEDS:
        path = paths[seed % len(paths)]
        assert run(scenario, seed, path, STREAMS[scenario], late=LATE[scenario]), (
            f"seed {seed}, {path}: {STREAMS[scenario]} is not missed"
        )


def test_the_race_shows_however_long_a_kernel_takes_on_a_loaded_machine() -> None:
    scenario, library = races.read_of_a_block_that_is_being_onboarded, lab.driver().library
    library.emu_set_patience_ms(0)
    try:
        for seed in SEEDS:
            assert run(scenario, seed, "plain", STREAMS[scenario], late=LATE[scenario]), f"seed {seed}"
    finally:
        library.emu_set_patience_ms(20)


def uploads(seed: int, guard: str | None) -> bool:
    """Whether each of some tables, handed over to a stream that is late, has the blocks of its sequence."""
    driver = lab.driver()
    driver.quiet(seed)
    try:
        gpu = EmulatedGpu("kernel")
        cache = KVCacheManager(
            small_layout(2), device_blocks=40, device=gpu, max_sequences=4, memory=MemoryOptions(staging_depth=2)
        )
        if guard is not None:
            cache.core.disable_guard(guard)
        stream = gpu.create_stream("a")
        sequences = [cache.add_sequence([10 * number, 1, 2], stream=stream) for number in range(4)]
        tables = [gpu.allocate(4 * 8, "device").view(np.int32).reshape(1, 8) for _ in sequences]
        gpu.hold("a")
        for table, sequence in zip(tables, sequences, strict=True):
            cache.tables.copy_batch_block_offsets(table, sequence, stream=stream)
        gpu.synchronize()
        rows = [
            (table.get()[0, :2], cache.block_table(sequence).dense()[0][:2])
            for table, sequence in zip(tables, sequences, strict=True)
        ]
        cache.release(sequences)
        cache.close(force=True)
        gpu.close()
        return all((actual == wanted).all() for actual, wanted in rows)
    finally:
        driver.quiet(seed, 0.3, 100)


def test_a_staged_table_is_not_overwritten_before_it_has_been_read() -> None:
    for seed in SEEDS:
        assert uploads(seed, None), f"seed {seed}"


def test_a_staged_table_is_overwritten_in_every_run_without_its_guard() -> None:
    for seed in SEEDS:
        assert not uploads(seed, "staged_buffers_retire_by_event"), f"seed {seed}"


def replays(seed: int, guard: str | None) -> bool:
    """Whether each replay of a graph, on a stream that is late, hands over what was staged for it."""
    driver, runtime = lab.driver(), pytest.importorskip("cupy").cuda.runtime
    driver.quiet(seed)
    try:
        gpu = EmulatedGpu("kernel")
        cache = KVCacheManager(small_layout(2), device_blocks=40, device=gpu, max_sequences=4)
        if guard is not None:
            cache.core.disable_guard(guard)
        stream = gpu.create_stream("a")
        sequences = [cache.add_sequence([10 * number, 1, 2], stream=stream) for number in range(3)]
        table, seen = (gpu.allocate(4 * 8 * rows, "device").view(np.int32).reshape(rows, 8) for rows in (1, 3))
        gpu.synchronize()
        runtime.streamBeginCapture(stream.handle, runtime.streamCaptureModeRelaxed)
        captured = cache.tables.capture_block_offsets(table, 1, stream=stream)
        graph = runtime.graphInstantiate(runtime.streamEndCapture(stream.handle))
        gpu.hold("a")
        for row, sequence in zip(seen, sequences, strict=True):
            captured.stage(sequence, stream=stream)
            runtime.graphLaunch(graph, stream.handle)
            runtime.memcpyAsync(row.data.ptr, table.data.ptr, row.nbytes, runtime.memcpyDefault, stream.handle)
        gpu.synchronize()
        wanted = cache.block_table(sequences).dense(8).tolist()
        actual = seen.get().tolist()
        cache.close(force=True)
        gpu.close()
        return bool(actual == wanted)
    finally:
        driver.quiet(seed, 0.3, 100)


def test_a_buffer_of_a_graph_is_not_staged_again_before_the_replay_has_read_it() -> None:
    for seed in SEEDS:
        assert replays(seed, None), f"seed {seed}"


def test_a_replay_hands_over_what_was_staged_for_the_next_in_every_run_without_its_guard() -> None:
    for seed in SEEDS:
        assert not replays(seed, "staged_buffers_retire_by_event"), f"seed {seed}"
