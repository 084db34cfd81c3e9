"""Stream capture, batched copies and IPC of the emulated driver, as strict as their documentation."""

from __future__ import annotations

import ctypes
import threading

import pytest

from tests.emulated import lab
from tests.emulated.lab import Driver
from tests.emulated.test_strictness import filled

pytestmark = pytest.mark.gpu


class Capturing:
    """A stream that captures, and what it ends with."""

    def __init__(self, driver: Driver, mode: int = lab.GLOBAL, flags: int = lab.NON_BLOCKING) -> None:
        self.driver, self.stream = driver, driver.stream(flags)
        driver.cuStreamBeginCapture_v2(self.stream, mode)

    def state(self, stream: int | None = None) -> int:
        status = ctypes.c_int()
        self.driver.cuStreamIsCapturing(stream or self.stream, ctypes.byref(status))
        return status.value

    def end(self) -> tuple[int, int]:
        """The status and the graph."""
        graph = ctypes.c_size_t()
        return self.driver.status("cuStreamEndCapture", self.stream, ctypes.byref(graph)), graph.value


def test_a_capturing_stream_records_instead_of_running(driver: Driver) -> None:
    target, source = filled(driver.pinned(8), 0), filled(driver.pinned(8), 5)
    capture = Capturing(driver)
    assert driver.copy(target, source, 8, capture.stream) == lab.SUCCESS
    status, graph = capture.end()
    assert status == lab.SUCCESS
    driver.cuCtxSynchronize()
    assert set(target) == {0}
    executable, stream = driver.made("cuGraphInstantiateWithFlags", graph, 0), driver.stream()
    for value in (6, 7):
        filled(source, value)
        driver.cuGraphLaunch(executable, stream)
        driver.cuStreamSynchronize(stream)
        assert set(target) == {value}


def test_an_event_of_a_capture_pulls_other_streams_in_and_they_have_to_join(driver: Driver) -> None:
    memory = driver.allocate(8)
    for join in (True, False):
        capture, other, event, back = Capturing(driver), driver.stream(), driver.event(), driver.event()
        driver.cuEventRecord(event, capture.stream)
        driver.cuStreamWaitEvent(other, event, 0)
        assert capture.state(other) == lab.ACTIVE
        driver.cuMemsetD8Async(memory, 0, 8, other)
        if join:
            driver.cuEventRecord(back, other)
            driver.cuStreamWaitEvent(capture.stream, back, 0)
        assert capture.end()[0] == (lab.SUCCESS if join else lab.CAPTURE_UNJOINED)
        assert capture.state(other) == lab.NONE


def test_a_captured_event_can_be_neither_queried_nor_waited_for(driver: Driver) -> None:
    for call in ("cuEventQuery", "cuEventSynchronize"):
        capture, event = Capturing(driver, lab.RELAXED), driver.event()
        driver.cuEventRecord(event, capture.stream)
        assert driver.status(call, event) == lab.CAPTURED_EVENT
        assert capture.end()[0] == lab.CAPTURE_INVALIDATED


@pytest.mark.parametrize("call", ["cuStreamQuery", "cuStreamSynchronize"])
def test_a_capturing_stream_can_be_neither_queried_nor_waited_for(driver: Driver, call: str) -> None:
    capture = Capturing(driver)
    assert driver.status(call, capture.stream) == lab.CAPTURE_UNSUPPORTED
    assert capture.state() == lab.INVALIDATED and capture.end()[0] == lab.CAPTURE_INVALIDATED


MODES = [
    (lab.GLOBAL, lab.GLOBAL, True),
    (lab.GLOBAL, lab.RELAXED, False),
    (lab.THREAD_LOCAL, lab.GLOBAL, False),
    (lab.RELAXED, lab.GLOBAL, False),
]


@pytest.mark.parametrize(("mode", "thread_mode", "harmed"), MODES)
def test_a_query_of_another_thread_invalidates_a_global_capture_unless_it_is_relaxed(
    driver: Driver, mode: int, thread_mode: int, harmed: bool
) -> None:
    event, statuses = driver.event(), []
    driver.cuEventRecord(event, driver.stream())
    capture = Capturing(driver, mode)

    def query() -> None:
        driver.use(0)
        wanted = ctypes.c_int(thread_mode)
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(wanted))
        statuses.append(driver.status("cuEventQuery", event))

    thread = threading.Thread(target=query)
    thread.start()
    thread.join()
    assert statuses == [lab.CAPTURE_UNSUPPORTED if harmed else lab.NOT_READY]
    assert capture.end()[0] == (lab.CAPTURE_INVALIDATED if harmed else lab.SUCCESS)


@pytest.mark.parametrize("mode", [lab.GLOBAL, lab.THREAD_LOCAL, lab.RELAXED])
def test_nobody_waits_for_a_gpu_while_a_stream_of_it_is_captured(driver: Driver, mode: int) -> None:
    """CUDA programming guide, stream capture, prohibited operations: also a thread in relaxed mode does not."""
    capture, relaxed = Capturing(driver, mode), ctypes.c_int(lab.RELAXED)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))
    assert driver.status("cuCtxSynchronize") == lab.CAPTURE_UNSUPPORTED
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))
    assert capture.end()[0] == lab.CAPTURE_INVALIDATED
    driver.cuCtxSynchronize()


# -- batches ---------------------------------------------------------------------------------------------------


class Attributes(ctypes.Structure):
    _fields_ = [("order", ctypes.c_int), ("places", ctypes.c_int * 4), ("flags", ctypes.c_uint)]


