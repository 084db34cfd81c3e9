"""Launches by machine code, on a driver of functions in Python: what it is told, what fails, and that its rows and
launches are those that are made step by step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.device import CpuDevice
from kvpool.device.copy_plan import make_plan
from kvpool.device.cuda import native
from kvpool.device.cuda.runtime import Driver
from kvpool.device.fragments import Cutter, table_size
from kvpool.device.launches import FEW_ROWS, SOME_ROWS, THREADS, WARP, Grid, Launch
from kvpool.errors import DeviceError
from tests.device.pools import DEVICE_BLOCKS, HOST_BLOCKS, make_pools, random_moves
from tests.kernels.fragment_tables import Table, launched, table_of, tabulate
from tests.kernels.test_copy_fragments import random_fragments

GRID, CONTEXT, STREAM, EVENT, COPY, BULK = Grid(2), 0x1000, 0x70, 0x60, 0x50, 0x40
MOST = GRID.thread_blocks(1 << 30, host=True)


class Functions:
    """The driver. It notes its calls; a call at one of the places in ``failing`` does nothing and returns a status."""

    def __init__(self, current: int = CONTEXT, failing: dict[int, int] | None = None) -> None:
        self.calls: list[str] = []
        self.launches: list[tuple[Any, ...]] = []
        self.contexts, self.failing = [current], failing or {}
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 11)
        self.functions = {name: kind(self._function(name)) for name in native.FUNCTIONS}

    def _function(self, name: str) -> Callable[..., int]:
        def call(*arguments: int) -> int:
            self.calls.append(name)
            status = self.failing.get(len(self.calls) - 1, 0)
            if not status:
                getattr(self, name)(*arguments)
            return status

        return call

    def cuCtxGetCurrent(self, place: int, *rest: int) -> None:
        ctypes.c_int64.from_address(place).value = self.contexts[-1]

    def cuCtxPushCurrent_v2(self, context: int, *rest: int) -> None:
        self.contexts.append(context)

    def cuCtxPopCurrent_v2(self, place: int, *rest: int) -> None:
        self.contexts.pop()

    def cuEventRecord(self, event: int, stream: int, *rest: int) -> None:
        assert (event, stream) == (EVENT, STREAM)

    def cuLaunchKernel(self, *arguments: int) -> None:
        assert self.contexts[-1] == CONTEXT
        function, *grid, shared, stream, parameters, extra = arguments
        # The arguments are ints of 32 bits; the others are pointers.
        blocks, y, z, threads, v, w = (number & 0xFFFFFFFF for number in grid)
        assert (y, z, v, w, shared & 0xFFFFFFFF, stream, extra) == (1, 1, 1, 1, 0, STREAM, 0)
        record = ctypes.c_int64.from_address(parameters).value
        inside = function not in (COPY, BULK)  # the rows
        nbytes = 16 + 32 * ctypes.c_int64.from_address(record).value if inside else 24
        self.launches.append((function, blocks, threads, ctypes.string_at(record, nbytes)))

    def found(self, context: int | None = CONTEXT) -> Any:
        return native.find_functions(SimpleNamespace(**self.functions), context)


def target(rows: np.ndarray, event: int = EVENT) -> np.ndarray:
    return np.array([rows.ctypes.data, len(rows), STREAM, event, MOST, 0], np.int64)


def kernels_of(bulk: bool = False) -> np.ndarray:
    """The handles of a kernel are a number for that of a table, and the next two."""
    crooked = [COPY, COPY + 1, COPY + 2, THREADS]
    return np.array([[BULK, BULK + 1, BULK + 2, WARP] if bulk else crooked, crooked])


def expected(table: Table, address: int, bulk: bool, size: int = 0) -> list[tuple[Any, ...]]:
    """What is launched for a table."""

    def seen(launch: Launch) -> tuple[Any, ...]:
        handle = size + (BULK if launch.source == "bulk_fragments.cu" else COPY)
        nbytes = 16 + 32 * len(table.rows) if size else 24
        return handle, launch.thread_blocks, launch.threads, launch.record.tobytes()[:nbytes]

    return [*map(seen, launched(table, address, GRID, bulk=bulk and table.in_words, size=size))]


def cutter_and_moves(seed: int) -> tuple[Cutter, np.ndarray, np.ndarray]:
    """A cutter, moves, and room for their rows."""
    layout = BlockLayout(2, 2, 16, 8, dtype="uint8", tokens="HND" if seed % 2 else "NHD")
    pools, moves = make_pools(CpuDevice(), layout), random_moves(layout, np.random.default_rng(seed))
    plan = make_plan(layout, pools.flat("device"), pools.flat("host"), DEVICE_BLOCKS, HOST_BLOCKS)
    cutter = Cutter(plan, np.array([[0, 1, 1]]))
    return cutter, moves, np.zeros((cutter.room(len(moves)), 4), np.int64)


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_blocks_are_rows_and_launches_as_made_step_by_step(seed: int, bulk: bool) -> None:
    (cutter, moves, rows), functions = cutter_and_moves(seed), Functions()
    to = target(rows)
    assert cutter.in_words
    assert native.copy_blocks(functions.found(), to, kernels_of(bulk), moves, cutter.vector) == 0
    table = table_of(cutter, moves)
    np.testing.assert_array_equal(rows[: len(table.rows)], table.rows)
    assert functions.launches == expected(table, rows.ctypes.data, bulk) and to[native.RECORDED]
    assert functions.calls == ["cuCtxGetCurrent", *["cuLaunchKernel"] * len(functions.launches), "cuEventRecord"]


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("seed", range(6))
def test_fragments_are_rows_and_launches_as_made_step_by_step(seed: int, unit: int, bulk: bool) -> None:
    _, fragments = random_fragments(np.random.default_rng(seed), 40, 9000, unit)
    functions, (words_max, room) = Functions(), table_size(fragments)
    rows = np.zeros((room, 4), np.int64)
    assert native.copy_fragments(functions.found(), target(rows), kernels_of(bulk), fragments, words_max) == 0
    table = tabulate(fragments)
    assert table.in_words == (unit == 16)
    np.testing.assert_array_equal(rows[: len(table.rows)], table.rows)
    assert functions.launches == expected(table, rows.ctypes.data, bulk)


def test_rows_that_no_launch_counts_are_several_launches_and_a_failed_one_is_the_last() -> None:
    huge = np.array([[i << 40, i << 40 | 1 << 39, 1 << 29] for i in range(1, 17385)])
    words_max, room = table_size(huge)
    rows = np.zeros((room, 4), np.int64)
    functions = Functions()
    assert native.copy_fragments(functions.found(), target(rows), kernels_of(), huge, words_max) == 0
    assert functions.launches == expected(tabulate(huge), rows.ctypes.data, False)
    assert len(functions.launches) == 2, "more pieces than 2**31"
    for place in (1, 2):
        functions, to = Functions(failing={place: 700}), target(rows)
        result = native.copy_fragments(functions.found(), to, kernels_of(), huge, words_max)
        assert native.failure(result) == ("cuLaunchKernel", 700)
        # The rows are free when the event is complete, since the first launch may read them.
        assert to[native.RECORDED] and functions.calls[-1] == "cuEventRecord"
        assert functions.calls.count("cuLaunchKernel") == place


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("count", [0, 1, FEW_ROWS, FEW_ROWS + 1, SOME_ROWS])
def test_few_rows_are_in_the_argument_of_the_smallest_kernel_that_has_room_and_need_no_event(
    count: int, unit: int, bulk: bool
) -> None:
    places = 4096 * np.arange(1, count + 1)  # runs of two lengths share no row
    fragments = np.stack([places, places + (1 << 40), unit * (3 + np.arange(count) % 2)], axis=1)
    memory = np.full(2 + 4 * SOME_ROWS, -1)
    to = target(memory[2:].reshape(-1, 4), event=0)

    def copied(functions: Functions) -> int:
        return native.copy_fragments(functions.found(), to, kernels_of(bulk), fragments, 1 << 20)

    functions, table = Functions(), tabulate(fragments)
    assert copied(functions) == 0 and len(table.rows) == count
    assert functions.launches == expected(table, 0, bulk, 1 if count <= FEW_ROWS else 2)
    assert functions.calls == ["cuCtxGetCurrent", *["cuLaunchKernel"] * len(functions.launches)]
    for current, name in ((CONTEXT, "cuLaunchKernel"), (0x2000, "cuCtxPushCurrent_v2")) if count else ():
        functions = Functions(current, {1: 700})
        assert native.failure(copied(functions)) == (name, 700) and functions.contexts == [current]


@pytest.mark.parametrize("status", [1, 700, 999])
@pytest.mark.parametrize(
    ("current", "place", "name", "recorded"),
    [
        (CONTEXT, 0, "cuCtxGetCurrent", False),
        (0x2000, 1, "cuCtxPushCurrent_v2", False),
        (CONTEXT, 1, "cuLaunchKernel", True),
        (0x2000, 2, "cuLaunchKernel", True),
        (CONTEXT, 2, "cuEventRecord", False),
    ],
)
def test_a_call_that_fails_is_named_with_its_status_and_leaves_the_context(
    status: int, current: int, place: int, name: str, recorded: bool
) -> None:
    (cutter, moves, rows), functions = cutter_and_moves(0), Functions(current, {place: status})
    to = target(rows)
    result = native.copy_blocks(functions.found(), to, kernels_of(), moves, cutter.vector)
    assert native.failure(result) == (name, status) and bool(to[native.RECORDED]) == recorded
    assert functions.contexts == [current]


@pytest.mark.parametrize("current", [CONTEXT, 0, 0x2000])
def test_another_context_is_current_again_afterwards(current: int) -> None:
    functions, record = Functions(current), np.arange(4)
    assert native.launch(functions.found(), COPY, 3, 64, record, STREAM) == 0
    assert functions.launches == [(COPY, 3, 64, record.tobytes()[:24])] and functions.contexts == [current]
    around = ["cuCtxPushCurrent_v2", "cuLaunchKernel", "cuCtxPopCurrent_v2"]
    assert functions.calls == ["cuCtxGetCurrent", *(around[1:2] if current == CONTEXT else around)]


def test_a_driver_that_lacks_a_function_is_refused() -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    for find in (lambda: native.find_functions(Driver(missing).library, CONTEXT), lambda: Functions().found(None)):
        with pytest.raises(DeviceError, match="cuLaunchKernel"):
            find()


def test_the_functions_of_a_launch_are_kept_on_disk() -> None:
    """A pointer of ctypes in them would keep them from it."""
    for function in (native.launch, native.copy_blocks, native.copy_fragments):
        stem = getattr(function, "stem", None)
        if stem is None:
            pytest.skip("jitted functions run in the interpreter")
        assert " at 0x" not in stem()


class Reading(Functions):
    """Notes the four numbers that a kernel gets."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.numbers: list[list[int]] = []

    def cuLaunchKernel(self, *arguments: int) -> None:
        function, *grid, shared, stream, parameters, extra = arguments
        assert [number & 0xFFFFFFFF for number in (*grid, shared)] == [7, 3, 1, 64, 1, 1, 0]
        assert (function, stream, extra, self.contexts[-1]) == (COPY, STREAM, 0, CONTEXT)
        places = (ctypes.c_int64 * 4).from_address(parameters)
        self.numbers.append([ctypes.c_int64.from_address(place).value for place in places])


