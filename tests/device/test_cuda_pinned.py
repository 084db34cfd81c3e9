"""Pinned memory is registered whole and in order, and all of it is given back, also when the driver refuses
half-way."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.device.cuda import cuda_memory, registrations
from kvpool.device.cuda.cuda_memory import AdoptedMemory, processors_near
from kvpool.device.cuda.runtime import ALREADY_REGISTERED
from kvpool.device.fragments import split

PAGE = mmap.PAGESIZE


class Pointer:
    """As ``cupy.cuda.PinnedMemoryPointer``."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class Pool:
    """Rounds up and keeps blocks as ``cupy.cuda.PinnedMemoryPool`` does."""

    def __init__(self, allocator: Callable[[int], Any]) -> None:
        self._allocator, self._free = allocator, list[Any]()

    def malloc(self, nbytes: int) -> Any:
        pointer = Pointer(self._allocator(1 << (max(512, nbytes) - 1).bit_length()).mem, 0)
        weakref.finalize(pointer, self._free.append, pointer.mem)
        return pointer

    def free_all_blocks(self) -> None:
        self._free.clear()


class Cuda:
    """As much of ``cupy.cuda`` as is used here; with ``-m gpu``, CuPy's own is in its place."""

    PinnedMemoryPool: Any = Pool
    PinnedMemoryPointer: Any = Pointer


class Chosen:
    cuda: Any = Cuda


@pytest.fixture(params=["fake", pytest.param("cupy", marks=pytest.mark.gpu)], autouse=True)
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cuda_memory, "CHUNK_BYTES", cuda_memory.CHUNK_BYTES)  # restored after the test
    if request.param == "cupy":
        monkeypatch.setattr(Chosen, "cuda", pytest.importorskip("cupy").cuda)
    return Chosen.cuda


def PinnedMemory(
    nbytes: int, registrar: Any, *, chunk_bytes: int = 1 << 30, **options: Any
) -> cuda_memory.PinnedMemory:
    cuda_memory.CHUNK_BYTES = chunk_bytes
    return cuda_memory.PinnedMemory(nbytes, registrar, Chosen.cuda, **options)


class FakeRegistrar:
    """Pins nothing, and notes what is pinned; refuses the call number ``refused``."""

    def __init__(self, refused: int | None = None) -> None:
        self.refused = refused
        self.calls: list[tuple[int, int, int]] = []
        self.pinned: dict[int, int] = {}

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        if len(self.calls) == self.refused:
            raise RuntimeError("no more of it")
        assert address % PAGE == 0 and nbytes % PAGE == 0
        if not all(address + nbytes <= other or other + size <= address for other, size in self.pinned.items()):
            error = RuntimeError("already")
            error.status = ALREADY_REGISTERED  # type: ignore[attr-defined]
            raise error
        self.calls.append((address, nbytes, flags))
        self.pinned[address] = nbytes

    def hostUnregister(self, address: int) -> None:
        del self.pinned[address]

    def pinned_span(self, address: int) -> tuple[int, int] | None:
        spans = ((start, start + size) for start, size in self.pinned.items())
        return next((span for span in spans if span[0] <= address < span[1]), None)


@pytest.mark.parametrize(
    ("nbytes", "chunks"),
    [(0, []), (1, [1]), (2 * PAGE, [2]), (5 * PAGE, [2, 2, 1]), (5 * PAGE + 1, [2, 2, 2])],
)
def test_all_of_it_is_registered_in_chunks_from_its_start_to_its_end(nbytes: int, chunks: list[int]) -> None:
    registrar = FakeRegistrar()
    memory = PinnedMemory(nbytes, registrar, chunk_bytes=2 * PAGE)
    assert memory.array.shape == (nbytes,) and memory.array.dtype == np.uint8 and not memory.array.any()
    start = memory.array.ctypes.data
    assert registrar.calls == [(start + 2 * PAGE * i, pages * PAGE, 0) for i, pages in enumerate(chunks)]
    memory.array[:] = 7
    memory.free()
    memory.free()
    assert not registrar.pinned
    assert (memory.array == 7).all()