STREAM_ORDER, DURING_CALL, ANY_ORDER = 1, 2, 3


def batch(driver: Driver, moves: list[tuple[int, int, int]], stream: int, order: int = STREAM_ORDER) -> tuple[int, int]:
    """The status, and which copy it blames."""
    columns = [(ctypes.c_size_t * len(moves))(*column) for column in zip(*moves, strict=True)] or [
        (ctypes.c_size_t * 0)()
    ] * 3
    first, failed, attributes = ctypes.c_size_t(0), ctypes.c_size_t(0), Attributes(order=order)
    status = driver.status(
        "cuMemcpyBatchAsync",
        *columns,
        len(moves),
        ctypes.byref(attributes),
        ctypes.byref(first),
        1,
        ctypes.byref(failed),
        stream,
    )
    return status, failed.value


def test_a_batch_needs_a_stream_of_its_own_and_at_least_one_copy(driver: Driver) -> None:
    host, memory = driver.pinned(64), driver.allocate(64)
    move = [(memory, ctypes.addressof(host), 64)]
    for stream in (0, 1):
        assert batch(driver, move, stream)[0] == lab.INVALID
    assert batch(driver, [], driver.stream())[0] == lab.INVALID
    assert batch(driver, move, driver.stream(), order=0) == (lab.INVALID, 0)
    assert batch(driver, [*move, (memory, ctypes.addressof(host), 65)], driver.stream()) == (lab.INVALID, 1)
    assert batch(driver, move, driver.stream())[0] == lab.SUCCESS


def test_a_batch_is_not_captured(driver: Driver) -> None:
    """CUgraphNodeType has no kind of node for cuMemcpyBatchAsync."""
    source, target, capture = driver.pinned(4), driver.allocate(4), Capturing(driver)
    assert batch(driver, [(target, ctypes.addressof(source), 4)], capture.stream)[0] == lab.CAPTURE_UNSUPPORTED
    assert capture.end()[0] == lab.CAPTURE_INVALIDATED


def test_sources_of_a_batch_are_read_when_its_attributes_say(driver: Driver) -> None:
    results: dict[int, set[int]] = {STREAM_ORDER: set(), DURING_CALL: set(), ANY_ORDER: set()}
    for order in results:
        for seed in range(30):
            driver.quiet(seed)
            first, source, memory, out, stream = (
                filled(driver.near(8), 2),
                filled(driver.pinned(8), 1),
                driver.allocate(8),
                driver.pinned(8),
                driver.stream(),
            )
            driver.copy(source, first, 8, stream)
            assert batch(driver, [(memory, ctypes.addressof(source), 8)], stream, order)[0] == lab.SUCCESS
            driver.copy(out, memory, 8, stream)
            driver.cuStreamSynchronize(stream)
            results[order] |= set(out)
    assert results == {STREAM_ORDER: {2}, DURING_CALL: {1}, ANY_ORDER: {1, 2}}


# -- IPC -------------------------------------------------------------------------------------------------------

OTHER = """
import ctypes, sys
from tests.emulated import lab
driver = lab.driver()
driver.use(0)
handle = (ctypes.c_uint8 * 64)(*bytes.fromhex(sys.argv[1]))
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * 64)]
given, opened = Handle(handle), ctypes.c_size_t()
call = driver.library.cuIpcOpenMemHandle_v2
call.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
assert call(ctypes.byref(opened), given, 0) == lab.INVALID, "without the flag"
status = call(ctypes.byref(opened), given, 1)
print("status", status)
if status == 0:
    first = opened.value
    assert call(ctypes.byref(opened), given, 1) == 0 and opened.value == first
    driver.cuIpcCloseMemHandle(first)
    host = driver.pinned(64)
    driver.cuMemcpyAsync(ctypes.addressof(host), first, 64, 0)
    driver.cuStreamSynchronize(0)
    assert set(host) == {3}, bytes(host)
    driver.cuMemsetD8_v2(first, 4, 64)
    assert driver.copy(first + 8, host, 64, 0) == lab.INVALID, "past the end"
    assert driver.status("cuMemFree_v2", first) == lab.INVALID
    assert driver.status("cuIpcGetMemHandle", ctypes.byref(Handle()), first) == lab.INVALID, "an import is not exported"
    driver.cuCtxSynchronize()  # closing waits for nothing
    driver.cuIpcCloseMemHandle(first)
    assert driver.status("cuIpcCloseMemHandle", first) == lab.INVALID
"""


def test_memory_is_shared_with_another_process_and_not_with_its_own(driver: Driver) -> None:
    class Handle(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_uint8 * 64)]

    handle, memory, out = Handle(), driver.allocate(64), driver.pinned(64)
    driver.cuMemsetD8_v2(memory, 3, 64)
    driver.cuCtxSynchronize()
    driver.cuIpcGetMemHandle(ctypes.byref(handle), memory)
    opened = ctypes.c_size_t()
    call = driver.library.cuIpcOpenMemHandle_v2
    call.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
    assert call(ctypes.byref(opened), handle, 1) == lab.INVALID_CONTEXT
    for other in (ctypes.addressof(out), 4096):
        assert driver.status("cuIpcGetMemHandle", ctypes.byref(Handle()), other) == lab.INVALID
    assert "status 0" in lab.in_a_process(OTHER, bytes(handle).hex())
    driver.copy(out, memory, 64)
    driver.cuStreamSynchronize(0)
    assert set(out) == {4}
    driver.cuMemFree_v2(memory)
    assert f"status {lab.INVALID}" in lab.in_a_process(OTHER, bytes(handle).hex()), "what is freed cannot be opened"
