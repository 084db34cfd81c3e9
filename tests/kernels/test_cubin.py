"""What the compiler makes of the CUDA sources: no spills, no local memory, wide words, several of them in flight."""

from __future__ import annotations

import re

import pytest

from kvpool.device.launches import BLOCKS_PER_MULTIPROCESSOR, THREADS, cuda_source, cuda_sources, kernel_source
from tests.kernels.cubins import ARCHITECTURES, BULK, EACH, EACH_BULK, EXHAUSTIVE, cubin, dump, scoreboards
from tests.kernels.shim import kernels

SOURCES = sorted(path.name for path in cuda_sources().glob("*.cu"))
IN_FLIGHT = {"kv_copy": 4, "copy_fragments": 8, "move_tokens": 4}
COPIES = ["copy_fragments.cu", "kv_copy.cu", "token_moves.cu"]
REGISTERS = 65536
SUFFIXES = {16: ".128", 8: ".64", 4: "", 2: ".U16", 1: ".U8"}


@pytest.mark.parametrize(
    ("source", "architecture"),
    [
        pytest.param(source, name, marks=EXHAUSTIVE[name])
        for source in SOURCES
        for name in (BULK if source == "bulk_fragments.cu" else ARCHITECTURES)
    ],
)
def test_cubin_has_no_spills_no_local_memory_and_fits_as_often_as_launches_expect(
    source: str, architecture: str
) -> None:
    usages = dump(source, architecture, "res-usage")
    assert sorted(usages) == sorted(kernels(cuda_source(source)))
    for kernel, usage in usages.items():
        numbers = {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", usage)}
        assert numbers["STACK"] == numbers["LOCAL"] == 0, (kernel, usage)
        assert numbers["REG"] * THREADS * BLOCKS_PER_MULTIPROCESSOR <= REGISTERS, (kernel, usage)


@pytest.mark.parametrize("architecture", EACH)
@pytest.mark.parametrize("source", COPIES)
def test_cubin_moves_words_of_its_widths_several_at_once(source: str, architecture: str) -> None:
    for kernel, sass in dump(source, architecture, "sass").items():
        name, _, width = kernel.rpartition("_")
        name, widths = (name, [int(width)]) if width.isdecimal() else ("copy_fragments", [16, 4, 1])
        # Loads and stores of data are those that leave the caches alone, in the order of the code.
        moves = re.findall(r"\b(LDG|STG)\.E\.EF((?:\.\w+)*)", sass)
        assert {suffix for _, suffix in moves} == {SUFFIXES[width] for width in widths}, kernel
        for suffix in {suffix for _, suffix in moves}:
            letters = "".join(operation[0] for operation, moved in moves if moved == suffix)
            assert f"{'L' * IN_FLIGHT[name]}{'S' * IN_FLIGHT[name]}" in letters, (kernel, suffix, letters)
        assert not re.search(r"\b(LDL|STL|LD|ST)\b", sass), kernel


TABLE_LOADS = r"\bLDG\.E(?:\.64|\.128)?\.CONSTANT\b"


@pytest.mark.parametrize("architecture", EACH)
def test_no_data_load_waits_for_the_row_of_the_next_piece(architecture: str) -> None:
    """A row of a table in host memory takes as long as data. Two round trips for a piece would be one after the
    other. A row is two loads of 16 bytes, and the next one is fetched before data moves."""
    code = scoreboards(dump("copy_fragments.cu", architecture, "sass")["copy_fragments"])
    tables = [i for i, instruction in enumerate(code) if re.search(TABLE_LOADS, instruction.text)]
    assert ["LDG.E.128.CONSTANT" in code[i].text for i in tables] == [True] * 4, "this row, and the next one"
    raised = sum({1 << code[i].raises for i in tables[2:]})
    begin, ways = tables[-1] + 1, 0
    for i in range(begin, len(code)):
        # From the row, or from the stores of another width, to the last load of a width.
        if "STG.E.EF" in code[i].text:
            begin = i + 1
        elif "LDG.E.EF" in code[i].text:
            early = [instruction.text for instruction in code[begin : i + 1] if instruction.waits & raised]
            assert not early, early
            ways += 1
    assert ways == 3 * IN_FLIGHT["copy_fragments"]


@pytest.mark.parametrize(
    ("source", "architecture"),
    [
        pytest.param(source, name, marks=EXHAUSTIVE[name])
        for source, names in (("copy_fragments.cu", ARCHITECTURES), ("bulk_fragments.cu", BULK))
        for name in names
    ],
)
def test_rows_in_the_argument_are_loaded_from_no_memory_of_gpu_or_host(source: str, architecture: str) -> None:
    for kernel, sass in dump(source, architecture, "sass").items():
        assert bool(re.search(TABLE_LOADS, sass)) == (not kernel.endswith(("_few", "_some"))), kernel


@pytest.mark.parametrize("architecture", EACH_BULK)
def test_bulk_copies_hold_no_data_in_registers(architecture: str) -> None:
    """All data goes by copy units, both ways. A thread loads rows only: two halves of the first, and of later ones."""
    sass = dump("bulk_fragments.cu", architecture, "sass")["bulk_fragments"]
    assert re.findall(r"\bUBLKCP\.[SG]\.[SG]\b", sass) == ["UBLKCP.S.G", "UBLKCP.G.S"]
    assert re.findall(r"\b(?:LDG|STG|LD|ST|LDL|STL)\.\S*", sass) == ["LDG.E.128.CONSTANT"] * 4
    usage = dump("bulk_fragments.cu", architecture, "res-usage")["bulk_fragments"]
    assert int(re.search(r"SHARED:(\d+)", usage).group(1)) <= 48 << 10  # type: ignore[union-attr]


@pytest.mark.parametrize("architecture", EACH_BULK)
def test_bulk_copies_wait_for_no_rows_before_they_are_needed(architecture: str) -> None:
    """The rows of 32 later turns are under way while pieces are copied: no copy waits for them."""
    code = scoreboards(dump("bulk_fragments.cu", architecture, "sass")["bulk_fragments"])
    later = [i for i, instruction in enumerate(code) if re.search(TABLE_LOADS, instruction.text)][2:]
    raised = sum({1 << code[i].raises for i in later})
    (load,) = [i for i, instruction in enumerate(code) if "UBLKCP.S.G" in instruction.text]
    assert not [instruction.text for instruction in code[later[-1] + 1 : load + 1] if instruction.waits & raised]


@pytest.mark.parametrize("architecture", EACH_BULK)
def test_bulk_copies_call_nothing(architecture: str) -> None:
    """For a stage in the memory of a cluster, sm_120 would get a branch to ``__cuda_syscall_cp_async_bulk_unicast``."""
    assert "CALL" not in dump("bulk_fragments.cu", architecture, "sass")["bulk_fragments"]
    assert b"__cuda_syscall" not in cubin("bulk_fragments.cu", architecture)


@pytest.mark.parametrize("architecture", EACH)
def test_slots_are_loaded_together_whatever_their_width(architecture: str) -> None:
    """The loads of slots before a load of data: none waits for another."""
    for kernel, sass in dump("kv_copy.cu", architecture, "sass").items():
        together, before, boards = 0, 0, 0
        for instruction in scoreboards(sass):
            if re.search(TABLE_LOADS, instruction.text):
                assert not before, (kernel, instruction.text)
                together, boards = together + 1, boards | 1 << instruction.raises
            elif "LDG.E.EF" in instruction.text:
                assert together == 0 or together >= IN_FLIGHT["kv_copy"], kernel
                together = before = boards = 0
            else:
                before |= instruction.waits & boards


@pytest.mark.parametrize("source", ["kv_copy.cu", "token_moves.cu"])
def test_a_kernel_is_compiled_without_those_of_other_widths(source: str) -> None:
    """Five widths take five times as long, inside the first call that needs one."""
    for kernel, record in kernels(cuda_source(source)).items():
        assert kernels(kernel_source(source, kernel)) == {kernel: record}