@pytest.mark.parametrize(("pages", "short"), [(1, PAGE - 1), (3, 0), (22, 1), (31, PAGE - 1), (64, 0)])
def test_the_pool_has_the_range_in_descending_powers_of_two_without_gaps(pages: int, short: int) -> None:
    memory = PinnedMemory(pages * PAGE - short, FakeRegistrar(), chunk_bytes=4 * PAGE)
    sizes = [block.mem.size for block in memory.blocks]
    assert sizes == sorted({1 << bit for bit in range(32) if pages * PAGE >> bit & 1}, reverse=True)
    ends = np.cumsum([0, *sizes]) + memory.array.ctypes.data
    assert [block.ptr for block in memory.blocks] == ends[:-1].tolist()
    memory.free()


def test_a_pool_that_rounds_up_gets_no_more_than_the_reserved_range(monkeypatch: pytest.MonkeyPatch) -> None:
    class Greedy(Pool):
        def malloc(self, nbytes: int) -> Any:
            return super().malloc(2 * nbytes)

    registrar = FakeRegistrar()
    monkeypatch.setattr(Cuda, "PinnedMemoryPool", Greedy)
    with pytest.raises(MemoryError, match=f"asks for {8 * PAGE} bytes, and {4 * PAGE} are reserved"):
        cuda_memory.PinnedMemory(4 * PAGE, registrar, Cuda)
    assert not registrar.pinned


def test_the_pool_keeps_no_block_after_free(cuda: Any) -> None:
    memory = PinnedMemory(7 * PAGE, FakeRegistrar())
    pool, parts = memory.pool, [weakref.ref(getattr(block.mem, "mem", block.mem)) for block in memory.blocks]
    assert type(pool) is cuda.PinnedMemoryPool and len(parts) == 3 and all(part() is not None for part in parts)
    memory.free()
    gc.collect()
    assert all(part() is None for part in parts)


def test_pages_are_touched_before_they_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_memory, "_TOUCHED_BYTES", PAGE)
    touched: list[int] = []
    touch = cuda_memory._touch
    monkeypatch.setattr(cuda_memory, "_touch", lambda array, start: (touch(array, start), touched.append(start)))

    class Watching(FakeRegistrar):
        def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
            first = 3 * PAGE * len(self.calls)
            assert set(range(first, first + nbytes, PAGE)) <= set(touched)
            super().hostRegister(address, nbytes, flags)

    registrar = Watching()
    PinnedMemory(10 * PAGE, registrar, chunk_bytes=3 * PAGE).free()
    assert len(registrar.calls) == 4


@pytest.mark.parametrize("refused", [0, 2])
def test_a_refusal_gives_everything_back_and_says_how_far_it_came(refused: int) -> None:
    registrar = FakeRegistrar(refused)
    with pytest.raises(MemoryError, match=rf"pinned {refused * PAGE} of {4 * PAGE} bytes .* no more of it .*ulimit -l"):
        PinnedMemory(4 * PAGE, registrar, chunk_bytes=PAGE)
    assert len(registrar.calls) == refused and not registrar.pinned


def test_memory_that_nobody_gave_back_is_unregistered_before_it_is_unmapped() -> None:
    unmapped: list[bool] = []
    registrar = FakeRegistrar()
    memory = PinnedMemory(3 * PAGE, registrar, chunk_bytes=PAGE)
    weakref.finalize(memory.array, lambda: unmapped.append(bool(registrar.pinned)))
    view = memory.array[:10]
    del memory
    gc.collect()
    assert not registrar.pinned
    del view
    gc.collect()
    assert unmapped == [False]


@pytest.mark.parametrize("given_back", [True, False])
def test_memory_that_the_driver_does_not_let_go_stays_mapped(given_back: bool) -> None:
    class Keeping(FakeRegistrar):
        def hostUnregister(self, address: int) -> None:
            raise RuntimeError("it is mine")

    memory = PinnedMemory(2 * PAGE, Keeping())
    gone = weakref.ref(memory.array)
    if given_back:
        with pytest.raises(RuntimeError, match="mine"):
            memory.free()
    del memory
    gc.collect()
    assert gone() is not None
    registrations._registered.clear()