@pytest.mark.parametrize(("event", "place", "status"), [(0, 99, 0), (EVENT, 99, 0), (EVENT, 2, 700), (EVENT, 3, 400)])
def test_a_launch_passes_numbers_one_by_one_and_records_its_event_only_if_it_succeeded(
    event: int, place: int, status: int
) -> None:
    functions, values = Reading(0x2000, {place: status}), [1, -1, 1 << 62, 0]
    result = native.launch_numbers(functions.found(), COPY, np.array([7, 3, 64, *values]), STREAM, event)
    assert native.failure(result) == ("cuEventRecord" if status == 400 else "cuLaunchKernel", status)
    assert functions.calls.count("cuEventRecord") == (event != 0 and status != 700)
    assert functions.contexts == [0x2000] and functions.numbers == ([] if status == 700 else [values])


class Asked(Functions):
    """Answers about an event, and about a stream."""

    mode, state = 1, 0

    def cuThreadExchangeStreamCaptureMode(self, place: int, *rest: int) -> None:
        wanted = ctypes.c_int32.from_address(place)
        self.mode, wanted.value = wanted.value, self.mode

    def cuEventQuery(self, event: int, *rest: int) -> None:
        assert (event, self.mode, self.contexts[-1]) == (EVENT, native.CAPTURE_RELAXED, CONTEXT)

    def cuStreamIsCapturing(self, stream: int, place: int, *rest: int) -> None:
        assert (stream, self.contexts[-1]) == (STREAM, CONTEXT)
        ctypes.c_int32.from_address(place).value = self.state


