"""The Numba kernels of tables: in Numba's simulator against the plain reference, and compiled for GPUs that are not
there."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvpool.device.launches import BLOCKS_PER_MULTIPROCESSOR, cuda_source, cuda_sources
from tests.kernels.cubins import EACH, dump_image, scoreboards
from tests.kernels.shim import kernels

ROOT = Path(__file__).resolve().parents[2]

SIMULATED = """
import sys
import numpy as np
from numba import cuda
from tests.device import reference
from kvpool.device.cuda.table_kernels import step_tables

assert cuda.is_available() and "simulator" in cuda.jit.__module__
# for each seed
random = np.random.default_rng(seed)
T, sinks = int(random.integers(1, 5)), seed % 2
rows, first, counts = [], [], []
for used in (3, 0, 7, 1):
    row, gone = random.integers(0, 2**20, 7).tolist(), used - sinks - 1 if sinks and used > 2 else 0
    row[sinks : sinks + gone] = [-1] * gone
    length = max(0, used * T - int(random.integers(0, T)))
    count = int(random.integers(0, length - (sinks + gone) * T * (gone > 0) + 1))
    rows.append(row), first.append(length - count), counts.append(count)
wanted = reference.step_tables(rows, first, counts, T)
used = [row[: -(-(a + b) // T)] for row, a, b in zip(rows, first, counts)]
ids = [block for row in used for block in row if block >= 0]
kept = np.cumsum([0, *(sum(block >= 0 for block in row) for row in used)])
ends, starts = [a + b for a, b in zip(first, counts)], np.cumsum([0, *counts])
numbers = np.array([*zip(kept, [row.count(-1) for row in used], ends, starts), (kept[-1], 0, 0, starts[-1])])

wide = wanted["table"].shape[1] + 1
names = ["slot_mapping", "seq_lens", "query_start_loc", "last_page_len", "table", "indptr", "indices"]
out = {name: np.full(values.size + 2, 7, values.dtype) for name, values in wanted.items()}
out["table"] = np.full(4 * wide + 2, 7, np.int32)
wants = int(random.integers(1, 128))
launch = cuda.jit(step_tables)[2, 3]
launch(numbers.ravel(), np.array(ids, np.int32), 4, -(-wide // 3), T, sinks, wants, *map(out.get, names), wide, wide)
for k, name in enumerate(names):
    values, found = wanted[name], out[name]
    if not wants >> k & 1:
        assert (found == 7).all(), name
    elif name == "table":
        full = np.full((4, wide), -1)
        full[:, :-1] = values
        np.testing.assert_array_equal(found, [*full.ravel(), 7, 7], err_msg=name)
    else:
        np.testing.assert_array_equal(found, [*values, 7, 7], err_msg=name)
"""

ROWS = """
import sys
import numpy as np
from numba import cuda
from kvpool.device.cuda import table_kernels
from kvpool.device.work import write_rows

assert cuda.is_available() and "simulator" in cuda.jit.__module__
# for each seed
random = np.random.default_rng(seed)
# More planes than a thread block keeps at a time; a table that is narrower, as wide, or wider than the ids.
table_kernels.PLANES, planes = 2, 1 + seed % 5
table_kernels._SHARED = 7
rows, width, columns = int(random.integers(1, 5)), int(random.integers(0, 9)), int(random.integers(1, 12))
width = min(width, columns)
ids = random.integers(-1, 2**20, (rows, width), dtype=np.int32)
table = np.full((planes, rows + 3, columns + 2), 7, np.int32)
starts = np.arange(planes) * table.strides[0]
numbers = np.concatenate([
    random.permutation(rows + 3)[:rows],
    np.stack([starts, random.integers(1, 2**10, planes), random.integers(-9, 9, planes)], axis=1).ravel(),
])
padded = np.zeros((4 * ids.size + 7) // 8 * 8 + numbers.nbytes, np.uint8)
padded[: 4 * ids.size] = ids.ravel().view(np.uint8)
padded[padded.size - numbers.nbytes :] = numbers.view(np.uint8)
wanted = table.copy()
write_rows(padded.ctypes.data, planes, rows, width, columns, wanted.ctypes.data, table.strides[1])
flat = table.ravel()
launch = cuda.jit(table_kernels.stage_rows)[(-(-columns // 4), 2), 4]
launch(ids.ravel() if ids.size else np.zeros(1, np.int32), numbers, planes, rows, width, columns, flat, table.shape[2])
np.testing.assert_array_equal(flat.reshape(table.shape), wanted)
"""


def need_numba_cuda() -> None:
    if importlib.util.find_spec("numba_cuda") is None:
        pytest.skip("numba-cuda is not installed; it comes with the extra 'test'")


@pytest.mark.parametrize("script", [SIMULATED, ROWS], ids=["step_tables", "stage_rows"])
def test_cudasim_runs_the_kernel_as_the_reference_does(script: str) -> None:
    need_numba_cuda()
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    imports, each = script.split("# for each seed\n")
    code = f"{imports}for seed in range(6):\n    print('seed', seed, file=sys.stderr)\n{textwrap.indent(each, '    ')}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@functools.cache
def compiled(name: str, architecture: str) -> str:
    """A kernel in PTX; skips where Numba cannot compile."""
    need_numba_cuda()
    from numba import cuda

    if "numba_cuda" not in (cuda.__file__ or ""):
        pytest.skip("numba.cuda is the one inside numba, not numba-cuda: site-packages come by PYTHONPATH")
    from kvpool.device.cuda.table_kernels import compile_for

    try:
        return compile_for(name, divmod(int(architecture[3:]), 10))
    except Exception as error:
        missing = [package for package in ("nvvm", "nvrtc") if package in str(error)]
        if not missing:
            raise
        pytest.skip(f"{missing[0]} is not installed; Numba compiles with nvidia-nvvm and nvidia-cuda-nvrtc")


def machine_code(name: str, architecture: str, what: str) -> str:
    """What ``cuobjdump -<what>`` prints about a kernel; skips where PTX cannot be assembled."""
    ptx = compiled(name, architecture)
    core = pytest.importorskip("cuda.core")
    try:
        program = core.Program(ptx, "ptx", core.ProgramOptions(arch=architecture))
        cubin = bytes(program.compile("cubin").code)
    except RuntimeError as error:
        if "nvJitLink" not in str(error):
            raise
        pytest.skip(f"nvidia-nvjitlink is not installed; it assembles what Numba compiles: {error}")
    return next(text for kernel, text in dump_image(cubin, what).items() if name in kernel)


NAMES = ["stage_rows", "step_tables"]


@pytest.mark.parametrize("architecture", EACH)
@pytest.mark.parametrize("name", NAMES)
def test_ptx_of_the_kernel_has_no_local_memory(name: str, architecture: str) -> None:
    ptx = compiled(name, architecture)
    assert f".target {architecture}" in ptx
    assert re.search(rf"\.entry \w*{name}", ptx) and re.search(r"\bst\.", ptx)
    assert ".local" not in ptx


@pytest.mark.parametrize("architecture", EACH)
@pytest.mark.parametrize("name", NAMES)
def test_machine_code_of_the_kernel_has_no_local_memory_and_no_spills(name: str, architecture: str) -> None:
    usage = machine_code(name, architecture, "res-usage")
    numbers = {kind: int(number) for kind, number in re.findall(r"(\w+):(\d+)", usage)}
    assert numbers["STACK"] == numbers["LOCAL"] == 0, usage
    # The most threads that a launch asks for must fit, as often as for the kernels of ``cuda/``.
    threads = {"stage_rows": 512, "step_tables": 128}[name]
    assert numbers["REG"] * threads * BLOCKS_PER_MULTIPROCESSOR <= 65536, usage
    assert not re.search(r"\b(LDL|STL)\b", machine_code(name, architecture, "sass"))


@pytest.mark.parametrize("architecture", EACH)
def test_a_staged_row_is_read_once_and_planes_before_any_element(architecture: str) -> None:
    """Host memory: there is a load of an id, and one of planes and the number of the row, before the barrier. The
    loop over planes, which stores, has none. The second load does not wait for the result of the first."""
    code = scoreboards(machine_code("stage_rows", architecture, "sass"))
    loads = [i for i, instruction in enumerate(code) if re.search(r"\b(LDG?|LD)\b", instruction.text)]
    stores = [i for i, instruction in enumerate(code) if re.search(r"\b(STG|ST)\b", instruction.text)]
    barriers = [i for i, instruction in enumerate(code) if "BAR.SYNC" in instruction.text]
    assert len(loads) == 2 and len(barriers) == 2 and stores, [code[i].text for i in loads]
    assert loads[0] < barriers[0] < loads[1] < barriers[1] < stores[0]
    raised = 1 << code[loads[0]].raises
    early = [instruction.text for instruction in code[loads[0] + 1 : loads[1] + 1] if instruction.waits & raised]
    assert not early


def test_the_table_of_kernels_names_each_with_its_file_and_its_tests() -> None:
    """``cuda/README.md`` is the only place where kernels of both compilers stand together."""
    need_numba_cuda()
    from kvpool.device.cuda.table_kernels import KERNELS

    rows = [
        line.split("|")[1:-1] for line in (cuda_sources() / "README.md").read_text().splitlines() if line[:1] == "|"
    ]
    places = {name: cells[1] for cells in rows[2:] for name in re.findall(r"`(\w+)`", cells[0])}
    for source in cuda_sources().glob("*.cu"):
        for kernel in kernels(cuda_source(source.name)):
            if kernel.endswith(("_16", "_1")) or not re.search(r"_\d+$", kernel):
                assert f"`{source.name}`" in places.pop(kernel), kernel
    for kernel in KERNELS:
        assert "`kvpool/device/cuda/table_kernels.py`" in places.pop(kernel), kernel
    assert not places, "kernels that are not there"
    for test in {path for cells in rows[2:] for path in re.findall(r"`(tests/\S+)`", cells[4])}:
        assert (ROOT / test).is_file(), test