def test_pages_are_touched_by_processors_near_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu, nodes = tmp_path / "bus/pci/devices/0000:3b:00.0", tmp_path / "devices/system/node"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text("1\n")
    assert processors_near("0000:3B:00.0", tmp_path) is None
    for node, processors in (("node0", "0-1,4"), ("node1", "2-3,5\n")):
        (nodes / node).mkdir(parents=True)
        (nodes / node / "cpulist").write_text(processors)
    assert processors_near("0000:3B:00.0", tmp_path) == {2, 3, 5}
    assert processors_near("0000:17:00.0", tmp_path) is None
    (gpu / "numa_node").write_text("-1\n")
    assert processors_near("0000:3B:00.0", tmp_path) is None
    asked = list[tuple[int, set[int]]]()
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda thread, processors: asked.append((threading.get_ident(), set(processors)))
    )
    processor = min(os.sched_getaffinity(0))
    for processors in ({processor, 10**6}, {10**6}):
        PinnedMemory(PAGE, FakeRegistrar(), processors=processors).free()
    ((thread, chosen),) = asked
    assert chosen == {processor} and thread != threading.get_ident()


def test_one_chunk_that_cannot_be_unregistered_does_not_keep_the_others() -> None:
    registrar = FakeRegistrar()
    memory = PinnedMemory(3 * PAGE, registrar, chunk_bytes=PAGE)
    middle = registrar.calls[1][0]
    del registrar.pinned[middle]
    with pytest.raises(KeyError):
        memory.free()
    assert not registrar.pinned


def test_one_registration_that_cannot_be_ended_does_not_keep_the_others_and_is_tried_again() -> None:
    array, registrar = owned(2), FakeRegistrar()
    hold, begin = registrations.Hold(array), array.ctypes.data
    for address in (begin, begin + PAGE):
        hold.new(registrar).register(address, PAGE)
    del registrar.pinned[begin + PAGE]
    with pytest.raises(KeyError):
        hold.release()
    assert not registrar.pinned and not hold.released
    registrar.pinned[begin + PAGE] = PAGE
    hold.release()
    assert not registrar.pinned and hold.released


def test_more_than_the_machine_has_is_refused_before_anything_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    registrar = FakeRegistrar()
    for available, nbytes, message in (
        (10 * PAGE, 11 * PAGE, f"{11 * PAGE} bytes .* {10 * PAGE} can be taken"),
        (None, 1 << 62, "no range"),
    ):
        monkeypatch.setattr(cuda_memory, "available_ram", lambda available=available: available)
        with pytest.raises(MemoryError, match=message):
            PinnedMemory(nbytes, registrar)
    assert not registrar.calls


# Memory of another owner


def owned(pages: int, shift: int = 0) -> np.ndarray:
    """uint8[pages * PAGE] that begins ``shift`` bytes after the start of a page."""
    raw = np.zeros((pages + 2) * PAGE, np.uint8)
    start = -raw.ctypes.data % PAGE + shift
    return raw[start : start + pages * PAGE]


def adopt(array: np.ndarray, registrar: FakeRegistrar, chunk: int = 2) -> AdoptedMemory:
    cuda_memory.CHUNK_BYTES = chunk * PAGE
    return AdoptedMemory(array, registrar, "host_memory")


@pytest.mark.parametrize("shift", [0, 64])
def test_memory_that_is_not_pinned_is_registered_in_whole_pages_and_unregistered(shift: int) -> None:
    array, registrar = owned(5, shift), FakeRegistrar()
    array[:] = 9
    memory, again = adopt(array, registrar), adopt(array, registrar)
    begin, pages = array.ctypes.data - shift, [(0, 2), (2, 2), (4, 1 + bool(shift))]
    assert registrar.calls == [(begin + first * PAGE, count * PAGE, 0) for first, count in pages]
    assert memory.rows[0, 0] == array.ctypes.data and memory.rows[-1, 1] == array.ctypes.data + array.nbytes
    assert (again.rows == memory.rows).all() and (array == 9).all()
    memory.free()
    memory.free()
    assert len(registrar.pinned) == 3, "of who adopted it again"
    again.free()
    assert not registrar.pinned