@pytest.mark.parametrize("status", [0, 600, 700])
@pytest.mark.parametrize("current", [CONTEXT, 0])
def test_an_event_is_queried_in_relaxed_mode_which_is_left_afterwards(current: int, status: int) -> None:
    functions = Asked(current, {2 + (current != CONTEXT): status})
    result = native.query(functions.found(), EVENT)
    assert (native.failure(result) if result else 0) == (("cuEventQuery", status) if status else 0)
    assert functions.contexts == [current] and functions.mode == 1


@pytest.mark.parametrize(("state", "status", "expected"), [(0, 0, 0), (1, 0, -1), (2, 0, -1), (0, 906, 906)])
@pytest.mark.parametrize("current", [CONTEXT, 0])
def test_a_stream_is_checked_for_a_capture(current: int, state: int, status: int, expected: int) -> None:
    functions = Asked(current, {1 + (current != CONTEXT): status})
    functions.state = state
    result = native.is_capturing(functions.found(), STREAM)
    assert (native.failure(result)[1] if result > 0 else result) == expected
    assert functions.contexts == [current]


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_record_that_fails_leaves_the_context(place: int) -> None:
    functions = Functions(0x2000, {place: 700})
    result = native.record(functions.found(), EVENT, STREAM)
    names = {0: "cuCtxGetCurrent", 1: "cuCtxPushCurrent_v2", 2: "cuEventRecord"}
    assert (native.failure(result) if result else None) == ((names[place], 700) if place in names else None)
    assert functions.contexts == [0x2000] or place == 3
