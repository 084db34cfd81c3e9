"""Pinned memory is registered whole and in order, and all of it is given back, also when the driver refuses
half-way."""

from __future__ import annotations

import gc
import io
import mmap
import os
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from kvpool.device.cuda import cuda_memory
from kvpool.device.cuda.cuda_memory import PinnedMemory, processors_near

PAGE = mmap.PAGESIZE


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
        assert all(address + nbytes <= other or other + size <= address for other, size in self.pinned.items())
        self.calls.append((address, nbytes, flags))
        self.pinned[address] = nbytes

    def hostUnregister(self, address: int) -> None:
        del self.pinned[address]


@pytest.mark.parametrize(
    ("nbytes", "chunks"),
    [(0, []), (1, [1]), (PAGE, [1]), (2 * PAGE, [2]), (5 * PAGE, [2, 2, 1]), (5 * PAGE + 1, [2, 2, 2])],
)
def test_all_of_it_is_registered_in_chunks_from_its_start_to_its_end(nbytes: int, chunks: list[int]) -> None:
    registrar = FakeRegistrar()
    memory = PinnedMemory(nbytes, registrar, chunk_bytes=2 * PAGE)
    assert memory.array.shape == (nbytes,) and memory.array.dtype == np.uint8 and not memory.array.any()
    start = memory.array.ctypes.data
    assert registrar.calls == [(start + 2 * PAGE * i, pages * PAGE, 0) for i, pages in enumerate(chunks)]
    memory.array[:] = 7
    memory.free()
    assert not registrar.pinned
    assert (memory.array == 7).all()


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


def test_freeing_twice_unregisters_once() -> None:
    registrar = FakeRegistrar()
    memory = PinnedMemory(3 * PAGE, registrar, chunk_bytes=PAGE)
    memory.free()
    memory.free()
    assert not registrar.pinned


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
    cuda_memory._registered.clear()


def test_pages_are_touched_by_processors_near_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bus/pci/devices/0000:3b:00.0").mkdir(parents=True)
    (tmp_path / "bus/pci/devices/0000:3b:00.0/numa_node").write_text("1\n")
    nodes = tmp_path / "devices/system/node"
    for node, processors in (("node0", "0-1,4"), ("node1", "2-3,5\n")):
        assert processors_near("0000:3B:00.0", tmp_path) is None
        (nodes / node).mkdir(parents=True)
        (nodes / node / "cpulist").write_text(processors)
    near = processors_near("0000:3B:00.0", tmp_path)
    assert near == {2, 3, 5} and processors_near("0000:17:00.0", tmp_path) is None
    (tmp_path / "bus/pci/devices/0000:3b:00.0/numa_node").write_text("-1\n")
    assert processors_near("0000:3B:00.0", tmp_path) is None
    mine, asked = os.sched_getaffinity(0), list[tuple[int, set[int]]]()
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda thread, processors: asked.append((threading.get_ident(), set(processors)))
    )
    one = min(mine)
    PinnedMemory(PAGE, FakeRegistrar(), processors={one, 10**6}).free()
    assert [processors for _, processors in asked] == [{one}] and asked[0][0] != threading.get_ident()
    PinnedMemory(PAGE, FakeRegistrar(), processors={10**6}).free()
    assert len(asked) == 1


def test_one_chunk_that_cannot_be_unregistered_does_not_keep_the_others() -> None:
    registrar = FakeRegistrar()
    memory = PinnedMemory(3 * PAGE, registrar, chunk_bytes=PAGE)
    middle = registrar.calls[1][0]
    del registrar.pinned[middle]
    with pytest.raises(KeyError):
        memory.free()
    assert not registrar.pinned


def test_more_than_the_machine_has_is_refused_before_anything_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    registrar = FakeRegistrar()
    monkeypatch.setattr(cuda_memory, "available_ram", lambda: 10 * PAGE)
    with pytest.raises(MemoryError, match=f"{11 * PAGE} bytes .* {10 * PAGE} can be taken"):
        PinnedMemory(11 * PAGE, registrar)
    assert not registrar.calls


def test_a_range_that_no_system_has_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_memory, "available_ram", lambda: None)
    with pytest.raises(MemoryError, match="no range"):
        PinnedMemory(1 << 62, FakeRegistrar())


def test_the_bar_is_shown_on_a_terminal_only_and_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    registrar = FakeRegistrar()
    PinnedMemory(2 * PAGE, registrar, chunk_bytes=PAGE).free()
    monkeypatch.setitem(sys.modules, "tqdm", None)
    PinnedMemory(2 * PAGE, registrar, chunk_bytes=PAGE).free()
    assert len(registrar.calls) == 4 and not registrar.pinned


def test_memory_is_pinned_where_standard_error_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    PinnedMemory(PAGE, FakeRegistrar()).free()