def test_memory_that_its_owner_has_pinned_is_used_as_it_is_and_cut_where_its_registrations_end() -> None:
    array, registrar = owned(8), FakeRegistrar()
    start = array.ctypes.data
    for first, pages in ((0, 1), (1, 3), (4, 3), (7, 1)):
        registrar.hostRegister(start + first * PAGE, pages * PAGE, 0)
    before = dict(registrar.pinned)
    memory = adopt(array[64:], registrar)
    pieces = split(np.array([[start + 64, 1 << 40, 8 * PAGE - 64]]), memory.rows)
    assert (pieces[:, 0] - start).tolist() == [64, PAGE, 4 * PAGE, 7 * PAGE]
    memory.free()
    assert registrar.pinned == before


@pytest.mark.parametrize("upwards", [True, False])
def test_two_arrays_on_one_page_are_both_pinned_until_the_last_is_freed(upwards: bool) -> None:
    array, registrar = owned(8), FakeRegistrar()
    halves = [array[: 3 * PAGE + 64], array[3 * PAGE + 64 :]]
    first, second = (adopt(half, registrar) for half in (halves if upwards else halves[::-1]))
    assert sum(registrar.pinned.values()) == array.nbytes
    for memory in (first, second):
        start = memory.array.ctypes.data
        assert (memory.rows[0, 0], memory.rows[-1, 1]) == (start, start + memory.array.nbytes)
    first.free()
    shared = array.ctypes.data + 3 * PAGE + (64 if upwards else 63)
    assert registrar.pinned_span(shared) is not None
    second.free()
    assert not registrar.pinned


def test_registered_pages_in_the_middle_are_refused_and_nothing_stays_pinned() -> None:
    array, registrar = owned(8), FakeRegistrar()
    middle = array.ctypes.data + 5 * PAGE
    registrar.hostRegister(middle, PAGE, 0)
    with pytest.raises(ValueError, match=rf"^host_memory: expected memory .* got {8 * PAGE} bytes .* in between"):
        adopt(array, registrar)
    assert list(registrar.pinned) == [middle]


def test_a_refusal_half_way_through_memory_of_the_caller_gives_everything_back() -> None:
    registrations._registered.clear()
    array, registrar = owned(8), FakeRegistrar(refused=3)
    with pytest.raises(MemoryError, match=f"pinned {6 * PAGE} of {8 * PAGE} bytes and refused the next {2 * PAGE}"):
        adopt(array, registrar)
    assert not registrar.pinned and not registrations._registered


def test_memory_that_another_call_unregisters_is_not_adopted() -> None:
    array = owned(2)
    refused: list[str] = []

    class Meeting(FakeRegistrar):
        def hostUnregister(self, address: int) -> None:
            with pytest.raises(MemoryError, match="another call is unregistering"):
                adopt(array, self)
            refused.append("")
            super().hostUnregister(address)

    adopt(array, registrar := Meeting()).free()
    assert refused and not registrar.pinned


@pytest.mark.parametrize("pinned", [True, False])
def test_the_owner_lives_until_all_that_may_use_its_memory_is_done(pinned: bool) -> None:
    array, registrar = owned(2), FakeRegistrar()
    if pinned:
        registrar.hostRegister(array.ctypes.data, array.nbytes, 0)
    alive, waited = weakref.ref(array.base), list[bool]()
    memory = AdoptedMemory(array, registrar, "host_memory", idle=lambda: waited.append(alive() is not None))
    del array
    gc.collect()
    assert alive() is not None and not waited
    del memory
    gc.collect()
    assert waited == [True] and alive() is None and len(registrar.pinned) == pinned
